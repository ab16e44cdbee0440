"""The Hopper forward for attention with a cache, for head dims above 256, such as latent attention's 576 and 512.

The consumers of :mod:`cute_attn.kernels.head_dim_512_sm90.kernel`, which divide the columns of O, with the loads and
the key ranges of :mod:`cute_attn.kernels.kvcache_sm90.kernel`. Each warpgroup stores its columns of O from registers. A
work tile whose queries see no key uses neither Q nor P: its O is 0.

Where V is the first columns of K (the trait ``latent``), a key block is loaded once, and is free again after both of
its products.

Limits: those of :mod:`cute_attn.kernels.kvcache_sm90.kernel`, with head dims up to 576 for q and k and 512 for v.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Constexpr, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from cute_attn.device.math import rematerialize
from cute_attn.device.pipeline import WARPGROUP
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.epilogues.softmax import multiply_rows
from cute_attn.kernels.base import beyond_cache
from cute_attn.kernels.forward_sm90.producer import CLAIM_AHEAD
from cute_attn.kernels.forward_sm90.storage import ForwardInputs, ForwardParams, PipelineState
from cute_attn.kernels.head_dim_512_sm90.kernel import ForwardLargeSm90
from cute_attn.kernels.head_dim_512_sm90.roles import SCORES, VALUES, LargeStorage, ScoreLoop, ValueConsumer
from cute_attn.kernels.kvcache_512_sm90.heuristics import cache_tile
from cute_attn.kernels.kvcache_sm90.kernel import KvcacheSm90
from cute_attn.kernels.kvcache_sm90.roles import CacheLoads, CacheResults
from cute_attn.outputs.staged_output import ForwardOutputs
from cute_attn.rows.cached import EntryTiles, PagedTiles
from cute_attn.rows.tma import LastUse
from cute_attn.tiles import KvcacheLargeTile, is_latent_dim
from cute_attn.traits import MAX_HEAD_DIM, MAX_HEAD_DIM_V, Traits
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import QueryTile
from cute_attn.work.replay import WorkItemId


@dataclass(frozen=True)
class LatentLoads(CacheLoads):
    """The loads of Q and of key blocks whose first columns are the values."""

    @cute.jit
    def run(self, tile: QueryTile, blocks: BlockRange, pipeline_state: PipelineState, claims: Any) -> Int32:
        inputs, storage, info, rows = self.inputs, self.storage, tile.info, self.params.rows
        last, keys, head = blocks.end - 1, pipeline_state.keys, tile.head_kv
        pipeline, count, claimed = storage.pipeline_k, blocks.end - blocks.begin, Int32(0)
        step: Constexpr = inputs.k.blocks_found
        found = inputs.k.find(rows, tile.batch, blocks, last, info)
        ahead = inputs.k.find(rows, tile.batch, blocks, last - step, info)
        claim_at = cutlass.max(count - CLAIM_AHEAD, 0)
        for i in cutlass.range(count, unroll=1):
            if cutlass.const_expr(claims is not None):
                if i == claim_at:
                    claimed = claims.claim()
            if i > 0 and i % step == 0:
                found = ahead
                ahead = inputs.k.find(rows, tile.batch, blocks, last - i - step, info)
            pipeline.producer_acquire(keys + i)
            inputs.k.load(found, i % step, head, storage.s_k, pipeline, keys + i)
            if i == 0:
                storage.q.load(inputs.q, tile, pipeline_state.queries)
        return claimed


@dataclass(frozen=True)
class CacheScoreLoop(ScoreLoop):
    """Like :class:`ScoreLoop`, but zeroes the rows of V before a sequence's first key before it publishes P."""

    def release_keys(self, n: Int32) -> None:
        """Release K of use n, unless K is latent: it is then read again as V."""
        if not self.storage.latent:
            super().release_keys(n)

    @cute.jit
    def publish(self, scores: ScoreTile, acc_s: cute.Tensor, n: Int32) -> None:
        self.zero_values_before_first(self.blocks.end - 1 - (n - self.uses.keys), n)
        # By its class: in traced code, super() in a base class calls the base class's method again.
        ScoreLoop.publish(self, scores, acc_s, n)


@dataclass(frozen=True)
class LatentInOrder(CacheScoreLoop):
    """The loop with one stage of P, for latent keys: P V of a block before S of the next one.

    A block's memory is free after P V. With room for two blocks, S and softmax then hide the load of the next one.
    """

    @cute.jit
    def step(self, block: Int32, masked: Constexpr, frozen: Constexpr) -> None:
        """Compute P V of the block visited before, then S and P of ``block``."""
        storage, n = self.storage, self.uses.keys + (self.blocks.end - 1 - block)
        scores, acc_s, loaded = self.score_tile(block, n)
        self.start_pv(n - 1)
        storage.pipeline_k.consumer_wait(n)
        self.start_qk(acc_s, n)
        warpgroup.wait_group(1)
        self.output.release(n - 1, n - 1 + self.tiles_before)
        warpgroup.wait_group(0)
        self.probabilities(scores, loaded, masked, False)
        self.publish(scores, acc_s, n)
        self.output.rescale()


