"""The consumer warpgroups of the Hopper forward: each computes O and LSE of 64 rows of every work tile.

:class:`Consumer` loops over work tiles, :class:`MainLoop` over the key blocks of one work tile, last block first.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

import layouts
from cute_attn.device.copy import zero_rows
from cute_attn.device.gemm import start_gemm
from cute_attn.device.math import convert_to_16_bits, optimization_barrier, rematerialize
from cute_attn.device.pipeline import WARPGROUP, Accessed, warpgroup_any, warpgroup_barrier
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.epilogues.chain import ScoreState
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.forward_sm90.role import ForwardRole
from cute_attn.kernels.forward_sm90.storage import (
    ConsumerThread,
    ForwardParams,
    ForwardStorage,
    PipelineState,
    all_rows,
)
from cute_attn.outputs.partial import store_lse
from cute_attn.outputs.staged_output import ForwardOutputs, OutputStore
from cute_attn.rows.tma import LastUse
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import QueryTile
from cute_attn.work.replay import WorkItemId

LARGEST_SUM = 2.0**40
"""Largest row sum with stale maxima that is not replayed; far below fp32's largest number."""
HIDDEN = -64.0
"""If a row's stale maximum, in log2, is below this, a bias has hidden all keys that the row visited."""


@dataclass(frozen=True)
class Consumer(ForwardRole):
    """A consumer warpgroup: computes and stores its rows of every work tile.

    Attributes:
        loop: class of the main loop: :class:`MainLoop`, or another class with the same fields.
        results: stores O and LSE: :class:`StagedResults`, or another object with the same method.
    """

    thread: ConsumerThread
    loop: Constexpr
    results: Any

    def run(self) -> None:
        self.thread.ping_pong.start()
        super().run()
        self.thread.ping_pong.finish()
        cute.arch.cp_async_bulk_wait_group(0)

    def finish_section(self) -> None:
        """Wait for all stores, so that a replayed O is not overwritten by the O of the first run."""
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        """Wait for Q, run the main loop, store O and LSE. Stale row maxima are used unless this is a replay."""
        queries, keys = pipeline_state.queries, pipeline_state.keys
        speculative = cutlass.const_expr(self.kernel.tile.speculative and item is not None)
        q, fragments = self.storage.q, self.thread.fragments
        loop = self.main_loop(tile, pipeline_state)
        blocks = loop.blocks
        fragments.acc_o.fill(0.0)
        if q.used(blocks):
            q.pipeline.consumer_wait(queries)
        if blocks.begin < blocks.end:
            if cutlass.const_expr(self.kernel.tile.q_in_regs):
                self.read_queries()
                q.release_after(LastUse.COPY, queries)
            loop.run(speculative)
            if cutlass.const_expr(speculative):
                if loop.overflowed():
                    self.storage.replay.mark(item)
        output = self.results.store(loop)
        if q.used(blocks):
            if cutlass.const_expr(q.last_use is LastUse.STORE):
                output.wait()
            q.release_after(LastUse.STORE, queries)
            queries += 1
            keys += blocks.end - blocks.begin
        return PipelineState(queries, keys)

    def main_loop(self, tile: QueryTile, uses: PipelineState) -> "MainLoop":
        """The main loop of one work tile, with empty row maxima and sums."""
        context, state = self.begin(tile)
        blocks, score_map = self.key_blocks(tile, state), self.kernel.score_map(self.thread.index)
        chain = self.kernel.epilogues
        softmax = OnlineSoftmax.make(
            len(score_map.modes.rows),
            chain.scale_log2(context.score_scale),
            chain.may_mask_rows,
            threshold=self.kernel.tile.rescale_threshold,
            may_be_large=chain.may_be_large,
            p_dtype=self.kernel.dtype,
            keeps_greatest=chain.maxima is not None,
        )
        return self.loop(
            self.kernel, self.storage, self.thread, tile, blocks, state, score_map, softmax, uses
        )

    @cute.jit
    def read_queries(self) -> None:
        """Load Q from shared memory into registers, once per work tile."""
        copy = layouts.ldmatrix_copy_a(self.kernel.mma_qk(), self.kernel.dtype)
        mine = copy.get_slice(self.thread.index)
        s_q = all_rows(self.storage.q.tensor)
        cute.copy(copy, mine.partition_S(s_q), mine.retile(self.thread.fragments.q))


