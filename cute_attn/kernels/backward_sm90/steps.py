"""Steps of the Hopper backward's consumer warpgroups; each combines a query block of one head with a key block.

:class:`Head` has the operations of a step. :class:`DqLate`, :class:`DqInStep` and, for large head dims,
:class:`ScoresAhead` put them in order.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

import layouts
from cute_attn.device.copy import zero_rows
from cute_attn.device.gemm import start_gemm
from cute_attn.device.math import converted, optimization_barrier, rematerialize_each
from cute_attn.device.pipeline import Accessed, Pipeline, consumer_barrier
from cute_attn.device.probabilities import probabilities, row_values, score_gradient, start_from
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.epilogues.chain import ScoreState
from cute_attn.kernels.backward_sm90.params import BackwardStorage, Fragments
from cute_attn.kernels.dq_order import accumulator_shape, block_floats, make_accumulator
from cute_attn.outputs.accumulate import add_fragment, load_fragment, stage_fragment
from cute_attn.outputs.fragment_rows import store_rows
from cute_attn.work.block_range import BlockRange


@dataclass(frozen=True)
class Head:
    """A query head's steps on one key block, in a consumer warpgroup."""

    kernel: Constexpr
    shared: BackwardStorage
    fragments: Fragments
    blocks: BlockRange
    state: ScoreState
    score_map: ScoreMap
    key0: Int32
    seqlen_q: Int32
    scale_log2: Float32
    dq: cute.Pointer | cute.Tensor  # see BackwardSm90.dq_of_head
    dq_scale: Float32 | None  # of dQ, with tile.dq_direct
    first_use: Int32  # of the pipelines of Q and dO
    thread: Int32
    bias_address: Int32 | None  # of the thread's first element in the first stage, or None
    key_use: Int32  # of the pipelines of K and V

    def use_of(self, block: Int32) -> Int32:
        """Index of the use of the pipelines, and of dS's buffer, for a query block."""
        return self.first_use + (block - self.blocks.begin)

    @cute.jit
    def full_blocks(self) -> tuple[Int32, Int32]:
        """The query blocks [begin, end) that need no mask; without a left bound they reach to the last block."""
        begin, full_end, end = self.blocks.full_begin, self.blocks.full_end, self.blocks.end
        if cutlass.const_expr(not self.kernel.masks_last_blocks):
            begin, full_end = (begin if begin < full_end else end), end
        return begin, full_end

    @property
    def visible_keys(self) -> Any:
        """For :func:`probabilities`: the number of keys that a query sees, if scores may be large."""
        return self.state.band.visible_keys if self.kernel.epilogues.may_be_large else None

    # ---- P and dS ----

    @cute.jit
    def zero_queries_out_of_bounds(
        self, block: Int32, n: Int32, q: Constexpr = True, do: Constexpr = True
    ) -> None:
        """Zero Q with the bias, and dO, beyond the sequence's last query."""
        if cutlass.const_expr(self.kernel.traits.varlen or self.kernel.traits.seqused_q):
            rows = self.seqlen_q - block * self.kernel.tile.tile_m
            if rows < self.kernel.tile.tile_m:
                shared, stage_q = self.shared, self.shared.pipeline_q.stage(n)
                where = (rows, self.kernel.tile.tile_m, self.thread, self.kernel.tile.mma_threads)
                if cutlass.const_expr(do):
                    shared.pipeline_do.consumer_wait(n)
                    zero_rows(shared.s_do[None, None, shared.pipeline_do.stage(n)], *where)
                if cutlass.const_expr(q):
                    zero_rows(shared.s_q[None, None, stage_q], *where)
                if cutlass.const_expr(q and self.kernel.loads_bias_by_tma):
                    zero_rows(shared.bias.tensor[None, None, stage_q], *where)
                cute.arch.fence_proxy("async.shared", space="cta")
                consumer_barrier(self.kernel.tile.warpgroups)

    @cute.jit
    def dropout_mask_of(self, n: Int32) -> tuple[Int32, ...]:
        """The thread's words of a step's mask; called by all consumer warps. See :meth:`EpilogueChain.dropout_mask`."""
        pipeline, words = self.shared.pipeline_mask, self.kernel.tile.mask_words
        pipeline.consumer_wait(n)
        mask = cute.recast_tensor(self.shared.s_mask[None, None, None, pipeline.stage(n)], Int32)
        thread = rematerialize_each(self.thread, n)
        mask = tuple(mask[0, thread, word] for word in range(words))
        pipeline.consumer_release(n, Accessed.BY_THREADS)
        return mask

    @cute.jit
    def probabilities_and_gradients(
        self, block: Int32, masked: Constexpr, first: Constexpr = False
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Compute P, with dropped elements zero, and dS of a query block, both in 16 bits."""
        shared, n = self.shared, self.use_of(block)
        acc_s, acc_dp = self.scores_accumulator(), self.scores_accumulator()
        scores, partial = self.score_tile(acc_s, block)
        loaded = self.kernel.epilogues.load(self.state, scores)
        mask, lse = self.start_s_and_dp(acc_s, acc_dp, block, first)
        # While S and dP run, the reads that were not issued before them.
        if cutlass.const_expr(mask is None):
            mask = self.kernel.epilogues.dropout_mask(self.state, scores)
        if cutlass.const_expr(lse is None and not self.kernel.loads_bias_by_tma):
            lse = self.row_values(shared.s_lse, shared.pipeline_q, n)
        warpgroup.wait_group(1)
        saved = self.kernel.epilogues.forward(self.state, scores, loaded, masked, partial, self.ends())
        if cutlass.const_expr(lse is None):
            # Only here, where the registers of a TMA-loaded bias are free again.
            lse = self.row_values(shared.s_lse, shared.pipeline_q, n)
        probabilities(scores, lse, self.scale_log2, self.visible_keys)
        # Converted while dP runs, if registers are left for that.
        early: Constexpr = self.kernel.tile.p_in_smem
        p = self.p_in_16_bits(acc_s, mask) if cutlass.const_expr(early) else None
        warpgroup.wait_group(0)
        ds = self.to_gradients(scores, acc_dp, saved, mask, n)
        return p if cutlass.const_expr(early) else self.p_in_16_bits(acc_s, mask), ds

    @cute.jit
    def p_in_16_bits(self, acc_s: cute.Tensor, mask: tuple) -> cute.Tensor:
        """P in 16 bits with dropped elements zero; acc_s is unchanged."""
        p = converted(acc_s, self.kernel.dtype)
        self.kernel.epilogues.zero_dropped(mask, self.score_map.view(p))
        return p

    @cute.jit
    def to_gradients(
        self, scores: ScoreTile, acc_dp: cute.Tensor, saved: tuple, mask: tuple, n: Int32
    ) -> cute.Tensor:
        """Turn dP in ``acc_dp`` into dS; returns dS in 16 bits."""
        minus_d = None
        if cutlass.const_expr(not self.kernel.dp_starts_from_d):
            # The barrier keeps the address from being computed, and kept in a register, long before it is used.
            minus_d = self.row_values(self.shared.s_minus_d, self.shared.pipeline_do, optimization_barrier(n))
        ds_tile = scores.of(self.score_map.view(acc_dp))
        self.kernel.epilogues.zero_dropped(mask, ds_tile.acc)
        score_gradient(scores.acc, ds_tile.acc, minus_d)
        adds = self.kernel.part() == 0 if cutlass.const_expr(self.kernel.tile.cluster > 1) else None
        self.kernel.epilogues.backward(self.state, ds_tile, saved, adds)
        return converted(acc_dp, self.kernel.dtype)

    @cute.jit
    def start_s_and_dp(
        self, acc_s: cute.Tensor, acc_dp: cute.Tensor, block: Int32, first: Constexpr
    ) -> tuple[tuple | None, cute.Tensor | None]:
        """Start S and dP of a query block; returns its dropout mask and its rows' log-sum-exps, or None if read later.

        Shared memory is read first: the reads wait in the same queue as wgmma.
        """
        op, shared, n = self.fragments, self.shared, self.use_of(block)
        mask = None
        if cutlass.const_expr(self.kernel.tile.mask_warps > 0):
            mask = self.dropout_mask_of(n)
        shared.pipeline_q.consumer_wait(n)
        self.zero_queries_out_of_bounds(self.blocks.block(block), n)
        lse, minus_d = None, None
        if cutlass.const_expr(self.kernel.reads_lse_first):
            lse = self.row_values(shared.s_lse, shared.pipeline_q, n)
        if cutlass.const_expr(self.kernel.dp_starts_from_d):
            shared.pipeline_do.consumer_wait(n)
            minus_d = self.row_values(shared.s_minus_d, shared.pipeline_do, n)
            start_from(self.score_map.view(acc_dp), minus_d)
        self.start_scores(op.a_scores, op.b_scores, acc_s, shared.pipeline_q.stage(n), False)
        if cutlass.const_expr(first and self.kernel.waits_for_v_late):
            shared.pipeline_v.consumer_wait(self.key_use)
        if cutlass.const_expr(not self.kernel.dp_starts_from_d):
            shared.pipeline_do.consumer_wait(n)
        self.start_scores(op.a_dp, op.b_dp, acc_dp, shared.pipeline_do.stage(n), self.kernel.dp_starts_from_d)
        return mask, lse

    def scores_accumulator(self) -> cute.Tensor:
        """Registers for S or dP of a query block."""
        return cute.make_rmem_tensor(
            self.kernel.mma_scores().get_slice(0).partition_shape_C(self.kernel.scores_shape), Float32
        )

    @cute.jit
    def score_tile(self, acc_s: cute.Tensor, block: Int32) -> tuple[ScoreTile, Boolean | None]:
        """S of ``block`` in ``acc_s``, with its place, and whether a listed block is partial."""
        place, partial = self.blocks.visit(block)
        scores = self.score_map.tile(acc_s, place * self.kernel.tile.tile_m, self.key0)
        if cutlass.const_expr(self.kernel.loads_bias_by_tma):
            stage = self.shared.pipeline_q.stage(self.use_of(block))
            scores = replace(scores, tma_bias=self.shared.bias.tile(self.bias_address, stage))
        return scores, partial

    def ends(self) -> Boolean:
        """True if the key block reaches beyond the sequence."""
        return self.key0 + self.kernel.tile.tile_n > self.state.band.seqlen_k

    @cute.jit
    def start_scores(
        self, a: cute.Tensor, b: cute.Tensor, acc: cute.Tensor, stage: Int32, accumulate: Constexpr
    ) -> None:
        """Start acc (+)= K Q^T or V dO^T; the keys' operand has one stage."""
        stage_a, stage_b = (stage, 0) if self.kernel.tile.p_in_smem else (0, stage)
        a, b = a[None, None, None, stage_a], b[None, None, None, stage_b]
        start_gemm(self.kernel.mma_scores(), acc, a, b, accumulate)

    @cute.jit
    def start_dv(self, p: cute.Tensor, n: Int32) -> None:
        """Start dV += P dO."""
        op, stage = self.fragments, self.shared.pipeline_do.stage(n)
        a, b = self.keys_operand(p, op.p_smem, n), op.do[None, None, None, stage]
        self.start_dkv(op.acc_dv, a, b, self.kernel.dims[1])

    @cute.jit
    def start_dk(self, ds: cute.Tensor, n: Int32) -> None:
        """Start dK += dS Q."""
        op, stage = self.fragments, self.shared.pipeline_q.stage(n)
        a, b = self.keys_operand(ds, op.ds_smem, n), op.q[None, None, None, stage]
        self.start_dkv(op.acc_dk, a, b, self.kernel.dims[0])

    @cute.jit
    def start_dkv(
        self, acc: cute.Tensor, keys: cute.Tensor, queries: cute.Tensor, head_dim: Constexpr
    ) -> None:
        """Start acc += keys queries, or its transpose; keys and queries: P and dO, or dS and Q."""
        a, b = (queries, keys) if self.kernel.tile.dkv_transposed else (keys, queries)
        start_gemm(self.kernel.mma_dkv(head_dim), acc, a, b, True)

    def keys_operand(self, registers: cute.Tensor, smem: cute.Tensor | None, n: Int32) -> cute.Tensor:
        """P or dS as operand (keys, queries), from shared memory if the tile stores it there, else from registers."""
        if smem is not None:
            return smem[None, None, None, self.kernel.ds_stage(n)]
        return layouts.as_operand_a(registers)

    @cute.jit
    def start_dq(self, acc_dq: cute.Tensor, n: Int32) -> None:
        """Start acc_dq = dS K, or its transpose."""
        op, stage = self.fragments, self.kernel.ds_stage(n)
        stage_a, stage_b = (0, stage) if self.kernel.tile.dq_transposed else (stage, 0)
        a, b = op.a_dq[None, None, None, stage_a], op.b_dq[None, None, None, stage_b]
        start_gemm(self.kernel.mma_dq(), acc_dq, a, b, False)

    @cute.jit
    def store_scores(self, fragment: cute.Tensor, target: cute.Tensor, n: Int32) -> None:
        """Store P or dS of a step to its stage of ``target``."""
        tile = target[None, None, self.kernel.ds_stage(n)]
        store = self.kernel.scores_store()
        # Otherwise addresses are kept in registers through the loop.
        mine = store.get_slice(rematerialize_each(self.thread, n))
        as_accumulator = tile if cutlass.const_expr(self.kernel.tile.p_in_smem) else layouts.transposed(tile)
        cute.copy(store, mine.retile(fragment), mine.partition_D(as_accumulator))

    def dq_accumulator(self) -> cute.Tensor:
        """Registers for dQ of a query block."""
        return make_accumulator(self.kernel.mma_dq(), self.kernel.traits, self.kernel.tile)

    def row_values(self, s_rows: cute.Tensor, pipeline: Pipeline, n: Int32) -> cute.Tensor:
        """The values of the thread's rows at use n, from (tile_m, stage) in shared memory."""
        return row_values(self.score_map, s_rows[None, pipeline.stage(n)])

    @cute.jit
    def stage_dq(self, acc_dq: cute.Tensor, block: Int32, place: Int32 | int = 0) -> None:
        """Store dQ to shared memory, by all consumer warps; its stage, or its ``place`` among several, must be free."""
        thread, vector = rematerialize_each(self.thread, block), self.kernel.tile.dq_vector
        floats = block_floats(self.kernel.traits, self.kernel.tile)
        stage_fragment(acc_dq, self.shared.s_dq + place * floats, thread, vector)

    @cute.jit
    def add_dq(self, acc_dq: cute.Tensor, block: Int32) -> None:
        """Add dQ to its accumulator, stage it for :class:`DqAdder`, or store it, by all consumer warps."""
        tile, floats = self.kernel.tile, block_floats(self.kernel.traits, self.kernel.tile)
        if cutlass.const_expr(tile.dq_rows > 0):
            place, thread = self.blocks.block(block), rematerialize_each(self.thread, block)
            load_fragment(acc_dq, self.shared.s_dq + place * floats, thread, tile.dq_vector, more=True)
            self.stage_dq(acc_dq, block, place)
        elif cutlass.const_expr(tile.dq_direct):
            self.store_dq(acc_dq, block)
        elif cutlass.const_expr(tile.dq_bulk):
            if cutlass.const_expr(tile.p_in_smem):  # DqLate has waited with dS
                self.shared.dq_staging.producer_wait(self.use_of(block))
            self.stage_dq(acc_dq, block)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.shared.dq_staging.producer_commit(self.use_of(block))
        else:
            base = self.dq + Int64(self.blocks.block(block)) * floats
            if cutlass.const_expr(tile.dq_in_order):
                self.shared.dq_staging.turn_wait(self.use_of(block))
            add_fragment(acc_dq, base, rematerialize_each(self.thread, block), tile.dq_vector)
            if cutlass.const_expr(tile.dq_in_order):
                self.shared.dq_staging.producer_commit(self.use_of(block))

    # ---- dQ that a CTA computes alone ----

    @cute.jit
    def store_dq(self, acc_dq: cute.Tensor, block: Int32) -> None:
        """Store dQ of a query block, by all consumer warps."""
        kernel, row0 = self.kernel, self.blocks.block(block) * self.kernel.tile.tile_m
        shape = accumulator_shape(kernel.traits, kernel.tile)
        own = ScoreMap.make(kernel.mma_dq(), *shape, rematerialize_each(self.thread, block))
        rows = (self.dq, row0, self.seqlen_q, kernel.traits.head_dim)
        store_rows(own.view(acc_dq), own, *rows, self.dq_scale)

    @cute.jit
    def clear_dq(self) -> None:
        """Zero the thread's elements of dQ in shared memory, for all query blocks."""
        zeros = self.dq_accumulator()
        zeros.fill(0.0)
        for block in cutlass.range(cute.ceil_div(self.seqlen_q, self.kernel.tile.tile_m), unroll=1):
            self.stage_dq(zeros, block, block)

    @cute.jit
    def store_all_dq(self) -> None:
        """Store dQ from shared memory, where each thread reads what it wrote."""
        tile, floats = self.kernel.tile, block_floats(self.kernel.traits, self.kernel.tile)
        for block in cutlass.range(cute.ceil_div(self.seqlen_q, tile.tile_m), unroll=1):
            acc_dq = self.dq_accumulator()
            load_fragment(acc_dq, self.shared.s_dq + block * floats, self.thread, tile.dq_vector)
            self.store_dq(acc_dq, block)


@cute.jit
def steps(step: Constexpr, begin: Int32, end: Int32, masked: Constexpr) -> None:
    """Call ``step``, a method of a loop, for each query block in [begin, end)."""
    for block in cutlass.range(begin, end, unroll=1):
        step(block, masked)


@dataclass(frozen=True)
class DqLate:
    """Loop with dQ a step late, so that warpgroups need not be in the same step. P and dS are register operands."""

    head: Head

    @cute.jit
    def run(self) -> None:
        """Run the steps of all query blocks of the head that see the key block."""
        head, begin, end = self.head, self.head.blocks.begin, self.head.blocks.end
        full_begin, full_end = head.full_blocks()
        if begin < end:
            # The first step has no dQ of a step before it; the last one's dQ follows the loop.
            second = begin + 1
            self.step(begin, True, first=True)
            steps(self.step, second, full_begin, True)
            steps(self.step, cutlass.max(full_begin, second), full_end, False)
            if cutlass.const_expr(head.kernel.masks_last_blocks):
                steps(self.step, cutlass.max(full_end, second), end, True)
            acc_dq, n = head.dq_accumulator(), head.use_of(end - 1)
            self.wait_for_ds(n)
            head.start_dq(acc_dq, n)
            warpgroup.wait_group(0)
            head.add_dq(acc_dq, end - 1)

    @cute.jit
    def step(self, block: Int32, masked: Constexpr, first: Constexpr = False) -> None:
        """Process one query block, and dQ of the previous block unless this is the ``first``."""
        head, shared, n = self.head, self.head.shared, self.head.use_of(block)
        dq_bulk: Constexpr = head.kernel.tile.dq_bulk
        acc_dq = head.dq_accumulator()
        p, ds = head.probabilities_and_gradients(block, masked, first)

        if cutlass.const_expr(not first):
            self.wait_for_ds(n - 1)
        elif cutlass.const_expr(head.kernel.tile.dv_leaves_v(head.kernel.traits)):
            consumer_barrier(head.kernel.tile.warpgroups)  # the last dK and dV have left dS's memory
        head.store_scores(ds, shared.s_ds, n)  # its stage is free: all have arrived at dS of the step before
        if cutlass.const_expr(not first):
            head.start_dq(acc_dq, n - 1)
        head.start_dv(p, n)
        warpgroup.wait_group(1)  # dQ: the arrival says that it has read dS
        if cutlass.const_expr(not first and dq_bulk):
            head.stage_dq(acc_dq, block)
        shared.ds_buffer.arrive(n)
        if cutlass.const_expr(not first):
            if cutlass.const_expr(dq_bulk):
                shared.dq_staging.producer_commit(n)
            else:
                head.add_dq(acc_dq, block - 1)
        head.start_dk(ds, n)
        warpgroup.wait_group(1)
        # LSE, D and a bias were read before dS was stored, and dS's arrival is fenced.
        shared.pipeline_do.consumer_release(n, Accessed.BY_THREADS_FENCED)
        warpgroup.wait_group(0)
        shared.pipeline_q.consumer_release(n, Accessed.BY_THREADS_FENCED)

    @cute.jit
    def wait_for_ds(self, n: Int32) -> None:
        """Wait until all warpgroups have written dS of step n, and until its dQ may be staged."""
        self.head.shared.ds_buffer.wait(n)
        if cutlass.const_expr(self.head.kernel.tile.dq_bulk):
            self.head.shared.dq_staging.producer_wait(n)


@dataclass(frozen=True)
class DqInStep:
    """Loop with P in shared memory and dQ in the same step: warpgroups wait for each other's P and dS."""

    head: Head

    @cute.jit
    def run(self) -> None:
        """Run the steps of all query blocks of the head that see the key block."""
        head, blocks = self.head, self.head.blocks
        full_begin, full_end = head.full_blocks()
        steps(self.step, blocks.begin, full_begin, True)
        steps(self.step, full_begin, full_end, False)
        if cutlass.const_expr(head.kernel.masks_last_blocks):
            steps(self.step, full_end, blocks.end, True)

    @cute.jit
    def step(self, block: Int32, masked: Constexpr) -> None:
        head, shared, n = self.head, self.head.shared, self.head.use_of(block)
        p, ds = head.probabilities_and_gradients(block, masked)
        # With two stages no read of a stage is pending: a warpgroup passes this step's barrier only after the others
        # have passed the last step's, and they passed that after all their products of the step before it.
        if cutlass.const_expr(head.kernel.tile.num_stages_ds == 1):
            consumer_barrier(head.kernel.tile.warpgroups)
        head.store_scores(ds, shared.s_ds, n)
        head.store_scores(p, shared.s_p, n)
        cute.arch.fence_proxy("async.shared", space="cta")
        consumer_barrier(head.kernel.tile.warpgroups)
        acc_dq = head.dq_accumulator()
        if cutlass.const_expr(head.kernel.adds_dq_early):
            head.start_dq(acc_dq, n)
            head.start_dv(p, n)
            warpgroup.wait_group(1)
            head.add_dq(acc_dq, block)
            head.start_dk(ds, n)
            warpgroup.wait_group(1)
        else:
            head.start_dv(p, n)
            head.start_dq(acc_dq, n)
            head.start_dk(ds, n)
            warpgroup.wait_group(1)
        shared.pipeline_do.consumer_release(n, Accessed.BY_THREADS_FENCED)  # fenced above
        if cutlass.const_expr(not head.kernel.adds_dq_early):
            head.add_dq(acc_dq, block)
        warpgroup.wait_group(0)
        shared.pipeline_q.consumer_release(n, Accessed.BY_THREADS_FENCED)


@dataclass(frozen=True)
class ScoresAhead:
    """Loop for head dims above 256: two CTAs, with S of the next query block computed ahead; P and dS in shared memory.

    dK and dV of such head dims do not fit registers, nor do K, V, Q and dO fit shared memory. So two CTAs (``cluster``)
    divide the columns of all these tensors and of dQ. Each computes S and dP from its columns and sends these partial
    sums to its peer in fp32. Both add the peer's sums, so both have the whole S and dP with equal bits:

        compute S of the first query block, send it to the peer
        for each query block:
            issue dP; add the peer's S; epilogues, P
            wait for dP, send it to the peer; store P to shared memory; barrier
            issue dV += P dO; add the peer's dP; store dS to shared memory
            wait for dV; barrier
            issue dQ = dS K, dK += dS Q
            wait for dQ, add it to global memory; issue S of the next query block
            wait for dK and S, send S to the peer

    Products overlap all other work and the exchanges.
    """

    head: Head

    @cute.jit
    def run(self) -> None:
        """Run the steps of all query blocks of the head that see the key block."""
        head, begin, end = self.head, self.head.blocks.begin, self.head.blocks.end
        full_begin, full_end = head.full_blocks()
        if begin < end:
            acc_s = head.scores_accumulator()
            self.start_s(acc_s, begin)
            warpgroup.wait_group(0)
            self.send_s(acc_s, head.use_of(begin))
            step, last = functools.partial(self.step, acc_s), end - 1  # the last step has no next S
            full_begin, full_end = cutlass.min(full_begin, last), cutlass.min(full_end, last)
            steps(step, begin, full_begin, True)
            steps(step, full_begin, full_end, False)
            if cutlass.const_expr(head.kernel.masks_last_blocks):
                steps(step, full_end, last, True)
            self.step(acc_s, last, True, last=True)

    @cute.jit
    def step(self, acc_s: cute.Tensor, block: Int32, masked: Constexpr, last: Constexpr = False) -> None:
        """Process a query block with S in ``acc_s``, and compute S of the next unless this is the ``last``.

        Stages of P and dS are free when they are written. dV, which reads P, finished in all warpgroups before the
        barrier of the last step's dS. dQ and dK, which read dS, finished before the barrier of this step's P.
        """
        head, shared, n = self.head, self.head.shared, self.head.use_of(block)
        chain, tile = head.kernel.epilogues, head.kernel.tile
        scores, partial = head.score_tile(acc_s, block)
        acc_dp = head.scores_accumulator()
        loaded = chain.load(head.state, scores)
        lse = head.row_values(shared.s_lse, shared.pipeline_q, n)
        self.start_dp(acc_dp, block)
        mask = chain.dropout_mask(head.state, scores)
        if cutlass.const_expr(tile.cluster > 1):
            shared.peer_s.add(acc_s, rematerialize_each(head.thread, n), n)
        saved = chain.forward(head.state, scores, loaded, masked, partial, head.ends())
        probabilities(scores, lse, head.scale_log2, head.visible_keys)
        p = head.p_in_16_bits(acc_s, mask)
        warpgroup.wait_group(0)
        if cutlass.const_expr(tile.cluster > 1):
            shared.peer_dp.send(acc_dp, rematerialize_each(head.thread, n))
        head.store_scores(p, shared.s_p, n)
        cute.arch.fence_proxy("async.shared", space="cta")
        consumer_barrier(tile.warpgroups)

        head.start_dv(p, n)
        if cutlass.const_expr(tile.cluster > 1):
            shared.peer_dp.add(acc_dp, rematerialize_each(head.thread, n), n)
        ds = head.to_gradients(scores, acc_dp, saved, mask, n)
        head.store_scores(ds, shared.s_ds, n)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.wait_group(0)
        shared.pipeline_do.consumer_release(n, Accessed.BY_THREADS_FENCED)
        consumer_barrier(tile.warpgroups)

        acc_dq = head.dq_accumulator()
        head.start_dq(acc_dq, n)
        head.start_dk(ds, n)
        warpgroup.wait_group(1)
        head.add_dq(acc_dq, block)
        if cutlass.const_expr(not last):
            self.start_s(acc_s, block + 1)  # only here are there registers for it
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        shared.pipeline_q.consumer_release(n, Accessed.BY_THREADS_FENCED)
        if cutlass.const_expr(not last):
            warpgroup.wait_group(0)
            self.send_s(acc_s, n + 1)

    @cute.jit
    def send_s(self, acc_s: cute.Tensor, n: Int32) -> None:
        """Send the CTA's partial S of step n to its peer, if any."""
        if cutlass.const_expr(self.head.kernel.tile.cluster > 1):
            self.head.shared.peer_s.send(acc_s, rematerialize_each(self.head.thread, n))

    @cute.jit
    def start_s(self, acc_s: cute.Tensor, block: Int32) -> None:
        head, op, pipeline = self.head, self.head.fragments, self.head.shared.pipeline_q
        n = head.use_of(block)
        pipeline.consumer_wait(n)
        head.zero_queries_out_of_bounds(head.blocks.block(block), n, do=False)
        head.start_scores(op.a_scores, op.b_scores, acc_s, pipeline.stage(n), False)

    @cute.jit
    def start_dp(self, acc_dp: cute.Tensor, block: Int32) -> None:
        head, op, pipeline = self.head, self.head.fragments, self.head.shared.pipeline_do
        kernel, n = head.kernel, head.use_of(block)
        pipeline.consumer_wait(n)
        head.zero_queries_out_of_bounds(head.blocks.block(block), n, q=False)
        if cutlass.const_expr(kernel.dp_starts_from_d):
            minus_d = head.row_values(head.shared.s_minus_d, pipeline, n)
            if cutlass.const_expr(kernel.tile.cluster > 1):  # only one CTA adds it to the sum
                minus_d.store(minus_d.load() * Float32(kernel.part() == 0))
            start_from(head.score_map.view(acc_dp), minus_d)
        head.start_scores(op.a_dp, op.b_dp, acc_dp, pipeline.stage(n), kernel.dp_starts_from_d)
