"""The two products of a forward on fp32 operands in two fp16 parts each; see :mod:`cute_attn.device.hi_lo`.

    A B^T = hi hi + (lo hi + hi lo), three products of m16n8k16

A tensor core rounds its sums toward zero, which would bias long ones. So few steps along K are summed from zero, the
small products first, and then added to the accumulator in fp32 (Ootomo and Yokota 2022,
https://arxiv.org/abs/2203.03341): in Q K^T with the factor that undoes the scales of Q and K, in P V, a key block at a
time, with the factor of the output so far.

A row of Q, K or V in shared memory has its hi part, then its lo part: an operand of twice the columns.
"""

import cutlass
from cutlass import Constexpr, Float16, Float32, Int32, Int64, cute

from cute_attn.device.forward_fp32 import scale_and_add
from cute_attn.device.gemm import SmemOperand
from cute_attn.device.math import convert_to_16_bits, rematerialize
from cute_attn.device.score_tile import ScoreMap

K_STEP = 16
"""Elements of a step along K."""
PIECES_AHEAD = 2
"""Pieces of 16 columns whose products may be under way at a time. Unbounded, ptxas computes the sums of many pieces
before it adds any of them to the output, and spills."""
P_SCALE = 14
"""P is in [0, 1]: times 2^14, its lo part keeps P's digits down to 2^-26."""


@cute.jit
def load_at(operand: SmemOperand, start: Int32, piece: Constexpr, slot: Constexpr, step: Constexpr) -> None:
    """Load a piece, ``step`` steps after ``start``, into step ``slot`` of the fragment."""
    source = cute.make_tensor(operand.address(start, piece, step), cute.make_layout(8))
    cute.copy(operand.tiled_copy, source, operand.view[None, piece, slot])


@cute.jit
def gemm_qk_parts(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    q: SmemOperand,
    k: SmemOperand,
    stage: Int32,
    unroll: Constexpr,
    factor: Float32,
) -> None:
    """acc += factor * Q K^T, ``unroll`` steps at a time, which are summed from zero."""
    half: Constexpr = q.steps // 2  # steps of each part
    q_start, k_start = q.start(Int32(0)), k.start(stage)
    pieces = cute.logical_divide(acc, (None, None, 2))
    k_pieces = cute.logical_divide(k.fragment, (None, 2, None))
    for first in cutlass.range(0, half, unroll, unroll=1):
        q_here = [q.at_step(q_start, first), q.at_step(q_start, first + half)]
        k_here = [k.at_step(k_start, first), k.at_step(k_start, first + half)]
        for part in cutlass.range_constexpr(2):
            for step in cutlass.range_constexpr(unroll):
                for piece in cutlass.range_constexpr(q.pieces):
                    load_at(q, q_here[part], piece, step + part * half, step)
        for piece in cutlass.range_constexpr(k.pieces):
            for part in cutlass.range_constexpr(2):
                for step in cutlass.range_constexpr(unroll):
                    load_at(k, k_here[part], piece, step + part * half, step)
            target = pieces[None, None, (None, piece)]
            total = cute.make_rmem_tensor(cute.make_layout(target.shape), Float32)
            total.fill(0.0)
            for a, b in ((half, 0), (0, half), (0, 0)):  # the first step of Q's and K's part
                for step in range(unroll):
                    own, other = q.fragment[None, None, a + step], k_pieces[None, (None, piece), b + step]
                    cute.gemm(tiled_mma, total, own, other, total)
            _add_scaled(target, total, factor)


@cute.jit
def _add_scaled(target: cute.Tensor, total: cute.Tensor, factor: Float32) -> None:
    for n in cutlass.range_constexpr(cute.size(target, mode=[2])):
        for m in cutlass.range_constexpr(cute.size(target, mode=[1])):
            for i in cutlass.range_constexpr(cute.size(target, mode=[0])):
                target[i, m, n] = target[i, m, n] + total[i, m, n] * factor


