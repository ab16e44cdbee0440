"""The Hopper backward: dK, dV and dQ with TMA, wgmma and specialised warpgroups.

    S = epilogues(softmax_scale * Q K^T)       (seqlen_q, seqlen_k), one tile at a time, in registers
    P = exp(S - LSE)                           as in the forward
    dP = keep * (dO V^T)                       keep: which elements dropout kept
    dS = P * (dP - D),  D = rowsum(dO * O)     then the epilogues' derivatives, last first
    dV = rp * (keep * P)^T dO                  rp = 1 / (1 - dropout_p)
    dK = rp * softmax_scale * dS^T Q
    dQ = rp * softmax_scale * dS K

The kernel is persistent: each CTA claims key blocks until none is left. For a key block it visits all query blocks
that see it, of every query head of the group, and accumulates dK and dV in registers. dQ is accumulated in fp32 in
global memory by atomic additions of all CTAs; another kernel converts it.

The producer warp claims the next key block (an atomic counter), broadcasts it, and loads: K and V once per key block,
through pipelines Q with LSE and a 16-bit bias, and dO with D. The next K is loaded when no product reads the last one
any more, and the next Q while dK and dV are stored; V only after dV, which is stored from the same memory. The two
consumer warpgroups compute S and dP transposed, each for 64 keys, so that the accumulators of P and dS are the register
operands of dV and dK (all as (keys, queries) here):

    issue S = K Q^T, dP = V dO^T
    wait for S; epilogues, P
    wait for dP; dS = P (dP - D); P and dS to 16 bits
    wait until all warpgroups' dS of the last step is in shared memory; store this step's next to it
    issue dQ = dS K of the last step, each warpgroup some of its columns or rows
    issue dV += P dO
    wait for dQ, arrive at the barrier of this step's dS, add dQ to global memory
    issue dK += dS Q
    wait for dV and dK

dQ is computed a step late, so warpgroups need not be in the same step: products of one overlap exponentials of the
other. P stays in fp32 until dS has been computed from it.

Shared-memory accesses wait in one queue with wgmma, behind earlier ones. So a step reads LSE before it issues
S, if registers are left for that; it stores dS before it issues dQ and dV; and D is free, since dP's accumulator is
initialized with -D (not with dropout, which drops dP but not D).

With ``mask_warps``, warps of the producer's warpgroup generate flash's dropout mask ahead of the steps: one bit per
element in shared memory, in the order of the consumers' registers.

With ``dq_bulk`` the consumers store dQ to shared memory, and a warp of the producer's warpgroup adds it to global
memory by one bulk reduction a step. Otherwise they add it from registers. With ``bias_stages`` another warp stores the
bias gradient, if that is dS.

Above head dim 128 dK and dV of 64 keys exceed a warpgroup's registers. P goes through shared memory too
(``p_in_smem``): the warpgroups divide the keys of S, and the columns of dV, dK and dQ, which is not a step late.

Above 256 not even those fit, nor do K, V, Q and dO fit shared memory: two CTAs (``cluster``) divide the columns of all
of them, and of dK, dV and dQ. Each computes S and dP of its columns and sends them to its peer in fp32; both add the
peer's sums, so both have the whole S and dP with equal bits, and derive equal values from them. S is sent
while dP is computed, dP while P is.

Limits: fp16 and bf16; head dims up to 576, multiples of 8, padded to multiples of 32 in shared memory; if one is
above 256, both have to be multiples of 64; rows 16-byte aligned with a contiguous last dimension.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

import layouts
from cute_attn.device.convert import converted
from cute_attn.device.copy import RowCopy
from cute_attn.device.math import optimization_barrier, rematerialize, rematerialize_each
from cute_attn.device.pipeline import WARPGROUP, Accessed, Pipeline, consumer_barrier
from cute_attn.device.probabilities import (
    probabilities,
    row_values,
    score_gradient,
    start_from,
)
from cute_attn.device.score_tile import ScoreContext, ScoreMap, ScoreTile
from cute_attn.device.seqlen import existing_rows, padded_row0, sequence, workspace_rows
from cute_attn.device.wgmma import start_gemm
from cute_attn.epilogues.chain import EpilogueChain, ScoreState
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.kernels import fakes
from cute_attn.kernels.backward_sm90.heuristics import EMPTY, FEW_ROWS, TABLE, keys
from cute_attn.kernels.backward_sm90.layouts import BackwardSm90Layouts
from cute_attn.kernels.backward_sm90.params import (
    BackwardInputs,
    BackwardOutputs,
    BackwardParams,
    BackwardStorage,
    Fragments,
    HeadContext,
    shared_memory,
)
from cute_attn.kernels.backward_sm90.producer import Producer
from cute_attn.kernels.backward_sm90.roles import BiasGradientStorer, DqAdder, PhiloxProducer
from cute_attn.kernels.limits import LARGE_HEAD_DIM, beyond
from cute_attn.outputs.accumulate import add_fragment, stage_fragment
from cute_attn.outputs.dq_order import block_floats, make_accumulator
from cute_attn.outputs.peer_sum import cluster_barrier
from cute_attn.rows.tma import TmaTiles, TmaVectors
from cute_attn.rows.tma_bias import bias_tma
from cute_attn.tiles import BackwardSm90Tile, first_that_fits, padded
from cute_attn.traits import MAX_HEAD_DIM, Traits
from cute_attn.work.block_range import BlockRange
from cute_attn.work.broadcast import KeyTile
from cute_attn.work.key_tiles import HeadSplits, KeyTileOrder


def _undivided(traits: Traits) -> str | None:
    """Why two CTAs cannot divide large head dims, or None."""
    dims = traits.head_dim, traits.head_dim_v
    if max(dims) <= LARGE_HEAD_DIM or all(padded(dim) % 64 == 0 for dim in dims):
        return None
    return (
        f"head_dim, head_dim_v are {dims}; accepted beside one above {LARGE_HEAD_DIM}: "
        "those whose next multiple of 32 is also one of 64"
    )


@dataclass(frozen=True)
class BackwardSm90(BackwardSm90Layouts):
    """Main backward kernel of (traits, tile); ``__call__`` launches it. Its layouts and MMAs are the base class'."""

    # ---- supported traits ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        if (traits.op, traits.arch) != ("backward", "sm90"):
            return f"it computes backward-sm90, not {traits.op}-{traits.arch}"
        return beyond(traits, most=MAX_HEAD_DIM) or _undivided(traits) or EpilogueChain.decline(traits)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> BackwardSm90Tile:
        """The tile for calls that name none."""
        return TABLE.first(traits, target, *keys(traits, target))

    def for_lengths(
        self,
        seqlen_q: int,
        seqlen_k: int,
        group: int,
        target: str = "sm90",
        pairs: int | None = None,
        window: int = 0,
    ) -> "BackwardSm90":
        """This kernel, with a tile of fewer rows where many rows of its default tile would be empty.

        A variant with another default tile keeps it.
        """
        rows, few = (-(-seqlen_q // n) * n for n in (self.tile.tile_m, FEW_ROWS))
        own = self.tile != BackwardSm90.default_tile(self.traits, target)
        if own or self.tile.tile_m <= FEW_ROWS or rows < EMPTY * few:
            return self
        fewer = [
            tile
            for tile in TABLE.tiles(*keys(self.traits, target))
            if tile.tile_m <= FEW_ROWS and tile.bias_stages == self.tile.bias_stages
        ]
        return replace(self, tile=first_that_fits(fewer, self.traits, target)) if fewer else self

    def without_tma_bias(self) -> "BackwardSm90":
        """This kernel with the default tile for a bias that TMA cannot load, or whose gradient TMA cannot store."""
        return replace(self, tile=TABLE.first(self.traits, "sm90", *keys(self.traits, "sm90", tma=False)))

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The score epilogues that the traits ask for."""
        return EpilogueChain.of(self.traits, self.tile)

    def score_args(self, inputs: ScoreInputs) -> tuple:
        """The epilogues' arguments of one launch."""
        return self.epilogues.host_args(inputs)

    # ---- code paths that traits and tile decide ----
    # ``rematerializes_thread`` and ``reads_lse_first`` are measured: they say where ptxas has registers left.

    @property
    def loads_bias_by_tma(self) -> bool:
        """A bias loaded by TMA needs strides and an address that are aligned like the ones of q, k and v."""
        return self.tile.bias_stages > 0

    @property
    def stores_bias_gradient(self) -> bool:
        """TMA stores dS from shared memory as the bias gradient, if they have the same dtype and value."""
        same = self.traits.bias == self.traits.dtype and self.epilogues.bias_has_scores_gradient
        return self.loads_bias_by_tma and self.traits.bias_grad and same

    @property
    def rematerializes_thread(self) -> bool:
        """The thread index is recomputed for each key block instead of kept in a register.

        Otherwise the kernel of head dim 64 with dropout spills 8 bytes per thread.
        """
        traits = self.traits
        epilogue = traits.windowed or traits.varlen or traits.alibi or traits.dropout
        return bool((traits.windowed and traits.varlen) or (self.tile.tile_m == 128 and epilogue))

    @property
    def reads_lse_first(self) -> bool:
        """A step reads LSE before it starts S and dP: a later read would wait behind them, in the same queue.

        The values then occupy registers during both products. With head dim 64 and a TMA-loaded bias that spills 48
        bytes per thread; a softcap's derivative and a mask generated in the step leave no registers either.
        """
        generates_mask = self.traits.dropout and not self.tile.mask_warps
        return not (self.loads_bias_by_tma or generates_mask or self.traits.softcap)

    @property
    def dp_starts_from_d(self) -> bool:
        """dP's accumulator is initialized with -D, to save the subtraction.

        Not with dropout: dS of a dropped element is -P D, without its dP.
        """
        return not self.traits.dropout

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.HeadRows,
        mV: fakes.HeadRows,
        mDO: fakes.HeadRows,
        mLSElog2: fakes.QueryNumbers,
        mMinusD: fakes.QueryNumbers,
        mDQaccum: fakes.Accumulators,
        mDK: fakes.HeadRows,
        mDV: fakes.HeadRows,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.BackwardCounters,
        score_args: fakes.ScoreArgs,
        stream: cuda.CUstream,
    ) -> None:
        """Launch."""
        traits, tile = self.traits, self.tile
        nheads = mQ.shape[-2]
        head_bytes = Int64(seqlens.max_seqlen_q) * (4 * padded(traits.head_dim))
        order = KeyTileOrder.make(seqlens, mDK, schedule, head_bytes, tile.tile_n, traits.causal)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        d, dv = self.dims
        inputs = BackwardInputs(
            self.rows(load, mK, self.layout_k(), tile.tile_n, d),
            self.rows(load, mV, self.layout_v(), tile.tile_n, dv),
            self.rows(load, mQ, self.layout_q(), tile.tile_m, d),
            self.rows(load, mDO, self.layout_do(), tile.tile_m, dv),
            bias_tma(self.epilogues.bias(score_args), self.layout_bias()) if self.loads_bias_by_tma else None,
            TmaVectors.make(mLSElog2, tile.tile_m, traits.varlen),
            TmaVectors.make(mMinusD, tile.tile_m, traits.varlen),
        )
        outputs = BackwardOutputs(
            self.rows(store, mDK, self.layout_k(), tile.tile_n, d),
            self.rows(store, mDV, self.layout_v(), tile.tile_n, dv),
            bias_tma(self.epilogues.bias_gradient(score_args), self.layout_ds(), store=True)
            if self.stores_bias_gradient
            else None,
            mDK,
            mDV,
            mDQaccum,
            schedule.split_stride,
        )
        head_splits = HeadSplits.make(mQ, mK, mDK)
        params = BackwardParams(
            seqlens, softmax_scale, score_args, order, schedule.counter, nheads, head_splits
        )
        clusters = {"cluster": [tile.cluster, 1, 1]} if tile.cluster > 1 else {}
        self.kernel(params, inputs, outputs).launch(
            grid=[cutlass.min(order.blocks, schedule.multiprocessors) * tile.cluster, 1, 1],
            block=[tile.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
            **clusters,
        )

    def rows(self, op: Any, tensor: cute.Tensor, layout: Any, rows: int, head_dim: int) -> TmaTiles:
        """TMA tiles of (rows, padded head_dim); see ``TmaTiles.make``."""
        one_stage = cute.select(layout, mode=[0, 1])
        return TmaTiles.make(op, tensor, one_stage, (rows, head_dim), self.traits.varlen)

    # ---- device ----

    @cute.kernel
    def kernel(self, params: BackwardParams, inputs: BackwardInputs, outputs: BackwardOutputs) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        shared = shared_memory(self)
        if warp == 0:
            for tma in (inputs.k, inputs.v, inputs.q, inputs.do, inputs.lse, inputs.minus_d):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for pipeline in (shared.pipeline_v, shared.pipeline_q, shared.pipeline_do):
                    pipeline.init(4 * self.tile.warpgroups)
                # other warps that read the broadcast key tile
                others = self.stores_bias_gradient + self.tile.dq_bulk + self.tile.mask_warps
                shared.pipeline_k.init(4 * self.tile.warpgroups + others)
                if cutlass.const_expr(self.tile.mask_warps > 0):
                    shared.pipeline_mask.init(4 * self.tile.warpgroups, self.tile.mask_warps)
                shared.ds_buffer.init(4 * self.tile.warpgroups + (1 if self.stores_bias_gradient else 0))
                shared.dq_staging.init(4 * self.tile.warpgroups)
                if cutlass.const_expr(self.tile.cluster > 1):
                    shared.peer_s.init()
                    shared.peer_dp.init()
                    shared.cluster_claims.init()
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.tile.cluster > 1):
            cluster_barrier()
        else:
            cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # the convert kernel; it waits for this one's end
        cute.arch.griddepcontrol_wait()  # for the preprocess kernel's outputs
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.tile.load_registers)
            if warp == 0:
                Producer(self, params, inputs, outputs, shared).run()
            if cutlass.const_expr(self.stores_bias_gradient):
                if warp == 1:
                    BiasGradientStorer(self, params, shared, outputs).run()
            if cutlass.const_expr(self.tile.dq_bulk):
                if warp == 2:
                    DqAdder(self, params, shared, outputs).run()
            if cutlass.const_expr(self.tile.mask_warps > 0):
                first = 4 - self.tile.mask_warps
                if warp >= first:
                    PhiloxProducer(self, params, shared, warp - first).run()
        else:
            cute.arch.setmaxregister_increase(self.tile.compute_registers // 8 * 8)
            self.compute_all(params, outputs, shared, thread - WARPGROUP)
            if cutlass.const_expr(self.tile.cluster > 1):
                cluster_barrier()  # a CTA's memory may be written until its peer has read the last sums

    def part(self) -> Int32 | int:
        """The index of this CTA's range of the head dims in its cluster."""
        return cute.arch.block_idx_in_cluster() if self.tile.cluster > 1 else 0

    def begin(
        self, params: BackwardParams, key_tile: KeyTile, head: Int32
    ) -> tuple[ScoreContext, ScoreState]:
        """The epilogues of one query head."""
        chain, args = self.epilogues, params.score_args
        context = chain.context(
            args, params.seqlens, key_tile.info, key_tile.batch, head, params.nheads, params.softmax_scale
        )
        return context, chain.begin(args, context)

    def query_blocks(self, params: BackwardParams, key_tile: KeyTile) -> BlockRange:
        """The query blocks that see a key block, the same for all its query heads, and the first one visited."""
        tile = self.tile
        _, state = self.begin(params, key_tile, params.query_heads(key_tile).first)
        key0 = key_tile.block * tile.tile_n
        blocks = self.epilogues.query_blocks(
            state, key0, key0 + tile.tile_n, key_tile.info.seqlen_q, tile.tile_m
        )
        if tile.staggered and not (self.traits.causal or self.traits.windowed or self.epilogues.visits_lists):
            return replace(blocks, first=key_tile.block % cutlass.max(blocks.end, 1))
        return blocks

    # ---- the consumer warpgroups ----

    @cute.jit
    def compute_all(
        self, params: BackwardParams, outputs: BackwardOutputs, shared: BackwardStorage, thread: Int32
    ) -> None:
        """All key blocks, with all query blocks of their query heads that see them."""
        tile = self.tile
        if cutlass.const_expr(not self.rematerializes_thread):
            # Otherwise ptxas reads the special register again at each use; see ``rematerialize_each``.
            thread = rematerialize(thread)
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        fragments = self.make_fragments(shared, warpgroup_index)
        i, steps = Int32(0), Int32(0)  # uses so far of the pipelines of K and V, of Q and dO
        while shared.work.holds(i):
            key_tile = shared.work.read(i, params.seqlens)
            blocks, heads = self.query_blocks(params, key_tile), params.query_heads(key_tile)
            score_map = self.score_map(
                rematerialize_each(thread, i) if self.rematerializes_thread else thread
            )
            fragments.acc_dk.fill(0.0)
            fragments.acc_dv.fill(0.0)
            shared.pipeline_v.consumer_wait(i)
            self.zero_keys_out_of_bounds(
                shared, key_tile.info.seqlen_k - key_tile.block * tile.tile_n, thread
            )
            for head in cutlass.range(heads.first, heads.end, unroll=1):
                context, begun = self.begin(params, key_tile, head)
                ctx = HeadContext(
                    shared,
                    fragments,
                    blocks,
                    begun,
                    score_map,
                    key_tile.block * tile.tile_n,
                    key_tile.info.seqlen_q,
                    self.epilogues.scale_log2(context.score_scale),
                    self.dq_of_head(params, outputs, key_tile, head),
                    steps,
                    thread,
                    shared.bias.address_of(thread) if self.loads_bias_by_tma else None,
                )
                self.query_loop(ctx)
                steps += blocks.end - blocks.begin
            self.store_keys(params, outputs, shared, fragments, i)
            i += 1

    def dq_of_head(
        self, params: BackwardParams, outputs: BackwardOutputs, key_tile: KeyTile, head: Int32
    ) -> cute.Pointer:
        """The accumulator of one head's first query block, in the key tile's split."""
        accum, packed = outputs.mDQaccum, self.traits.varlen
        split = cute.make_tensor(
            accum.iterator + Int64(key_tile.split) * outputs.split_stride,
            cute.select(accum.layout, mode=[1, 2] if packed else [1, 2, 3]),
        )
        row0 = padded_row0(params.seqlens, key_tile.info, key_tile.batch, self.tile.tile_m)
        width = padded(self.traits.head_dim)
        rows = workspace_rows(split, key_tile.batch, head, row0, width, packed)
        return rows.iterator + self.part() * (block_floats(self.traits, self.tile) // self.tile.cluster)

    def score_map(self, thread: Int32) -> ScoreMap:
        """The scores that a consumer thread holds."""
        tile = self.tile
        return ScoreMap.make(
            self.mma_scores(), tile.tile_m, tile.tile_n, thread, transposed=not tile.p_in_smem
        )

    def make_fragments(self, shared: BackwardStorage, group: Int32) -> Fragments:
        """Descriptors of a warpgroup's operands, and its registers."""
        tile, (d, dv), transposed = self.tile, self.dims, layouts.transposed
        scores, dk, dv_mma, dq = self.mma_scores(), self.mma_dkv(d), self.mma_dkv(dv), self.mma_dq()
        in_scores, in_dk, in_dv, in_dq = (
            mma.get_slice(group * WARPGROUP) for mma in (scores, dk, dv_mma, dq)
        )
        p_in_smem = tile.p_in_smem
        a_scores, b_scores = (shared.s_q, shared.s_k) if p_in_smem else (shared.s_k, shared.s_q)
        a_dp, b_dp = (shared.s_do, shared.s_v) if p_in_smem else (shared.s_v, shared.s_do)
        ds, k = shared.s_ds, transposed(shared.s_k)
        a_dq, b_dq = (k, ds) if tile.dq_transposed else (ds, k)
        return Fragments(
            scores.make_fragment_A(in_scores.partition_A(a_scores)),
            scores.make_fragment_B(in_scores.partition_B(b_scores)),
            scores.make_fragment_A(in_scores.partition_A(a_dp)),
            scores.make_fragment_B(in_scores.partition_B(b_dp)),
            self.operand(dv_mma, in_dv, transposed(shared.s_do), tile.dkv_transposed),
            self.operand(dk, in_dk, transposed(shared.s_q), tile.dkv_transposed),
            dq.make_fragment_A(in_dq.partition_A(a_dq)),
            dq.make_fragment_B(in_dq.partition_B(b_dq)),
            self.operand(dv_mma, in_dv, transposed(shared.s_p), not tile.dkv_transposed)
            if p_in_smem
            else None,
            self.operand(dk, in_dk, transposed(shared.s_ds), not tile.dkv_transposed) if p_in_smem else None,
            cute.make_rmem_tensor(in_dk.partition_shape_C(self.gradient_shape(d)), Float32),
            cute.make_rmem_tensor(in_dv.partition_shape_C(self.gradient_shape(dv)), Float32),
        )

    def operand(self, mma: cute.TiledMma, own: cute.TiledMma, smem: cute.Tensor, is_a: bool) -> cute.Tensor:
        """Descriptors of a product's first or second operand, for the warpgroup's slice ``own`` of the MMA."""
        if is_a:
            return mma.make_fragment_A(own.partition_A(smem))
        return mma.make_fragment_B(own.partition_B(smem))

    @cute.jit
    def query_loop(self, ctx: HeadContext) -> None:
        """All query blocks of one head that see the key block."""
        blocks, end = ctx.blocks, ctx.blocks.end
        full_begin, full_end = blocks.full_begin, blocks.full_end
        masked_last: Constexpr = self.traits.windowed or self.epilogues.visits_lists
        if cutlass.const_expr(not masked_last):
            # Without a left bound, masks are needed up to some query block, or by all.
            full_begin, full_end = (full_begin if full_begin < full_end else end), end
        if cutlass.const_expr(self.tile.scores_ahead):
            if blocks.begin < end:
                # The last step has no next S.
                acc_s, last = self.first_scores(ctx), end - 1
                full_begin, full_end = cutlass.min(full_begin, last), cutlass.min(full_end, last)
                self.steps_ahead(ctx, acc_s, blocks.begin, full_begin, True)
                self.steps_ahead(ctx, acc_s, full_begin, full_end, False)
                if cutlass.const_expr(masked_last):
                    self.steps_ahead(ctx, acc_s, full_end, last, True)
                self.step_with_scores_ahead(ctx, acc_s, last, True, last=True)
        elif cutlass.const_expr(self.tile.p_in_smem):
            self.steps(ctx, blocks.begin, full_begin, True)
            self.steps(ctx, full_begin, full_end, False)
            if cutlass.const_expr(masked_last):
                self.steps(ctx, full_end, end, True)
        elif blocks.begin < end:
            # The first step has no dQ of a step before it; the last one's dQ follows the loop.
            second = blocks.begin + 1
            self.step(ctx, blocks.begin, True, first=True)
            self.steps(ctx, second, full_begin, True)
            self.steps(ctx, cutlass.max(full_begin, second), full_end, False)
            if cutlass.const_expr(masked_last):
                self.steps(ctx, cutlass.max(full_end, second), end, True)
            acc_dq, n = self.dq_accumulator(), ctx.use_of(end - 1)
            self.wait_for_ds(ctx, n)
            self.start_dq(ctx, acc_dq, n)
            warpgroup.wait_group(0)
            self.add_dq(ctx, acc_dq, end - 1)

    @cute.jit
    def steps(self, ctx: HeadContext, begin: Int32, end: Int32, masked: Constexpr) -> None:
        """Query blocks [begin, end)."""
        for block in cutlass.range(begin, end, unroll=1):
            if cutlass.const_expr(self.tile.p_in_smem):
                self.step_with_p_in_smem(ctx, block, masked)
            else:
                self.step(ctx, block, masked)

    @cute.jit
    def step(self, ctx: HeadContext, block: Int32, masked: Constexpr, first: Constexpr = False) -> None:
        """One query block, and dQ of the one before unless this is the ``first``."""
        shared, n = ctx.shared, ctx.use_of(block)
        acc_dq = self.dq_accumulator()
        p, ds = self.probabilities_and_gradients(ctx, block, masked)

        if cutlass.const_expr(not first):
            self.wait_for_ds(ctx, n - 1)
        self.store_scores(
            ctx, ds, shared.s_ds, n
        )  # its stage is free: all have arrived at dS of the step before
        if cutlass.const_expr(not first):
            self.start_dq(ctx, acc_dq, n - 1)
        self.start_dv(ctx, p, n)
        warpgroup.wait_group(1)  # dQ: the arrival says that it has read dS
        if cutlass.const_expr(not first and self.tile.dq_bulk):
            self.stage_dq(ctx, acc_dq, block)
        shared.ds_buffer.arrive(n)
        if cutlass.const_expr(not first):
            if cutlass.const_expr(self.tile.dq_bulk):
                shared.dq_staging.producer_commit()
            else:
                self.add_dq(ctx, acc_dq, block - 1)
        self.start_dk(ctx, ds, n)
        warpgroup.wait_group(1)
        # LSE, D and a bias were read before dS was stored, and dS's arrival is fenced.
        shared.pipeline_do.consumer_release(n, Accessed.BY_THREADS_FENCED)
        warpgroup.wait_group(0)
        shared.pipeline_q.consumer_release(n, Accessed.BY_THREADS_FENCED)

    @cute.jit
    def step_with_p_in_smem(self, ctx: HeadContext, block: Int32, masked: Constexpr) -> None:
        """One query block with dQ in the same step: all warpgroups wait for each other's P and dS."""
        shared, n = ctx.shared, ctx.use_of(block)
        p, ds = self.probabilities_and_gradients(ctx, block, masked)
        self.share(ctx, p, ds, n)
        self.start_dv(ctx, p, n)
        acc_dq = self.dq_accumulator()
        self.start_dq(ctx, acc_dq, n)
        self.start_dk(ctx, ds, n)
        warpgroup.wait_group(1)
        shared.pipeline_do.consumer_release(n, Accessed.BY_THREADS_FENCED)  # since ``share``
        self.add_dq(ctx, acc_dq, block)
        warpgroup.wait_group(0)
        shared.pipeline_q.consumer_release(n, Accessed.BY_THREADS_FENCED)

    @cute.jit
    def first_scores(self, ctx: HeadContext) -> cute.Tensor:
        """The first query block's S, on its way to the peer."""
        acc_s, begin = self.scores_accumulator(), ctx.blocks.begin
        self.start_s(ctx, acc_s, begin)
        warpgroup.wait_group(0)
        self.send_s(ctx, acc_s, ctx.use_of(begin))
        return acc_s

    @cute.jit
    def steps_ahead(
        self, ctx: HeadContext, acc_s: cute.Tensor, begin: Int32, end: Int32, masked: Constexpr
    ) -> None:
        """Query blocks [begin, end), each with S of the next one; acc_s: S of the first one."""
        for block in cutlass.range(begin, end, unroll=1):
            self.step_with_scores_ahead(ctx, acc_s, block, masked)

    @cute.jit
    def step_with_scores_ahead(
        self, ctx: HeadContext, acc_s: cute.Tensor, block: Int32, masked: Constexpr, last: Constexpr = False
    ) -> None:
        """One query block with S in ``acc_s``, and S of the next one unless it is the ``last``.

        Stages of P and dS are free when they are written. dV reads P; all warpgroups have passed the barrier of the
        last step's dS after its dV. dQ and dK read dS; all have passed the barrier of this step's P after them.
        """
        shared, n = ctx.shared, ctx.use_of(block)
        scores, acc_dp = self.score_tile(ctx, acc_s, block), self.scores_accumulator()
        loaded = self.epilogues.load(ctx.state, scores)
        lse = self.row_values(ctx, shared.s_lse, shared.pipeline_q, n)
        self.start_dp(ctx, acc_dp, block)
        mask = self.epilogues.dropout_mask(ctx.state, scores)
        if cutlass.const_expr(self.tile.cluster > 1):
            shared.peer_s.add(acc_s, rematerialize_each(ctx.thread, n), n)
        partial = ctx.blocks.partial(block) if cutlass.const_expr(masked) else None
        saved = self.epilogues.forward(ctx.state, scores, loaded, masked, partial)
        visible_keys = ctx.state.band.visible_keys if self.epilogues.may_be_large else None
        probabilities(scores, lse, ctx.scale_log2, visible_keys)
        p = self.p_in_16_bits(ctx, acc_s, mask)
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.tile.cluster > 1):
            shared.peer_dp.send(acc_dp, rematerialize_each(ctx.thread, n))
        self.store_scores(ctx, p, shared.s_p, n)
        cute.arch.fence_proxy("async.shared", space="cta")
        consumer_barrier(self.tile.warpgroups)

        self.start_dv(ctx, p, n)
        if cutlass.const_expr(self.tile.cluster > 1):
            shared.peer_dp.add(acc_dp, rematerialize_each(ctx.thread, n), n)
        ds = self.to_gradients(ctx, scores, acc_dp, saved, mask, n)
        self.store_scores(ctx, ds, shared.s_ds, n)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.wait_group(0)
        shared.pipeline_do.consumer_release(n, Accessed.BY_THREADS_FENCED)
        consumer_barrier(self.tile.warpgroups)

        acc_dq = self.dq_accumulator()
        self.start_dq(ctx, acc_dq, n)
        self.start_dk(ctx, ds, n)
        warpgroup.wait_group(1)
        self.add_dq(ctx, acc_dq, block)
        if cutlass.const_expr(not last):
            self.start_s(ctx, acc_s, block + 1)  # only here are there registers for it
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        shared.pipeline_q.consumer_release(n, Accessed.BY_THREADS_FENCED)
        if cutlass.const_expr(not last):
            warpgroup.wait_group(0)
            self.send_s(ctx, acc_s, n + 1)

    @cute.jit
    def send_s(self, ctx: HeadContext, acc_s: cute.Tensor, n: Int32) -> None:
        """Send the CTA's partial S of step n to its peer, if any."""
        if cutlass.const_expr(self.tile.cluster > 1):
            ctx.shared.peer_s.send(acc_s, rematerialize_each(ctx.thread, n))

    @cute.jit
    def wait_for_ds(self, ctx: HeadContext, n: Int32) -> None:
        """Wait until all warpgroups have written dS of step n, and until its dQ may be staged."""
        ctx.shared.ds_buffer.wait(n)
        if cutlass.const_expr(self.tile.dq_bulk):
            ctx.shared.dq_staging.producer_wait(n)

    # ---- step helpers ----

    @cute.jit
    def zero_queries_out_of_bounds(
        self, ctx: HeadContext, block: Int32, n: Int32, q: Constexpr = True, do: Constexpr = True
    ) -> None:
        """Zero Q with the bias, and dO, beyond the sequence's last query."""
        if cutlass.const_expr(self.traits.varlen or self.traits.seqused_q):
            rows = ctx.seqlen_q - block * self.tile.tile_m
            if rows < self.tile.tile_m:
                shared = ctx.shared
                stage_q = shared.pipeline_q.stage(n)
                if cutlass.const_expr(do):
                    shared.pipeline_do.consumer_wait(n)
                    self.zero_rows(shared.s_do[None, None, shared.pipeline_do.stage(n)], rows, ctx.thread)
                if cutlass.const_expr(q):
                    self.zero_rows(shared.s_q[None, None, stage_q], rows, ctx.thread)
                if cutlass.const_expr(q and self.loads_bias_by_tma):
                    self.zero_rows(shared.bias.tensor[None, None, stage_q], rows, ctx.thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                consumer_barrier(self.tile.warpgroups)

    @cute.jit
    def dropout_mask_of(self, ctx: HeadContext, n: Int32) -> tuple[Int32, ...]:
        """By the consumer warps: the thread's words of a step's mask, see :meth:`EpilogueChain.dropout_mask`."""
        pipeline, words = ctx.shared.pipeline_mask, self.tile.mask_words
        pipeline.consumer_wait(n)
        mask = cute.recast_tensor(ctx.shared.s_mask[None, None, None, pipeline.stage(n)], Int32)
        thread = rematerialize_each(ctx.thread, n)
        mask = tuple(mask[0, thread, word] for word in range(words))
        pipeline.consumer_release(n, Accessed.BY_THREADS)
        return mask

    @cute.jit
    def probabilities_and_gradients(
        self, ctx: HeadContext, block: Int32, masked: Constexpr
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """P, dropped elements zero, and dS of a query block, in 16 bits."""
        shared, n = ctx.shared, ctx.use_of(block)
        acc_s, acc_dp = self.scores_accumulator(), self.scores_accumulator()
        scores = self.score_tile(ctx, acc_s, block)
        loaded = self.epilogues.load(ctx.state, scores)
        mask, lse = self.start_s_and_dp(ctx, acc_s, acc_dp, block)
        # While S and dP run, the reads that were not issued before them.
        if cutlass.const_expr(mask is None):
            mask = self.epilogues.dropout_mask(ctx.state, scores)
        if cutlass.const_expr(lse is None and not self.loads_bias_by_tma):
            lse = self.row_values(ctx, shared.s_lse, shared.pipeline_q, n)
        warpgroup.wait_group(1)
        partial = ctx.blocks.partial(block) if cutlass.const_expr(masked) else None
        saved = self.epilogues.forward(ctx.state, scores, loaded, masked, partial)
        if cutlass.const_expr(
            lse is None
        ):  # only here, where the registers of a TMA-loaded bias are free again
            lse = self.row_values(ctx, shared.s_lse, shared.pipeline_q, n)
        visible_keys = ctx.state.band.visible_keys if self.epilogues.may_be_large else None
        probabilities(scores, lse, ctx.scale_log2, visible_keys)
        # Converted while dP runs, if registers are left for that.
        early: Constexpr = self.tile.p_in_smem
        p = self.p_in_16_bits(ctx, acc_s, mask) if cutlass.const_expr(early) else None
        warpgroup.wait_group(0)
        ds = self.to_gradients(ctx, scores, acc_dp, saved, mask, n)
        return p if cutlass.const_expr(early) else self.p_in_16_bits(ctx, acc_s, mask), ds

    @cute.jit
    def p_in_16_bits(self, ctx: HeadContext, acc_s: cute.Tensor, mask: tuple) -> cute.Tensor:
        """P, dropped elements zero; acc_s stays as it is."""
        p = converted(acc_s, self.dtype)
        self.epilogues.zero_dropped(mask, ctx.score_map.view(p))
        return p

    @cute.jit
    def to_gradients(
        self, ctx: HeadContext, scores: ScoreTile, acc_dp: cute.Tensor, saved: tuple, mask: tuple, n: Int32
    ) -> cute.Tensor:
        """dP becomes dS; the result is dS in 16 bits."""
        minus_d = None
        if cutlass.const_expr(not self.dp_starts_from_d):
            # The barrier keeps the address from being computed, and kept in a register, long before it is used.
            minus_d = self.row_values(
                ctx, ctx.shared.s_minus_d, ctx.shared.pipeline_do, optimization_barrier(n)
            )
        ds_tile = scores.of(ctx.score_map.view(acc_dp))
        self.epilogues.zero_dropped(mask, ds_tile.acc)
        score_gradient(scores.acc, ds_tile.acc, minus_d)
        adds = self.part() == 0 if cutlass.const_expr(self.tile.cluster > 1) else None
        self.epilogues.backward(ctx.state, ds_tile, saved, adds)
        return converted(acc_dp, self.dtype)

    @cute.jit
    def start_s_and_dp(
        self, ctx: HeadContext, acc_s: cute.Tensor, acc_dp: cute.Tensor, block: Int32
    ) -> tuple[tuple | None, cute.Tensor | None]:
        """Start S and dP of a query block; returns its dropout mask and its rows' log-sum-exps, or None if read later.

        Shared memory is read first: the reads wait in the same queue as wgmma.
        """
        op, shared, n = ctx.fragments, ctx.shared, ctx.use_of(block)
        mask = None
        if cutlass.const_expr(self.tile.mask_warps > 0):
            mask = self.dropout_mask_of(ctx, n)
        shared.pipeline_q.consumer_wait(n)
        self.zero_queries_out_of_bounds(ctx, ctx.blocks.block(block), n)
        lse, minus_d = None, None
        if cutlass.const_expr(self.reads_lse_first):
            lse = self.row_values(ctx, shared.s_lse, shared.pipeline_q, n)
        if cutlass.const_expr(self.dp_starts_from_d):
            shared.pipeline_do.consumer_wait(n)
            minus_d = self.row_values(ctx, shared.s_minus_d, shared.pipeline_do, n)
            start_from(ctx.score_map.view(acc_dp), minus_d)
        self.start_scores(op.a_scores, op.b_scores, acc_s, shared.pipeline_q.stage(n), False)
        if cutlass.const_expr(not self.dp_starts_from_d):
            shared.pipeline_do.consumer_wait(n)
        self.start_scores(op.a_dp, op.b_dp, acc_dp, shared.pipeline_do.stage(n), self.dp_starts_from_d)
        return mask, lse

    @cute.jit
    def start_s(self, ctx: HeadContext, acc_s: cute.Tensor, block: Int32) -> None:
        """Start S of a query block."""
        op, pipeline, n = ctx.fragments, ctx.shared.pipeline_q, ctx.use_of(block)
        pipeline.consumer_wait(n)
        self.zero_queries_out_of_bounds(ctx, ctx.blocks.block(block), n, do=False)
        self.start_scores(op.a_scores, op.b_scores, acc_s, pipeline.stage(n), False)

    @cute.jit
    def start_dp(self, ctx: HeadContext, acc_dp: cute.Tensor, block: Int32) -> None:
        """Start dP of a query block."""
        op, pipeline, n = ctx.fragments, ctx.shared.pipeline_do, ctx.use_of(block)
        pipeline.consumer_wait(n)
        self.zero_queries_out_of_bounds(ctx, ctx.blocks.block(block), n, q=False)
        if cutlass.const_expr(self.dp_starts_from_d):
            minus_d = self.row_values(ctx, ctx.shared.s_minus_d, pipeline, n)
            if cutlass.const_expr(self.tile.cluster > 1):  # once in the sum
                minus_d.store(minus_d.load() * Float32(self.part() == 0))
            start_from(ctx.score_map.view(acc_dp), minus_d)
        self.start_scores(op.a_dp, op.b_dp, acc_dp, pipeline.stage(n), self.dp_starts_from_d)

    def scores_accumulator(self) -> cute.Tensor:
        """Registers for S or dP of a query block."""
        return cute.make_rmem_tensor(
            self.mma_scores().get_slice(0).partition_shape_C(self.scores_shape), Float32
        )

    def score_tile(self, ctx: HeadContext, acc_s: cute.Tensor, block: Int32) -> ScoreTile:
        """S of ``block`` in ``acc_s``, with its place."""
        scores = ctx.score_map.tile(acc_s, ctx.blocks.block(block) * self.tile.tile_m, ctx.key0)
        if cutlass.const_expr(self.loads_bias_by_tma):
            stage = ctx.shared.pipeline_q.stage(ctx.use_of(block))
            scores = replace(scores, tma_bias=ctx.shared.bias.tile(ctx.bias_address, stage))
        return scores

    @cute.jit
    def start_scores(
        self, a: cute.Tensor, b: cute.Tensor, acc: cute.Tensor, stage: Int32, accumulate: Constexpr
    ) -> None:
        """acc (+)= K Q^T or V dO^T; the keys' operand has one stage."""
        stage_a, stage_b = (stage, 0) if self.tile.p_in_smem else (0, stage)
        a, b = a[None, None, None, stage_a], b[None, None, None, stage_b]
        start_gemm(self.mma_scores(), acc, a, b, accumulate)

    @cute.jit
    def start_dv(self, ctx: HeadContext, p: cute.Tensor, n: Int32) -> None:
        """dV += P dO."""
        op, stage = ctx.fragments, ctx.shared.pipeline_do.stage(n)
        a, b = self.keys_operand(p, op.p_smem, n), op.do[None, None, None, stage]
        self.start_dkv(op.acc_dv, a, b, self.dims[1])

    @cute.jit
    def start_dk(self, ctx: HeadContext, ds: cute.Tensor, n: Int32) -> None:
        """dK += dS Q."""
        op, stage = ctx.fragments, ctx.shared.pipeline_q.stage(n)
        a, b = self.keys_operand(ds, op.ds_smem, n), op.q[None, None, None, stage]
        self.start_dkv(op.acc_dk, a, b, self.dims[0])

    @cute.jit
    def start_dkv(
        self, acc: cute.Tensor, keys: cute.Tensor, queries: cute.Tensor, head_dim: Constexpr
    ) -> None:
        """acc += keys queries, of P and dO or of dS and Q, or its transpose."""
        a, b = (queries, keys) if self.tile.dkv_transposed else (keys, queries)
        start_gemm(self.mma_dkv(head_dim), acc, a, b, True)

    def keys_operand(self, registers: cute.Tensor, smem: cute.Tensor | None, n: Int32) -> cute.Tensor:
        """P or dS as (keys, queries), from registers or shared memory as the tile says."""
        if smem is not None:
            return smem[None, None, None, self.ds_stage(n)]
        return layouts.as_operand_a(registers)

    @cute.jit
    def start_dq(self, ctx: HeadContext, acc_dq: cute.Tensor, n: Int32) -> None:
        """acc_dq = dS K, or its transpose."""
        a, b, stage = ctx.fragments.a_dq, ctx.fragments.b_dq, self.ds_stage(n)
        stage_a, stage_b = (0, stage) if self.tile.dq_transposed else (stage, 0)
        start_gemm(self.mma_dq(), acc_dq, a[None, None, None, stage_a], b[None, None, None, stage_b], False)

    def ds_stage(self, n: Int32) -> Int32:
        """The stage of a step's dS (and P)."""
        return Int32(0) if self.tile.num_stages_ds == 1 else n & 1

    @cute.jit
    def share(self, ctx: HeadContext, p: cute.Tensor, ds: cute.Tensor, n: Int32) -> None:
        """dS (and P) to shared memory, for all warpgroups to read once this returns.

        With two stages no read of a stage is pending: a warpgroup passes this step's barrier only after the others have
        passed the last step's, and they passed that after all their products of the step before it.
        """
        tile, shared = self.tile, ctx.shared
        if cutlass.const_expr(tile.num_stages_ds == 1):
            consumer_barrier(tile.warpgroups)
        self.store_scores(ctx, ds, shared.s_ds, n)
        if cutlass.const_expr(tile.p_in_smem):
            self.store_scores(ctx, p, shared.s_p, n)
        cute.arch.fence_proxy("async.shared", space="cta")
        consumer_barrier(tile.warpgroups)

    @cute.jit
    def store_scores(self, ctx: HeadContext, fragment: cute.Tensor, target: cute.Tensor, n: Int32) -> None:
        """P or dS of a step to its stage."""
        tile = target[None, None, self.ds_stage(n)]
        store = self.scores_store()
        # Otherwise addresses are kept in registers through the loop.
        mine = store.get_slice(rematerialize_each(ctx.thread, n))
        as_accumulator = tile if cutlass.const_expr(self.tile.p_in_smem) else layouts.transposed(tile)
        cute.copy(store, mine.retile(fragment), mine.partition_D(as_accumulator))

    def dq_accumulator(self) -> cute.Tensor:
        """Registers for dQ of a query block."""
        return make_accumulator(self.mma_dq(), self.traits, self.tile)

    def row_values(self, ctx: HeadContext, s_rows: cute.Tensor, pipeline: Pipeline, n: Int32) -> cute.Tensor:
        """The values of the thread's rows at use n, from (tile_m, stage) in shared memory."""
        return row_values(ctx.score_map, s_rows[None, pipeline.stage(n)])

    @cute.jit
    def stage_dq(self, ctx: HeadContext, acc_dq: cute.Tensor, block: Int32) -> None:
        """By the consumer warps: dQ to shared memory; its stage must be empty."""
        stage_fragment(acc_dq, ctx.shared.s_dq, rematerialize_each(ctx.thread, block), self.tile.dq_vector)

    @cute.jit
    def add_dq(self, ctx: HeadContext, acc_dq: cute.Tensor, block: Int32) -> None:
        """By the consumer warps: add dQ to the query block's accumulator, or stage it for :class:`DqAdder`."""
        if cutlass.const_expr(self.tile.dq_bulk):
            self.stage_dq(ctx, acc_dq, block)
            cute.arch.fence_proxy("async.shared", space="cta")
            ctx.shared.dq_staging.producer_commit()
        else:
            base = ctx.dq + Int64(ctx.blocks.block(block)) * block_floats(self.traits, self.tile)
            add_fragment(acc_dq, base, rematerialize_each(ctx.thread, block), self.tile.dq_vector)

    # ---- of a key block ----

    @cute.jit
    def zero_keys_out_of_bounds(self, shared: BackwardStorage, rows: Int32, thread: Int32) -> None:
        """Zero K and V from row ``rows`` of the key block on, the first one beyond the sequence."""
        if cutlass.const_expr(self.traits.varlen or self.traits.seqused_k):
            if rows < self.tile.tile_n:
                self.zero_rows(shared.s_k[None, None, 0], cutlass.max(rows, 0), thread)
                self.zero_rows(shared.s_v[None, None, 0], cutlass.max(rows, 0), thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                consumer_barrier(self.tile.warpgroups)

    @cute.jit
    def zero_rows(self, tile: cute.Tensor, first: Int32, thread: Int32) -> None:
        """Zero (rows, cols) in shared memory from row ``first`` on, by all consumer threads."""
        rows, cols = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
        vectors = cols // 8
        zeros = cute.make_rmem_tensor(cute.make_layout(8), tile.element_type)
        zeros.fill(0.0)
        for i in cutlass.range(thread, (rows - first) * vectors, self.tile.mma_threads, unroll=1):
            row = cute.local_tile(tile, (1, 8), (first + i // vectors, i % vectors))
            cute.autovec_copy(zeros, row[0, None])

    @cute.jit
    def store_keys(
        self,
        params: BackwardParams,
        outputs: BackwardOutputs,
        shared: BackwardStorage,
        fragments: Fragments,
        i: Int32,
    ) -> None:
        """Store dK and dV of the i-th key tile through shared memory, and release K and V. Writes all rows that exist.

        The key tile is read again, so that no register holds it through the main loop. If dK is not stored from K's
        memory, the memory that it is stored from is free for the next key tile once the next V has been loaded.
        """
        thread = rematerialize(cute.arch.thread_idx()[0] - WARPGROUP)
        key_tile = shared.work.read(i, params.seqlens)
        block, leaves_k = key_tile.block, self.tile.dk_leaves_k(self.traits)
        _, state = self.begin(params, key_tile, params.query_heads(key_tile).first)
        rescale = self.epilogues.rescale(state)
        d, dv = self.dims
        consumer_barrier(self.tile.warpgroups)  # no product reads K, V and dS any more
        if cutlass.const_expr(leaves_k):
            shared.pipeline_k.consumer_release(i, Accessed.BY_THREADS)
        self.to_smem(fragments.acc_dv, rescale, dv, shared.s_v[None, None, 0], thread)
        scale = rescale * params.softmax_scale
        self.to_smem(fragments.acc_dk, scale, d, shared.s_dk[None, None, 0], thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        consumer_barrier(self.tile.warpgroups)
        if cutlass.const_expr(self.traits.varlen):
            rows = (
                existing_rows(params.seqlens.cu_seqlens_k, outputs.mDK, key_tile.batch)
                - block * self.tile.tile_n
            )
            self.store_rows(shared.s_dk, outputs.mDK, self.traits.head_dim, key_tile, rows, thread)
            self.store_rows(shared.s_v, outputs.mDV, self.traits.head_dim_v, key_tile, rows, thread)
            consumer_barrier(self.tile.warpgroups)
        elif thread < 32:
            where = (Int32(0), key_tile.head_dkv, key_tile.batch, self.part())
            outputs.tma_dv.store(shared.s_v[None, None, 0], outputs.tma_dv.sequence(*where), block)
            outputs.tma_dk.store(shared.s_dk[None, None, 0], outputs.tma_dk.sequence(*where), block)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(not leaves_k):
            shared.pipeline_k.consumer_release(i, Accessed.BY_THREADS)
        shared.pipeline_v.consumer_release(i, Accessed.BY_THREADS)

    @cute.jit
    def to_smem(
        self,
        acc: cute.Tensor,
        factor: Float32,
        head_dim: Constexpr,
        target: cute.Tensor,
        thread: Int32,
    ) -> None:
        """An accumulator of dK or dV times ``factor`` in 16 bits to ``target`` (keys, head_dim)."""
        fragment = cute.make_rmem_tensor_like(acc, self.dtype)
        fragment.store((acc.load() * factor).to(self.dtype))
        store = self.gradient_store(head_dim)
        mine = store.get_slice(thread)
        transpose: Constexpr = self.tile.dkv_transposed
        as_accumulator = layouts.transposed(target) if cutlass.const_expr(transpose) else target
        cute.copy(store, mine.retile(fragment), mine.partition_D(as_accumulator))

    @cute.jit
    def store_rows(
        self,
        source: cute.Tensor,
        target: cute.Tensor,
        head_dim: Constexpr,
        key_tile: KeyTile,
        rows: Int32,
        thread: Int32,
    ) -> None:
        """Store the first ``rows`` keys of a key tile to varlen ``target``."""
        cols = self.tile.columns_of(head_dim)
        # Which need not be a multiple of the rows of one copy.
        rows = cutlass.min(rows, self.tile.tile_n)
        plane = sequence(target, key_tile.batch, key_tile.head_dkv, key_tile.info.offset_k, True)
        for part in cutlass.range_constexpr(self.tile.cluster):
            tiles = cute.local_tile(plane, (self.tile.tile_n, cols), (key_tile.block, part))
            exist: Constexpr = min(head_dim - part * cols, cols)
            own = rows if cutlass.const_expr(self.tile.cluster == 1) else rows * Int32(self.part() == part)
            RowCopy(self.gmem_store(cols), thread, cols, exist).copy(source[None, None, 0], tiles, own, False)
