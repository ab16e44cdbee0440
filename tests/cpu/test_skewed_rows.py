"""Rows that start alike: what lies in a tile of shared memory after the copies of all threads, on the host."""

import mmap

import cutlass
import numpy as np
import pytest
import torch
from cutlass import Float32, Int16, Int32, cute
from cutlass.cute.runtime import from_dlpack

import layouts
from cute_attn.device.skewed_rows import SkewedRows, has_room, heads_start_alike, rows_start_alike, shift_rows
from cute_attn.kernels.backward_sm80.loads import BlockLoad

POISON = -7
THREADS = 64


@cute.jit
def load(
    g: cute.Tensor,
    s: cute.Tensor,
    out: cute.Tensor,
    row0: Int32,
    rows: Int32,
    head_dim: cutlass.Constexpr,
    what: cutlass.Constexpr,
):
    """Load a tile into s by all threads, one after the other, and clean it if wanted; out: it without swizzle."""
    tile_rows, cols = (cute.size(out, mode=[i]) for i in range(2))
    tile = cute.make_tensor(s.iterator, layouts.smem_layout(tile_rows, cols, Int16))
    pieces = cute.make_tensor(s.iterator, layouts.smem_layout(tile_rows // 2, cols, Int16, stages=2))
    if cutlass.const_expr(what == "pieces"):  # of a stage of the Ampere backward
        numbers = cute.make_tensor(
            cute.recast_ptr(s.iterator, dtype=Float32), cute.make_layout((tile_rows, 1))
        )
        tile = BlockLoad(g, False, head_dim, pieces, *(numbers,) * 3, rows, Int32(0), THREADS)._stage(
            Int32(0)
        )
    for thread in cutlass.range(THREADS):
        SkewedRows(g, head_dim, thread, THREADS).start(tile, row0, rows, what == "whole")
    if cutlass.const_expr(what != "as copied"):
        for thread in cutlass.range(THREADS):
            SkewedRows(g, head_dim, thread, THREADS).clean(tile)
    for row in cutlass.range(tile_rows):
        for col in cutlass.range(cols):
            if cutlass.const_expr(what == "pieces"):
                out[row, col] = pieces[row % (tile_rows // 2), col, row // (tile_rows // 2)]
            else:
                out[row, col] = tile[row, col]


def rows_at(skew: int, head_dim: int, length: int, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory, rows in it): rows ``distance`` elements apart, numbers from 1 on; POISON before, between and behind."""
    memory = torch.full((length * distance + 16,), POISON, dtype=torch.int16)
    assert memory.data_ptr() % 8 == 0
    rows = memory.as_strided((length, head_dim), (distance, 1), 8 + skew)
    rows.copy_(torch.arange(1, 1 + length * head_dim, dtype=torch.int16).view(length, head_dim))
    return memory, rows


def loaded(rows: torch.Tensor, row0: int, cols: int, what: str) -> np.ndarray:
    s, out = (torch.full((32, cols), POISON, dtype=torch.int16) for _ in range(2))
    length, head_dim = rows.shape
    g = from_dlpack(rows, assumed_align=2).mark_layout_dynamic()
    load(g, from_dlpack(s, assumed_align=16), from_dlpack(out), row0, length - row0, head_dim, what)
    return out.numpy()


def placed(rows: torch.Tensor, row0: int, cols: int, skew: int) -> np.ndarray:
    """The wanted tile: rows from column ``skew`` on, and zeros."""
    wanted = np.zeros((32, cols), np.int16)
    some = rows[row0 : row0 + 32].numpy()
    wanted[: len(some), skew : skew + some.shape[1]] = some
    return wanted


@pytest.mark.parametrize("skew", range(4))
@pytest.mark.parametrize(("head_dim", "cols"), [(59, 64), (61, 64), (1, 32), (93, 96), (123, 128)])
def test_a_clean_tile_has_rows_and_zeros(head_dim, cols, skew):
    for what, length, distance in (
        ("whole", 40, 128),
        ("clean", 40, 132),
        ("clean", 23, 256),
        ("clean", 32, 124),
    ):
        _, rows = rows_at(skew, head_dim, length, distance)
        row0 = 32 if what == "clean" and length == 40 else 0
        found = loaded(rows, row0, cols, what)
        np.testing.assert_array_equal(found, placed(rows, row0, cols, skew))


@pytest.mark.parametrize("skew", range(4))
def test_what_is_copied_beside_rows(skew):
    """The rest of the aligned 8 bytes, but zeros behind the last row, where an allocation may end."""
    _, rows = rows_at(skew, 59, 20, 64)
    found, wanted = loaded(rows, 0, 64, "as copied"), placed(rows, 0, 64, skew)
    wanted[:20, :skew] = POISON
    end = -(-(skew + 59) // 4) * 4
    wanted[:19, skew + 59 : end] = POISON
    np.testing.assert_array_equal(found, wanted)


@cute.jit
def shift(tile: cute.Tensor, s: cute.Tensor, skew: Int32):
    rows, cols = (cute.size(tile, mode=[i]) for i in range(2))
    swizzled = cute.make_tensor(s.iterator, layouts.smem_layout(rows, cols, Int16))
    for row in cutlass.range(rows):
        for col in cutlass.range(cols):
            swizzled[row, col] = tile[row, col]
    for thread in cutlass.range(THREADS):
        shift_rows(swizzled, skew, thread, THREADS)
    for row in cutlass.range(rows):
        for col in cutlass.range(cols):
            tile[row, col] = swizzled[row, col]


@pytest.mark.parametrize("cols", [32, 64, 96, 128])
def test_shifted_rows(cols):
    tile = torch.arange(1, 1 + 16 * cols, dtype=torch.int16).view(16, cols)
    for skew in range(4):
        found = tile.clone()
        s = from_dlpack(torch.empty_like(tile), assumed_align=16)
        shift(from_dlpack(found), s, skew)
        wanted = torch.zeros_like(tile)
        wanted[:, skew:] = tile[:, : cols - skew]
        assert torch.equal(found, wanted)


@cute.jit
def write_alike(m: cute.Tensor, out: cute.Tensor):
    """out[group]: whether rows of so many heads start alike; of 0 each head's."""
    out[0] = rows_start_alike(m)
    for group in cutlass.range_constexpr(1, 3):
        out[group] = heads_start_alike(m, Int32(group))


@pytest.mark.parametrize(
    ("strides", "wanted"),
    [
        ((4 * 59, 59, 1), True),
        ((59, 59, 1), False),
        ((2 * 59, 59, 1), False),
        ((64, 7, 1), True),
        ((240, 60, 1), True),
        ((64, 59, 2), False),
        ((0, 59, 1), False),
        ((1 << 23, 59, 1), True),
        ((1 << 24, 59, 1), False),
        ((1 << 34, 59, 1), False),
    ],
)
def test_which_rows_start_alike(strides, wanted):
    """m: (length, heads, head_dim)."""
    m = torch.empty(1, dtype=torch.int16).as_strided((1, 1, 1), strides)
    out = torch.full((3,), -1, dtype=torch.int32)
    fake = from_dlpack(m, assumed_align=2).mark_layout_dynamic()
    write_alike(fake, from_dlpack(out))
    assert out.tolist() == [wanted, wanted, wanted and strides[1] % 4 == 0]


def test_rows_far_apart():
    """As far as any that start alike may be, in memory of which only the rows are there."""
    length, distance, skew = 14, 1 << 23, 1
    memory = torch.frombuffer(mmap.mmap(-1, 2 * length * distance), dtype=torch.int16)
    rows = memory.as_strided((length, 59), (distance, 1), 8 + skew)
    rows.copy_(torch.arange(1, 1 + length * 59).view(length, 59))
    assert np.array_equal(loaded(rows, 0, 64, "clean"), placed(rows, 0, 64, skew))


@pytest.mark.parametrize(
    ("rows", "cols", "head_dim", "threads", "wanted"),
    [(96, 64, 61, 128, True), (96, 64, 62, 128, False), (64, 128, 123, 128, True), (48, 32, 29, 256, False)],
)
def test_tiles_with_room(rows, cols, head_dim, threads, wanted):
    """For head dims 3 below the padded one, where warps copy whole tiles."""
    assert has_room(rows, cols, head_dim, threads) == wanted
