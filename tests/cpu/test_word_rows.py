"""Rows that start anywhere: which lanes copy and move them, their addresses, and how words are moved."""

import itertools

import cutlass
import numpy as np
import pytest
from cutlass import BFloat16, Boolean, Float32, Int32, cute

import layouts
from cute_attn.device.word_rows import VECTOR, WARP, WORD, RowLanes, shift_element, swizzled_addresses
from layouts.host import run_on_host

# The loops over one thread's places are unrolled on purpose: fragments take static indices.


def visits(division, owner, rows):
    """(row, unit) -> the warps that visit it, for each thread's first row and those whole steps further."""
    found = {}
    for thread in range(WARP * division.warps):
        first, lane = division.first_row(thread, owner), thread % division.lanes
        for m, c in itertools.product(range(0, rows, division.step), range(division.chunks)):
            found.setdefault((first + m, lane + c * division.lanes), []).append(thread // WARP)
    return found


@pytest.mark.parametrize("warps", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("row_bytes", [64, 128, 192, 256, 320, 512, 1024])
def test_a_warp_moves_what_it_copied(row_bytes, warps):
    owner = RowLanes(row_bytes // WORD, warps)
    rows = 8 * warps
    copied = visits(owner, owner, rows)
    assert set(copied) == set(itertools.product(range(rows), range(owner.units)))
    for unit in (WORD, 2 * WORD, VECTOR):
        division = RowLanes(row_bytes // unit, warps)
        moved = visits(division, owner, rows)
        assert set(moved) == set(itertools.product(range(rows), range(division.units)))
        for (row, part), found in moved.items():
            assert found == copied[row, part * unit // WORD]
    ends = visits(RowLanes(1, warps), owner, rows)
    for row in range(rows):
        assert ends[row, 0] == copied[row, 0]


def test_a_thread_copies_its_first_row_by_adjacent_lanes():
    owner = RowLanes(16, 4)
    assert [owner.first_row(thread, owner) for thread in (0, 15, 16, 31, 32, 127)] == [0, 0, 1, 1, 2, 7]


@cute.jit
def write_addresses(
    layout: cutlass.Constexpr, dtype: cutlass.Constexpr, col: cutlass.Constexpr, out: cute.Tensor
):
    """out[row, i] = what an address is beside that of the layout, for rows 0 to 7 and static distances."""
    tile = cute.make_tensor(cute.recast_ptr(out.iterator, dtype=dtype), layout)
    rows, cols = (cute.size(tile, mode=[i]) for i in range(2))
    atom = layouts.atom_cols(cols, dtype.width)
    for row in cutlass.range(cute.size(out.shape[0])):
        address = swizzled_addresses(tile, row, Int32(col))
        for i in cutlass.range_constexpr(4):
            m, k = (0, 4, 8, rows - 8)[i], (0, 0, cols - atom, cols - atom)[i]
            wanted = (tile.iterator + cute.crd2idx((row + m, k + col), layout)).toint()
            out[row, i] = Int32(address(m, k) - wanted)


@pytest.mark.parametrize(
    "cols, dtype", [(32, BFloat16), (64, BFloat16), (96, BFloat16), (256, BFloat16), (32, Float32)]
)
def test_addresses_at_static_distances(cols, dtype):
    """Of rows in the first half of a period, so that 4 rows further is in the same one."""
    for col in (0, 8, 24):
        found = run_on_host(
            lambda out, col=col: write_addresses(layouts.smem_layout(32, cols, dtype), dtype, col, out),
            *(4, 4),
            alignment=1024,
        )
        assert not found.any()


@cute.jit
def write_shifted(out: cute.Tensor):
    """Row 0: words 1, 2, ... from the second 16 bits on; row 1: as they are."""
    for row in cutlass.range(cute.size(out.shape[0])):
        words = cute.make_rmem_tensor(4, Int32)
        for w in cutlass.range_constexpr(4):
            words[w] = Int32(0x00020001 + 0x00020002 * w)
        shift_element(words, Int32(-1 << 16 | 9), Boolean(row == 0))
        for w in cutlass.range_constexpr(4):
            out[row, w] = words[w]


def test_words_are_moved_by_an_element():
    found = run_on_host(write_shifted, 2, 4).astype(np.int32)
    assert np.frombuffer(found[0].tobytes(), np.uint16).tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert np.frombuffer(found[1].tobytes(), np.uint16).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
