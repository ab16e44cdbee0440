"""Rows between shared memory and any addresses, element by element, on the host."""

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn.device.element_copy import store_elements

NAN = float("nan")


@cute.jit
def store(
    s: cute.Tensor, g: cute.Tensor, row0: Int32, rows: Int32, first_col: Int32, threads: cutlass.Constexpr
):
    """Store a tile that is swizzled in memory of its own; s: it without swizzle, and that memory."""
    plain, swizzled = (s[i, None, None] for i in range(2))
    tile = cute.make_tensor(swizzled.iterator, layouts.smem_layout(48, 64, cutlass.Float32))
    for row in cutlass.range(48):
        for col in cutlass.range(64):
            tile[row, col] = plain[row, col]
    for thread in cutlass.range(threads):
        store_elements(tile, g, row0, rows, thread, threads, first_col)


@pytest.mark.parametrize(
    "cols, first_col, threads", [(1, 0, 64), (32, 3, 128), (33, 1, 96), (59, 2, 256), (64, 0, 128)]
)
@pytest.mark.parametrize("rows", [-3, 0, 5, 90])
def test_stores_write_the_rows_that_exist_alone(cols, first_col, threads, rows):
    tile = torch.randn(2, 48, 64)
    memory = torch.full((60, 2 * cols + 3), NAN)
    target = memory[:, 1 : 2 * cols + 1 : 2]
    store(from_dlpack(tile), from_dlpack(target).mark_layout_dynamic(), 7, rows, first_col, threads)
    wanted = torch.full_like(memory, NAN)
    count = max(min(rows, 48), 0)
    wanted[7 : 7 + count, 1 : 2 * cols + 1 : 2] = tile[0, :count, first_col : first_col + cols]
    torch.testing.assert_close(memory, wanted, rtol=0, atol=0, equal_nan=True)
