"""Stores an accumulator from registers to rows in global memory."""

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute

from cute_attn.device.score_tile import ScoreMap


@cute.jit
def store_rows(
    acc: cute.Tensor,
    score_map: ScoreMap,
    rows: cute.Tensor,
    row0: Int32,
    end: Int32,
    width: Constexpr,
    scale: Float32 | None = None,
    vector: Constexpr = 2,
) -> None:
    """Store ``acc``, or ``acc * scale``, to the rows from ``row0`` up to ``end``, in their type.

    Args:
        acc: fp32, with the rows and columns in ``score_map``, for the tile that starts at ``row0``.
        rows: (any, width), rows of whole vectors, aligned to their size.
        width: number of columns; columns of acc from there on are not stored.
        vector: adjacent columns of a row that a thread holds, and that one instruction stores.
    """
    dtype: Constexpr = rows.element_type
    cols: Constexpr = score_map.modes.cols
    some = cute.make_rmem_tensor(cute.make_layout(vector), dtype)
    for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
        row = row0 + score_map.query(r)
        if row < end:
            first = rows.iterator + cute.assume(Int64(row) * rows.stride[0] + score_map.thr_col, divby=vector)
            for c in cutlass.range_constexpr(0, len(cols), vector):
                if score_map.thr_col + cols[c] < width:
                    for j in cutlass.range_constexpr(vector):
                        value = acc[r, c + j]
                        if cutlass.const_expr(scale is not None):
                            value = value * scale
                        some[j] = value.to(dtype)
                    cute.autovec_copy(some, cute.make_tensor(first + cols[c], cute.make_layout(vector)))
