"""The Hopper forward: attention with TMA, wgmma and specialised warpgroups.

    S = epilogues(softmax_scale * Q K^T)       (seqlen_q, seqlen_k), one tile at a time, in registers
    P = exp(S - LSE),  LSE = log sum exp S     online: running row maxima and sums
    O = dropout(P) V                           (seqlen_q, head_dim_v)

The kernel is persistent: a CTA a multiprocessor claims one work tile (a block of queries of a head) after the other.
One warp is the producer: it claims, tells the others, and loads Q once a work tile, then K and V block by block, last
one first, into pipelines of ``num_stages`` stages. One to three warpgroups consume, each 64 of the tile's queries:

    S[0] = Q K[0]; softmax                              the first key block
    wait for the other warpgroups' products (ping-pong) then, for j = 1, 2, ...
        start S[j] = Q K[j]
        start O += P[j - 1] V[j - 1]
    let the next warpgroup issue its products
    wait for S[j]; epilogues, online softmax            beside P V of this warpgroup and all products of the next
    wait for O; rescale it; P[j] to 16 bits
    O += P V of the last block

After the masked blocks the row maxima are frozen (``speculative``): they are nearly always large enough with 2^40 to
spare. A row whose sum overflows 2^40 has its work tile replayed with exact online softmax. Every row has seen a key by
then (``BlockRange``), unless a bias hides it: a warpgroup with such a row takes the exact steps at once.

The scheme is FlashAttention-3's (Shah et al. 2024, https://arxiv.org/abs/2407.08608): overlap of products and softmax
within a warpgroup and, by ping-pong, between warpgroups; the next tile's loads start while O is on its way out.

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
    Fragments,
    Inputs,
    Outputs,
    PipelineState,
    Problem,
    QueryTileContext,
    Shared,
    all_rows,
    make_fragments,
    shared_memory,
)
from cute_attn.kernels.forward_sm90.producer import load_all, load_all_bias, loads_queries
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
"""What a thread's probabilities of a row may add up to under too small a maximum: far from where fp32 ends."""
HIDDEN = -64.0
"""A frozen maximum below this, as a power of two, is no row's but where a bias hides what was seen so far."""


@dataclass(frozen=True)
class Which:
    """A work tile as :class:`Replay` remembers it: the CTA's n-th, and its index in the order."""

    n: Int32
    index: Int32


