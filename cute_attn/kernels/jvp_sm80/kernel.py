"""The Ampere forward with its forward-mode derivative: cp.async, ldmatrix and mma.sync. Runs on sm80 to sm120.

X_dot is the tangent of X, P are the probabilities of the scores S, and sums run over a row's keys::

    S_dot   = epilogues'(softmax_scale * (Q_dot K^T + Q K_dot^T))
    LSE_dot = sum P S_dot
    O_dot   = dropout(P (S_dot - LSE_dot)) V + dropout(P) V_dot

The kernel is the forward of :mod:`cute_attn.kernels.forward_sm80` on dual numbers X + X_dot e with e^2 = 0. Each of the
forward's products becomes three tensor-core products, which load each operand once. The second product multiplies
P + P S_dot e and V + V_dot e. A work tile thus has two accumulators, O and A = P S_dot V + P V_dot, and at the end
O_dot = A - LSE_dot O. P S_dot is centered (:class:`cute_attn.epilogues.tangents.RowTangents`). The epilogues' factors
are those of a backward.

A step has six products, the forward's has two. No result is added atomically, and nothing is saved: the kernel also
returns O and LSE.

Shared memory: a tile of Q, K, V or O and the tile of its tangent are two adjacent stages.

Limits: fp16 and bf16; head dims up to 256, of V up to 128: two wider accumulators do not fit into registers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Constexpr, Float32, Int32, cute

import layouts
from cute_attn.device.gemm import Dual, dual_gemm, dual_gemm_rs
from cute_attn.device.math import optimization_barrier, rematerialize
from cute_attn.device.seqlen import Seqlens, sequence
from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.epilogues.softmax import multiply_rows
from cute_attn.epilogues.tangents import RowTangents
from cute_attn.kernels.base import DualLaunch, beyond
from cute_attn.kernels.forward_sm80.kernel import ForwardSm80
from cute_attn.kernels.forward_sm80.main_loop import MainLoop
from cute_attn.kernels.forward_sm80.storage import BlockLoad, ForwardParams, KeyGroup, SharedMemory
from cute_attn.kernels.jvp_sm80.heuristics import TABLE, keys
from cute_attn.outputs.partial import store_lse
from cute_attn.tiles import JvpSm80Tile
from cute_attn.traits import MAX_DUAL_COLUMNS, Traits
from cute_attn.work.query_tiles import QueryTile


@dataclass(frozen=True)
class JvpParams(ForwardParams):
    """Parameters of a launch of the forward, and its tangents."""

    mQdot: cute.Tensor
    mKdot: cute.Tensor
    mVdot: cute.Tensor
    mOdot: cute.Tensor
    mLSEdot: cute.Tensor


@dataclass(frozen=True)
class DualLoad:
    """Loads key blocks of K or V and of its tangent into two adjacent stages."""

    value: BlockLoad
    tangent: BlockLoad

    def start(self, block: Int32, stage: Int32, whole: Constexpr) -> None:
        self.value.start(block, 2 * stage, whole)
        self.tangent.start(block, 2 * stage + 1, whole)


@dataclass(frozen=True)
class DualLoop(MainLoop):
    """The forward's main loop on dual numbers."""

    tangents: Any  # ``Operands`` of the tangents' fragments
    acc_dot: cute.Tensor  # P S_dot V + P V_dot
    acc_dot_rows: cute.Tensor  # acc_dot as (rows, head_dim_v)
    rows: RowTangents

    @cute.jit
    def scores(self, block: Int32, stage: Int32):
        """Issue the epilogues' loads from global memory, then compute Q K^T and its tangent; return both."""
        op, dot, tile, chain = self.operands, self.tangents, self.kernel.tile, self.kernel.epilogues
        shape = op.tiled_mma.get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n))
        acc = tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        for x in acc:
            x.fill(0.0)
        loaded = ()
        if cutlass.const_expr(chain.modifiers):
            loaded = chain.load(self.state, self.score_tile(block, acc[0], rematerialize(self.thread)))
        dual_gemm(op.tiled_mma, acc, (op.q, dot.q), (op.k, dot.k), stage, self.kernel.unroll)
        return acc, loaded

    @cute.jit
    def accumulate(self, block: Int32, acc: Dual, loaded: tuple, stage: Int32, masked: Constexpr) -> None:
        """Turn scores into probabilities and tangents into P S_dot; add the product with V + V_dot e."""
        chain = self.kernel.epilogues
        thread = rematerialize(self.thread)
        scores = self.score_tile(block, acc[0], thread)
        partial = self.blocks.visit(block)[1] if cutlass.const_expr(masked) else None
        saved = chain.forward(self.state, scores, loaded, masked, partial)
        stored = self.stored_softmax(thread)
        softmax = stored.load_stats()
        unseen = tuple(softmax.row_max[r] == -Float32.inf for r in range(cute.size(softmax.row_max)))
        factors = cute.make_rmem_tensor(cute.make_layout(cute.size(softmax.row_max)), Float32)
        softmax.advance(scores.acc, factors, masked)
        stored.store_stats(softmax)
        dots = scores.of(self.by_rows(acc[1]))
        chain.tangents(self.state, dots, saved)
        self.rows.advance(scores.acc, dots.acc, factors, unseen, chain.tangents_may_be_nan(masked))
        for x in (self.acc_o_rows, self.acc_dot_rows):
            multiply_rows(x, factors)
        dropped = chain.dropout_mask(self.state, scores)
        p = tuple(cute.make_rmem_tensor_like(x, self.kernel.dtype) for x in acc)
        for x, half in zip(acc, p, strict=True):
            half.store(x.load().to(self.kernel.dtype))
            chain.zero_dropped(dropped, self.by_rows(half))
        a = tuple(layouts.as_operand_a(half) for half in p)
        v = (self.operands.v, self.tangents.v)
        dual_gemm_rs(self.operands.tiled_mma, (self.acc_o, self.acc_dot), a, v, stage)


