"""Loads of the forward for rows that start anywhere.

Rows of K and V that start alike stay where they are copied. Then O's columns lie where V's do, and O is stored from
there on; Q is brought to where K lies.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

from cute_attn.device.skewed_rows import SkewedRows, has_room, rows_start_alike, shift_rows
from cute_attn.device.word_rows import WordRows


@dataclass(frozen=True)
class UnalignedLoad:
    """Loads blocks of one head's Q, K or V; see :class:`cute_attn.kernels.forward_sm80.loads.BlockLoad`."""

    rows: WordRows
    s: cute.Tensor  # (rows of a block, padded head_dim, stage)
    seqlen: Int32
    alike: Int32 | None = None  # whether rows are to lie where they are copied; None where they never are
    cleaned: Constexpr = True  # whether zeros are beside those
    last_may_be_whole: Constexpr = False  # whether the last block is loaded as a whole one, too

    @property
    def has_room(self) -> bool:
        """Whether shared memory has room for rows that lie where they are copied."""
        return has_room(self.s[None, None, 0], self.rows.head_dim, self.rows.num_threads)

    @property
    def skewed(self) -> SkewedRows:
        """The loads of rows that start alike."""
        rows = self.rows
        return SkewedRows(rows.g, rows.head_dim, rows.thread, rows.num_threads)

    @cute.jit
    def start(self, block: Int32, stage: Int32 | int, whole: Constexpr) -> None:
        """Start loading ``block``; ``whole``: all its rows exist. Others are zeroed, since 0 * NaN is NaN."""
        row0 = block * cute.size(self.s, mode=[0])
        tile, rows = self.s[None, None, stage], self.seqlen - row0
        if cutlass.const_expr(self.alike is None):
            self.rows.start(tile, row0, rows, whole)
        elif self.alike != 0:
            if cutlass.const_expr(not (whole and self.last_may_be_whole)):
                self.skewed.start(tile, row0, rows, whole)
            elif rows > cute.size(self.s, mode=[0]):
                self.skewed.start(tile, row0, rows, True)
            else:
                self.skewed.start(tile, row0, rows, False)
        else:
            self.rows.start(tile, row0, rows, whole)

    @cute.jit
    def finish(self, block: Int32, stage: Int32 | int) -> None:
        """After a thread's copies of ``block`` have arrived, and before the barrier that publishes them."""
        row0 = block * cute.size(self.s, mode=[0])
        tile, rows = self.s[None, None, stage], self.seqlen - row0
        moves = Boolean(True)
        if cutlass.const_expr(self.alike is not None):
            moves = self.alike == 0
        if moves:
            self.rows.finish(tile, row0, rows)
        elif cutlass.const_expr(self.cleaned):
            self.skewed.clean(tile)

    @cute.jit
    def first_col(self) -> Int32:
        """The column in shared memory of a row's first element."""
        col = Int32(0)
        if cutlass.const_expr(self.alike is not None):
            if self.alike != 0:
                col = self.skewed.skew
        return col

    @cute.jit
    def bring_to(self, other: "UnalignedLoad") -> None:
        """Move rows that have been loaded to the column where those of ``other`` lie."""
        if cutlass.const_expr(other.alike is not None):
            col = other.first_col()
            if col != 0:
                cute.arch.barrier()
                shift_rows(self.s[None, None, 0], col, self.rows.thread, self.rows.num_threads)


def unaligned_load(
    kernel: Any, g: cute.Tensor, s: cute.Tensor, head_dim: int, seqlen: Int32, thread: Int32
) -> UnalignedLoad:
    """The loads of one head's Q, K or V by a forward kernel."""
    return UnalignedLoad(WordRows(g, head_dim, thread, kernel.tile.num_threads), s, seqlen)


def start_alike(kernel: Any, mK: cute.Tensor, mV: cute.Tensor) -> tuple:
    """Whether rows of K, and of V, start alike; Nones where that does not matter."""
    if kernel.loads_aligned or kernel.single:
        return None, None
    return rows_start_alike(mK), rows_start_alike(mV)


def as_copied(kernel: Any, load_k: Any, load_v: Any, alike: tuple) -> tuple:
    """Both :class:`UnalignedLoad`; where shared memory has room, rows that start alike stay where they are copied."""
    loads = [
        replace(load, alike=one) if load.has_room else load
        for load, one in zip((load_k, load_v), alike, strict=True)
    ]
    # Columns beside V make columns beside O, which are not stored.
    loads[1] = replace(loads[1], cleaned=False, last_may_be_whole=kernel.tile.num_stages == 1)
    return tuple(loads)