@dataclass(frozen=True)
class ForwardSm90:
    """Forward kernel of (traits, tile); call it to trace the host side, see ``__call__``."""

    traits: Traits
    tile: ForwardSm90Tile

    # ---- what it serves ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        if (traits.op, traits.arch) != ("forward", "sm90"):
            return f"it computes forward-sm90, not {traits.op}-{traits.arch}"
        return None

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ForwardSm90Tile:
        """The tile that is taken when none is named."""
        return first_that_fits(preferred_tiles(traits), traits, target)

    def for_lengths(self, seqlen_q: int, seqlen_k: int, group: int) -> "ForwardSm90":
        """This kernel, which has its default tile, with the one for sequences of at most such lengths.

        ``group``: query heads of a key head.
        """
        tile = tile_for_lengths(self.traits, seqlen_q, seqlen_k, group)
        return dataclasses.replace(self, tile=tile) if tile else self

    def without_tma_bias(self) -> "ForwardSm90":
        """This kernel, which has its default tile, for a bias that TMA cannot read."""
        tiles = [tile for tile in preferred_tiles(self.traits) if not tile.bias_stages]
        return dataclasses.replace(self, tile=first_that_fits(tiles, self.traits, "sm90"))

    @property
    def loads_bias_by_tma(self) -> bool:
        """Whether TMA brings the bias: its strides and its address then have to be those of q, k and v."""
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

    # ---- layouts, copies and the MMAs: override one of these to experiment ----

    @property
    def dtype(self) -> Any:
        """Element type of Q, K, V and O."""
        return CUTE_DTYPES[self.traits.dtype]

    def smem_layout(self, rows: int, head_dim: int, stages: int | None = None) -> cute.ComposedLayout:
        """(rows, padded head_dim[, stages]) in shared memory, as TMA writes and wgmma reads it."""
        return layouts.wgmma_smem_layout(rows, padded(head_dim), self.dtype, stages=stages)

    def bias_layout(self, stages: int | None = None) -> cute.ComposedLayout:
        """A warpgroup's tile of the bias in shared memory, as TMA writes it: (ROWS, tile_n[, stages])."""
        dtype = CUTE_DTYPES[self.traits.bias]
        return layouts.wgmma_smem_layout(ROWS, self.tile.tile_n, dtype, stages=stages)

    def mma_qk(self) -> cute.TiledMma:
        """S = Q K^T, K from shared memory and Q from there or from registers."""
        tile = self.tile
        return layouts.tiled_mma_sm90(
            self.dtype,
            tile.tile_m,
            tile.tile_n,
            warpgroups=tile.warpgroups,
            a_source="rmem" if tile.q_in_regs else "smem",
        )

    def mma_pv(self) -> cute.TiledMma:
        """O += P V, P from registers and V as it lies in memory, head_dim_v contiguous."""
        tile, dv = self.tile, padded(self.traits.head_dim_v)
        return layouts.tiled_mma_sm90(
            self.dtype, tile.tile_m, dv, warpgroups=tile.warpgroups, a_source="rmem", b_major="mn"
        )

    def gmem_store(self) -> cute.TiledCopy:
        """Shared to global memory by one warpgroup, where TMA would write rows that are not there."""
        return layouts.gmem_tiled_copy(
            self.dtype, WARPGROUP, padded(self.traits.head_dim_v), asynchronous=False
        )

    @property
    def stores_by_tma(self) -> bool:
        """Whether a query block's rows end where the tensor's do, so that TMA leaves out what does not exist."""
        return not (self.traits.varlen or self.traits.seqused_q)

    @property
    def has_values_out_of_bounds(self) -> bool:
        """Whether rows of V behind a sequence's last are somebody else's: they may be NaN, and 0 * NaN is NaN."""
        return self.traits.varlen or self.traits.seqused_k

    @property
    def may_hide_rows(self) -> bool:
        """Whether a speculative kernel's rows may have seen no key though they have passed all masks: by a bias."""
        return self.tile.speculative and self.epilogues.may_mask_rows

    @property
    def releases_q_late(self) -> bool:
        """Whether Q's shared memory is needed until the output has been stored."""
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
        inputs = Inputs(
            self.rows(load, mQ, 64, traits.head_dim, tile.pack_heads),
            self.rows(load, mK, tile.tile_n, traits.head_dim),
            self.rows(load, mV, tile.tile_n, traits.head_dim_v),
            bias_tma(self.epilogues.bias(score_args), self.bias_layout()) if self.loads_bias_by_tma else None,
        )
        tma_o = self.rows(cpasync.CopyBulkTensorTileS2GOp(), mO, 64, traits.head_dim_v, tile.pack_heads)
        problem = Problem(seqlens, softmax_scale, score_args, order, schedule.counters, mQ.shape[-2])
        self.kernel(problem, inputs, Outputs(tma_o, mO, mLSE)).launch(
            grid=[cutlass.min(tile.blocks_per_sm * schedule.multiprocessors, order.total), 1, 1],
            block=[tile.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=tile.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    def rows(self, op: Any, tensor: cute.Tensor, rows: int, head_dim: int, heads: int = 1) -> TmaTiles:
        """How tiles of a tensor's rows move: see ``TmaTiles.make``."""
        layout, shape = self.smem_layout(rows, head_dim), (rows, padded(head_dim))
        return TmaTiles.make(op, tensor, layout, shape, self.traits.varlen, heads)

    # ---- device ----

    @cute.kernel
    def kernel(self, problem: Problem, inputs: Inputs, outputs: Outputs) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        shared = shared_memory(self)
        if warp == 0:
            for tma in (inputs.q, inputs.k, inputs.v):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for ring in (shared.pipeline_q, shared.pipeline_k, shared.pipeline_v):
                    ring.init(4 * self.tile.warpgroups)
                shared.work.pipeline.init((4 + self.loads_bias_by_tma) * self.tile.warpgroups)
                if cutlass.const_expr(self.loads_bias_by_tma):
                    shared.bias.init()
            cute.arch.mbarrier_init_fence()
            shared.replay.clear(thread)
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.tile.load_registers)
            if warp == 0:
                load_all(self, problem, inputs, shared)
            if cutlass.const_expr(self.loads_bias_by_tma):
                if (warp > 0) & (warp <= self.tile.warpgroups):
                    load_all_bias(self, problem, inputs, shared, warp - 1)
        else:
            cute.arch.setmaxregister_increase(self.tile.compute_registers // 8 * 8)
            self.compute_all(problem, outputs, shared, thread - WARPGROUP)

    def begin(self, problem: Problem, place: QueryTile) -> tuple[ScoreContext, ScoreState]:
        """The epilogues of one query block."""
        chain, args = self.epilogues, problem.score_args
        context = chain.context(
            args, problem.seqlens, place.info, place.batch, place.head, problem.nheads, problem.softmax_scale
        )
        return context, chain.begin(args, context)

    def key_blocks(self, place: QueryTile, state: ScoreState) -> BlockRange:
        """The key blocks that one query block visits."""
        end_row = cutlass.min(place.row0 + self.tile.queries, place.info.seqlen_q)
        return BlockRange.of_queries(state.band, place.row0, end_row, self.tile.tile_n)

    # ---- the computing warpgroups ----

    @cute.jit
    def compute_all(self, problem: Problem, outputs: Outputs, shared: Shared, thread: Int32) -> None:
        """Every work tile that this CTA claims, then what of each section has to be replayed."""
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        ping_pong = PingPong(group, self.tile.warpgroups, self.tile.warpgroups > 1)
        crew = Consumer(group, thread, ping_pong, make_fragments(self, shared, group))
        ping_pong.start()
        filled, n, more = PipelineState(Int32(0), Int32(0)), Int32(0), Boolean(True)
        while more:
            note = shared.work.take(n)
            n += 1
            while note.index >= 0:
                tile = problem.order.of(note.row0, note.head, note.batch, problem.seqlens)
                which = Which(n, note.index)
                filled = self.compute_tile(
                    problem, outputs, shared, crew, tile, filled, which, self.tile.speculative
                )
                note = shared.work.take(n)
                n += 1
            if cutlass.const_expr(self.tile.speculative):
                cute.arch.cp_async_bulk_wait_group(0)  # what may be wrong has arrived before what is right
                filled = self.compute_replayed(problem, outputs, shared, crew, filled)
            more = note.index == WorkItem.SECTION_END
        ping_pong.finish()
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def compute_replayed(
        self, problem: Problem, outputs: Outputs, shared: Shared, crew: Consumer, filled: PipelineState
    ) -> PipelineState:
        """What of a section failed, with exact online softmax."""
        shared.replay.meet()
        if shared.replay.any():
            for slot in cutlass.range(Replay.SECTION, unroll=1):
                if shared.replay.failed(slot):
                    index = shared.replay.index(slot)
                    tile = problem.order.tile(index, problem.seqlens)
                    which = Which(slot, index)
                    filled = self.compute_tile(problem, outputs, shared, crew, tile, filled, which, False)
            shared.replay.reset(crew.thread, False)
        return filled

    @cute.jit
    def compute_tile(
        self,
        problem: Problem,
        outputs: Outputs,
        shared: Shared,
        crew: Consumer,
        tile: QueryTile,
        filled: PipelineState,
        which: Which,
        speculative: Constexpr,
    ) -> PipelineState:
        """One work tile; ``filled``: the pipelines' fillings before it, and then after it."""
        queries, keys = filled.queries, filled.keys
        fragments, thread = crew.fragments, crew.thread
        context, state = self.begin(problem, tile)
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
        work = QueryTileContext(
            shared, fragments, crew.ping_pong, blocks, state, score_map, tile, crew.group, lane, softmax, keys
        )
        fragments.acc_o.fill(0.0)
        if loads_queries(self, blocks):
            shared.pipeline_q.consumer_wait(queries)
        if blocks.begin < blocks.end:
            if cutlass.const_expr(self.tile.q_in_regs):
                self.read_queries(shared, fragments, thread)
                if cutlass.const_expr(not self.releases_q_late):
                    shared.pipeline_q.consumer_release(queries)
            self.compute_blocks(work, queries, speculative)
            if cutlass.const_expr(speculative):
                if self.overflowed(work, self.score_map(rematerialize(thread))):
                    shared.replay.mark(which.n, which.index)
        thread = rematerialize(
            thread
        )  # or what follows from it would wait in registers for the main loop to end
        lse = cute.make_rmem_tensor(cute.make_layout(rows), Float32)
        softmax.normalize(fragments.acc_o_rows, lse, self.epilogues.rescale(state))
        store_lse(outputs.mLSE, lse, self.score_map(thread), tile, self.traits.varlen)
        store_output(self, outputs, shared, fragments, tile, crew.group, thread % WARPGROUP)
        if loads_queries(self, blocks):
            if cutlass.const_expr(self.releases_q_late):
                wait_for_stores(self, crew.group, thread % WARPGROUP)
                shared.pipeline_q.consumer_release(queries)
            queries += 1
            keys += blocks.end - blocks.begin
        return PipelineState(queries, keys)

    @cute.jit
    def overflowed(self, work: QueryTileContext, score_map: ScoreMap) -> Boolean:
        """Whether the thread's part of a row that exists has numbers that are too large, or none."""
        failed = Boolean(False)
        for r in cutlass.range_constexpr(len(score_map.modes.rows)):
            exists = work.tile.row0 + score_map.query(r) < work.tile.info.seqlen_q
            too_large = ~work.softmax.within(r, LARGEST_SUM)
            if cutlass.const_expr(self.traits.dtype == "fp16"):
                # A probability beyond 2^16 is infinite there, and its product with V, whatever that is, not finite.
                o = work.fragments.acc_o_rows[r, 0]
                too_large = too_large | ~(o - o == 0.0)
            failed = failed | (exists & too_large)
        return failed

    @cute.jit
    def some_row_hidden(self, work: QueryTileContext) -> Boolean:
        """Whether a row of the warpgroup has seen nothing that counts yet; a barrier of all its threads."""
        hidden, score_map = Boolean(False), self.score_map(rematerialize(work.lane + work.group * WARPGROUP))
        for r in cutlass.range_constexpr(len(score_map.modes.rows)):
            exists = work.tile.row0 + score_map.query(r) < work.tile.info.seqlen_q
            hidden = hidden | (exists & ~work.softmax.has_seen(r, HIDDEN))
        return warpgroup_any(work.group, hidden)

    def score_map(self, thread: Int32) -> ScoreMap:
        """Which scores a thread that computes holds."""
        tile = self.tile
        return ScoreMap.make(self.mma_qk(), tile.tile_m, tile.tile_n, thread, heads=tile.pack_heads)

    @cute.jit
    def read_queries(self, shared: Shared, fragments: Fragments, thread: Int32) -> None:
        """Q from shared memory into registers, where it stays for the whole query block."""
        copy = layouts.ldmatrix_copy_a(self.mma_qk(), self.dtype)
        mine = copy.get_slice(thread)
        cute.copy(copy, mine.partition_S(all_rows(shared.s_q)), mine.retile(fragments.q))

    @cute.jit
    def compute_blocks(self, work: QueryTileContext, queries: Int32, speculative: Constexpr) -> None:
        """All key blocks of one work tile, last first."""
        blocks = work.blocks
        self.first_step(work)
        last = blocks.end - 1
        self.steps(work, cutlass.min(blocks.full_end, last), last, True, False)
        begin, end = blocks.full_begin, cutlass.min(blocks.full_end, last)
        if cutlass.const_expr(speculative and self.may_hide_rows):
            if self.some_row_hidden(work):
                self.steps(work, begin, end, False, False)
            else:
                self.steps(work, begin, end, False, True)
        else:
            self.steps(work, begin, end, False, speculative)
        if cutlass.const_expr(self.traits.windowed):
            self.steps(work, blocks.begin, cutlass.min(blocks.full_begin, last), True, False)
        if cutlass.const_expr(not (self.releases_q_late or self.tile.q_in_regs)):
            work.shared.pipeline_q.consumer_release(queries)
        self.last_product(work)

    @cute.jit
    def steps(
        self, work: QueryTileContext, begin: Int32, end: Int32, masked: Constexpr, frozen: Constexpr
    ) -> None:
        """Blocks [begin, end), from the last down; ``frozen``: under the row maxima in use."""
        begin, end = (
            optimization_barrier(begin),
            optimization_barrier(end),
        )  # or their minima and maxima are found again in every step
        for i in cutlass.range(end - begin, unroll=1):
            self.step(work, end - 1 - i, masked, frozen)

    @cute.jit
    def first_step(self, work: QueryTileContext) -> None:
        """The last key block, which nothing precedes."""
        block, shared, n = work.blocks.end - 1, work.shared, work.first_filling
        tile, acc_s, loaded = self.score_tile(work, block, n)
        shared.pipeline_k.consumer_wait(n)
        self.start_qk(work, acc_s, n)
        warpgroup.wait_group(0)
        shared.pipeline_k.consumer_release(n)
        self.probabilities(work, tile, loaded, True, False)
        self.convert(work, tile, acc_s)
        self.zero_values_out_of_bounds(work, block, n)

    @cute.jit
    def step(self, work: QueryTileContext, block: Int32, masked: Constexpr, frozen: Constexpr) -> None:
        """Scores of ``block`` beside the output of the block before it."""
        shared, n = work.shared, work.first_filling + (work.blocks.end - 1 - block)
        tile, acc_s, loaded = self.score_tile(work, block, n)
        shared.pipeline_k.consumer_wait(n)
        work.ping_pong.sync()
        self.start_qk(work, acc_s, n)
        shared.pipeline_v.consumer_wait(n - 1)
        self.start_pv(work, n - 1)
        work.ping_pong.pass_on()
        warpgroup.wait_group(1)
        shared.pipeline_k.consumer_release(n)
        self.probabilities(work, tile, loaded, masked, frozen)
        warpgroup.wait_group(0)
        shared.pipeline_v.consumer_release(n - 1)
        self.convert(work, tile, acc_s)
        if cutlass.const_expr(not frozen):
            work.softmax.rescale(work.fragments.acc_o_rows, work.fragments.factors)

    @cute.jit
    def last_product(self, work: QueryTileContext) -> None:
        """The output of the first key block, which is the last one visited."""
        n = work.first_filling + (work.blocks.end - 1 - work.blocks.begin)
        work.shared.pipeline_v.consumer_wait(n)
        self.start_pv(work, n)
        warpgroup.wait_group(0)
        work.shared.pipeline_v.consumer_release(n)

    @cute.jit
    def score_tile(self, work: QueryTileContext, block: Int32, n: Int32):
        """Registers for the scores of ``block``, filling n, and what the epilogues read of global memory meanwhile."""
        tile = self.tile
        acc_s = cute.make_rmem_tensor(
            self.mma_qk().get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n)), Float32
        )
        scores = work.score_map.tile(acc_s, work.tile.row0, block * tile.tile_n)
        if cutlass.const_expr(self.loads_bias_by_tma):
            scores = dataclasses.replace(scores, tma_bias=work.shared.bias.tile(work.group, work.lane, n))
        return scores, acc_s, self.epilogues.load(work.state, scores)

    @cute.jit
    def start_qk(self, work: QueryTileContext, acc_s: cute.Tensor, n: Int32) -> None:
        """acc_s = Q K^T, K from filling n."""
        op, stage = work.fragments, work.shared.pipeline_k.stage(n)
        start_gemm(self.mma_qk(), acc_s, op.q, op.k[None, None, None, stage], False)

    @cute.jit
    def start_pv(self, work: QueryTileContext, n: Int32) -> None:
        """O += P V, V from filling n."""
        op, stage = work.fragments, work.shared.pipeline_v.stage(n)
        start_gemm(self.mma_pv(), op.acc_o, op.p_operand, op.v[None, None, None, stage], True)

    @cute.jit
    def probabilities(
        self, work: QueryTileContext, tile: ScoreTile, loaded: tuple, masked: Constexpr, frozen: Constexpr
    ) -> None:
        """Scores to probabilities; ``factors`` says what the output has to be multiplied with."""
        self.epilogues.forward(work.state, tile, loaded, masked)
        if cutlass.const_expr(frozen):
            work.softmax.advance_frozen(tile.acc)
        else:
            work.softmax.advance(tile.acc, work.fragments.factors, masked)

    @cute.jit
    def convert(self, work: QueryTileContext, tile: ScoreTile, acc_s: cute.Tensor) -> None:
        """P to 16 bits, dropped elements to zero, to where P V reads it; nothing may be reading the old P."""
        p = work.fragments.p
        convert_to_16_bits(acc_s, p)
        self.epilogues.drop(work.state, tile, work.score_map.view(p))

    @cute.jit
    def zero_values_out_of_bounds(self, work: QueryTileContext, block: Int32, n: Int32) -> None:
        """Rows of V behind the sequence's last key become zeros, where they are somebody else's."""
        if cutlass.const_expr(self.has_values_out_of_bounds):
            rows = work.state.band.seqlen_k - block * self.tile.tile_n
            if rows < self.tile.tile_n:
                shared = work.shared
                shared.pipeline_v.consumer_wait(n)
                tile = shared.s_v[None, None, shared.pipeline_v.stage(n)]
                lane = cute.arch.thread_idx()[0] % WARPGROUP
                vectors = padded(self.traits.head_dim_v) // 8
                zeros = cute.make_rmem_tensor(cute.make_layout(8), self.dtype)
                zeros.fill(0.0)
                for i in cutlass.range(lane, (self.tile.tile_n - rows) * vectors, WARPGROUP, unroll=1):
                    row = cute.local_tile(tile, (1, 8), (rows + i // vectors, i % vectors))
                    cute.autovec_copy(zeros, row[0, None])
                cute.arch.fence_proxy("async.shared", space="cta")
                warpgroup_barrier(work.ping_pong.warpgroup)
