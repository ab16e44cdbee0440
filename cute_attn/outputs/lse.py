"""Stores the LSE of a forward."""

import cutlass
from cutlass import Constexpr, Int64, cute

from cute_attn.device.score_tile import ScoreMap
from cute_attn.outputs.partial import row_exists
from cute_attn.work.query_tiles import QueryTile


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