@dataclass(frozen=True)
class CacheScoreResults:
    """Stores the results of the warpgroup that computes S and P: LSE, and the first half of O's columns."""

    results: CacheResults

    @cute.jit
    def store(self, loop: CacheScoreLoop) -> None:
        """Publish the factors that normalize O; store LSE and the first half of O's columns."""
        kernel, fragments, thread = loop.kernel, loop.thread.fragments, rematerialize(loop.thread.index)
        lse = loop.finish_rows(loop.sinks(self.results.params, thread))
        if loop.blocks.begin < loop.blocks.end:
            loop.publish_factors(kernel.score_map(thread))
        multiply_rows(fragments.acc_o_rows, fragments.factors)
        o_map = output_map(kernel, SCORES, thread)
        self.results.write(kernel, loop.query_tile, fragments.acc_o_rows, lse, o_map)
        kernel.epilogues.store_maxima(
            loop.state, loop.softmax.seen, kernel.score_map(thread), loop.query_tile.row0
        )


@dataclass(frozen=True)
class CacheValueConsumer(ValueConsumer):
    """Like :class:`ValueConsumer`; ``outputs`` is a :class:`CacheResults`."""

    stores_by_tma: ClassVar[bool] = False

    @cute.jit
    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        queries, keys = pipeline_state.queries, pipeline_state.keys
        q, op, blocks = self.storage.q, self.thread.fragments, self.blocks_of(tile)
        op.acc_o.fill(0.0)
        if blocks.begin < blocks.end:
            q.pipeline.consumer_wait(queries)
            q.release_after(LastUse.PRODUCTS, queries)
            end = keys + (blocks.end - blocks.begin)
            self.multiply(keys, end, queries)
            queries, keys = queries + 1, end
        o_map = output_map(self.kernel, VALUES, rematerialize(self.thread.index))
        self.outputs.write(self.kernel, tile, op.acc_o_rows, None, o_map)
        return PipelineState(queries, keys)


def output_map(kernel: Constexpr, group: int, lane: Int32) -> ScoreMap:
    """Rows and columns of O that a thread of warpgroup ``group`` holds."""
    tile = kernel.tile
    columns, thread = tile.columns_of_v(kernel.traits), lane + group * WARPGROUP
    return ScoreMap.make(kernel.mma_pv(), tile.tile_m, columns, thread, heads=tile.pack_heads)


@dataclass(frozen=True)
class KvcacheLargeSm90(KvcacheSm90, ForwardLargeSm90):
    """Kernel for attention with a cache and a head dim above 256, for (traits, tile); ``__call__`` launches it."""

    tile: KvcacheLargeTile  # type: ignore[assignment]
    cache_tile: ClassVar[Any] = staticmethod(cache_tile)

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        if traits.head_dim_v > MAX_HEAD_DIM_V:
            return f"head_dim_v is {traits.head_dim_v}; accepted: up to {MAX_HEAD_DIM_V}"
        if traits.latent and not is_latent_dim(traits.head_dim_v):
            return f"head_dim_v is {traits.head_dim_v} with latent; accepted: one of whole 128 columns, padded to 64"
        return beyond_cache(traits, "sm90", lacks=("alignment",), most=MAX_HEAD_DIM)

    def cached_values(self, op: Any, cache: cute.Tensor, policy: Int64) -> EntryTiles | PagedTiles:
        """The loads of V, with each warpgroup's columns in whole swizzle atoms."""
        if self.traits.paged:
            tile, columns = self.tile, self.tile.columns_of_v(self.traits)
            return PagedTiles.make(op, cache, tile.tile_n, tile.page_rows, columns, policy, tile.warpgroups)
        return EntryTiles(dataclasses.replace(self.values(op, cache), policy=policy))

    def loads(self, inputs: ForwardInputs, storage: LargeStorage, params: ForwardParams) -> Any:  # type: ignore[override]
        if self.traits.latent:
            return LatentLoads(inputs, storage, params)
        return super().loads(inputs, storage, params)

    @property
    def score_loop(self) -> type[CacheScoreLoop]:  # type: ignore[override]
        return LatentInOrder if self.tile.p_stages == 1 else CacheScoreLoop

    value_consumer = CacheValueConsumer

    def score_results(self, params: ForwardParams, outputs: ForwardOutputs) -> CacheScoreResults:
        return CacheScoreResults(self.results(params, outputs))

    def value_outputs(self, params: ForwardParams, outputs: ForwardOutputs) -> CacheResults:
        return self.results(params, outputs)
