"""Main loop steps in which several warps divide each row: with large head dims one warp cannot hold a row of O.

``warps_n`` warps divide the keys of a score tile and the columns of V and O. Through shared memory they exchange row
maxima and P in each step, and row sums once at the end:

    wait K[j]; start V[j]
    S = Q K[j]^T, epilogues; store the warp's row maxima
    wait V[j]; start K[j - 1]
    read the row maxima of all warps; P = exp(S - max); store P
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


@dataclass(frozen=True)
class RowExchange:
    """One number per row and per warp of the row. values: (tile_m, warps_n) in shared memory."""

    values: cute.Tensor
    score_map: ScoreMap
    warp_n: Int32

    def row(self, r: int) -> Int32:
        """The index in the tile of the thread's row r."""
        return self.score_map.thr_row + self.score_map.modes.rows[r]

    @cute.jit
    def write(self, numbers: cute.Tensor, thread: Int32) -> None:
        """Write the warp's numbers, which are equal in all lanes of a quad."""
        if thread % 4 == 0:
            for r in cutlass.range_constexpr(cute.size(numbers)):
                self.values[self.row(r), self.warp_n] = numbers[r]

    @cute.jit
    def read(self, numbers: cute.Tensor, reduce: Constexpr) -> None:
        """After a barrier, replace ``numbers`` by the reduction of all warps' numbers, in the same order everywhere."""
        for r in cutlass.range_constexpr(cute.size(numbers)):
            total = self.values[self.row(r), 0]
            for n in cutlass.range_constexpr(1, cute.size(self.values, mode=[1])):
                total = reduce(total, self.values[self.row(r), n])
            numbers[r] = total


@dataclass(frozen=True)
class SharedRows:
    """The steps of a main loop with ``warps_n`` warps per row."""

    loop: Any  # a ``MainLoop``

    @cute.jit
    def step(self, block: Int32, masked: Constexpr) -> None:
        """Process one key block; each load overlaps the other operand's product."""
        loop, chain = self.loop, self.loop.kernel.epilogues
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        loop.load_v.start(block, 0, not masked)
        cute.arch.cp_async_commit_group()
        acc_s, loaded = loop.scores(block, Int32(0))
        thread = rematerialize(loop.thread)
        scores = loop.score_tile(block, acc_s, thread)
        partial = loop.blocks.visit(block)[1] if cutlass.const_expr(masked) else None
        chain.forward(loop.state, scores, loaded, masked, partial)
        stored = loop.stored_softmax(thread)
        softmax, exchange = stored.load_stats(), self.row_exchange(thread)
        maxima = cute.make_rmem_tensor(cute.make_layout(cute.size(scores.acc, mode=[0])), Float32)
        for r in cutlass.range_constexpr(cute.size(maxima)):
            maxima[r] = quad_reduce(softmax.block_max(scores.acc, r), fmax)
        exchange.write(maxima, thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        if block > loop.blocks.begin:
            loop.find_pages(block - 1)
            loop.load_k.start(block - 1, 0, True)
        cute.arch.cp_async_commit_group()
        exchange.read(maxima, fmax)
        factors = cute.make_rmem_tensor_like(maxima)
        for r in cutlass.range_constexpr(cute.size(maxima)):
            factors[r] = softmax.replace_max(r, maxima[r], masked)
            softmax.exponentiate(scores.acc, r, masked)
        stored.store_stats(softmax)
        self.share_probabilities(scores, acc_s, thread)
        cute.arch.barrier()
        self.accumulate_shared(softmax, factors)

    def row_exchange(self, thread: Int32) -> RowExchange:
        """The exchange for a thread's rows."""
        loop = self.loop
        warp_n = thread // (32 * loop.kernel.tile.warps_m)
        return RowExchange(loop.shared.exchange, loop.score_map(thread), warp_n)

    @cute.jit
    def share_probabilities(self, scores: ScoreTile, acc_s: cute.Tensor, thread: Int32) -> None:
        """Store P, with dropout, to shared memory, in the operands' dtype or as terms."""
        loop, kernel, op = self.loop, self.loop.kernel, self.loop.operands
        chain, products, shape = kernel.epilogues, kernel.products, (kernel.tile.tile_m, kernel.tile.tile_n)
        s_p = loop.shared.p[None, None, 0]
        if cutlass.const_expr(products.scales_output):
            chain.drop(loop.state, scores, scores.acc)
            products.store_p(op, acc_s, shape, s_p, thread)
        else:
            p = loop.p_in_16_bits(scores, acc_s)
            SmemResult(op.tiled_mma, shape, s_p, thread).store((p,))

    @cute.jit
    def accumulate_shared(self, softmax: OnlineSoftmax, factors: cute.Tensor) -> None:
        """Compute O = factors * O + P V for the warp's columns."""
        loop, op, products = self.loop, self.loop.operands, self.loop.kernel.products
        if cutlass.const_expr(products.scales_output):
            products.stored_pv(op, loop.acc_o, factors)
        else:
            softmax.rescale(loop.acc_o_rows, factors)
            gemm(op.tiled_mma, loop.acc_o, op.p, op.v, Int32(0), op.v.steps)

    @cute.jit
    def add_row_sums(self, softmax: OnlineSoftmax, thread: Int32) -> None:
        """Sum row_sum over all warps of each row. The result is divided by 4, since each quad adds its lanes later."""
        exchange = self.row_exchange(thread)
        sums = cute.make_rmem_tensor_like(softmax.row_sum)
        for r in cutlass.range_constexpr(cute.size(sums)):
            sums[r] = quad_reduce(softmax.row_sum[r], add)
        cute.arch.barrier()
        exchange.write(sums, thread)
        cute.arch.barrier()
        exchange.read(sums, add)
        for r in cutlass.range_constexpr(cute.size(sums)):
            softmax.row_sum[r] = sums[r] * Float32(0.25)
