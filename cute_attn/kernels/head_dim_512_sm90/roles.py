"""The consumer warpgroups for head dims above 256: one computes S and P, and both divide the columns of O."""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Constexpr, Int32, cute
from cutlass.cute.nvgpu import warpgroup

import layouts
from cute_attn.device.gemm import start_gemm
from cute_attn.device.math import rematerialize
from cute_attn.device.pipeline import Accessed
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.epilogues.softmax import multiply_rows, rescale_rows
from cute_attn.kernels.forward_sm90.consumer import MainLoop
from cute_attn.kernels.forward_sm90.role import ForwardRole
from cute_attn.kernels.forward_sm90.storage import ConsumerThread, ForwardParams, PipelineState
from cute_attn.kernels.head_dim_512_sm90.storage import SCORES, VALUES, LargeStorage
from cute_attn.outputs.partial import store_lse
from cute_attn.outputs.staged_output import ForwardOutputs, OutputStore
from cute_attn.rows.query_buffer import LastUse
from cute_attn.work.query_tiles import QueryTile
from cute_attn.work.replay import WorkItemId


@dataclass(frozen=True)
class HalfOutput:
    """Half of O's columns, in one warpgroup's registers: O += P V, with P in shared memory."""

    kernel: Constexpr
    storage: LargeStorage
    thread: ConsumerThread

    @cute.jit
    def rescale(self) -> None:
        """Multiply O's rows by the thread's ``factors``."""
        op = self.thread.fragments
        rescale_rows(op.acc_o_rows, op.factors, self.kernel.tile.rescale_threshold > 0)

    @cute.jit
    def start(self, n: Int32, use: Int32) -> None:
        """Issue O += P V with use n of V's pipeline and ``use`` of P's, whose P has arrived."""
        storage, op = self.storage, self.thread.fragments
        storage.pipeline_v.consumer_wait(n)
        p = op.p_operand[None, None, None, storage.p.pipeline.stage(use)]
        v = op.v[None, None, None, storage.pipeline_v.stage(n)]
        start_gemm(self.kernel.mma_pv(), op.acc_o, p, v, True)

    @cute.jit
    def release(self, n: Int32, use: Int32) -> None:
        """Release the stages of V and P, after the product is complete."""
        self.storage.pipeline_v.consumer_release(n, Accessed.BY_WGMMA)
        self.storage.p.pipeline.consumer_release(use, Accessed.BY_THREADS)


@dataclass(frozen=True)
class ScoreLoop(MainLoop):
    """The loop of the warpgroup that computes P: S, softmax and P of a key block, during P V of the previous block."""

    storage: LargeStorage

    @property
    def tiles_before(self) -> Int32:
        """Number of the CTA's previous work tiles. Each used P's pipeline once more than it has key blocks."""
        return self.uses.queries

    @property
    def output(self) -> HalfOutput:
        """The warpgroup's half of O."""
        return HalfOutput(self.kernel, self.storage, self.thread)

    @cute.jit
    def first_step(self) -> None:
        scores, acc_s = self.first_probabilities()
        self.zero_values_out_of_bounds(self.blocks.end - 1, self.uses.keys)
        self.publish(scores, acc_s, self.uses.keys)

    @cute.jit
    def step(self, block: Int32, masked: Constexpr, frozen: Constexpr) -> None:
        """Compute S and P of ``block``, and P V of the block visited before."""
        storage, n = self.storage, self.uses.keys + (self.blocks.end - 1 - block)
        scores, acc_s, loaded = self.score_tile(block, n)
        storage.pipeline_k.consumer_wait(n)
        self.start_qk(acc_s, n)
        self.start_pv(n - 1)
        warpgroup.wait_group(1)
        self.release_keys(n)
        self.probabilities(scores, loaded, masked, False)
        self.publish(scores, acc_s, n)
        warpgroup.wait_group(0)
        self.output.release(n - 1, n - 1 + self.tiles_before)
        self.output.rescale()

    @cute.jit
    def last_product(self) -> None:
        n = self.uses.keys + (self.blocks.end - 1 - self.blocks.begin)
        self.start_pv(n)
        warpgroup.wait_group(0)
        self.output.release(n, n + self.tiles_before)

    @cute.jit
    def start_pv(self, n: Int32) -> None:
        """Issue the first half of O += P V with use n of V's pipeline, once all warps have written P."""
        self.storage.p.pipeline.consumer_wait(n + self.tiles_before)
        self.output.start(n, n + self.tiles_before)

    @cute.jit
    def publish(self, scores: ScoreTile, acc_s: cute.Tensor, n: Int32) -> None:
        """Store P, in 16 bits with dropout, and O's rescaling factors to shared memory."""
        kernel, p, use = self.kernel, self.storage.p, n + self.tiles_before
        self.convert(scores, acc_s)
        p.pipeline.producer_wait(use)
        store = layouts.store_copy_c(kernel.mma_qk(), kernel.dtype, "sm90")
        mine = store.get_slice(self.thread.index)
        target = mine.partition_D(p.tensor[None, None, p.pipeline.stage(use)])
        cute.copy(store, mine.retile(self.thread.fragments.p), target)
        p.write_factors(self.thread.fragments.factors, self.score_map, use)
        p.commit(use)

    @cute.jit
    def finish_rows(self, sinks: Constexpr) -> cute.Tensor:
        """Set the thread's factors to normalize O's rows; returns the rows' LSE. sinks: one per row, or None."""
        factors, rescale = self.thread.fragments.factors, self.kernel.epilogues.rescale(self.state)
        lse = cute.make_rmem_tensor_like(factors)
        for r in cutlass.range_constexpr(cute.size(factors)):
            factors[r], lse[r] = self.softmax.finish_row(r, rescale, sinks)
        return lse

    @cute.jit
    def publish_factors(self, score_map: ScoreMap) -> None:
        """Publish the factors that normalize O to the other warpgroup."""
        p, use = self.storage.p, self.uses.keys + (self.blocks.end - self.blocks.begin) + self.tiles_before
        p.pipeline.producer_wait(use)
        p.write_factors(self.thread.fragments.factors, score_map, use)
        p.commit(use)
        p.pipeline.consumer_release(use, Accessed.BY_THREADS)