@dataclass(frozen=True)
class StagedResults:
    """Stores O through shared memory, and LSE from registers."""

    params: ForwardParams
    outputs: ForwardOutputs

    @cute.jit
    def store(self, loop: "MainLoop") -> OutputStore:
        """Normalize O and store it with the LSE; a TMA store may be pending afterwards."""
        # Otherwise coordinates derived from it stay in registers through the main loop.
        thread, group = rematerialize(loop.thread.index), loop.thread.group
        kernel, fragments, tile = loop.kernel, loop.thread.fragments, loop.query_tile
        lse = cute.make_rmem_tensor(cute.make_layout(len(loop.score_map.modes.rows)), Float32)
        sinks = loop.sinks(self.params, thread)
        loop.softmax.normalize(fragments.acc_o_rows, lse, kernel.epilogues.rescale(loop.state), sinks)
        store_lse(self.outputs.mLSE, lse, kernel.score_map(thread), tile, kernel.traits.varlen)
        kernel.epilogues.store_maxima(loop.state, loop.softmax.seen, kernel.score_map(thread), tile.row0)
        s_o = loop.storage.s_o[None, None, group]
        output = OutputStore(kernel, self.outputs, s_o, group, thread % WARPGROUP)
        output.store(fragments.acc_o, tile)
        return output


