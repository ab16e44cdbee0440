"""Stores rows of O and LSE from registers: 16-bit results, or fp32 partial results in a workspace.

Only rows that exist are written: with few queries there are few such rows, and no shared memory is needed.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute

from cute_attn.device.score_tile import ScoreMap
from cute_attn.work.block_range import Partials
from cute_attn.work.query_tiles import QueryTile


@dataclass(frozen=True)
class RowTarget:
    """Addresses of a work tile's output rows: row r is query r // heads of the tile's head r % heads.

    Attributes:
        out, lse: addresses for the tile's first query and head.
        out_steps, lse_steps: elements from one head to the next, and from one query to the next.
        width: columns stored at once: 2, or 1 if rows may start at any element.
        is_partial: the results are partial: O is not needed for rows whose LSE is -inf.
    """

    out: cute.Pointer
    lse: cute.Pointer
    out_steps: tuple[Int64, Int64]
    lse_steps: tuple[Int64, Int64]
    width: Constexpr = 2
    is_partial: Constexpr = True

    @staticmethod
    @cute.jit
    def whole(
        mO: cute.Tensor, mLSE: cute.Tensor, tile: QueryTile, varlen: Constexpr, width: Constexpr = 2
    ) -> "RowTarget":
        """Rows of results mO (batch, seqlen_q, nheads, head_dim_v) and mLSE (batch, nheads, seqlen_q), or varlen."""
        query = Int64(tile.info.offset_q + tile.row0)
        out = query * mO.stride[-3] + Int64(tile.head) * mO.stride[-2]
        lse = Int64(tile.head) * mLSE.stride[-2] + query * mLSE.stride[-1]
        if cutlass.const_expr(not varlen):
            out += Int64(tile.batch) * mO.stride[0]
            lse += Int64(tile.batch) * mLSE.stride[0]
        return RowTarget(
            mO.iterator + cute.assume(out, divby=width),
            mLSE.iterator + lse,
            (Int64(mO.stride[-2]), Int64(mO.stride[-3])),
            (Int64(mLSE.stride[-2]), Int64(mLSE.stride[-1])),
            width,
            False,
        )

    @staticmethod
    @cute.jit
    def split(partials: Partials, split: Int32, tile: QueryTile, varlen: Constexpr) -> "RowTarget":
        """Rows of the partial results of fixed splits."""
        out, lse = partials.out, partials.lse
        batch = Int32(0) if cutlass.const_expr(varlen) else tile.batch
        query = Int64(tile.info.offset_q + tile.row0)
        first = Int64(split) * out.stride[0] + Int64(batch) * out.stride[1]
        first += query * out.stride[2] + Int64(tile.head) * out.stride[3]
        first_lse = Int64(split) * lse.stride[0] + Int64(batch) * lse.stride[1]
        first_lse += Int64(tile.head) * lse.stride[2] + query * lse.stride[3]
        return RowTarget(
            out.iterator + cute.assume(first, divby=4),
            lse.iterator + first_lse,
            (Int64(out.stride[3]), Int64(out.stride[2])),
            (Int64(lse.stride[2]), Int64(lse.stride[3])),
        )


@cute.jit
def row_exists(score_map: ScoreMap, r: Constexpr, tile: QueryTile):
    """False for rows beyond the sequence or beyond a pack's heads, which are not stored."""
    exists = tile.row0 + score_map.query(r) < tile.info.seqlen_q
    if cutlass.const_expr(score_map.heads > 1):
        exists = exists & (score_map.head(r) < tile.heads_left)
    return exists


@cute.jit
def store_rows(
    target: RowTarget,
    acc: Any,  # or None
    lse: Any,  # or None
    score_map: ScoreMap,
    tile: QueryTile,
    dim: Constexpr,
) -> None:
    """Store O and its LSE, or one of them.

    Args:
        acc: normalised O, fp32, with the rows and columns in ``score_map``; stored in the target's type.
        lse: (rows), natural logarithms.
        score_map: the map of O's accumulator.
        dim: head_dim_v; columns from ``dim`` on are not written, except the first if ``dim`` is odd and width is 2. For
            partial results that saw no key, only the LSE is stored.
    """
    dtype: Any = target.out.dtype
    cols = score_map.modes.cols
    for r in cutlass.range_constexpr(len(score_map.modes.rows)):
        if row_exists(score_map, r, tile):
            head = Int64(score_map.head(r)) if cutlass.const_expr(score_map.heads > 1) else Int64(0)
            query = Int64(score_map.query(r))
            row = target.out + cute.assume(
                head * target.out_steps[0] + query * target.out_steps[1] + score_map.thr_col,
                divby=target.width,
            )
            some, wanted = cute.make_rmem_tensor(cute.make_layout(target.width), dtype), Int32(dim)
            if cutlass.const_expr(target.is_partial and lse is not None):
                wanted = cutlass.select_(lse[r] == -Float32.inf, Int32(0), wanted)
            columns: Constexpr = 0 if acc is None else len(cols)
            for c in cutlass.range_constexpr(0, columns, target.width):
                if score_map.thr_col + cols[c] < wanted:
                    for e in cutlass.range_constexpr(target.width):
                        some[e] = dtype(acc[r, c + e])
                    cute.autovec_copy(some, cute.make_tensor(row + cols[c], cute.make_layout(target.width)))
            if cutlass.const_expr(lse is not None):
                if score_map.thr_col == 0:
                    place = head * target.lse_steps[0] + query * target.lse_steps[1]
                    cute.make_tensor(target.lse + place, cute.make_layout(1))[0] = lse[r]


@cute.jit
def store_lse(
    mLSE: cute.Tensor, lse: cute.Tensor, score_map: ScoreMap, tile: QueryTile, varlen: Constexpr
) -> None:
    """Store lse (rows), natural log, to mLSE: (batch, nheads, seqlen_q), or varlen (nheads, total_q)."""
    if cutlass.const_expr(varlen):
        head_stride = mLSE.stride[0]
        start = Int64(tile.head) * head_stride + tile.info.offset_q
    else:
        head_stride = mLSE.stride[1]
        start = Int64(tile.batch) * mLSE.stride[0] + Int64(tile.head) * head_stride
    if score_map.thr_col == 0:
        for r in cutlass.range_constexpr(cute.size(lse)):
            own = start
            if cutlass.const_expr(score_map.heads > 1):
                own = start + Int64(score_map.head(r)) * head_stride
            g_lse = cute.make_tensor(mLSE.iterator + own, cute.make_layout(tile.info.seqlen_q))
            if row_exists(score_map, r, tile):
                g_lse[tile.row0 + score_map.query(r)] = lse[r]
