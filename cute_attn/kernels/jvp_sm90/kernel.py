"""The Hopper forward with its forward-mode derivative: TMA, wgmma and specialised warpgroups.

X_dot is the tangent of X, P are the probabilities of the scores S, and sums run over a row's keys::

    S_dot   = epilogues'(softmax_scale * (Q_dot K^T + Q K_dot^T))
    LSE_dot = sum P S_dot
    O_dot   = dropout(P (S_dot - LSE_dot)) V + dropout(P) V_dot

The kernel is the forward of :mod:`cute_attn.kernels.forward_sm90` with the products of
:mod:`cute_attn.kernels.jvp_sm80`. A step has six products: three for the scores of a key block and their tangents, and
three, for the block before, for O and A = P S_dot V + P V_dot. At the end O_dot = A - LSE_dot O. P S_dot is centered
(:class:`cute_attn.epilogues.tangents.RowTangents`).

A tile of Q, K or V and the tile of its tangent are two adjacent stages of shared memory, loaded by one pipeline.

Limits: fp16 and bf16, head dims up to 128. Two accumulators of 64 rows and 128 columns leave a consumer thread 112
registers for scores, P and their tangents.
"""

from dataclasses import dataclass, replace
from typing import Any

from cutlass import Constexpr, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cute_attn.device.gemm import issue
from cute_attn.device.math import convert_to_16_bits, rematerialize
from cute_attn.device.pipeline import WARPGROUP, Pipeline
from cute_attn.device.score_tile import ScoreTile
from cute_attn.device.seqlen import Seqlens
from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.epilogues.tangents import RowTangents
from cute_attn.kernels.base import DualLaunch, beyond
from cute_attn.kernels.forward_sm90.consumer import Consumer, MainLoop
from cute_attn.kernels.forward_sm90.kernel import ForwardSm90
from cute_attn.kernels.forward_sm90.storage import (
    ConsumerThread,
    ForwardInputs,
    ForwardParams,
    ForwardStorage,
    Fragments,
    PipelineState,
    make_fragments,
)
from cute_attn.kernels.jvp_sm90.heuristics import TABLE, keys
from cute_attn.outputs.partial import store_lse
from cute_attn.outputs.staged_output import ForwardOutputs, OutputStore
from cute_attn.rows.tma import TmaTiles
from cute_attn.tiles import JvpSm90Tile
from cute_attn.traits import MAX_DUAL_COLUMNS, Traits
from cute_attn.work.query_tiles import QueryTile


