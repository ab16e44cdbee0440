"""Loads of rows that start anywhere by cp.async of 4 or 8 bytes.

Rows of odd head dims and strides start at multiples of an element, cp.async reads from multiples of the bytes that it
copies. So a warp copies the words that its rows have parts of: rows that start at a multiple of 4 bytes lie in place
then, and those of 16-bit elements that start between two such multiples one element too far right. Once they are
there, the warp moves its own rows by that element, so that loads overlap products as those of aligned rows do and need
no barrier of their own.

What is read beside a row is at most the 2 bytes before it, in the same word as its first element, and so of the same
allocation; it is moved out of the row and never enters a sum. Of the word in which a row ends only the row's part is
copied, and the last row's is loaded without cp.async, since the allocation may end there. Rows whose elements are not
neighbours are read one element at a time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Int16, Int32, Int64, Uint16, Uint32, cute

from cute_attn.device.element_copy import load_elements
from cute_attn.device.gemm import below_1024
from cute_attn.device.math import byte_permute, on_device, optimization_barrier, rematerialize

WARP = 32
WORD = 4
VECTOR = 16
_ATOM_ROWS = 8  # after which a swizzle repeats
_AT_ONCE = 4  # vectors that a thread holds while it moves rows


@dataclass(frozen=True)
class RowLanes:
    """How a warp's lanes divide its rows of a tile: ``lanes`` of them share a row, ``at_once`` rows at a time."""

    units: int  # of a row, divided among its lanes
    warps: int

    @property
    def lanes(self) -> int:
        """Lanes of a row."""
        return math.gcd(WARP, self.units)

    @property
    def at_once(self) -> int:
        """Rows that a warp visits at once."""
        return WARP // self.lanes

    @property
    def step(self) -> int:
        """Rows of a tile from one of a thread's rows to its next one."""
        return self.at_once * self.warps

    @property
    def chunks(self) -> int:
        """Units of a row that a lane has, ``lanes`` units apart."""
        return self.units // self.lanes

    def first_row(self, thread: Any, owner: "RowLanes") -> Any:
        """The thread's first row, of the rows that its warp has with ``owner``'s division."""
        row, warp = thread % WARP // self.lanes, thread // WARP
        return row // owner.at_once * owner.step + warp * owner.at_once + row % owner.at_once


