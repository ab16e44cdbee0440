"""The Hopper forward: attention with TMA, wgmma and specialised warpgroups.

    S = epilogues(softmax_scale * Q K^T)       (seqlen_q, seqlen_k), one tile at a time, in registers
    P = exp(S - LSE),  LSE = log sum exp S     online: running row maxima and sums
    O = dropout(P) V                           (seqlen_q, head_dim_v)

The kernel is persistent: each CTA claims work tiles (a query block of a head) until none is left. The producer warp
claims and broadcasts them and loads Q once a work tile, then K and V block by block, last block first, into pipelines
of ``num_stages`` stages. One to three consumer warpgroups take 64 rows of the tile each:

    S[0] = Q K[0]; softmax                              the first key block
    for j = 1, 2, ...
        ping-pong barrier: wait for this warpgroup's turn
        issue S[j] = Q K[j]
        issue O += P[j - 1] V[j - 1]
        ping-pong barrier: the next warpgroup's turn
        wait for S[j]; epilogues, online softmax        overlaps P V of this warpgroup and the next one's products
        wait for O; rescale it; P[j] to 16 bits
    O += P V of the last block

After the masked blocks the row maxima are frozen (``speculative``). A work tile with a row whose sum exceeds 2^40 is
replayed with exact online softmax. Every row has seen a key by then (``BlockRange``), unless a bias hides it: a
warpgroup with such a row takes exact steps at once.

Overlap of products and softmax within a warpgroup and, by ping-pong, between warpgroups follows FlashAttention-3 (Shah
et al. 2024, https://arxiv.org/abs/2407.08608). The next tile's loads overlap the store of O.

Limits: fp16 and bf16; head dims up to 256, multiples of 8, padded to multiples of 32 in shared memory; rows 16-byte
aligned with a contiguous last dimension.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

import layouts
from cute_attn.device.math import LOG2_E, convert_to_16_bits, optimization_barrier, rematerialize
from cute_attn.device.pipeline import WARPGROUP, PingPong, warpgroup_any, warpgroup_barrier
from cute_attn.device.score_tile import ScoreContext, ScoreMap, ScoreTile
from cute_attn.device.seqlen import Seqlens
from cute_attn.device.wgmma import start_gemm
from cute_attn.epilogues.chain import EpilogueChain, ScoreState
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.arguments import CUTE_DTYPES, forward_fake_args
from cute_attn.kernels.forward_sm90.heuristics import preferred_tiles, tile_for_lengths
from cute_attn.kernels.forward_sm90.output import store_output, wait_for_stores
from cute_attn.kernels.forward_sm90.params import (
    Consumer,
    ForwardInputs,
    ForwardOutputs,
    ForwardParams,
    ForwardStorage,
    Fragments,
    PipelineState,
    QueryTileContext,
    all_rows,
    make_fragments,
    make_storage,
)
from cute_attn.kernels.forward_sm90.producer import load_all, load_all_bias, loads_queries
from cute_attn.kernels.step import StepContent, wgmma_count
from cute_attn.outputs.lse import store_lse
from cute_attn.rows.tma import TmaTiles
from cute_attn.rows.tma_bias import ROWS, bias_tma
from cute_attn.tiles import ForwardSm90Tile, first_that_fits, padded
from cute_attn.traits import Traits
from cute_attn.work.block_range import BlockRange
from cute_attn.work.broadcast import WorkItem
from cute_attn.work.query_tiles import ForwardSchedule, QueryTile, QueryTileOrder
from cute_attn.work.replay import Replay

LARGEST_SUM = 2.0**40
"""Largest sum of a thread's probabilities of a row that a frozen maximum may leave: far below fp32's largest."""
HIDDEN = -64.0
"""log2: a row whose frozen maximum is below this has only seen keys that a bias hides."""


@dataclass(frozen=True)
class WorkItemId:
    """A work tile for :class:`Replay`: the CTA's n-th, and its index in the order."""

    n: Int32
    index: Int32


