"""Loads of rows that start anywhere: whole 16 bytes of global memory to staging memory, shifted into place from there.

cp.async copies 16 bytes at multiples of 16, which the rows of odd head dims and strides are not. So the 16 bytes at
such multiples that a row has a part of are copied as they are, without waiting for them. Once they are there, a thread
shifts 16 bytes of a row at a time from two neighbouring ones into the tile.

What is read beside a row is at most 15 bytes before and after it, in the same 16 bytes as a part of it, and so in the
same page of memory; it is masked bit by bit and never enters a sum. Rows whose elements are not neighbours are read one
element at a time instead, without staging.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, Int64, cute
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_attn.device.element_copy import load_elements
from cute_attn.device.math import byte_permute, rematerialize

VECTOR_BYTES = 16


def vectors_of_row(head_dim: int, element_bytes: int) -> int:
    """The most aligned 16 bytes that a row of ``head_dim`` elements has parts of."""
    return -(-(head_dim * element_bytes + VECTOR_BYTES - element_bytes) // VECTOR_BYTES)


@dataclass(frozen=True)
class StagedRows:
    """Loads blocks of rows of g, (length, head_dim) with any strides, through staging memory.

    Attributes:
        staging: 16 bytes times ``vectors_of_row`` for each row of a block.
        head_dim, num_threads: compile-time constants; all of the threads load.
    """

    g: cute.Tensor
    staging: cute.Pointer
    head_dim: Constexpr
    thread: Int32
    num_threads: Constexpr

    @property
    def is_staged(self) -> Any:
        """Whether the elements of a row are neighbours."""
        return self.g.stride[1] == 1

    @property
    def _row_bytes(self) -> int:
        return self.head_dim * self._element_bytes

    @property
    def _element_bytes(self) -> int:
        return self.g.element_type.width // 8

    @property
    def _vectors(self) -> int:
        return vectors_of_row(self.head_dim, self._element_bytes)

    def _staged(self, index: Int32) -> cute.Tensor:
        """The ``index``-th 16 bytes of staging memory, as words."""
        start = (cute.recast_ptr(self.staging, dtype=Int32) + 4 * index).align(VECTOR_BYTES)
        return cute.make_tensor(start, cute.make_layout((4, 1)))

    @cute.jit
    def start(self, row0: Int32, rows: Int32, block_rows: Constexpr) -> None:
        """Start loading ``block_rows`` rows from ``row0`` on, of which ``rows`` exist."""
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), Int32, num_bits_per_copy=8 * VECTOR_BYTES
        )
        thread = rematerialize(self.thread)
        if self.is_staged:
            for n in cutlass.range(-(-block_rows * self._vectors // self.num_threads), unroll=1):
                index = thread + n * self.num_threads
                row, vector = index // self._vectors, index % self._vectors
                address = (self.g.iterator + Int64(row0 + row) * self.g.stride[0]).toint()
                source = (address & ~Int64(VECTOR_BYTES - 1)) + Int64(VECTOR_BYTES * vector)
                if (row < block_rows) & (row < rows) & (source < address + self._row_bytes):
                    words = cute.make_ptr(Int32, source, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
                    cute.copy(atom, cute.make_tensor(words, cute.make_layout((4, 1))), self._staged(index))

    @cute.jit
    def finish(self, tile: cute.Tensor, row0: Int32, rows: Int32) -> None:
        """Write the block that was started, and has arrived, to ``tile`` (rows, columns).

        What does not exist, and columns beyond head_dim, become zeros.
        """
        if self.is_staged:
            self.shift(tile, 0, row0, rows, cute.size(tile, mode=[0]))
        else:
            load_elements(self.g, row0, rows, tile, self.thread, self.num_threads)

    @cute.jit
    def load(self, tile: cute.Tensor, row0: Int32, rows: Int32, at_once: Constexpr) -> None:
        """Load all of ``tile`` and wait for it, ``at_once`` rows at a time, which staging memory holds."""
        if self.is_staged:
            for first in cutlass.range_constexpr(0, cute.size(tile, mode=[0]), at_once):
                count: Constexpr = min(at_once, cute.size(tile, mode=[0]) - first)
                self.start(row0 + first, rows - first, count)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                cute.arch.barrier()
                self.shift(tile, first, row0 + first, rows - first, count)
                cute.arch.barrier()
        else:
            load_elements(self.g, row0, rows, tile, self.thread, self.num_threads)

    @cute.jit
    def shift(
        self, tile: cute.Tensor, tile_row0: Constexpr, row0: Int32, rows: Int32, block_rows: Constexpr
    ) -> None:
        """Rows of ``tile`` from ``tile_row0`` on from what staging memory has."""
        size: Constexpr = self._element_bytes
        length: Constexpr = VECTOR_BYTES // size
        pieces: Constexpr = cute.size(tile, mode=[1]) // length
        thread = rematerialize(self.thread)
        first = Int32(self.g.iterator.toint() & Int64(VECTOR_BYTES - 1))
        step = Int32(self.g.stride[0]) * size  # its low bits are all that counts
        # Unrolled, loads overlap; but long rows would take all registers.
        unroll: Constexpr = 4 if self.head_dim <= 64 else 1
        for n in cutlass.range(-(-block_rows * pieces // self.num_threads), unroll=unroll):
            index = thread + n * self.num_threads
            row, piece = index // pieces, index % pieces
            if row < block_rows:
                words = cute.make_rmem_tensor(8, Int32)
                for half in cutlass.range_constexpr(2):
                    vector = row * self._vectors + cutlass.min(piece + half, self._vectors - 1)
                    own = cute.make_tensor(words.iterator + 4 * half, cute.make_layout((4, 1)))
                    cute.autovec_copy(self._staged(vector), own)
                shift = (first + (row0 + row) * step) & Int32(VECTOR_BYTES - 1)
                shifted = shift_words(words, shift, size)
                valid = self._row_bytes - VECTOR_BYTES * piece if row < rows else Int32(0)
                mask_words(shifted, valid, size)
                offset = cute.crd2idx((tile_row0 + row, piece * length), tile.layout)
                at = (tile.iterator + offset).toint()
                target = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
                cute.autovec_copy(shifted, cute.make_tensor(target, cute.make_layout(4)))


@cute.jit
def shift_words(words: cute.Tensor, shift: Int32, size: Constexpr) -> cute.Tensor:
    """The 16 bytes from byte ``shift``, 0 to 15 and a multiple of ``size``, of 8 words on."""
    two, one, half = shift & Int32(8), shift & Int32(4), shift & Int32(2)
    some: list[Any] = [cutlass.select_(two != Int32(0), words[i + 2], words[i]) for i in range(6)]
    some = [cutlass.select_(one != Int32(0), some[i + 1], some[i]) for i in range(5)]
    result = cute.make_rmem_tensor(4, Int32)
    for i in cutlass.range_constexpr(4):
        result[i] = some[i]
        if cutlass.const_expr(size == 2):
            between = byte_permute(some[i], some[i + 1], 0x5432)
            result[i] = cutlass.select_(half != Int32(0), between, some[i])
    return result


@cute.jit
def mask_words(words: cute.Tensor, valid: Int32, size: Constexpr) -> None:
    """Zero all but the first ``valid`` bytes, a multiple of ``size`` and perhaps negative or more than there are."""
    for i in cutlass.range_constexpr(cute.size(words)):
        kept = cutlass.select_(valid > Int32(4 * i), words[i], Int32(0))
        if cutlass.const_expr(size == 2):
            kept = cutlass.select_(valid == Int32(4 * i + 2), words[i] & Int32(0xFFFF), kept)
        words[i] = kept
