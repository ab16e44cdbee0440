"""Loads of rows that start alike: at addresses with one remainder by 8 bytes, as rows a multiple of 8 bytes apart do.

Rows of odd head dims start anywhere, but those of one head of a contiguous tensor, with a multiple of 4 heads, start
alike. Their tile in shared memory is a copy of the aligned 8 bytes that rows have parts of. So all rows lie ``skew``
elements, 0 to 3, too far right, and stay there:

- in a product over keys or queries, as P V, the result's columns are as far right, and are stored from there on;
- in one over the head dim, as Q K^T, the other operand is brought to the same place (:func:`shift_rows`), and what was
  copied beside rows becomes zeros (:meth:`SkewedRows.clean`), since 0 * NaN is NaN.

What is copied beside a row lies in the same aligned 8 bytes as one of its elements, and so in the same allocation. Only
behind the last row an allocation may end, as compute-sanitizer sees it: the last row's last elements are loaded one by
one.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, Int64, cute

from cute_attn.device.gemm import below_1024
from cute_attn.device.math import (
    byte_permute,
    on_device,
    optimization_barrier,
    rematerialize,
    rematerialize_each,
)
from cute_attn.device.word_rows import VECTOR, WARP, RowLanes, copy_async, swizzled_addresses

UNIT = 8  # bytes of a copy
LENGTH = 4  # elements of a copy
_FARTHEST = (
    1 << 23
)  # elements from a row to the next one, so that 64 rows' bytes, a thread's step, fit 31 bits
_AT_ONCE = 4  # vectors of a row that a thread holds while it shifts the row


def division_of(rows: int, cols: int, num_threads: int) -> RowLanes | None:
    """How lanes divide copies of a tile, or None where warps do not copy whole tiles."""
    division = RowLanes(cols // LENGTH, num_threads // WARP)
    return division if rows % division.step == 0 else None


def has_room(rows: int, cols: int, head_dim: int, num_threads: int) -> bool:
    """Whether a tile of 16-bit elements, (rows, cols), has room for rows of ``head_dim`` elements with any skew."""
    return head_dim + LENGTH - 1 <= cols and division_of(rows, cols, num_threads) is not None


def rows_start_alike(m: cute.Tensor) -> Int32:
    """Whether rows of each head of ``m``, (..., length, heads, head_dim) of 16 bits, start alike, as 0 or 1.

    The distance between rows is a multiple of 8 bytes, positive, and fits 31 bits.
    """
    distance = Int64(m.stride[-3]) - LENGTH
    wrong = (distance & ~Int64(_FARTHEST - LENGTH)) | (Int64(m.stride[-1]) ^ 1)
    return Int32(wrong == Int64(0))


def heads_start_alike(m: cute.Tensor, group: Int32) -> Int32:
    """As :func:`rows_start_alike`, and rows of every ``group`` heads start alike."""
    heads = (Int64(m.stride[-2]) & Int64(LENGTH - 1)) == Int64(0)
    return rows_start_alike(m) & Int32(heads | (group == 1))


@dataclass(frozen=True)
class SkewedRows:
    """Loads tiles of rows of g, (length, head_dim) of 16-bit elements, that start alike.

    Attributes:
        head_dim, num_threads: compile-time constants; all of the threads load.
    """

    g: cute.Tensor
    head_dim: Constexpr
    thread: Int32
    num_threads: Constexpr

    @property
    def skew(self) -> Int32:
        """The column of a row's first element."""
        return skew_of(self.g.iterator.toint())

    def _division(self, tile: cute.Tensor) -> RowLanes:
        rows, cols = (cute.size(tile, mode=[i]) for i in range(2))
        division = division_of(rows, cols, self.num_threads)
        assert division is not None, "warps copy whole tiles"
        return division

    @cute.jit
    def start(self, tile: cute.Tensor, row0: Int32, rows: Int32, whole: Constexpr) -> None:
        """Start loading ``tile``, (rows, columns), of which ``rows`` rows exist; all of them and one more if ``whole``.

        Rows that do not exist become zeros, and so do columns in none of a row's aligned 8 bytes.
        """
        division = self._division(tile)
        thread = below_1024(rematerialize(self.thread))
        lane, first = thread % division.lanes, thread // division.lanes
        distance = optimization_barrier(Int32(self.g.stride[0])) * 2
        start = self.g.iterator.toint() + Int64(row0 + first) * Int64(distance)
        row_end = skew_of(start) + self.head_dim
        start = (start & Int64(-UNIT)) + Int64(lane * UNIT)
        for c in cutlass.range_constexpr(division.chunks):
            before = c * division.lanes
            count = row_end - (before + lane) * LENGTH  # of the row's elements, from here on
            address = swizzled_addresses(tile, first, lane * LENGTH)
            source = start + before * UNIT
            for m in cutlass.range_constexpr(0, cute.size(tile, mode=[0]), division.step):
                target = address(m, before * LENGTH)
                if cutlass.const_expr(whole):
                    copy_async(target, source, UNIT, count > 0)
                elif (count >= LENGTH) | (first + m != rows - 1):
                    copy_async(target, source, UNIT, (first + m < rows) & (count > 0))
                source += Int64(distance * division.step)
            if cutlass.const_expr(not whole):
                self.load_end(tile, first, (before + lane) * LENGTH, count, row0, rows)

    @cute.jit
    def load_end(
        self, tile: cute.Tensor, first: Int32, col: Int32, count: Int32, row0: Int32, rows: Int32
    ) -> None:
        """Load ``count`` elements from column ``col`` of the last row on, and zeros behind them, if it is the thread's
        and they are fewer than a copy's."""
        row, step = rows - 1, self._division(tile).step
        mine = (row >= 0) & (row < cute.size(tile, mode=[0])) & ((row - first) % step == 0)
        if mine & (count < LENGTH):
            target = cute.make_tensor(element(tile, row, col), cute.make_layout(LENGTH))
            source = self.g.iterator + (Int64(row0 + row) * self.g.stride[0] + (col - self.skew))
            for e in cutlass.range_constexpr(LENGTH):
                value = tile.element_type(0.0)
                if e < count:
                    value = cute.make_tensor(source + e, cute.make_layout(1))[0]
                target[e] = value

    @cute.jit
    def clean(self, tile: cute.Tensor) -> None:
        """After a thread's copies have arrived, and before a barrier: zeros beside the rows that its warp copied."""
        owner = self._division(tile)
        division = RowLanes(1, owner.warps)
        index = rematerialize(self.thread)
        thread = below_1024(index)
        # Otherwise what follows from it stays in registers from step to step.
        skew = skew_of(rematerialize_each(Int32(self.g.iterator.toint()), index))
        own: Constexpr = cute.size(tile, mode=[0]) // owner.warps
        sync_warp()  # the other lanes' copies have arrived as well
        for m in cutlass.range_constexpr(0, own, WARP):
            row = division.first_row(thread, owner) + m * owner.warps
            exists = thread % WARP + m < own if own % WARP else True
            if exists:
                end = skew + self.head_dim
                zero_some(element(tile, row, Int32(0)), skew, False)
                zero_some(element(tile, row, end & -LENGTH), -end & (LENGTH - 1), True)