@dataclass(frozen=True)
class ForwardSm90:
    """Forward kernel of (traits, tile); ``__call__`` launches it."""

    traits: Traits
    tile: ForwardSm90Tile

    # ---- support, tiles and arguments ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        if (traits.op, traits.arch) != ("forward", "sm90"):
            return f"it computes forward-sm90, not {traits.op}-{traits.arch}"
        return None

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ForwardSm90Tile:
        """The tile for calls that name none."""
        return first_that_fits(preferred_tiles(traits), traits, target)

    def for_lengths(self, seqlen_q: int, seqlen_k: int, group: int) -> "ForwardSm90":
        """This kernel, which has its default tile, with the tile for sequences of at most these lengths.

        ``group``: query heads per key head.
        """
        tile = tile_for_lengths(self.traits, seqlen_q, seqlen_k, group)
        return dataclasses.replace(self, tile=tile) if tile else self

    def without_tma_bias(self) -> "ForwardSm90":
        """This kernel, which has its default tile, with a tile whose threads read the bias from global memory."""
        tiles = [tile for tile in preferred_tiles(self.traits) if not tile.bias_stages]
        return dataclasses.replace(self, tile=first_that_fits(tiles, self.traits, "sm90"))

    @property
    def loads_bias_by_tma(self) -> bool:
        """Whether TMA loads the bias; its strides and address must then be aligned like those of q, k and v."""
        return self.tile.bias_stages > 0

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The score epilogues that the traits ask for."""
        return EpilogueChain.of(self.traits)

    def fake_args(self) -> tuple:
        """The arguments of ``__call__`` for compiling, without the stream."""
        return forward_fake_args(self.traits, self.epilogues.fake_args())

    def score_args(self, inputs: ScoreInputs) -> tuple:
        """The epilogues' arguments of one launch."""
        return self.epilogues.host_args(inputs)

    def step_content(self) -> StepContent:
        """A step of the unmasked loop, with frozen row maxima if ``speculative``: else two rows' factors beside it."""
        tile, d, dv = self.tile, padded(self.traits.head_dim), padded(self.traits.head_dim_v)
        qk = wgmma_count(tile.tile_m, tile.tile_n, d, tile.warpgroups)
        pv = wgmma_count(tile.tile_m, dv, tile.tile_n, tile.warpgroups)
        elements = tile.tile_n // 2
        exp2 = elements * (1 + self.traits.softcap) + (0 if tile.speculative else 2)
        loaded = 2 * tile.tile_n * (d + dv + (tile.tile_m if tile.bias_stages else 0))
        return StepContent(qk + pv, exp2, elements, 4 * tile.warpgroups, async_bytes=loaded)

    # ---- layouts, copies and the MMAs: override one of these to experiment ----

    @property
    def dtype(self) -> Any:
        """Element type of Q, K, V and O."""
        return CUTE_DTYPES[self.traits.dtype]

    def smem_layout(self, rows: int, head_dim: int, stages: int | None = None) -> cute.ComposedLayout:
        """(rows, padded head_dim[, stages]) in shared memory, with a swizzle of TMA and wgmma."""
        return layouts.wgmma_smem_layout(rows, padded(head_dim), self.dtype, stages=stages)

    def bias_layout(self, stages: int | None = None) -> cute.ComposedLayout:
        """A warpgroup's bias tile in shared memory, written by TMA: (ROWS, tile_n[, stages])."""
        dtype = CUTE_DTYPES[self.traits.bias]
        return layouts.wgmma_smem_layout(ROWS, self.tile.tile_n, dtype, stages=stages)

    def mma_qk(self) -> cute.TiledMma:
        """S = Q K^T: K from shared memory, Q from shared memory or registers."""
        tile = self.tile
        return layouts.tiled_mma_sm90(
            self.dtype,
            tile.tile_m,
            tile.tile_n,
            warpgroups=tile.warpgroups,
            a_source="rmem" if tile.q_in_regs else "smem",
        )

    def mma_pv(self) -> cute.TiledMma:
        """O += P V: P from registers, V from shared memory with head_dim_v contiguous."""
        tile, dv = self.tile, padded(self.traits.head_dim_v)
        return layouts.tiled_mma_sm90(
            self.dtype, tile.tile_m, dv, warpgroups=tile.warpgroups, a_source="rmem", b_major="mn"
        )

    def gmem_store(self) -> cute.TiledCopy:
        """Shared to global memory by one warpgroup, where TMA would write rows beyond the sequence."""
        return layouts.gmem_tiled_copy(
            self.dtype, WARPGROUP, padded(self.traits.head_dim_v), asynchronous=False
        )

    @property
    def stores_by_tma(self) -> bool:
        """Whether sequences end where the tensor does, so that TMA's bounds check suffices to store O."""
        return not (self.traits.varlen or self.traits.seqused_q)

    @property
    def has_values_out_of_bounds(self) -> bool:
        """Whether loads of V reach rows that the sequence does not own: they may be NaN, and 0 * NaN is NaN."""
        return self.traits.varlen or self.traits.seqused_k

    @property
    def may_hide_rows(self) -> bool:
        """Whether a row of a speculative kernel may have seen no key after the masked blocks, because of a bias."""
        return self.tile.speculative and self.epilogues.may_mask_rows

    @property
    def releases_q_late(self) -> bool:
        """Whether Q's stage is released only after O, which shares its memory, has been stored."""
        return self.tile.share_qo_smem

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        seqlens: Seqlens,
        softmax_scale: Float32,
        schedule: ForwardSchedule,
        score_args: tuple,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Shapes: see ``cute_attn.kernels.arguments``."""
        traits, tile = self.traits, self.tile
        key_bytes = 2 * (traits.head_dim + traits.head_dim_v)
        order = QueryTileOrder.make(seqlens, mQ, mK, key_bytes, tile.queries, tile.pack_heads, traits.causal)
        load = cpasync.CopyBulkTensorTileG2SOp()
        inputs = ForwardInputs(
            self.rows(load, mQ, 64, traits.head_dim, tile.pack_heads, mK.shape[-2]),
            self.rows(load, mK, tile.tile_n, traits.head_dim),
            self.rows(load, mV, tile.tile_n, traits.head_dim_v),
            bias_tma(self.epilogues.bias(score_args), self.bias_layout()) if self.loads_bias_by_tma else None,
        )
        store = cpasync.CopyBulkTensorTileS2GOp()
        tma_o = self.rows(store, mO, 64, traits.head_dim_v, tile.pack_heads, mK.shape[-2])
        params = ForwardParams(seqlens, softmax_scale, score_args, order, schedule.counters, mQ.shape[-2])
        self.kernel(params, inputs, ForwardOutputs(tma_o, mO, mLSE)).launch(
            grid=[cutlass.min(tile.blocks_per_sm * schedule.multiprocessors, order.total), 1, 1],
            block=[tile.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=tile.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    def rows(
        self, op: Any, tensor: cute.Tensor, rows: int, head_dim: int, heads: int = 1, nheads_kv: Any = 1
    ) -> TmaTiles:
        """TMA tiles of (rows, padded head_dim); see ``TmaTiles.make``."""
        layout, shape = self.smem_layout(rows, head_dim), (rows, padded(head_dim))
        return TmaTiles.make(op, tensor, layout, shape, self.traits.varlen, heads, nheads_kv)

    # ---- device ----

    @cute.kernel
    def kernel(self, params: ForwardParams, inputs: ForwardInputs, outputs: ForwardOutputs) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        storage = make_storage(self)
        if warp == 0:
            for tma in (inputs.q, inputs.k, inputs.v):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for pipeline in (storage.pipeline_q, storage.pipeline_k, storage.pipeline_v):
                    pipeline.init(4 * self.tile.warpgroups)
                storage.work.pipeline.init((4 + self.loads_bias_by_tma) * self.tile.warpgroups)
                if cutlass.const_expr(self.loads_bias_by_tma):
                    storage.bias.init()
            cute.arch.mbarrier_init_fence()
            storage.replay.clear(thread)
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.tile.load_registers)
            if warp == 0:
                load_all(self, params, inputs, storage)
            if cutlass.const_expr(self.loads_bias_by_tma):
                if (warp > 0) & (warp <= self.tile.warpgroups):
                    load_all_bias(self, params, inputs, storage, warp - 1)
        else:
            cute.arch.setmaxregister_increase(self.tile.compute_registers // 8 * 8)
            self.compute_all(params, outputs, storage, thread - WARPGROUP)

    def begin(self, params: ForwardParams, tile: QueryTile) -> tuple[ScoreContext, ScoreState]:
        """The epilogues' context and state for one work tile."""
        chain, args = self.epilogues, params.score_args
        context = chain.context(
            args, params.seqlens, tile.info, tile.batch, tile.head, params.nheads, params.softmax_scale
        )
        return context, chain.begin(args, context)

    def key_blocks(self, tile: QueryTile, state: ScoreState) -> BlockRange:
        """The key blocks that one work tile visits."""
        end_row = cutlass.min(tile.row0 + self.tile.queries, tile.info.seqlen_q)
        return BlockRange.of_queries(state.band, tile.row0, end_row, self.tile.tile_n)

    # ---- the consumer warpgroups ----

    @cute.jit
    def compute_all(
        self, params: ForwardParams, outputs: ForwardOutputs, storage: ForwardStorage, thread: Int32
    ) -> None:
        """Every work tile that this CTA claims, section by section, and each section's replays."""
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        ping_pong = PingPong(group, self.tile.warpgroups, self.tile.warpgroups > 1)
        consumer = Consumer(group, thread, ping_pong, make_fragments(self, storage, group))
        ping_pong.start()
        pipeline_state, n, more = PipelineState(Int32(0), Int32(0)), Int32(0), Boolean(True)
        while more:
            item = storage.work.take(n)
            n += 1
            while item.index >= 0:
                tile = params.order.of(item.row0, item.head, item.batch, params.seqlens)
                item_id = WorkItemId(n, item.index)
                pipeline_state = self.compute_tile(
                    params, outputs, storage, consumer, tile, pipeline_state, item_id, self.tile.speculative
                )
                item = storage.work.take(n)
                n += 1
            if cutlass.const_expr(self.tile.speculative):
                # A replayed O must not be overwritten by its first version.
                cute.arch.cp_async_bulk_wait_group(0)
                pipeline_state = self.compute_replayed(params, outputs, storage, consumer, pipeline_state)
            more = item.index == WorkItem.SECTION_END
        ping_pong.finish()
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def compute_replayed(
        self,
        params: ForwardParams,
        outputs: ForwardOutputs,
        storage: ForwardStorage,
        consumer: Consumer,
        pipeline_state: PipelineState,
    ) -> PipelineState:
        """Replay the section's failed work tiles with exact online softmax."""
        storage.replay.meet()
        if storage.replay.any():
            for slot in cutlass.range(Replay.SECTION, unroll=1):
                if storage.replay.failed(slot):
                    index = storage.replay.index(slot)
                    tile = params.order.tile(index, params.seqlens)
                    item_id = WorkItemId(slot, index)
                    pipeline_state = self.compute_tile(
                        params, outputs, storage, consumer, tile, pipeline_state, item_id, False
                    )
            storage.replay.reset(consumer.thread, False)
        return pipeline_state

    @cute.jit
    def compute_tile(
        self,
        params: ForwardParams,
        outputs: ForwardOutputs,
        storage: ForwardStorage,
        consumer: Consumer,
        tile: QueryTile,
        pipeline_state: PipelineState,
        item_id: WorkItemId,
        speculative: Constexpr,
    ) -> PipelineState:
        """One work tile; returns the pipeline state after it."""
        queries, keys = pipeline_state.queries, pipeline_state.keys
        fragments, thread = consumer.fragments, consumer.thread
        context, state = self.begin(params, tile)
        blocks = self.key_blocks(tile, state)
        score_map = self.score_map(thread)
        rows = len(score_map.modes.rows)
        softmax = OnlineSoftmax.make(
            rows,
            context.score_scale * LOG2_E,
            self.epilogues.may_mask_rows,
            threshold=self.tile.rescale_threshold,
        )
        lane = thread % WARPGROUP
        ctx = QueryTileContext(
            storage,
            fragments,
            consumer.ping_pong,
            blocks,
            state,
            score_map,
            tile,
            consumer.group,
            lane,
            softmax,
            keys,
        )
        fragments.acc_o.fill(0.0)
        if loads_queries(self, blocks):
            storage.pipeline_q.consumer_wait(queries)
        if blocks.begin < blocks.end:
            if cutlass.const_expr(self.tile.q_in_regs):
                self.read_queries(storage, fragments, thread)
                if cutlass.const_expr(not self.releases_q_late):
                    storage.pipeline_q.consumer_release(queries)
            self.compute_blocks(ctx, queries, speculative)
            if cutlass.const_expr(speculative):
                if self.overflowed(ctx, self.score_map(rematerialize(thread))):
                    storage.replay.mark(item_id.n, item_id.index)
        # Otherwise coordinates derived from it stay in registers through the main loop.
        thread = rematerialize(thread)
        lse = cute.make_rmem_tensor(cute.make_layout(rows), Float32)
        softmax.normalize(fragments.acc_o_rows, lse, self.epilogues.rescale(state))
        store_lse(outputs.mLSE, lse, self.score_map(thread), tile, self.traits.varlen)
        store_output(self, outputs, storage, fragments, tile, consumer.group, thread % WARPGROUP)
        if loads_queries(self, blocks):
            if cutlass.const_expr(self.releases_q_late):
                wait_for_stores(self, consumer.group, thread % WARPGROUP)
                storage.pipeline_q.consumer_release(queries)
            queries += 1
            keys += blocks.end - blocks.begin
        return PipelineState(queries, keys)

    @cute.jit
    def overflowed(self, ctx: QueryTileContext, score_map: ScoreMap) -> Boolean:
        """Whether, in the thread's part of a row below seqlen_q, the sum is above LARGEST_SUM, NaN, or O not finite."""
        failed = Boolean(False)
        for r in cutlass.range_constexpr(len(score_map.modes.rows)):
            exists = ctx.tile.row0 + score_map.query(r) < ctx.tile.info.seqlen_q
            too_large = ~ctx.softmax.within(r, LARGEST_SUM)
            if cutlass.const_expr(self.traits.dtype == "fp16"):
                # A probability above 2^16 is inf in fp16, and its product with any V is not finite.
                o = ctx.fragments.acc_o_rows[r, 0]
                too_large = too_large | ~(o - o == 0.0)
            failed = failed | (exists & too_large)
        return failed

    @cute.jit
    def some_row_hidden(self, ctx: QueryTileContext) -> Boolean:
        """Whether a row of the warpgroup has seen only hidden keys yet; a barrier of all its threads."""
        hidden, score_map = Boolean(False), self.score_map(rematerialize(ctx.lane + ctx.group * WARPGROUP))
        for r in cutlass.range_constexpr(len(score_map.modes.rows)):
            exists = ctx.tile.row0 + score_map.query(r) < ctx.tile.info.seqlen_q
            hidden = hidden | (exists & ~ctx.softmax.has_seen(r, HIDDEN))
        return warpgroup_any(ctx.group, hidden)

    def score_map(self, thread: Int32) -> ScoreMap:
        """The scores that a consumer thread holds."""
        tile = self.tile
        return ScoreMap.make(self.mma_qk(), tile.tile_m, tile.tile_n, thread, heads=tile.pack_heads)

    @cute.jit
    def read_queries(self, storage: ForwardStorage, fragments: Fragments, thread: Int32) -> None:
        """Q from shared memory into registers, for the whole work tile."""
        copy = layouts.ldmatrix_copy_a(self.mma_qk(), self.dtype)
        mine = copy.get_slice(thread)
        cute.copy(copy, mine.partition_S(all_rows(storage.s_q)), mine.retile(fragments.q))

    @cute.jit
    def compute_blocks(self, ctx: QueryTileContext, queries: Int32, speculative: Constexpr) -> None:
        """All key blocks of one work tile, last one first."""
        blocks = ctx.blocks
        self.first_step(ctx)
        last = blocks.end - 1
        self.steps(ctx, cutlass.min(blocks.full_end, last), last, True, False)
        begin, end = blocks.full_begin, cutlass.min(blocks.full_end, last)
        if cutlass.const_expr(speculative and self.may_hide_rows):
            if self.some_row_hidden(ctx):
                self.steps(ctx, begin, end, False, False)
            else:
                self.steps(ctx, begin, end, False, True)
        else:
            self.steps(ctx, begin, end, False, speculative)
        if cutlass.const_expr(self.traits.windowed):
            self.steps(ctx, blocks.begin, cutlass.min(blocks.full_begin, last), True, False)
        if cutlass.const_expr(not (self.releases_q_late or self.tile.q_in_regs)):
            ctx.storage.pipeline_q.consumer_release(queries)
        self.last_product(ctx)

    @cute.jit
    def steps(
        self, ctx: QueryTileContext, begin: Int32, end: Int32, masked: Constexpr, frozen: Constexpr
    ) -> None:
        """Key blocks [begin, end), last one first; ``frozen``: with frozen row maxima."""
        # Otherwise the compiler recomputes their minima and maxima in every step.
        begin, end = optimization_barrier(begin), optimization_barrier(end)
        for i in cutlass.range(end - begin, unroll=1):
            self.step(ctx, end - 1 - i, masked, frozen)

    @cute.jit
    def first_step(self, ctx: QueryTileContext) -> None:
        """S, softmax and P of the last key block, the first one visited."""
        block, storage, n = ctx.blocks.end - 1, ctx.storage, ctx.first_use
        scores, acc_s, loaded = self.score_tile(ctx, block, n)
        storage.pipeline_k.consumer_wait(n)
        self.start_qk(ctx, acc_s, n)
        warpgroup.wait_group(0)
        storage.pipeline_k.consumer_release(n)
        self.probabilities(ctx, scores, loaded, True, False)
        self.convert(ctx, scores, acc_s)
        self.zero_values_out_of_bounds(ctx, block, n)

    @cute.jit
    def step(self, ctx: QueryTileContext, block: Int32, masked: Constexpr, frozen: Constexpr) -> None:
        """S and P of ``block``, overlapped with P V of the block visited before it."""
        storage, n = ctx.storage, ctx.first_use + (ctx.blocks.end - 1 - block)
        scores, acc_s, loaded = self.score_tile(ctx, block, n)
        storage.pipeline_k.consumer_wait(n)
        ctx.ping_pong.sync()
        self.start_qk(ctx, acc_s, n)
        storage.pipeline_v.consumer_wait(n - 1)
        self.start_pv(ctx, n - 1)
        ctx.ping_pong.pass_on()
        warpgroup.wait_group(1)
        storage.pipeline_k.consumer_release(n)
        self.probabilities(ctx, scores, loaded, masked, frozen)
        warpgroup.wait_group(0)
        storage.pipeline_v.consumer_release(n - 1)
        self.convert(ctx, scores, acc_s)
        if cutlass.const_expr(not frozen):
            ctx.softmax.rescale(ctx.fragments.acc_o_rows, ctx.fragments.factors)

    @cute.jit
    def last_product(self, ctx: QueryTileContext) -> None:
        """O += P V of the first key block, the last one visited."""
        n = ctx.first_use + (ctx.blocks.end - 1 - ctx.blocks.begin)
        ctx.storage.pipeline_v.consumer_wait(n)
        self.start_pv(ctx, n)
        warpgroup.wait_group(0)
        ctx.storage.pipeline_v.consumer_release(n)

    @cute.jit
    def score_tile(self, ctx: QueryTileContext, block: Int32, n: Int32):
        """Registers for the scores of ``block``, use n of K's pipeline, and the epilogues' loads from global memory."""
        acc_s = cute.make_rmem_tensor(
            self.mma_qk().get_slice(0).partition_shape_C((self.tile.tile_m, self.tile.tile_n)), Float32
        )
        scores = ctx.score_map.tile(acc_s, ctx.tile.row0, block * self.tile.tile_n)
        if cutlass.const_expr(self.loads_bias_by_tma):
            scores = dataclasses.replace(scores, tma_bias=ctx.storage.bias.tile(ctx.group, ctx.lane, n))
        return scores, acc_s, self.epilogues.load(ctx.state, scores)

    @cute.jit
    def start_qk(self, ctx: QueryTileContext, acc_s: cute.Tensor, n: Int32) -> None:
        """Issue acc_s = Q K^T with use n of K's pipeline."""
        op, stage = ctx.fragments, ctx.storage.pipeline_k.stage(n)
        start_gemm(self.mma_qk(), acc_s, op.q, op.k[None, None, None, stage], False)

    @cute.jit
    def start_pv(self, ctx: QueryTileContext, n: Int32) -> None:
        """Issue O += P V with use n of V's pipeline."""
        op, stage = ctx.fragments, ctx.storage.pipeline_v.stage(n)
        start_gemm(self.mma_pv(), op.acc_o, op.p_operand, op.v[None, None, None, stage], True)

    @cute.jit
    def probabilities(
        self, ctx: QueryTileContext, scores: ScoreTile, loaded: tuple, masked: Constexpr, frozen: Constexpr
    ) -> None:
        """Scores to probabilities; unless ``frozen``, ``factors`` become O's rescaling factors."""
        self.epilogues.forward(ctx.state, scores, loaded, masked)
        if cutlass.const_expr(frozen):
            ctx.softmax.advance_frozen(scores.acc)
        else:
            ctx.softmax.advance(scores.acc, ctx.fragments.factors, masked)

    @cute.jit
    def convert(self, ctx: QueryTileContext, scores: ScoreTile, acc_s: cute.Tensor) -> None:
        """P to 16 bits with dropout, into the operand of P V, whose last use must be complete."""
        p = ctx.fragments.p
        convert_to_16_bits(acc_s, p)
        self.epilogues.drop(ctx.state, scores, ctx.score_map.view(p))

    @cute.jit
    def zero_values_out_of_bounds(self, ctx: QueryTileContext, block: Int32, n: Int32) -> None:
        """Zero the rows of V beyond the sequence in shared memory, where it does not own them."""
        if cutlass.const_expr(self.has_values_out_of_bounds):
            rows = ctx.state.band.seqlen_k - block * self.tile.tile_n
            if rows < self.tile.tile_n:
                storage = ctx.storage
                storage.pipeline_v.consumer_wait(n)
                s_v = storage.s_v[None, None, storage.pipeline_v.stage(n)]
                lane = cute.arch.thread_idx()[0] % WARPGROUP
                vectors = padded(self.traits.head_dim_v) // 8
                zeros = cute.make_rmem_tensor(cute.make_layout(8), self.dtype)
                zeros.fill(0.0)
                for i in cutlass.range(lane, (self.tile.tile_n - rows) * vectors, WARPGROUP, unroll=1):
                    row = cute.local_tile(s_v, (1, 8), (rows + i // vectors, i % vectors))
                    cute.autovec_copy(zeros, row[0, None])
                cute.arch.fence_proxy("async.shared", space="cta")
                warpgroup_barrier(ctx.ping_pong.warpgroup)