@cute.jit
def parts_of_probabilities(p: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """P in fp32, which becomes rounding errors, as its hi and lo parts times 2^14, in the same layout."""
    hi, lo = (cute.make_rmem_tensor_like(p, Float16) for _ in range(2))
    for i in cutlass.range_constexpr(cute.size(p)):
        p[i] = p[i] * Float32(2.0**P_SCALE)
    convert_to_16_bits(p, hi)
    for i in cutlass.range_constexpr(cute.size(p)):
        p[i] = p[i] - Float32(hi[i])
    convert_to_16_bits(p, lo)
    return hi, lo


@cute.jit
def gemm_pv_parts(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    hi: cute.Tensor,
    lo: cute.Tensor,
    v: SmemOperand,
    stage: Int32,
    factors: cute.Tensor,
) -> None:
    """acc = factors * acc + P V, acc ((2, 2), M, columns / 8), factors (2 M): of the rows of each M, two by two.

    hi, lo: P's parts as A operands; v: a row's hi part, then its lo part.
    """
    half: Constexpr = v.pieces // 2  # pieces of each part
    start = v.start(stage)
    pieces = cute.logical_divide(acc, (None, None, 2))
    v_pieces = cute.logical_divide(v.fragment, (None, 2, None))
    zero = rematerialize(v.thread) >> 31  # which the compiler does not know
    for piece in cutlass.range_constexpr(half):
        here = start
        if cutlass.const_expr(piece >= PIECES_AHEAD):
            here = _after(start, pieces[None, None, (None, piece - PIECES_AHEAD)], zero)
        for step in cutlass.range_constexpr(v.steps):
            v.load(here, piece, step)
            v.load(here, piece + half, step)
        target = pieces[None, None, (None, piece)]
        total = cute.make_rmem_tensor(cute.make_layout(target.shape), Float32)
        total.fill(0.0)
        for p, part in ((lo, 0), (hi, half), (hi, 0)):
            for step in range(v.steps):
                own, other = p[None, None, step], v_pieces[None, (None, piece + part), step]
                cute.gemm(tiled_mma, total, own, other, total)
        scale_and_add(target, total, factors)


@cute.jit
def _after(address: Int32, results: cute.Tensor, zero: Int32) -> Int32:
    """``address``, for loads that shall not start before ``results`` have been computed."""
    bits = Int32(0)
    for i in cutlass.range_constexpr(cute.size(results)):
        bits = bits | results[i].bitcast(Int32)
    return address | (bits & zero)


@cute.jit
def store_pairs(
    o: cute.Tensor,
    acc_rows: cute.Tensor,
    score_map: ScoreMap,
    row0: Int32,
    seqlen: Int32,
    head_dim: Constexpr,
    aligned: Constexpr,
) -> None:
    """Store fp32 results to o, (seqlen, head_dim), from registers.

    Args:
        acc_rows: (rows, columns) as ``score_map`` has them; of the tile that starts at ``row0``.
        aligned: whether rows of o start at multiples of 16 bytes; else single elements are stored.
    """
    pair = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(cute.size(acc_rows, mode=[0])):
        row = row0 + score_map.query(r)
        if row < seqlen:
            start = o.iterator + Int64(row) * o.stride[0]
            for c in cutlass.range_constexpr(0, cute.size(acc_rows, mode=[1]), 2):
                col = score_map.thr_col + score_map.modes.cols[c]
                if cutlass.const_expr(aligned):
                    if col < head_dim:
                        pair[0], pair[1] = acc_rows[r, c], acc_rows[r, c + 1]
                        target = (start + Int64(col)).align(8)
                        cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))
                else:
                    for i in cutlass.range_constexpr(2):
                        if col + i < head_dim:
                            element = start + Int64(col + i) * o.stride[1]
                            cute.make_tensor(element, cute.make_layout(1))[0] = acc_rows[r, c + i]
