"""Rows of a paged cache in shared memory: boxes make up the tile that wgmma reads."""

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

import layouts


@cute.jit
def offsets(whole: cute.Tensor, boxes: cute.Tensor, rows: Constexpr, cols: Constexpr, box: Constexpr):
    """Of each element, before the swizzle: in the whole tile, and as its box's place plus its offset in a box."""
    dtype = cutlass.BFloat16
    width = layouts.atom_cols(cols, dtype.width)
    tile = layouts.wgmma_smem_layout(rows, cols, dtype).outer
    own = layouts.wgmma_smem_layout(box, width, dtype).outer
    for r in cutlass.range(rows):
        for c in cutlass.range(cols):
            whole[r, c] = Int32(tile((r, c)))
            first = tile((r // box * box, c // width * width))
            boxes[r, c] = Int32(first + own((r % box, c % width)))


@pytest.mark.parametrize("cols", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("rows", "box"), [(64, 8), (64, 16), (128, 64), (48, 16), (80, 80)])
def test_boxes_make_up_the_tile(rows, box, cols):
    whole, boxes = (torch.full((rows, cols), -1, dtype=torch.int32) for _ in range(2))
    offsets(from_dlpack(whole), from_dlpack(boxes), rows, cols, box)
    assert whole.equal(boxes)
    width = layouts.atom_cols(cols, 16)
    # A swizzle repeats after 8 rows of an atom, so that it is the same at each box's start.
    assert not (whole[::box, ::width] % (8 * width)).any()
    assert whole.flatten().sort()[0].equal(torch.arange(rows * cols, dtype=torch.int32))