@dataclass(frozen=True)
class MainLoop:
    """The steps of one work tile: S, softmax and P of a key block, overlapped with P V of the previous one."""

    kernel: Constexpr
    storage: ForwardStorage
    thread: ConsumerThread
    query_tile: QueryTile
    blocks: BlockRange
    state: ScoreState
    score_map: ScoreMap
    softmax: OnlineSoftmax
    uses: PipelineState  # the first ones of the work tile

    def sinks(self, params: ForwardParams, thread: Int32) -> tuple[Float32, ...] | None:
        """The attention sinks of the rows of ``thread``, or None."""
        tile, score_map = self.query_tile, self.kernel.score_map(thread)
        return self.kernel.epilogues.sinks_of_rows(params.score_args, tile.head, tile.heads_left, score_map)

    @cute.jit
    def run(self, speculative: Constexpr) -> None:
        blocks = self.blocks
        self.first_step()
        last = blocks.end - 1
        # All blocks of a list may be partial, where a band has two.
        freezes: Constexpr = speculative and blocks.listed is not None
        self.steps_from_first(cutlass.min(blocks.full_end, last), last, True, freezes)
        self.steps_from_first(blocks.full_begin, cutlass.min(blocks.full_end, last), False, speculative)
        if cutlass.const_expr(self.state.band.has_first):
            self.steps(blocks.begin, cutlass.min(blocks.full_begin, last), True, False)
        self.storage.q.release_after(LastUse.PRODUCTS, self.uses.queries)
        self.last_product()

    @property
    def largest_sum(self) -> float:
        """Largest sum of a thread's probabilities in a row for which a stale maximum is accepted."""
        return LARGEST_SUM

    @cute.jit
    def overflowed(self) -> Boolean:
        """True if, in one of the thread's existing rows, the sum exceeds largest_sum or is NaN, or O is not finite."""
        failed, score_map = Boolean(False), self.kernel.score_map(rematerialize(self.thread.index))
        for r in cutlass.range_constexpr(len(score_map.modes.rows)):
            too_large = ~self.softmax.within(r, self.largest_sum)
            if cutlass.const_expr(self.kernel.traits.dtype == "fp16"):
                # A probability above 2^16 is inf in fp16, and its product with any V is not finite.
                o = self.thread.fragments.acc_o_rows[r, 0]
                too_large = too_large | ~(o - o == 0.0)
            failed = failed | (self.exists(score_map, r) & too_large)
        return failed

    @cute.jit
    def some_row_hidden(self) -> Boolean:
        """True if a row of the warpgroup has seen only hidden keys so far; a barrier of the warpgroup's threads.

        The result is declared warp-uniform: otherwise loops behind its branch keep descriptors in per-lane registers.
        """
        index = rematerialize(self.thread.lane + self.thread.group * WARPGROUP)
        hidden, score_map = Boolean(False), self.kernel.score_map(index)
        for r in cutlass.range_constexpr(len(score_map.modes.rows)):
            hidden = hidden | (self.exists(score_map, r) & ~self.softmax.has_seen(r, HIDDEN))
        found = warpgroup_any(self.thread.group, hidden)
        return Boolean(cute.arch.make_warp_uniform(Int32(found)) != 0)

    def exists(self, score_map: ScoreMap, r: int) -> Boolean:
        """False if row r only pads the tile (at or beyond seqlen_q); a padding row cannot fail."""
        return self.query_tile.row0 + score_map.query(r) < self.query_tile.info.seqlen_q

    @cute.jit
    def steps(self, begin: Int32, end: Int32, masked: Constexpr, frozen: Constexpr) -> None:
        """Run the steps of key blocks [begin, end), last block first. frozen: with stale row maxima."""
        # Otherwise the compiler recomputes their minima and maxima in every step.
        begin, end = optimization_barrier(begin), optimization_barrier(end)
        for i in cutlass.range(end - begin, unroll=1):
            self.step(end - 1 - i, masked, frozen)

    @cute.jit
    def steps_from_first(self, begin: Int32, end: Int32, masked: Constexpr, speculative: Constexpr) -> None:
        """Run key blocks [begin, end). speculative: with stale row maxima, unless a row has seen only hidden keys."""
        if cutlass.const_expr(speculative and self.kernel.may_hide_rows):
            if self.some_row_hidden():
                self.steps(begin, end, masked, False)
            else:
                self.steps(begin, end, masked, True)
        else:
            self.steps(begin, end, masked, speculative)

    @cute.jit
    def first_step(self) -> None:
        """Compute S, softmax and P of the last key block, which is visited first."""
        scores, acc_s = self.first_probabilities()
        self.convert(scores, acc_s)
        self.zero_values_out_of_bounds(self.blocks.block(self.blocks.end - 1), self.uses.keys)

    @cute.jit
    def first_probabilities(self):
        """Compute S and softmax of the last key block; return its score tile, and the registers that now hold P."""
        storage, n = self.storage, self.uses.keys
        block, partial = self.blocks.visit(self.blocks.end - 1)
        scores, acc_s, loaded = self.score_tile(block, n)
        storage.pipeline_k.consumer_wait(n)
        self.start_qk(acc_s, n)
        warpgroup.wait_group(0)
        self.release_keys(n)
        self.probabilities(scores, loaded, True, False, partial, ends=True)
        return scores, acc_s

    @cute.jit
    def step(self, step: Int32, masked: Constexpr, frozen: Constexpr) -> None:
        """Compute S and P of the block of ``step``, overlapped with P V of the block visited before it."""
        storage, n = self.storage, self.uses.keys + (self.blocks.end - 1 - step)
        block, partial = self.blocks.visit(step)
        scores, acc_s, loaded = self.score_tile(block, n)
        storage.pipeline_k.consumer_wait(n)
        self.thread.ping_pong.sync()
        self.start_qk(acc_s, n)
        storage.pipeline_v.consumer_wait(n - 1)
        self.start_pv(n - 1)
        self.thread.ping_pong.arrive()
        warpgroup.wait_group(1)
        self.release_keys(n)
        if cutlass.const_expr(not frozen):
            self.before_softmax(step)
        self.probabilities(scores, loaded, masked, frozen, partial)
        warpgroup.wait_group(0)
        storage.pipeline_v.consumer_release(n - 1, Accessed.BY_WGMMA)
        self.convert(scores, acc_s)
        if cutlass.const_expr(not frozen):
            self.rescale(step)

    def before_softmax(self, step: Int32) -> None:
        """Called before the softmax of the block of ``step``, unless row maxima are stale."""

    def rescale(self, step: Int32) -> None:
        """Rescale the accumulated O to the row maxima after the block of ``step``."""
        self.softmax.rescale(self.thread.fragments.acc_o_rows, self.thread.fragments.factors)

    @cute.jit
    def last_product(self) -> None:
        """Add P V of the first key block, which is visited last, to O."""
        n = self.uses.keys + (self.blocks.end - 1 - self.blocks.begin)
        self.zero_values_before_first(self.blocks.begin, n)
        self.storage.pipeline_v.consumer_wait(n)
        self.start_pv(n)
        warpgroup.wait_group(0)
        self.storage.pipeline_v.consumer_release(n, Accessed.BY_WGMMA)

    @cute.jit
    def score_tile(self, block: Int32, n: Int32):
        """Score tile and registers for S of ``block`` (use n of K's pipeline), and the epilogues' global loads."""
        kernel, thread = self.kernel, self.thread
        shape = (kernel.tile.tile_m, kernel.tile.tile_n)
        acc_s = cute.make_rmem_tensor(kernel.mma_qk().get_slice(0).partition_shape_C(shape), Float32)
        scores = self.score_map.tile(acc_s, self.query_tile.row0, block * kernel.tile.tile_n)
        if cutlass.const_expr(kernel.loads_bias_by_tma):
            tma_bias = self.storage.bias.tile(thread.group, thread.lane, n)
            scores = dataclasses.replace(scores, tma_bias=tma_bias)
        return scores, acc_s, kernel.epilogues.load(self.state, scores)

    @cute.jit
    def start_qk(self, acc_s: cute.Tensor, n: Int32) -> None:
        """Issue acc_s = Q K^T with use n of K's pipeline."""
        op, stage = self.thread.fragments, self.storage.pipeline_k.stage(n)
        start_gemm(self.kernel.mma_qk(), acc_s, op.q, op.k[None, None, None, stage], False)

    def release_keys(self, n: Int32) -> None:
        """Release use n of K's pipeline after S is complete."""
        self.storage.pipeline_k.consumer_release(n, Accessed.BY_WGMMA)

    @cute.jit
    def start_pv(self, n: Int32) -> None:
        """Issue O += P V with use n of V's pipeline."""
        op, stage = self.thread.fragments, self.storage.pipeline_v.stage(n)
        start_gemm(self.kernel.mma_pv(), op.acc_o, op.p_operand, op.v[None, None, None, stage], True)

    @cute.jit
    def probabilities(
        self,
        scores: ScoreTile,
        loaded: tuple,
        masked: Constexpr,
        frozen: Constexpr,
        partial: Boolean | None = None,
        ends: Constexpr = False,
    ) -> None:
        """Turn scores into probabilities; unless ``frozen``, also set ``factors`` to O's rescaling factors.

        partial, ends: see :meth:`EpilogueChain.forward`. A list's last block, which is visited first, may reach beyond
        the sequence.
        """
        saved = self.kernel.epilogues.forward(self.state, scores, loaded, masked, partial, ends)
        self.advance(scores, saved, masked, frozen)

    @cute.jit
    def advance(self, scores: ScoreTile, saved: tuple, masked: Constexpr, frozen: Constexpr) -> None:
        """The softmax after the epilogues, which have ``saved`` values for their derivatives."""
        if cutlass.const_expr(frozen):
            self.softmax.advance_frozen(scores.acc)
        else:
            self.softmax.advance(scores.acc, self.thread.fragments.factors, masked)

    @cute.jit
    def convert(self, scores: ScoreTile, acc_s: cute.Tensor) -> None:
        """Convert P, with dropout, to the 16-bit operand of P V, whose previous use must be complete."""
        p = self.thread.fragments.p
        convert_to_16_bits(acc_s, p)
        self.kernel.epilogues.drop(self.state, scores, self.score_map.view(p))

    @cute.jit
    def zero_values_out_of_bounds(self, block: Int32, n: Int32) -> None:
        """Zero the rows of V in shared memory that lie beyond the sequence."""
        kernel, storage = self.kernel, self.storage
        if cutlass.const_expr(kernel.has_values_out_of_bounds):
            rows = self.state.band.seqlen_k - block * kernel.tile.tile_n
            if rows < kernel.tile.tile_n:
                storage.pipeline_v.consumer_wait(n)
                self.zero_values(rows, Int32(kernel.tile.tile_n), n)

    @cute.jit
    def zero_values_before_first(self, block: Int32, n: Int32) -> None:
        """Zero the rows of V in ``block`` before the sequence's first key, if the first key is not row 0."""
        if cutlass.const_expr(self.state.band.first is not None):
            rows = self.state.band.first - block * self.kernel.tile.tile_n
            if rows > 0:
                self.storage.pipeline_v.consumer_wait(n)
                self.zero_values(Int32(0), cutlass.min(rows, self.kernel.tile.tile_n), n)

    @property
    def values(self) -> tuple[cute.Tensor, ...]:
        """V in shared memory, (tile_n, head_dim_v, stages)."""
        return (self.storage.s_v,)

    @cute.jit
    def zero_values(self, begin: Int32, end: Int32, n: Int32) -> None:
        """Zero rows [begin, end) of V in the stage of use n, which must be full. Ends with a warpgroup barrier."""
        lane = cute.arch.thread_idx()[0] % WARPGROUP
        for values in self.values:
            s_v = values[None, None, self.storage.pipeline_v.stage(n)]
            zero_rows(s_v, begin, end, lane, WARPGROUP)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup_barrier(self.thread.group)
