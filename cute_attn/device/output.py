"""What every forward writes besides O: log-sum-exps, and for inspection the probabilities."""

import cutlass
from cutlass import Constexpr, Float32, Int64, cute

from cute_attn.device.math import LOG2_E, exp2
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.work.query_tiles import QueryTile


@cute.jit
def store_lse(
    mLSE: cute.Tensor, lse: cute.Tensor, score_map: ScoreMap, place: QueryTile, packed: Constexpr
) -> None:
    """lse (rows) to (batch, nheads, seqlen_q) or packed (nheads, total_q): one lane of the four that share a row."""
    if cutlass.const_expr(packed):
        head_stride = mLSE.stride[0]
        start = Int64(place.head) * head_stride + place.info.offset_q
    else:
        head_stride = mLSE.stride[1]
        start = Int64(place.batch) * mLSE.stride[0] + Int64(place.head) * head_stride
    if score_map.thr_col == 0:
        for r in cutlass.range_constexpr(cute.size(lse)):
            own = start
            if cutlass.const_expr(score_map.heads > 1):
                own = start + Int64(score_map.head(r)) * head_stride
            g_lse = cute.make_tensor(mLSE.iterator + own, cute.make_layout(place.info.seqlen_q))
            row = place.row0 + score_map.query(r)
            if row < place.info.seqlen_q:
                g_lse[row] = lse[r]


@cute.jit
def normalized(tile: ScoreTile, lse: cute.Tensor, scale_log2: Float32) -> None:
    """Scores in ``tile.acc`` become probabilities under the final log-sum-exps."""
    for r in cutlass.range_constexpr(len(tile.rows)):
        lse_log2 = Float32(0.0) if lse[r] == -Float32.inf else lse[r] * LOG2_E
        for c in cutlass.range_constexpr(len(tile.cols)):
            tile.acc[r, c] = exp2(tile.acc[r, c] * scale_log2 - lse_log2)


@cute.jit
def store_probabilities(mSoftmax: cute.Tensor, p: cute.Tensor, tile: ScoreTile, place: QueryTile) -> None:
    """p (rows, cols) of one tile to (batch, nheads, max_seqlen_q, max_seqlen_k), element by element."""
    stride_batch, stride_head, stride_row, _ = mSoftmax.stride
    plane = mSoftmax.iterator + (Int64(place.batch) * stride_batch + Int64(place.head) * stride_head)
    for r in cutlass.range_constexpr(len(tile.rows)):
        row = tile.row0 + tile.rows[r]
        for c in cutlass.range_constexpr(len(tile.cols)):
            column = tile.col0 + tile.cols[c]
            if row < place.info.seqlen_q and column < place.info.seqlen_k:
                element = plane + (Int64(row) * stride_row + Int64(column))
                cute.make_tensor(element, cute.make_layout(1))[0] = p[r, c]