def skew_of(address: Int64 | Int32) -> Int32:
    """Elements from the multiple of 8 bytes before an address."""
    return Int32(address) >> 1 & (LENGTH - 1)


def sync_warp() -> None:
    """A barrier of the warp; on the host threads proceed one by one."""
    if on_device():
        cute.arch.sync_warp()


def element(tile: cute.Tensor, row: Int32, col: Any) -> cute.Pointer:
    """Where an element of a tile lies, at a multiple of 8 bytes."""
    offset = cute.assume(cute.crd2idx((row, col), tile.layout), divby=LENGTH)
    return tile.iterator + offset


@cute.jit
def zero_some(place: cute.Pointer, count: Int32, last: Constexpr) -> None:
    """Zero the first or ``last`` ``count`` of 4 elements at a multiple of 8 bytes, 0 to 3 of them."""
    words, halves = (cute.recast_ptr(place, dtype=dtype) for dtype in (cutlass.Int32, cutlass.Int16))
    word, half = 0, count & 2
    if cutlass.const_expr(last):
        word, half = 1, LENGTH - 1 - half
    if (count & 2) != 0:
        cute.make_tensor(words, cute.make_layout(2))[word] = cutlass.Int32(0)
    if (count & 1) != 0:
        cute.make_tensor(halves, cute.make_layout(LENGTH))[half] = cutlass.Int16(0)


@cute.jit
def shift_rows(tile: cute.Tensor, skew: Int32, thread: Int32, num_threads: Constexpr) -> None:
    """Move each row's elements ``skew`` columns, 0 to 3, to the right, between barriers; zeros come from the left."""
    length: Constexpr = VECTOR * 8 // tile.element_type.width
    rows, cols = (cute.size(tile, mode=[i]) for i in range(2))
    for row in cutlass.range(thread, rows, num_threads, unroll=1):
        for begin in cutlass.range(cols - _AT_ONCE * length, -1, -_AT_ONCE * length, unroll=1):
            words = cute.make_rmem_tensor(
                (4, _AT_ONCE + 1), Int32
            )  # of the vectors, behind those of the one before
            words.fill(0)
            if begin > 0:
                cute.autovec_copy(vector_of(tile, row, begin - length), words[None, 0])
            for v in cutlass.range_constexpr(_AT_ONCE):
                cute.autovec_copy(vector_of(tile, row, begin + v * length), words[None, v + 1])
            flat = cute.make_tensor(words.iterator, cute.make_layout(4 * (_AT_ONCE + 1)))
            for i in cutlass.range_constexpr(cute.size(flat) - 1, 3, -1):
                far = (skew & 2) != 0
                word = cutlass.select_(far, flat[i - 1], flat[i])
                before = cutlass.select_(far, flat[i - 2], flat[i - 1])
                flat[i] = cutlass.select_((skew & 1) != 0, byte_permute(before, word, 0x5432), word)
            for v in cutlass.range_constexpr(_AT_ONCE):
                cute.autovec_copy(words[None, v + 1], vector_of(tile, row, begin + v * length))


def vector_of(tile: cute.Tensor, row: Int32, col: Int32) -> cute.Tensor:
    """The 16 bytes from an element of a tile on, as four words."""
    length = VECTOR * 8 // tile.element_type.width
    offset = cute.assume(cute.crd2idx((row, col), tile.layout), divby=length)
    return cute.make_tensor(cute.recast_ptr(tile.iterator + offset, dtype=Int32), cute.make_layout(4))