@dataclass(frozen=True)
class DualTiles:
    """A tensor and its tangent. Each tile is loaded together with the tangent's tile, to two adjacent stages."""

    value: TmaTiles
    tangent: TmaTiles

    @property
    def atom(self) -> cute.CopyAtom:
        return self.value.atom

    def _both(self, name: str, *arguments: Any) -> tuple[cute.Tensor, cute.Tensor]:
        first, second = (getattr(x, name)(*arguments) for x in (self.value, self.tangent))
        return first, second

    def sequence(self, first_row: Int32, head: Int32, batch: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        return self._both("sequence", first_row, head, batch)

    def sequence_of_tile(self, first_row: Int32, tile: QueryTile) -> tuple[cute.Tensor, cute.Tensor]:
        return self._both("sequence_of_tile", first_row, tile)

    def load(self, tiles: tuple, n: Int32, target: cute.Tensor, pipeline: Pipeline, use: Int32) -> None:
        """Start loading tile n of value and tangent into their stages of ``target`` (rows, cols, 2 stages)."""
        for i, own in enumerate((self.value, self.tangent)):
            stage = 2 * pipeline.stage(use) + i
            own.load_part(tiles[i], n, target[None, None, stage], pipeline, use)

    def load_part(self, tiles: tuple, part: int, target: cute.Tensor, pipeline: Pipeline, use: Int32) -> None:
        """Start loading into ``target`` (rows, cols). part: 2 n for tile n of the value, 2 n + 1 for the tangent."""
        own = self.tangent if part % 2 else self.value
        own.load_part(tiles[part % 2], part // 2, target, pipeline, use)


@dataclass(frozen=True)
class DualOutputs:
    """Results and their tangents in global memory."""

    value: ForwardOutputs
    tangent: ForwardOutputs


def every_second(tensor: cute.Tensor, first: int) -> cute.Tensor:
    """View of a tensor (rows, cols, 2 stages) with only the stages ``first``, ``first`` + 2, ..."""
    layout, stages = tensor.layout, cute.size(tensor, mode=[2]) // 2
    (rows, cols, _), (d_rows, d_cols, _) = layout.shape, layout.stride
    layout = cute.make_layout((rows, cols, stages), stride=(d_rows, d_cols, layout((0, 0, 2))))
    return cute.make_tensor(tensor[None, None, first].iterator, layout)


def storage_of(storage: ForwardStorage, which: int) -> ForwardStorage:
    """View of the shared storage with only the operands (``which`` 0) or only their tangents (1)."""
    q = replace(storage.q, tensor=every_second(storage.q.tensor, which))
    return replace(storage, q=q, s_k=every_second(storage.s_k, which), s_v=every_second(storage.s_v, which))


@dataclass(frozen=True)
class DualScores(ScoreTile):
    """A score tile, and the tile of its tangents."""

    dots: Any = None


@dataclass(frozen=True)
class DualLoop(MainLoop):
    """The forward's main loop on dual numbers, which are pairs of a score and its tangent."""

    tangents: Fragments  # of the operands' tangents; its acc_o is A
    s_vdot: cute.Tensor
    rows: RowTangents

    @property
    def values(self) -> tuple[cute.Tensor, ...]:
        return self.storage.s_v, self.s_vdot

    def score_tile(self, block: Int32, n: Int32):
        """Score tiles and registers for S and its tangent, and the epilogues' loads from global memory."""
        scores, acc_s, loaded = super().score_tile(block, n)
        dots = cute.make_rmem_tensor_like(acc_s)
        pair = DualScores(**vars(scores), dots=scores.of(self.score_map.view(dots)))
        return pair, (acc_s, dots), loaded

    @cute.jit
    def start_qk(self, acc_s: tuple, n: Int32) -> None:
        """Issue Q K^T and its tangent with use n of K's pipeline, as one wgmma group."""
        op, dot, mma = self.thread.fragments, self.tangents, self.kernel.mma_qk()
        k, k_dot = (x.k[None, None, None, self.storage.pipeline_k.stage(n)] for x in (op, dot))
        warpgroup.fence()
        issue(mma, acc_s[0], op.q, k, False)
        issue(mma, acc_s[1], dot.q, k, False)
        issue(mma, acc_s[1], op.q, k_dot, True)
        warpgroup.commit_group()

    @cute.jit
    def start_pv(self, n: Int32) -> None:
        """Issue O += P V and A += P S_dot V + P V_dot with use n of V's pipeline, as one wgmma group."""
        op, dot, mma = self.thread.fragments, self.tangents, self.kernel.mma_pv()
        v, v_dot = (x.v[None, None, None, self.storage.pipeline_v.stage(n)] for x in (op, dot))
        warpgroup.fence()
        issue(mma, op.acc_o, op.p_operand, v, True)
        issue(mma, dot.acc_o, dot.p_operand, v, True)
        issue(mma, dot.acc_o, op.p_operand, v_dot, True)
        warpgroup.commit_group()

    @cute.jit
    def advance(self, scores: DualScores, saved: tuple, masked: Constexpr, frozen: Constexpr) -> None:
        """Turn scores into probabilities, and their tangents into P (S_dot - center)."""
        factors, row_max = self.thread.fragments.factors, self.softmax.row_max
        unseen = tuple(row_max[r] == -Float32.inf for r in range(0 if frozen else cute.size(row_max)))
        super().advance(scores, saved, masked, frozen)
        chain = self.kernel.epilogues
        chain.tangents(self.state, scores.dots, saved)
        # Keys beyond the sequence may be NaN.
        guarded = masked or chain.tangents_may_be_nan(masked)
        self.rows.advance(scores.acc, scores.dots.acc, None if frozen else factors, unseen, guarded)

    @cute.jit
    def convert(self, scores: DualScores, acc_s: tuple) -> None:
        """Convert P and P S_dot, with dropout, to 16 bits."""
        chain = self.kernel.epilogues
        dropped = chain.dropout_mask(self.state, scores)
        for acc, own in ((acc_s[0], self.thread.fragments), (acc_s[1], self.tangents)):
            convert_to_16_bits(acc, own.p)
            chain.zero_dropped(dropped, self.score_map.view(own.p))

    def rescale(self, step: Int32) -> None:
        """Rescale the accumulated O and A to the row maxima after the block of ``step``."""
        factors = self.thread.fragments.factors
        for own in (self.thread.fragments, self.tangents):
            self.softmax.rescale(own.acc_o_rows, factors)


@dataclass(frozen=True)
class DualConsumer(Consumer):
    """A consumer warpgroup: computes O, LSE and their tangents for its rows of every work tile."""

    tangents: Fragments
    s_vdot: cute.Tensor

    def main_loop(self, tile: QueryTile, uses: PipelineState) -> DualLoop:
        """The main loop of one work tile. A and the sums of tangents start at zero."""
        forward = super().main_loop(tile, uses)
        self.tangents.acc_o.fill(0.0)
        count = cute.size(self.tangents.acc_o_rows, mode=[0])
        rows = RowTangents.make(count, self.kernel.epilogues.tangent_scale(self.params.softmax_scale))
        return DualLoop(**vars(forward), tangents=self.tangents, s_vdot=self.s_vdot, rows=rows)


@dataclass(frozen=True)
class DualResults:
    """Stores O and then its tangent through shared memory; LSE and its tangent from registers."""

    params: ForwardParams
    outputs: DualOutputs

    @cute.jit
    def store(self, loop: DualLoop) -> OutputStore:
        """Normalize and store O, LSE and their tangents; a TMA store may be pending afterwards."""
        thread, group = rematerialize(loop.thread.index), loop.thread.group
        kernel, tile, value, tangent = loop.kernel, loop.query_tile, loop.thread.fragments, loop.tangents
        layout = cute.make_layout(len(loop.score_map.modes.rows))
        lse, lse_dot = (cute.make_rmem_tensor(layout, Float32) for _ in range(2))
        sinks, rescale = loop.sinks(self.params, thread), kernel.epilogues.rescale(loop.state)
        score_map = kernel.score_map(thread)
        sink_tangents = kernel.epilogues.sink_tangents_of_rows(self.params.score_args, tile.head, score_map)
        out = (value.acc_o_rows, tangent.acc_o_rows)
        loop.rows.normalize(loop.softmax, out, (lse, lse_dot), rescale, sinks, sink_tangents)
        for m, found in ((self.outputs.value, lse), (self.outputs.tangent, lse_dot)):
            store_lse(m.mLSE, found, kernel.score_map(thread), tile, kernel.traits.varlen)
        s_o, lane = loop.storage.s_o[None, None, group], thread % WARPGROUP
        OutputStore(kernel, self.outputs.value, s_o, group, lane).store(value.acc_o, tile)
        output = OutputStore(kernel, self.outputs.tangent, s_o, group, lane)
        output.store(tangent.acc_o, tile)
        return output


@dataclass(frozen=True)
class JvpSm90(DualLaunch, ForwardSm90):
    """The kernel of the forward and its forward-mode derivative for (traits, tile); ``__call__`` launches it."""

    tile: JvpSm90Tile

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        return beyond(traits, "jvp-sm90", most=MAX_DUAL_COLUMNS) or EpilogueChain.decline(traits)

    table, keys = TABLE, staticmethod(keys)

    # ---- host ----

    def launch_duals(self, tensors: Any, results: Any, seqlens: Seqlens, *rest: Any) -> None:
        value, tangent = (self.inputs(mQ, mK, mV, rest[2]) for mQ, mK, mV in tensors)
        pairs = zip((value.q, value.k, value.v), (tangent.q, tangent.k, tangent.v), strict=True)
        q, k, v = (DualTiles(*pair) for pair in pairs)
        inputs = ForwardInputs(q, k, v, None)
        mQ, mK, _ = tensors[0]
        outputs = DualOutputs(*(self.outputs(mO, mLSE, mK) for mO, mLSE in results))
        self.launch(mQ, mK, inputs, outputs, seqlens, *rest)

    # ---- device ----

    @cute.kernel
    def kernel(self, params: ForwardParams, inputs: ForwardInputs, outputs: DualOutputs) -> None:
        self.run(params, inputs, outputs)

    def consume(
        self,
        params: ForwardParams,
        storage: ForwardStorage,
        outputs: DualOutputs,  # type: ignore[override]
        warp: Int32,
        thread: Int32,
    ) -> None:
        value, tangent = (storage_of(storage, i) for i in range(2))
        consumer = ConsumerThread.make(self, value, thread - WARPGROUP)
        tangents = make_fragments(self, tangent, consumer.group)
        results = DualResults(params, outputs)
        DualConsumer(self, params, value, consumer, MainLoop, results, tangents, tangent.s_v).run()