@dataclass(frozen=True)
class WordRows:
    """Loads tiles of rows of g, (length, head_dim) with any strides.

    Attributes:
        head_dim, num_threads: compile-time constants; all of the threads load, an even number of warps unless elements
            are words.
        pairs: whether rows at multiples of 8 bytes are copied by as many.
    """

    g: cute.Tensor
    head_dim: Constexpr
    thread: Int32
    num_threads: Constexpr
    pairs: Constexpr = True

    @property
    def is_contiguous(self) -> Any:
        """Whether the elements of a row are neighbours."""
        return self.g.stride[1] == 1

    @property
    def _size(self) -> int:
        return self.g.element_type.width // 8

    @property
    def _row_bytes(self) -> int:
        return self.head_dim * self._size

    def _division(self, tile: cute.Tensor, unit: int) -> RowLanes:
        """How lanes divide rows of ``tile`` into units of so many bytes."""
        division = RowLanes(cute.size(tile, mode=[1]) * self._size // unit, self.num_threads // WARP)
        assert cute.size(tile, mode=[0]) % division.step == 0, "warps copy whole tiles"
        assert division.step % 2 == 0 or self._size == WORD, "a thread's rows start alike within words"
        return division

    @cute.jit
    def start(self, tile: cute.Tensor, row0: Int32, rows: Int32, whole: Constexpr) -> None:
        """Start loading ``tile``, (rows, columns), of which ``rows`` rows exist; all of them if ``whole``.

        What does not exist becomes zeros, since 0 * NaN is NaN.
        """
        if self.is_contiguous:
            if cutlass.const_expr(self.pairs and self._row_bytes % (2 * WORD) == 0):
                starts = self.g.iterator.toint() | (Int64(self.g.stride[0]) * self._size)
                if (starts & Int64(2 * WORD - 1)) == Int64(0):
                    self.copy_words(tile, row0, rows, whole, 2 * WORD)
                else:
                    self.copy_words(tile, row0, rows, whole, WORD)
            else:
                self.copy_words(tile, row0, rows, whole, WORD)

    @cute.jit
    def copy_words(
        self, tile: cute.Tensor, row0: Int32, rows: Int32, whole: Constexpr, unit: Constexpr
    ) -> None:
        """Start copying the ``unit`` bytes at multiples of ``unit`` that rows have parts of."""
        division = self._division(tile, unit)
        thread = below_1024(rematerialize(self.thread))
        lane, first = thread % division.lanes, thread // division.lanes
        stride = optimization_barrier(Int64(self.g.stride[0])) * self._size
        start = self.g.iterator.toint() + Int64(row0 + first) * stride
        skew = Int32(start) & Int32(unit - 1)
        for c in cutlass.range_constexpr(division.chunks):
            before = c * division.lanes * unit
            end = self._row_bytes + skew - (before + lane * unit)  # of the row, from here
            source = start + Int64(before + lane * unit - skew)
            address = swizzled_addresses(tile, first, lane * unit // self._size)
            if (end <= 0) | (end >= unit):
                for m in cutlass.range_constexpr(0, cute.size(tile, mode=[0]), division.step):
                    exists = None
                    if cutlass.const_expr(before + division.lanes * unit > self._row_bytes):
                        exists = end > 0
                    if cutlass.const_expr(not whole):
                        exists = (first + m < rows) & (end > 0)
                    copy_async(address(m, before // self._size), source, unit, exists)
                    source += division.step * stride
        if cutlass.const_expr(self._size < WORD and unit == WORD):
            self.copy_last_elements(tile, row0, rows)

    @cute.jit
    def copy_last_elements(self, tile: cute.Tensor, row0: Int32, rows: Int32) -> None:
        """Start copying the last elements of the warp's rows that end between two words, a row a lane.

        The tensor may end between the words of its last row, which is loaded at once, therefore: cp.async touches a
        whole word, also where it copies the half of it.
        """
        owner = self._division(tile, WORD)
        division = RowLanes(1, owner.warps)
        thread = below_1024(rematerialize(self.thread))
        stride = optimization_barrier(Int64(self.g.stride[0])) * self._size
        own: Constexpr = cute.size(tile, mode=[0]) // owner.warps
        for m in cutlass.range_constexpr(0, own, WARP):
            row = division.first_row(thread, owner) + m * owner.warps
            source = self.g.iterator.toint() + (Int64(row0 + row) * stride + (self._row_bytes - self._size))
            start = (Int32(source) - (self._row_bytes - self._size)) & Int32(WORD - 1)
            col = self.head_dim - 1 + start // self._size
            there = (Int32(source) & Int32(WORD - 1)) == Int32(0)
            if cutlass.const_expr(own % WARP != 0):
                there = there & (thread % WARP + m < own)
            if there & (col < cute.size(tile, mode=[1])):
                target = (tile.iterator + cute.crd2idx((row, col), tile.layout)).toint()
                if row == rows - 1:
                    store_element(target, source)
                else:
                    copy_async_element(target, source, row < rows)

    @cute.jit
    def finish(self, tile: cute.Tensor, row0: Int32, rows: Int32) -> None:
        """After a thread's copies have arrived, and before a barrier: move the rows that lie an element too far."""
        if self.is_contiguous:
            if cutlass.const_expr(self._size < WORD):
                self.move(tile, row0, rows)
        else:
            load_elements(self.g, row0, rows, tile, self.thread, self.num_threads)

    @cute.jit
    def move(self, tile: cute.Tensor, row0: Int32, rows: Int32) -> None:
        """Move the warp's rows that start between two words."""
        division, owner = self._division(tile, VECTOR), self._division(tile, WORD)
        length: Constexpr = VECTOR // self._size
        thread = below_1024(rematerialize(self.thread))
        first, lane = division.first_row(thread, owner), thread % division.lanes
        start = Int32(self.g.iterator.toint()) + (row0 + first) * (Int32(self.g.stride[0]) * self._size)
        skewed = (start & Int32(2)) != Int32(0)
        if cute.arch.vote_ballot_sync(skewed) != 0:
            beyond: Constexpr = (division.units - 1) * length
            here = swizzled_addresses(tile, first, lane * length)
            after = swizzled_addresses(tile, first, cutlass.min((lane + 1) * length, beyond))
            places: Constexpr = [
                (m, vector)
                for m in range(0, cute.size(tile, mode=[0]), division.step)
                for vector in range(0, division.units, division.lanes)
            ]
            at_once: Constexpr = -(-_AT_ONCE // division.chunks) * division.chunks  # whole rows
            cute.arch.sync_warp()  # the other lanes' copies have arrived as well
            for begin in cutlass.range_constexpr(0, len(places), at_once):
                some: Constexpr = places[begin : begin + at_once]
                words = cute.make_rmem_tensor((4, len(some)), Int32)
                for i, (m, vector) in enumerate(some):
                    word = self.word_after(
                        after(m, vector * length),
                        lane + vector == division.units - 1,
                        row0 + first + m,
                        first + m < rows,
                        division.units * length,
                    )
                    read_vector(here(m, vector * length), words[None, i])
                    shift_element(words[None, i], word, skewed)
                cute.arch.sync_warp()  # the other lanes have read what is overwritten now
                for i, (m, vector) in enumerate(some):
                    write_vector(words[None, i], here(m, vector * length))

    @cute.jit
    def word_after(
        self, address: Int32, is_last: Boolean, row: Int32, exists: Boolean, cols: Constexpr
    ) -> Int32:
        """The word after 16 bytes of a row, at ``address`` unless they are the last ones of ``cols`` columns."""
        word = Int32(0)
        if is_last:
            if cutlass.const_expr(self.head_dim == cols):  # the last element was not copied
                if exists:
                    source = self.g.iterator + (Int64(row) * self.g.stride[0] + (cols - 1))
                    bits = cute.recast_ptr(source, dtype=Int16)
                    word = Int32(cute.make_tensor(bits, cute.make_layout(1))[0])
        else:
            source = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=VECTOR)
            word = cute.make_tensor(source, cute.make_layout(1))[0]
        return word


def swizzled_addresses(tile: cute.Tensor, row: Int32, col: Int32) -> Callable[[int, int], Int32]:
    """The shared-memory address of element (row + m, col + k) of a swizzled tile, for static m and k.

    Rows whole periods of the swizzle apart, and columns whole atoms, are constant distances apart: one address in a
    register serves all of them.

    Args:
        col: within the first atom of columns, or the next one's start.
    """
    size, periods = tile.element_type.width // 8, {}

    def address(m: int, k: int) -> Int32:
        phase = m % _ATOM_ROWS
        if phase not in periods:
            periods[phase] = (tile.iterator + cute.crd2idx((row + phase, col), tile.layout)).toint()
        return periods[phase] + cute.crd2idx((m - phase, k), tile.layout.outer) * size

    return address


def copy_async(target: Int32, source: Int64, unit: int, exists: Boolean | None) -> None:
    """cp.async of ``unit`` bytes, 4 or 8; if given, of zeros unless they exist. On the host a copy."""
    if not on_device():
        copy_on_host(target, source, unit, Boolean(True) if exists is None else exists)
        return
    size = [] if exists is None else [cutlass.select_(exists, Int32(unit), Int32(0))]
    last = ", {$r2}" if size else ""
    cute.arch.inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {unit}{last};",
        read_only_args=[target, source, *size],
    )


@cute.jit
def copy_on_host(target: Int64, source: Int64, unit: Constexpr, exists: Boolean) -> None:
    """Copy ``unit`` bytes, or zeros."""
    halves = [
        cute.make_tensor(
            cute.make_ptr(Int16, address, cute.AddressSpace.generic, assumed_align=2),
            cute.make_layout(unit // 2),
        )
        for address in (target, source)
    ]
    for i in cutlass.range_constexpr(unit // 2):
        value = Int16(0)
        if exists:
            value = halves[1][i]
        halves[0][i] = value


def copy_async_element(target: Int32, source: Int64, exists: Boolean) -> None:
    """cp.async of a word's first 2 bytes, or of zeros, and zeros after them."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};",
        read_only_args=[target, source, cutlass.select_(exists, Int32(2), Int32(0))],
    )


@cute.jit
def store_element(target: Int32, source: Int64) -> None:
    """Load 2 bytes, and store them and zeros after them at a word of shared memory."""
    bits = cute.make_ptr(Uint16, source, cute.AddressSpace.gmem, assumed_align=2)
    word = cute.make_ptr(Uint32, target, cute.AddressSpace.smem, assumed_align=WORD)
    cute.make_tensor(word, cute.make_layout(1))[0] = Uint32(cute.make_tensor(bits, cute.make_layout(1))[0])


def read_vector(address: Int32, words: cute.Tensor) -> None:
    """Four words of shared memory from a multiple of 16 bytes on."""
    source = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=VECTOR)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)


def write_vector(words: cute.Tensor, address: Int32) -> None:
    """Store four words at a multiple of 16 bytes of shared memory."""
    target = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=VECTOR)
    cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(4)))


@cute.jit
def shift_element(words: cute.Tensor, after: Int32, skewed: Boolean) -> None:
    """If ``skewed``, the words from their second 16 bits on; ``after``: the word after them."""
    for i in cutlass.range_constexpr(cute.size(words)):
        follower = after
        if cutlass.const_expr(i + 1 < cute.size(words)):
            follower = words[i + 1]
        words[i] = cutlass.select_(skewed, byte_permute(words[i], follower, 0x5432), words[i])
