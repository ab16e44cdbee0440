"""The Hopper forward for attention with a cache, for head dims above 256, such as latent attention's 576 and 512.

The loads and the key ranges of :mod:`cute_attn.kernels.kvcache_sm90.kernel`. As in
:mod:`cute_attn.kernels.head_dim_512_sm90.kernel`, two warpgroups divide the columns of O, but a third one computes the
scores:

    scores warpgroup                                     two values warpgroups, each
    for j = 0, 1, ...                                    for j = 0, 1, ...
        S[j] = Q K[j]                                        wait for P[j] and the factors of O's rows
        epilogues, online softmax                            rescale O
        P[j] and the factors of O's rows to shared memory    O += P[j] V[j], half of the columns
    the factors that normalize O to shared memory        wait for the factors that normalize O

Each values warpgroup stores its columns of O from registers. A work tile whose queries see no key uses neither Q nor P:
its O is 0.

Where V is the first columns of K (the trait ``latent``), a key block is loaded once, and is free again after P V, which
does not wait for S of the next block.

Limits: those of :mod:`cute_attn.kernels.kvcache_sm90.kernel`, with head dims up to 576 for q and k and 512 for v.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Constexpr, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

import layouts
from cute_attn.device.math import rematerialize
from cute_attn.device.pipeline import WARPGROUP, PingPong
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.kernels.base import beyond_cache
from cute_attn.kernels.copies import Copies
from cute_attn.kernels.forward_sm90.consumer import Consumer
from cute_attn.kernels.forward_sm90.producer import CLAIM_AHEAD
from cute_attn.kernels.forward_sm90.storage import (
    ConsumerThread,
    ForwardInputs,
    ForwardParams,
    PipelineState,
    fragments_of,
)
from cute_attn.kernels.head_dim_512_sm90.kernel import ForwardLargeSm90
from cute_attn.kernels.head_dim_512_sm90.roles import LargeStorage, ScoreLoop, ValueConsumer
from cute_attn.kernels.kvcache_512_sm90.heuristics import cache_tile
from cute_attn.kernels.kvcache_sm90.kernel import KvcacheSm90
from cute_attn.kernels.kvcache_sm90.roles import CacheLoads, CacheResults
from cute_attn.outputs.staged_output import ForwardOutputs
from cute_attn.rows.cached import EntryTiles, PagedTiles
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


SCORES = 2
"""Index of the warpgroup that computes the scores."""


@dataclass(frozen=True)
class CacheScoreLoop(ScoreLoop):
    """S, softmax and P of each key block; zeroes the rows of V before a sequence's first key before it publishes P."""

    @cute.jit
    def step(self, block: Int32, masked: Constexpr, frozen: Constexpr) -> None:
        """Compute S and P of ``block``."""
        storage, n = self.storage, self.uses.keys + (self.blocks.end - 1 - block)
        scores, acc_s, loaded = self.score_tile(block, n)
        storage.pipeline_k.consumer_wait(n)
        self.start_qk(acc_s, n)
        warpgroup.wait_group(0)
        self.release_keys(n)
        self.probabilities(scores, loaded, masked, False)
        self.publish(scores, acc_s, n)

    def last_product(self) -> None:
        """Nothing: other warpgroups compute P V."""

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
class CacheScoreResults:
    """Publishes the factors that normalize O, and stores LSE."""

    results: CacheResults

    @cute.jit
    def store(self, loop: CacheScoreLoop) -> None:
        kernel, tile, thread = loop.kernel, loop.query_tile, rematerialize(loop.thread.index)
        score_map = kernel.score_map(thread)
        lse = loop.finish_rows(loop.sinks(self.results.params, thread))
        if loop.blocks.begin < loop.blocks.end:
            loop.publish_factors(score_map)
        self.results.write(kernel, tile, None, lse, score_map)
        kernel.epilogues.store_maxima(loop.state, loop.softmax.seen, score_map, tile.row0)


