"""Stores O in fp32 from an accumulator's registers to global memory."""

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute

from cute_attn.device.gemm_terms import COLUMNS
from cute_attn.device.score_tile import ScoreMap


@cute.jit
def store_pairs(
    o: cute.Tensor,
    acc_rows: cute.Tensor,
    score_map: ScoreMap,
    row0: Int32,
    seqlen: Int32,
    head_dim: Constexpr,
) -> None:
    """Store fp32 results to o, (seqlen, head_dim), from registers.

    acc_rows: the rows and columns in ``score_map``, for the tile that starts at ``row0``.
    """
    pair = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(cute.size(acc_rows, mode=[0])):
        row = row0 + score_map.query(r)
        if row < seqlen:
            start = o.iterator + Int64(row) * o.stride[0]
            for c in cutlass.range_constexpr(0, cute.size(acc_rows, mode=[1]), 2):
                col = score_map.thr_col + score_map.modes.cols[c]
                if col < head_dim:
                    pair[0], pair[1] = acc_rows[r, c], acc_rows[r, c + 1]
                    target = (start + Int64(col)).align(8)
                    cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))


@cute.jit
def store_vectors(
    o: cute.Tensor,
    acc: cute.Tensor,
    rows: tuple,
    row0: Int32,
    seqlen: Int32,
    col0: Int32,
    head_dim: Constexpr,
) -> None:
    """Store P V with :class:`cute_attn.device.gemm_terms.Fp32Values` to o, (seqlen, head_dim), by vectors of four.

    rows: the offset of each of the thread's rows from its first row, ``row0``; col0: the thread's first column.
    """
    vector = cute.make_rmem_tensor(4, Float32)
    for r in cutlass.range_constexpr(len(rows)):
        row = row0 + rows[r]
        for group in cutlass.range_constexpr(cute.size(acc, mode=[2]) // 4):
            for half in cutlass.range_constexpr(2):
                col = col0 + (COLUMNS * group + 4 * half)
                for j in cutlass.range_constexpr(4):
                    vector[j] = acc[half + 2 * (r % 2), r // 2, 4 * group + j]
                if (row < seqlen) & (col < head_dim):
                    target = cute.make_tensor(
                        (o.iterator + cute.crd2idx((Int64(row), col), o.layout)).align(16),
                        cute.make_layout(4),
                    )
                    cute.autovec_copy(vector, target)
