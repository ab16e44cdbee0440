"""Loads of the Ampere forward by cp.async, block by block: of aligned rows, or of rows that start anywhere."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.device.skewed_rows import shift_rows
from cute_attn.device.unaligned_rows import UnalignedRows
from cute_attn.kernels.forward_sm80.key_groups import KeyGroup


@dataclass(frozen=True)
class BlockLoad:
    """Loads a group's keys of key blocks of one head's K or V, (seqlen_k, head_dim), from global to shared memory."""

    row_copy: RowCopy
    g: cute.Tensor
    s: cute.Tensor  # (group_keys, padded head_dim, stage)
    seqlen_k: Int32
    group: KeyGroup
    first_key: Int32 | None = None  # keys before it do not exist

    @cute.jit
    def start(self, block: Int32, stage: Int32, whole: Constexpr) -> None:
        """Start loading ``block``; ``whole``: all its keys exist. Others are zeroed, since 0 * NaN is NaN."""
        rows = cute.size(self.s, mode=[0])
        block = self.group.part_of(block)
        g_block = block_of_rows(self.g, block, rows, cute.size(self.s, mode=[1]))
        target, last = self.s[None, None, stage], self.seqlen_k - block * rows
        if cutlass.const_expr(self.first_key is None):
            self.row_copy.copy(g_block, target, last, whole)
        else:
            self.row_copy.copy(g_block, target, last, False, self.first_key - block * rows)

    def finish(self, block: Int32, stage: Int32 | int) -> None:
        """After a thread's copies of ``block`` have arrived: they are where they belong."""


@dataclass(frozen=True)
class UnalignedLoad:
    """Loads blocks of one head's Q, K or V whose rows start anywhere.

    Rows that start alike stay where they are copied, see :class:`UnalignedRows`; others are moved.
    """

    rows: UnalignedRows
    s: cute.Tensor  # (rows of a block, padded head_dim, stage)
    seqlen: Int32
    last_may_be_whole: Constexpr = False  # whether the last block is loaded as a whole one, too

    @cute.jit
    def start(self, block: Int32, stage: Int32 | int, whole: Constexpr) -> None:
        """Start loading ``block``; ``whole``: all its rows exist. Others are zeroed, since 0 * NaN is NaN."""
        size: Constexpr = cute.size(self.s, mode=[0])
        row0 = block * size
        tile, rows = self.s[None, None, stage], self.seqlen - row0
        if cutlass.const_expr(not (whole and self.last_may_be_whole and self.rows.alike is not None)):
            self.rows.start(tile, row0, rows, whole)
        elif rows > size:
            self.rows.start(tile, row0, rows, True)
        else:
            self.rows.start(tile, row0, rows, False)

    def finish(self, block: Int32, stage: Int32 | int) -> None:
        """After a thread's copies of ``block`` have arrived, and before the barrier that publishes them."""
        row0 = block * cute.size(self.s, mode=[0])
        self.rows.finish(self.s[None, None, stage], row0, self.seqlen - row0)

    @cute.jit
    def bring_to(self, other: "UnalignedLoad") -> None:
        """Move rows that have been loaded, and lie there or at column 0, to the column where those of ``other`` lie."""
        if cutlass.const_expr(other.rows.alike is not None):
            col = other.rows.first_col()
            if col != self.rows.first_col():
                cute.arch.barrier()
                shift_rows(self.s[None, None, 0], col, self.rows.thread, self.rows.num_threads)
