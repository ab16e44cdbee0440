"""Rows of a paged cache in shared memory: boxes, and rows that warps copy, make up the tile that wgmma reads."""

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn.rows.row_copies import CHUNK, WARP, OwnRows, RowCopies


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


@pytest.mark.parametrize("cols", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("tile_n", [32, 64, 80, 128])
def test_warps_copy_every_row_once(tile_n, cols):
    """And each row's address comes from the lane that found it."""
    copied = []
    for warp in range(3):
        own = OwnRows.make(tile_n, 3, cols, warp)
        for chunk in range(own.chunks):
            k, first = chunk // (WARP // CHUNK), chunk % (WARP // CHUNK) * own.steps
            assert k < own.registers
            for i in range(own.steps):
                for lane in range(WARP):
                    finder = lane & own.row_bits | (first + i) & ~own.row_bits
                    row = (chunk * 3 + warp) * CHUNK + i * own.at_once + lane // own.lanes
                    assert own.row(finder, k) == row
                    copied += [(row, lane % own.lanes)]
    rows = [row for row, _ in copied if row < tile_n]
    assert len(set(copied)) == len(copied) and len(rows) == tile_n * own.lanes


@cute.jit
def copy_targets(found: cute.Tensor, cache: cute.Tensor, tile_n: Constexpr, cols: Constexpr):
    """Of each element, where the row copies write it in bytes."""
    source, own = RowCopies(cache, tile_n, cols, cols), OwnRows.make(tile_n, 1, cols, Int32(0))
    for lane in cutlass.range(WARP):
        targets = source.targets(own, lane)
        for chunk in cutlass.range_constexpr(own.chunks):
            for i in cutlass.range_constexpr(own.steps):
                row = chunk * CHUNK + i * own.at_once + lane // own.lanes
                col = 8 * (lane % own.lanes)
                if col < cols:
                    for c in cutlass.range_constexpr(8):
                        found[row, col + c] = targets[i] + chunk * source.chunk_bytes + 2 * c


@pytest.mark.parametrize("cols", [32, 64, 96, 128, 256])
def test_row_copies_make_up_the_tile(cols):
    tile_n, width = 64, layouts.atom_cols(cols, 16)
    whole, boxes, found = (torch.full((tile_n, cols), -1, dtype=torch.int32) for _ in range(3))
    offsets(from_dlpack(whole), from_dlpack(boxes), tile_n, cols, tile_n)
    copy_targets(from_dlpack(found), from_dlpack(torch.empty(1, dtype=torch.float16)), tile_n, cols)
    swizzle = (2 * width // 16 - 1) << 4
    assert found.equal(2 * whole ^ (2 * whole >> 3 & swizzle))
