"""Loads of the forward for rows that start anywhere.

Rows of K and V that start alike stay where they are copied. Then O's columns lie where V's do, and O is stored from
there on; Q is brought to where K lies.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.skewed_rows import has_room, rows_start_alike, shift_rows
from cute_attn.device.unaligned_rows import UnalignedRows
from cute_attn.tiles import padded


@dataclass(frozen=True)
class UnalignedLoad:
    """Loads blocks of one head's Q, K or V; see :class:`cute_attn.kernels.forward_sm80.loads.BlockLoad`."""

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


def unaligned_load(
    kernel: Any, g: cute.Tensor, s: cute.Tensor, head_dim: int, seqlen: Int32, thread: Int32
) -> UnalignedLoad:
    """The loads of one head's Q, K or V by a forward kernel."""
    return UnalignedLoad(UnalignedRows(g, head_dim, thread, kernel.tile.num_threads), s, seqlen)


def start_alike(kernel: Any, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor) -> tuple:
    """Whether rows of Q, of K and of V start alike; Nones where they are moved, or always aligned."""
    if kernel.loads_aligned or kernel.single:
        return None, None, None
    tile, (dim, dim_v) = kernel.tile, kernel.row_widths
    return tuple(
        rows_start_alike(m) if has_room(rows, padded(width), width, tile.num_threads) else None
        for m, rows, width in ((mQ, tile.tile_m, dim), (mK, tile.tile_n, dim), (mV, tile.tile_n, dim_v))
    )


def as_copied(kernel: Any, load_q: Any, load_k: Any, load_v: Any, alike: tuple) -> dict[str, Any]:
    """The loads as fields of a context. Rows that start alike stay where they are copied; Q's, if K's start there."""
    # Columns beside V make columns beside O, which are not stored.
    rows_k, rows_v = replace(load_k.rows, alike=alike[1]), replace(load_v.rows, alike=alike[2], cleaned=False)
    rows_q = load_q.rows.at_column(rows_k.first_col(), alike[0])
    return {
        "load_q": replace(load_q, rows=rows_q),
        "load_k": replace(load_k, rows=rows_k),
        "load_v": replace(load_v, rows=rows_v, last_may_be_whole=kernel.tile.num_stages == 1),
    }
