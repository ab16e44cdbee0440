"""A step of the forward in which several warps share rows: large head dims, whose output one warp cannot hold.

``warps_n`` warps divide the keys of a score tile and the columns of V and O. What they exchange in shared memory: row
maxima, P, and once at the end row sums.

    wait K[j]; start V[j]
    S = Q K[j]^T, epilogues; own row maxima to shared memory
    wait V[j]; start K[j - 1]
    row maxima of all; P = exp(S - max), to shared memory
    barrier
    O = rescaled O + P V[j]
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, cute

from cute_attn.device.gemm import SmemResult, gemm
from cute_attn.device.math import add, fmax, quad_reduce, rematerialize
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.forward_sm80.params import MainloopContext


@dataclass(frozen=True)
class RowExchange:
    """One number a row from each of the warps that share it: values (tile_m, warps_n) in shared memory."""

    values: cute.Tensor
    score_map: ScoreMap
    warp_n: Int32

    @staticmethod
    def make(kernel: Any, ctx: MainloopContext, thread: Int32) -> "RowExchange":
        """For a thread's rows."""
        return RowExchange(
            ctx.shared.exchange, kernel.score_map(ctx, thread), thread // (32 * kernel.tile.warps_m)
        )

    def row(self, r: int) -> Int32:
        """The thread's row r in the tile."""
        return self.score_map.thr_row + self.score_map.modes.rows[r]

    @cute.jit
    def write(self, numbers: cute.Tensor, thread: Int32) -> None:
        """The warp's own, which all lanes of a quad have."""
        if thread % 4 == 0:
            for r in cutlass.range_constexpr(cute.size(numbers)):
                self.values[self.row(r), self.warp_n] = numbers[r]

    @cute.jit
    def read(self, numbers: cute.Tensor, reduce: Constexpr) -> None:
        """``reduce`` of all warps' in place of the own, after a barrier; in the same order for all of them."""
        for r in cutlass.range_constexpr(cute.size(numbers)):
            total = self.values[self.row(r), 0]
            for n in cutlass.range_constexpr(1, cute.size(self.values, mode=[1])):
                total = reduce(total, self.values[self.row(r), n])
            numbers[r] = total


@cute.jit
def step_of_divided_columns(kernel: Constexpr, ctx: MainloopContext, block: Int32, masked: Constexpr) -> None:
    """One key block."""
    cute.arch.cp_async_wait_group(0)
    cute.arch.barrier()
    ctx.load_v.start(block, 0, not masked)
    cute.arch.cp_async_commit_group()
    acc_s, loaded = kernel.scores(ctx, block, Int32(0))
    thread = rematerialize(ctx.thread)
    scores = kernel.score_tile(ctx, block, acc_s, thread)
    kernel.epilogues.forward(ctx.state, scores, loaded, masked)
    stored = kernel.stored_softmax(ctx, thread)
    softmax, exchange = stored.load_stats(), RowExchange.make(kernel, ctx, thread)
    maxima = cute.make_rmem_tensor(cute.make_layout(cute.size(scores.acc, mode=[0])), Float32)
    for r in cutlass.range_constexpr(cute.size(maxima)):
        maxima[r] = quad_reduce(softmax.block_max(scores.acc, r), fmax)
    exchange.write(maxima, thread)
    cute.arch.cp_async_wait_group(0)
    cute.arch.barrier()
    if block > ctx.blocks.begin:
        ctx.load_k.start(block - 1, 0, True)
    cute.arch.cp_async_commit_group()
    exchange.read(maxima, fmax)
    factors = cute.make_rmem_tensor_like(maxima)
    for r in cutlass.range_constexpr(cute.size(maxima)):
        factors[r] = softmax.exponentiate(scores.acc, r, maxima[r], masked)
    stored.store_stats(softmax)
    _share_probabilities(kernel, ctx, scores, acc_s, thread)
    cute.arch.barrier()
    _accumulate(kernel, ctx, softmax, factors)


@cute.jit
def _share_probabilities(
    kernel: Constexpr, ctx: MainloopContext, scores: ScoreTile, acc_s: cute.Tensor, thread: Int32
) -> None:
    """P with dropout to shared memory, in the operands' dtype; of operands in two parts hi, then lo."""
    tile, chain = kernel.tile, kernel.epilogues
    tiled_mma, shape, s_p = ctx.operands.tiled_mma, (tile.tile_m, tile.tile_n), ctx.shared.p
    assert s_p is not None
    s_p = s_p[None, None, 0]
    if cutlass.const_expr(kernel.products.scales_output):
        chain.drop(ctx.state, scores, scores.acc)
        kernel.products.store_p(ctx.operands, acc_s, shape, s_p, thread)
    else:
        p = cute.make_rmem_tensor_like(acc_s, kernel.dtype)
        p.store(acc_s.load().to(kernel.dtype))
        chain.drop(ctx.state, scores, kernel.by_rows(ctx, p))
        SmemResult(tiled_mma, shape, s_p, thread).store(p)


@cute.jit
def _accumulate(
    kernel: Constexpr, ctx: MainloopContext, softmax: OnlineSoftmax, factors: cute.Tensor
) -> None:
    """O = factors * O + P V, of the warp's own columns."""
    op = ctx.operands
    if cutlass.const_expr(kernel.products.scales_output):
        kernel.products.stored_pv(op, ctx.acc_o, factors)
    else:
        softmax.rescale(ctx.acc_o_rows, factors)
        gemm(op.tiled_mma, ctx.acc_o, op.p, op.v, Int32(0), op.v.steps)


@cute.jit
def add_row_sums(kernel: Constexpr, ctx: MainloopContext, softmax: OnlineSoftmax, thread: Int32) -> None:
    """Row sums of all warps that share a row, a quarter in each lane of a quad, which adds them up."""
    exchange = RowExchange.make(kernel, ctx, thread)
    sums = cute.make_rmem_tensor_like(softmax.row_sum)
    for r in cutlass.range_constexpr(cute.size(sums)):
        sums[r] = quad_reduce(softmax.row_sum[r], add)
    cute.arch.barrier()
    exchange.write(sums, thread)
    cute.arch.barrier()
    exchange.read(sums, add)
    for r in cutlass.range_constexpr(cute.size(sums)):
        softmax.row_sum[r] = sums[r] * Float32(0.25)