@dataclass(frozen=True)
class JvpSm80(DualLaunch, ForwardSm80):
    """The kernel of the forward and its forward-mode derivative for (traits, tile); ``__call__`` launches it."""

    tile: JvpSm80Tile
    numbers: ClassVar[int] = 2

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        if traits.head_dim_v > MAX_DUAL_COLUMNS:
            return f"head_dim_v is {traits.head_dim_v}; accepted: up to {MAX_DUAL_COLUMNS}"
        return beyond(traits, "jvp-sm80") or EpilogueChain.decline(traits)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> JvpSm80Tile:
        return TABLE.first(traits, target, *keys(traits, target))

    # ---- host ----

    def launch_duals(
        self,
        tensors: tuple,
        results: tuple,
        seqlens: Seqlens,
        softmax_scale: Float32,
        schedule: Any,
        *rest: Any,
    ) -> None:
        (score_args, stream), (values, (mQdot, mKdot, mVdot)) = rest, tensors
        (mO, mLSE), (mOdot, mLSEdot) = results
        forward = self.params((*values, mO, mLSE), seqlens, softmax_scale, schedule, score_args)
        duals = {"mQdot": mQdot, "mKdot": mKdot, "mVdot": mVdot, "mOdot": mOdot, "mLSEdot": mLSEdot}
        params = JvpParams(**vars(forward), **duals)
        ctas = params.grid.tiles(seqlens.batch(params.mQ))
        self.kernel(params).launch(grid=[ctas, 1, 1], block=[self.tile.num_threads, 1, 1], stream=stream)

    # ---- device ----

    @cute.kernel
    def kernel(self, params: JvpParams) -> None:
        self.run(params)

    def loads(
        self, params: JvpParams, shared: SharedMemory, tile: QueryTile, group: KeyGroup
    ) -> tuple[DualLoad, DualLoad]:
        """The loads of K and V with their tangents."""

        def load(pair: Dual, area: cute.Tensor, columns: int) -> DualLoad:
            return DualLoad(*(self.block_load(m, area, columns, tile, group) for m in pair))

        width, width_v = self.row_widths
        load_k = load((params.mK, params.mKdot), shared.k, width)
        return load_k, load((params.mV, params.mVdot), shared.v, width_v)

    def main_loop(self, params: JvpParams, *given: Any) -> DualLoop:
        """The main loop before its first step: O, A and all sums are zero."""
        forward = super().main_loop(params, *given)
        acc_dot = cute.make_rmem_tensor_like(forward.acc_o)
        acc_dot.fill(0.0)
        rows = cute.make_tensor(acc_dot.iterator, forward.acc_o_rows.layout)
        return DualLoop(
            **vars(forward),
            tangents=self.products.operands(self.tiled_mma(), forward.shared, forward.thread, None),
            acc_dot=acc_dot,
            acc_dot_rows=rows,
            rows=RowTangents.make(
                cute.size(rows, mode=[0]), self.epilogues.tangent_scale(params.softmax_scale)
            ),
        )

    def queries(self, params: JvpParams, tile: QueryTile) -> None:
        """None: :meth:`load_queries` makes Q and its tangent."""

    @cute.jit
    def load_queries(self, params: JvpParams, q: None, tile: QueryTile, loop: DualLoop) -> None:
        """Start loading Q and its tangent, then the first key blocks."""
        d, _ = self.row_widths
        copy = self.row_copy(self.gmem_load(d), d, tile, loop.thread)
        for i, m in enumerate((params.mQ, params.mQdot)):
            head = sequence(m, tile.batch, tile.head, tile.info.offset_q, self.traits.varlen)
            rows = self.rows(head, m, d, loop.row0)
            copy.copy(rows, loop.shared.q[None, None, i], tile.info.seqlen_q - loop.row0, False)
        cute.arch.cp_async_commit_group()
        loop.start_loads()

    @cute.jit
    def finish(self, params: JvpParams, loop: DualLoop, tile: QueryTile) -> None:
        """Normalise and store O, LSE and their tangents."""
        thread, rows = loop.thread, cute.size(loop.acc_o_rows, mode=[0])
        lse, lse_dot = (cute.make_rmem_tensor(cute.make_layout(rows), Float32) for _ in range(2))
        softmax, rescale = loop.stored_softmax(thread).load_stats(), self.output_scale(loop)
        chain, args, score_map = self.epilogues, params.score_args, loop.score_map(thread)
        sinks = chain.sinks_of_rows(args, tile.head, tile.heads_left, score_map)
        sink_tangents = chain.sink_tangents_of_rows(args, tile.head, score_map)
        out = (loop.acc_o_rows, loop.acc_dot_rows)
        loop.rows.normalize(softmax, out, (lse, lse_dot), rescale, sinks, sink_tangents)
        thread = optimization_barrier(thread)
        for m, found in ((params.mLSE, lse), (params.mLSEdot, lse_dot)):
            store_lse(m, found, loop.score_map(thread), tile, self.traits.varlen)
        for m, acc in ((params.mO, loop.acc_o), (params.mOdot, loop.acc_dot)):
            o = sequence(m, tile.batch, tile.head, tile.info.offset_q, self.traits.varlen)
            self.store_half(o, m, loop, tile, thread, acc)
