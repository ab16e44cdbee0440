"""The consumer warpgroups for a cache and head dims above 256: they store their columns of O from registers.

A work tile whose queries see no key uses neither Q nor P: its O is 0.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cute_attn.device.math import rematerialize
from cute_attn.device.pipeline import WARPGROUP, Accessed
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.epilogues.softmax import multiply_rows
from cute_attn.kernels.forward_sm90.producer import CLAIM_AHEAD
from cute_attn.kernels.forward_sm90.role import ForwardRole
from cute_attn.kernels.forward_sm90.storage import (
    ConsumerThread,
    ForwardInputs,
    ForwardParams,
    PipelineState,
)
from cute_attn.kernels.head_dim_512_sm90.roles import HalfOutput, ScoreLoop
from cute_attn.kernels.head_dim_512_sm90.storage import SCORES, VALUES, LargeStorage
from cute_attn.kernels.kvcache_sm90.roles import CacheResults
from cute_attn.rows.query_buffer import LastUse
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import QueryTile
from cute_attn.work.replay import WorkItemId


@dataclass(frozen=True)
class LatentLoads:
    """The loads of Q and of key blocks whose first columns are the values."""

    inputs: ForwardInputs
    storage: LargeStorage
    params: ForwardParams

    @cute.jit
    def run(self, tile: QueryTile, blocks: BlockRange, pipeline_state: PipelineState, claims: Any) -> Int32:
        """As :meth:`CacheLoads.run`."""
        inputs, storage, info, rows = self.inputs, self.storage, tile.info, self.params.rows
        last, keys, head = blocks.end - 1, pipeline_state.keys, tile.head_kv
        pipeline, count, claimed = storage.pipeline_k, blocks.end - blocks.begin, Int32(0)
        step: Constexpr = inputs.k.blocks_found
        found = inputs.k.find(rows, tile.batch, last, info)
        ahead = inputs.k.find(rows, tile.batch, last - step, info)
        claim_at = cutlass.max(count - CLAIM_AHEAD, 0)
        for i in cutlass.range(count, unroll=1):
            if cutlass.const_expr(claims is not None):
                if i == claim_at:
                    claimed = claims.claim()
            if i > 0 and i % step == 0:
                found = ahead
                ahead = inputs.k.find(rows, tile.batch, last - i - step, info)
            pipeline.producer_acquire(keys + i)
            inputs.k.load(found, i % step, head, storage.s_k, pipeline, keys + i)
            if i == 0:
                storage.q.load(inputs.q, tile, pipeline_state.queries)
        return claimed


@dataclass(frozen=True)
class CacheScoreLoop(ScoreLoop):
    """As :class:`ScoreLoop`; the rows of V before a sequence's first key are zeroed before P is published."""

    def release_keys(self, n: Int32) -> None:
        """Latent keys are read once more, as values."""
        if not self.storage.latent:
            super().release_keys(n)

    @cute.jit
    def publish(self, scores: ScoreTile, acc_s: cute.Tensor, n: Int32) -> None:
        self.zero_values_before_first(self.blocks.end - 1 - (n - self.uses.keys), n)
        super().publish(scores, acc_s, n)


@dataclass(frozen=True)
class CacheScoreResults:
    """Results of the warpgroup that computes S and P: LSE, and the first half of O's columns."""

    results: CacheResults

    @cute.jit
    def store(self, loop: CacheScoreLoop) -> None:
        """Publish the factors that normalize O; store its first half, and LSE."""
        kernel, storage, own, tile = loop.kernel, loop.storage, loop.thread, loop.query_tile
        fragments, thread = own.fragments, rematerialize(own.index)
        factors, lse = fragments.factors, cute.make_rmem_tensor_like(fragments.factors)
        sinks, rescale = self.results.sinks(loop, thread), kernel.epilogues.rescale(loop.state)
        for r in cutlass.range_constexpr(cute.size(factors)):
            factors[r], lse[r] = loop.softmax.finish_row(r, rescale, sinks)
        count = loop.blocks.end - loop.blocks.begin
        if count > 0:
            p, use = storage.p, loop.uses.keys + count + loop.tiles_before
            p.pipeline.producer_wait(use)
            p.write_factors(factors, kernel.score_map(thread), use)
            p.commit(use)
            p.pipeline.consumer_release(use, Accessed.BY_THREADS)
        multiply_rows(fragments.acc_o_rows, factors)
        self.results.write(kernel, tile, fragments.acc_o_rows, lse, output_map(kernel, SCORES, thread))


@dataclass(frozen=True)
class CacheValueConsumer(ForwardRole):
    """The warpgroup with the second half of O's columns; it multiplies the other warpgroup's P by V."""

    storage: LargeStorage
    thread: ConsumerThread
    results: CacheResults

    @cute.jit
    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        """Its half of O of one work tile."""
        queries, keys = pipeline_state.queries, pipeline_state.keys
        q, p, op = self.storage.q, self.storage.p, self.thread.fragments
        blocks = self.blocks_of(tile)
        op.acc_o.fill(0.0)
        if blocks.begin < blocks.end:
            q.pipeline.consumer_wait(queries)
            q.release_after(LastUse.PRODUCTS, queries)
            score_map = output_map(self.kernel, VALUES, self.thread.index)
            end = keys + (blocks.end - blocks.begin)
            for n in cutlass.range(keys, end, unroll=1):
                self.step(score_map, n, n + queries)
            p.pipeline.consumer_wait(end + queries)
            p.read_factors(op.factors, score_map, end + queries)
            p.pipeline.consumer_release(end + queries, Accessed.BY_THREADS)
            multiply_rows(op.acc_o_rows, op.factors)
            queries, keys = queries + 1, end
        target_map = output_map(self.kernel, VALUES, rematerialize(self.thread.index))
        self.results.write(self.kernel, tile, op.acc_o_rows, None, target_map)
        return PipelineState(queries, keys)

    @cute.jit
    def step(self, score_map: ScoreMap, n: Int32, use: Int32) -> None:
        """O += P V with use n of V's pipeline and ``use`` of P's."""
        p, output = self.storage.p, HalfOutput(self.kernel, self.storage, self.thread)
        p.pipeline.consumer_wait(use)
        p.read_factors(self.thread.fragments.factors, score_map, use)
        output.rescale()
        output.start(n, use)
        warpgroup.wait_group(0)
        output.release(n, use)


def output_map(kernel: Constexpr, group: int, lane: Int32) -> ScoreMap:
    """Rows and columns of O that a thread of warpgroup ``group`` holds."""
    tile = kernel.tile
    columns, thread = tile.columns_of_v(kernel.traits), lane + group * WARPGROUP
    return ScoreMap.make(kernel.mma_pv(), tile.tile_m, columns, thread, heads=tile.pack_heads)