@dataclass(frozen=True)
class ScoreResults:
    """Stores the results of the warpgroup that computes S and P: LSE, and the first half of O's columns."""

    params: ForwardParams
    outputs: ForwardOutputs

    @cute.jit
    def store(self, loop: ScoreLoop) -> OutputStore:
        """Publish the factors that normalize O; store LSE and the first half of O's columns."""
        kernel, storage, own = loop.kernel, loop.storage, loop.thread
        thread, fragments, tile = rematerialize(own.index), own.fragments, loop.query_tile
        score_map = kernel.score_map(thread)
        lse = loop.finish_rows(loop.sinks(self.params, thread))
        loop.publish_factors(score_map)
        multiply_rows(fragments.acc_o_rows, fragments.factors)
        store_lse(self.outputs.mLSE, lse, score_map, tile, kernel.traits.varlen)
        kernel.epilogues.store_maxima(loop.state, loop.softmax.seen, score_map, tile.row0)
        s_o = storage.s_o[None, None, SCORES]
        output = OutputStore(kernel, self.outputs, s_o, own.group, thread, SCORES)
        output.store(fragments.acc_o, tile)
        return output


@dataclass(frozen=True)
class ValueConsumer(ForwardRole):
    """The warpgroup with the second half of O's columns; it multiplies the other warpgroup's P by V.

    outputs: where O is stored; a subclass may use another class.
    """

    storage: LargeStorage
    outputs: Any
    thread: ConsumerThread

    stores_by_tma: ClassVar[bool] = True

    def run(self) -> None:
        super().run()
        if self.stores_by_tma:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        queries, keys = pipeline_state.queries, pipeline_state.keys
        q, op, blocks = self.storage.q, self.thread.fragments, self.blocks_of(tile)
        op.acc_o.fill(0.0)
        q.pipeline.consumer_wait(queries)  # O reuses its memory
        end = keys + (blocks.end - blocks.begin)
        self.multiply(keys, end, queries)
        s_o = self.storage.s_o[None, None, VALUES]
        output = OutputStore(self.kernel, self.outputs, s_o, self.thread.group, self.thread.index, VALUES)
        output.store(op.acc_o, tile)
        output.wait()
        q.release_after(LastUse.STORE, queries)
        return PipelineState(queries + 1, end)

    @cute.jit
    def multiply(self, begin: Int32, end: Int32, queries: Int32) -> None:
        """Compute normalised O from uses [begin, end) of V's pipeline; queries: number of previous work tiles."""
        p, op, score_map = self.storage.p, self.thread.fragments, self.score_map()
        for n in cutlass.range(begin, end, unroll=1):
            self.step(score_map, n, n + queries)
        p.pipeline.consumer_wait(end + queries)
        p.read_factors(op.factors, score_map, end + queries)
        p.pipeline.consumer_release(end + queries, Accessed.BY_THREADS)
        multiply_rows(op.acc_o_rows, op.factors)

    def score_map(self) -> ScoreMap:
        """The map of the rows and columns of O that the thread holds."""
        kernel, tile = self.kernel, self.kernel.tile
        columns = tile.columns_of_v(kernel.traits)
        return ScoreMap.make(kernel.mma_pv(), tile.tile_m, columns, self.thread.index)

    @cute.jit
    def step(self, score_map: ScoreMap, n: Int32, use: Int32) -> None:
        """Rescale O and add P V, with use n of V's pipeline and ``use`` of P's."""
        p, output = self.storage.p, HalfOutput(self.kernel, self.storage, self.thread)
        p.pipeline.consumer_wait(use)
        p.read_factors(self.thread.fragments.factors, score_map, use)
        output.rescale()
        output.start(n, use)
        warpgroup.wait_group(0)
        output.release(n, use)