@dataclass(frozen=True)
class CacheValueConsumer(ValueConsumer):
    """Like :class:`ValueConsumer`, with half ``columns`` of O; ``outputs`` is a :class:`CacheResults`."""

    columns: Constexpr  # 0 or 1

    stores_by_tma: ClassVar[bool] = False

    @cute.jit
    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        queries, keys = pipeline_state.queries, pipeline_state.keys
        op, blocks = self.thread.fragments, self.blocks_of(tile)
        op.acc_o.fill(0.0)
        if blocks.begin < blocks.end:
            end = keys + (blocks.end - blocks.begin)
            self.multiply(keys, end, queries)
            queries, keys = queries + 1, end
        self.outputs.write(self.kernel, tile, op.acc_o_rows, None, self.score_map())
        return PipelineState(queries, keys)

    def score_map(self) -> ScoreMap:
        """The map of the rows and columns of O that the thread holds."""
        kernel, columns = self.kernel, self.kernel.output_columns
        lane, heads = rematerialize(self.thread.index), kernel.tile.pack_heads
        own = ScoreMap.make(kernel.mma_pv(), kernel.tile.tile_m, columns, lane, heads=heads)
        return dataclasses.replace(own, thr_col=own.thr_col + self.columns * columns)


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

    def mma_pv(self) -> cute.TiledMma:
        """O += P V by one warpgroup with half of the columns, both from shared memory."""
        return layouts.tiled_mma_sm90(
            self.dtype, self.tile.tile_m, self.columns_at_once, warpgroups=1, b_major="mn"
        )

    def copies(self) -> Copies:
        return super().copies().part("mma-pv", "mma_pv", threads=WARPGROUP)

    @property
    def columns_at_once(self) -> int:
        """Columns of an instruction of P V: all of a warpgroup's, or half of 256.

        ptxas accepts no instruction with more registers than each of 512 threads begins with.
        """
        columns = self.output_columns
        return columns // 2 if columns > 192 else columns

    @cute.jit
    def run_roles(
        self,
        params: ForwardParams,
        storage: LargeStorage,
        inputs: ForwardInputs,
        outputs: ForwardOutputs,
        warp: Int32,
        thread: Int32,
    ) -> None:
        """Set each warpgroup's register count and run its role: loads, half of O's columns, or the scores."""
        results, lane = self.results(params, outputs), thread % WARPGROUP
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.tile.load_registers)
            if warp == 0:
                self.produce(params, storage, inputs)
        elif warp < 8:
            self.compute_values(params, storage, results, 0, lane)
        elif warp < 12:
            self.compute_values(params, storage, results, 1, lane)
        else:
            cute.arch.setmaxregister_increase(self.tile.score_registers)
            own = self.consumer_thread(storage, SCORES, lane)
            Consumer(self, params, storage, own, CacheScoreLoop, CacheScoreResults(results)).run()

    @cute.jit
    def compute_values(
        self,
        params: ForwardParams,
        storage: LargeStorage,
        results: CacheResults,
        columns: Constexpr,
        lane: Int32,
    ) -> None:
        """Compute half ``columns`` of O's columns of all work tiles."""
        cute.arch.setmaxregister_increase(self.tile.compute_registers)
        own = self.consumer_thread(storage, columns, lane)
        CacheValueConsumer(self, params, storage, results, own, columns).run()

    def consumer_thread(self, storage: LargeStorage, group: int, lane: Int32) -> ConsumerThread:
        """The running thread of consumer warpgroup ``group``, with its half of V's columns."""
        columns, (tile_n, _, stages) = self.output_columns, storage.s_v.shape
        half = (columns, tile_n, stages), (group % self.tile.warpgroups, 0, 0)
        s_v = cute.local_tile(layouts.transposed(storage.s_v), *half)
        s_q = storage.q.tensor[None, None, 0]
        fragments = fragments_of(self, storage, 0, 0, s_q, columns, storage.p.tensor, s_v)
        return ConsumerThread(Int32(group), lane, PingPong(Int32(group), 1, False), fragments)
