"""Rows between shared memory and any addresses, element by element, on the host."""

import cutlass
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.device.element_copy import store_elements

NAN = float("nan")


@cute.jit
def store(s: cute.Tensor, g: cute.Tensor, row0: Int32, rows: Int32, threads: cutlass.Constexpr):
    tile = cute.make_tensor(s.iterator, cute.make_layout((16, 64), stride=(64, 1)))
    for thread in cutlass.range(threads):
        store_elements(tile, g, row0, rows, thread, threads)


@pytest.mark.parametrize("cols", [1, 32, 33, 59, 64])
@pytest.mark.parametrize("rows", [-3, 0, 5, 40])
def test_stores_write_the_rows_that_exist_alone(cols, rows):
    tile = torch.randn(16, 64)
    memory = torch.full((30, 2 * cols + 3), NAN)
    target = memory[:, 1 : 2 * cols + 1 : 2]
    store(from_dlpack(tile), from_dlpack(target).mark_layout_dynamic(), 7, rows, 64)
    wanted = torch.full_like(memory, NAN)
    count = max(min(rows, 16), 0)
    wanted[7 : 7 + count, 1 : 2 * cols + 1 : 2] = tile[:count, :cols]
    torch.testing.assert_close(memory, wanted, rtol=0, atol=0, equal_nan=True)
