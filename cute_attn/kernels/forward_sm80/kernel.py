"""The Ampere forward: attention with cp.async, ldmatrix and mma.sync. Runs on sm80, sm86, sm89 and sm90.

    S = epilogues(softmax_scale * Q K^T)       (seqlen_q, seqlen_k), one tile at a time, in registers
    P = exp(S - LSE),  LSE = log sum exp S     online: running row maxima and sums
    O = dropout(P) V                           (seqlen_q, head_dim_v)

A CTA owns tile_m queries of one head and visits the key blocks that they see, last one first:

    one stage                                      two or more stages
    wait K[j]; start V[j]                          wait K[j], V[j]; start K, V[j - stages + 1]
    S = Q K[j]^T                                   S = Q K[j]^T
    wait V[j]; start K[j - 1]
    epilogues, online softmax, P to 16 bits        epilogues, online softmax, P to 16 bits
    O = rescaled O + P V[j]                        O = rescaled O + P V[j]

Key blocks that the mask's edge crosses take loops with masks, those inside a loop without. Follows FlashAttention-2
(Dao 2023, https://arxiv.org/abs/2307.08691).

Limits: fp16 and bf16; head dims up to 256, multiples of 8, padded to multiples of 32 in shared memory and registers;
rows 16-byte aligned with a contiguous last dimension.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Constexpr, Float32, Int32, Uint32, cute, memory

import layouts
from cute_attn.device.copy import RowCopy
from cute_attn.device.gemm import SmemOperand, gemm, gemm_rs
from cute_attn.device.math import LOG2_E, optimization_barrier, rematerialize
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.device.seqlen import Seqlens, sequence
from cute_attn.epilogues.chain import EpilogueChain, ScoreState
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.arguments import CUTE_DTYPES, forward_fake_args
from cute_attn.kernels.forward_sm80.heuristics import preferred_tiles
from cute_attn.kernels.forward_sm80.params import BlockLoad, MainloopContext, Operands
from cute_attn.kernels.limits import beyond
from cute_attn.kernels.step import StepContent, mma_sync_count, product_loop
from cute_attn.outputs.lse import store_lse
from cute_attn.tiles import ForwardSm80Tile, first_that_fits, padded
from cute_attn.traits import Traits
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import ForwardSchedule, QueryGrid, QueryTile


@dataclass(frozen=True)
class ForwardSm80:
    """Forward kernel of (traits, tile); ``__call__`` launches it."""

    traits: Traits
    tile: ForwardSm80Tile

    # ---- support, tiles and arguments ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        if (traits.op, traits.arch) != ("forward", "sm80"):
            return f"it computes forward-sm80, not {traits.op}-{traits.arch}"
        return beyond(traits)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ForwardSm80Tile:
        """The tile for calls that name none."""
        return first_that_fits(preferred_tiles(traits), traits, target)

    def for_lengths(self, seqlen_q: int, seqlen_k: int, group: int) -> "ForwardSm80":
        """This kernel: its default tile does not depend on lengths and heads."""
        return self

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
        """A step of the unmasked loop; each of a thread's rows has one exponential more, the factor of O."""
        tile, d, dv = self.tile, padded(self.traits.head_dim), padded(self.traits.head_dim_v)
        qk = mma_sync_count(tile.tile_m, tile.tile_n, d, tile.num_warps)
        pv = mma_sync_count(tile.tile_m, dv, tile.tile_n, tile.num_warps)
        elements, rows = tile.tile_m * tile.tile_n // tile.num_threads, tile.tile_m // (8 * tile.num_warps)
        loops = product_loop(qk, d // 16, tile.steps_at_once(d, tile.qk_unroll))
        exp2 = elements * (1 + self.traits.softcap) + rows
        return StepContent(qk + pv, exp2, elements, tile.num_warps, () if tile.keeps_q else loops)

    # ---- layouts, copies and the MMA: override one of these to experiment ----

    @property
    def dtype(self) -> Any:
        """Element type of Q, K, V and O."""
        return CUTE_DTYPES[self.traits.dtype]

    @property
    def swizzle_bits(self) -> int | None:
        """log2 of the 16-byte units that a row is permuted over, or None for the widest swizzle."""
        return None if self.tile.swizzle_bits < 0 else self.tile.swizzle_bits

    def smem_layout(self, rows: int, head_dim: int, stages: int = 1) -> cute.ComposedLayout:
        """(rows, padded head_dim, stages) in shared memory."""
        return layouts.smem_layout(
            rows, padded(head_dim), self.dtype, stages=stages, swizzle_bits=self.swizzle_bits
        )

    def gmem_load(self, head_dim: int) -> cute.TiledCopy:
        """Global to shared memory: cp.async of 16 bytes."""
        return layouts.gmem_tiled_copy(self.dtype, self.tile.num_threads, padded(head_dim), asynchronous=True)

    def gmem_store(self, head_dim: int) -> cute.TiledCopy:
        """Shared to global memory: 16-byte stores."""
        return layouts.gmem_tiled_copy(
            self.dtype, self.tile.num_threads, padded(head_dim), asynchronous=False
        )

    def tiled_mma(self) -> cute.TiledMma:
        """MMA of both products: warps along the queries."""
        return layouts.tiled_mma_sm80(self.dtype, self.tile.num_warps)

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
        batch = seqlens.batch(mQ)
        nheads, nheads_kv = (mQ.shape[1], mK.shape[1]) if self.traits.varlen else (mQ.shape[2], mK.shape[2])
        m_blocks = cute.ceil_div(seqlens.max_seqlen_q, self.tile.tile_m)
        grid = QueryGrid.make(m_blocks, nheads, nheads_kv)
        # A kernel argument takes no register. With softcap, score_args[0] is the cap.
        scale_log2 = (score_args[0] if self.traits.softcap else softmax_scale) * LOG2_E
        self.kernel(
            mQ, mK, mV, mO, mLSE, seqlens, softmax_scale, score_args, scale_log2, grid, nheads
        ).launch(grid=[m_blocks * nheads * batch, 1, 1], block=[self.tile.num_threads, 1, 1], stream=stream)

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        seqlens: Seqlens,
        softmax_scale: Float32,
        score_args: tuple,
        scale_log2: Float32,
        grid: QueryGrid,
        nheads: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        tile = grid.tile(seqlens, self.tile.tile_m)
        row0, info = tile.row0, tile.info
        if row0 < info.seqlen_q:
            chain = self.epilogues
            varlen = self.traits.varlen
            q = sequence(mQ, tile.batch, tile.head, info.offset_q, varlen)
            context = chain.context(score_args, seqlens, info, tile.batch, tile.head, nheads, softmax_scale)
            state = chain.begin(score_args, context)
            end_row = cutlass.min(row0 + self.tile.tile_m, info.seqlen_q)
            blocks = BlockRange.of_queries(state.band, row0, end_row, self.tile.tile_n)
            s_q, s_k, s_v, s_o, stats = self.shared_memory()
            operands = self.operands(s_q, s_k, s_v, thread)
            load_k = self.block_load(mK, s_k, self.traits.head_dim, tile, thread)
            load_v = self.block_load(mV, s_v, self.traits.head_dim_v, tile, thread)
            ctx = self.mainloop_context(
                operands, load_k, load_v, blocks, state, row0, scale_log2, stats, thread
            )
            self.load_queries(q, s_q, info.seqlen_q - row0, ctx, thread)
            self.main_loop(ctx)
            tile = grid.tile(seqlens, self.tile.tile_m)
            lse = cute.make_rmem_tensor(cute.make_layout(cute.size(ctx.acc_o_rows, mode=[0])), Float32)
            self.stored_softmax(ctx, thread).load_stats().normalize(ctx.acc_o_rows, lse, chain.rescale(state))
            thread = optimization_barrier(thread)
            score_map = ScoreMap.make(operands.tiled_mma, self.tile.tile_m, self.tile.tile_n, thread)
            store_lse(mLSE, lse, score_map, tile, self.traits.varlen)
            o = sequence(mO, tile.batch, tile.head, tile.info.offset_q, varlen)
            self.store_output(o, s_o, ctx, tile, thread)

    def shared_memory(self):
        """sQ, sK, sV and sO as (rows, cols, stage), and a pointer to the row statistics."""
        d, dv, tile = self.traits.head_dim, self.traits.head_dim_v, self.tile
        q_layout = self.smem_layout(tile.tile_m, d)
        k_layout = self.smem_layout(tile.tile_n, d, tile.num_stages)
        v_layout = self.smem_layout(tile.tile_n, dv, tile.num_stages)
        o_layout = self.smem_layout(tile.tile_m, dv)
        base = memory.SmemAllocator().allocate(tile.smem_bytes(self.traits), byte_alignment=1024)
        areas = tile.smem_areas(self.traits)

        def area(name: str, dtype: Any) -> cute.Pointer:
            return cute.recast_ptr(base + areas[name][0], dtype=dtype)

        return (
            cute.make_tensor(area("q", self.dtype), q_layout),
            cute.make_tensor(area("k", self.dtype), k_layout),
            cute.make_tensor(area("v", self.dtype), v_layout),
            cute.make_tensor(area("o", self.dtype), o_layout),
            area("stats", Float32),
        )

    def row_stats(self, stats: cute.Pointer, rows: int, thread: Int32) -> cute.Tensor:
        """This thread's row maxima and sums in shared memory, (rows, 2)."""
        threads = self.tile.num_threads
        layout = cute.make_layout((rows, 2, threads), stride=(1, rows * threads, rows))
        return cute.make_tensor(stats, layout)[None, None, thread]

    def operands(self, s_q: cute.Tensor, s_k: cute.Tensor, s_v: cute.Tensor, thread: Int32) -> Operands:
        """Operands of both products in shared memory; V is read transposed."""
        tiled_mma = self.tiled_mma()
        copy_a = layouts.ldmatrix_copy_a(tiled_mma, self.dtype)
        copy_b = layouts.ldmatrix_copy_b(tiled_mma, self.dtype)
        copy_bt = layouts.ldmatrix_copy_b(tiled_mma, self.dtype, transpose=True)
        return Operands(
            tiled_mma,
            SmemOperand.a(tiled_mma, copy_a, s_q, thread),
            SmemOperand.b(tiled_mma, copy_b, s_k, thread),
            SmemOperand.b(tiled_mma, copy_bt, layouts.transposed(s_v), thread),
        )

    def block_load(
        self, m: cute.Tensor, s: cute.Tensor, head_dim: int, tile: QueryTile, thread: Int32
    ) -> BlockLoad:
        """The loads of one head's K or V."""
        row_copy = RowCopy(self.gmem_load(head_dim), thread, padded(head_dim), head_dim)
        g = sequence(m, tile.batch, tile.head_kv, tile.info.offset_k, self.traits.varlen)
        return BlockLoad(row_copy, g, s, tile.info.seqlen_k)

    def mainloop_context(
        self,
        operands: Operands,
        load_k: BlockLoad,
        load_v: BlockLoad,
        blocks: BlockRange,
        state: ScoreState,
        row0: Int32,
        scale_log2: Float32,
        stats: cute.Pointer,
        thread: Int32,
    ) -> MainloopContext:
        """Before the first step: O is zero, row maxima are -inf, row sums are 0."""
        tile, dv, tiled_mma = self.tile, padded(self.traits.head_dim_v), operands.tiled_mma
        acc_o = cute.make_rmem_tensor(
            tiled_mma.get_slice(thread).partition_shape_C((tile.tile_m, dv)), Float32
        )
        acc_o.fill(0.0)
        acc_o_rows = layouts.row_col_view(acc_o, layouts.row_col_modes(tiled_mma, tile.tile_m, dv))
        rows = cute.size(acc_o_rows, mode=[0])
        own_stats = self.row_stats(stats, rows, thread) if tile.stats_in_smem else None
        softmax = OnlineSoftmax.make(rows, scale_log2, self.epilogues.may_mask_rows, own_stats)
        return MainloopContext(
            operands, load_k, load_v, blocks, state, thread, row0, softmax, stats, acc_o, acc_o_rows
        )

    @cute.jit
    def load_queries(
        self, q: cute.Tensor, s_q: cute.Tensor, rows: Int32, ctx: MainloopContext, thread: Int32
    ) -> None:
        """Start loading Q; if it is kept in registers, wait and read it."""
        d = self.traits.head_dim
        g_q = cute.local_tile(q, (self.tile.tile_m, padded(d)), (ctx.row0 // self.tile.tile_m, 0))
        RowCopy(self.gmem_load(d), thread, padded(d), d).copy(g_q, s_q[None, None, 0], rows, False)
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.tile.keeps_q):
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier()
            ctx.operands.q.load_all()
            if cutlass.const_expr(self.tile.share_qk_smem):
                cute.arch.barrier()

    @cute.jit
    def main_loop(self, ctx: MainloopContext) -> None:
        """All key blocks, last one first: masked at the right edge of the mask, unmasked, masked at its left edge."""
        blocks = ctx.blocks
        self.start_loads(ctx)
        block = self.steps(ctx, blocks.end - 1, blocks.full_end, True)
        block = self.steps(ctx, block, blocks.full_begin, False)
        if cutlass.const_expr(self.traits.windowed):
            self.steps(ctx, block, blocks.begin, True)
        # O reuses the shared memory of loads in flight.
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def start_loads(self, ctx: MainloopContext) -> None:
        """Prologue: K of the last block, or K and V of num_stages - 1 blocks."""
        last = ctx.blocks.end - 1
        if cutlass.const_expr(self.tile.num_stages == 1):
            if ctx.blocks.begin < ctx.blocks.end:
                ctx.load_k.start(last, 0, False)
            cute.arch.cp_async_commit_group()
        else:
            for ahead in cutlass.range_constexpr(self.tile.num_stages - 1):
                if last - ahead >= ctx.blocks.begin:
                    stage = self.stage(last - ahead)
                    ctx.load_k.start(last - ahead, stage, False)
                    ctx.load_v.start(last - ahead, stage, False)
                cute.arch.cp_async_commit_group()

    @cute.jit
    def steps(self, ctx: MainloopContext, block: Int32, begin: Int32, masked: Constexpr) -> Int32:
        """Key blocks ``block`` down to ``begin``; returns the next one."""
        while block >= begin:
            if cutlass.const_expr(self.tile.num_stages == 1):
                self.step_one_stage(ctx, block, masked)
            else:
                self.step_pipelined(ctx, block, masked)
            block -= 1
        return block

    @cute.jit
    def step_one_stage(self, ctx: MainloopContext, block: Int32, masked: Constexpr) -> None:
        """One key block; each load overlaps the other operand's product."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        ctx.load_v.start(block, 0, not masked)
        cute.arch.cp_async_commit_group()
        acc_s, loaded = self.scores(ctx, block, Int32(0))
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        if block > ctx.blocks.begin:
            ctx.load_k.start(block - 1, 0, True)
        cute.arch.cp_async_commit_group()
        self.accumulate(ctx, block, acc_s, loaded, Int32(0), masked)

    @cute.jit
    def step_pipelined(self, ctx: MainloopContext, block: Int32, masked: Constexpr) -> None:
        """One key block, with the loads of num_stages - 1 later ones in flight."""
        stages: Constexpr = self.tile.num_stages
        stage = self.stage(block)
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.barrier()
        ahead = block - (stages - 1)
        if ahead >= ctx.blocks.begin:
            ctx.load_k.start(ahead, self.stage(ahead), True)
            ctx.load_v.start(ahead, self.stage(ahead), True)
        cute.arch.cp_async_commit_group()
        acc_s, loaded = self.scores(ctx, block, stage)
        # Recomputed, or the stage would stay in a register through the softmax.
        stage = self.stage(optimization_barrier(block) + stages)
        self.accumulate(ctx, block, acc_s, loaded, stage, masked)

    def stage(self, block: Int32) -> Int32:
        """The stage of a key block."""
        return Int32(Uint32(block) % Uint32(self.tile.num_stages))

    @cute.jit
    def scores(self, ctx: MainloopContext, block: Int32, stage: Int32):
        """S = Q K^T, and the epilogues' loads from global memory, issued before it."""
        op, tile = ctx.operands, self.tile
        acc_s = cute.make_rmem_tensor(
            op.tiled_mma.get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n)), Float32
        )
        acc_s.fill(0.0)
        loaded = ()
        if cutlass.const_expr(self.epilogues.modifiers):
            loaded = self.epilogues.load(
                ctx.state, self.score_tile(ctx, block, acc_s, rematerialize(ctx.thread))
            )
        if cutlass.const_expr(tile.keeps_q):
            gemm_rs(op.tiled_mma, acc_s, op.q.fragment, op.k, stage)
        else:
            gemm(
                op.tiled_mma,
                acc_s,
                op.q,
                op.k,
                stage,
                tile.steps_at_once(padded(self.traits.head_dim), tile.qk_unroll),
            )
        return acc_s, loaded

    def score_tile(self, ctx: MainloopContext, block: Int32, acc_s: cute.Tensor, thread: Int32) -> ScoreTile:
        """acc_s with its query and key indices."""
        tile = self.tile
        score_map = ScoreMap.make(ctx.operands.tiled_mma, tile.tile_m, tile.tile_n, thread)
        return score_map.tile(acc_s, ctx.row0, block * tile.tile_n)

    def by_rows(self, ctx: MainloopContext, p: cute.Tensor) -> cute.Tensor:
        """P in the layout of the scores' accumulator, as (rows, cols)."""
        modes = layouts.row_col_modes(ctx.operands.tiled_mma, self.tile.tile_m, self.tile.tile_n)
        return layouts.row_col_view(p, modes)

    def stored_softmax(self, ctx: MainloopContext, thread: Int32) -> OnlineSoftmax:
        """The online softmax with its statistics where they stay between steps: in registers or shared memory."""
        if not self.tile.stats_in_smem:
            return ctx.softmax
        stats = self.row_stats(ctx.stats, cute.size(ctx.acc_o_rows, mode=[0]), thread)
        return dataclasses.replace(ctx.softmax, row_max=stats[None, 0], row_sum=stats[None, 1])

    @cute.jit
    def accumulate(
        self,
        ctx: MainloopContext,
        block: Int32,
        acc_s: cute.Tensor,
        loaded: tuple,
        stage: Int32,
        masked: Constexpr,
    ) -> None:
        """Scores to probabilities, and O += P V."""
        chain, op = self.epilogues, ctx.operands
        # Otherwise coordinates and addresses stay in registers from step to step.
        thread = rematerialize(ctx.thread)
        scores = self.score_tile(ctx, block, acc_s, thread)
        chain.forward(ctx.state, scores, loaded, masked)
        stored = self.stored_softmax(ctx, thread)
        softmax = stored.load_stats()
        softmax.step(scores.acc, ctx.acc_o_rows, masked)
        stored.store_stats(softmax)
        p = cute.make_rmem_tensor_like(acc_s, self.dtype)
        p.store(acc_s.load().to(self.dtype))
        chain.drop(ctx.state, scores, self.by_rows(ctx, p))
        gemm_rs(op.tiled_mma, ctx.acc_o, layouts.as_operand_a(p), op.v, stage)

    @cute.jit
    def store_output(
        self, o: cute.Tensor, s_o: cute.Tensor, ctx: MainloopContext, tile: QueryTile, thread: Int32
    ) -> None:
        """O through shared memory, for 16-byte stores."""
        dv, tiled_mma, tile_m = self.traits.head_dim_v, ctx.operands.tiled_mma, self.tile.tile_m
        fragment = cute.make_rmem_tensor_like(ctx.acc_o, self.dtype)
        fragment.store(ctx.acc_o.load().to(self.dtype))
        cute.arch.barrier()
        store = layouts.store_copy_c(tiled_mma, self.dtype, "sm80")
        mine = store.get_slice(thread)
        s_o = s_o[None, None, 0]
        cute.copy(store, mine.retile(fragment), mine.partition_D(s_o))
        cute.arch.barrier()
        g_o = cute.local_tile(o, (tile_m, padded(dv)), (tile.row0 // tile_m, 0))
        copy_o = RowCopy(self.gmem_store(dv), thread, padded(dv), dv)
        copy_o.copy(s_o, g_o, tile.info.seqlen_q - tile.row0, False)
