"""The Ampere forward: attention with cp.async, ldmatrix and mma.sync. Runs on sm80, sm86, sm89 and sm90.

    S = epilogues(softmax_scale * Q K^T)       (seqlen_q, seqlen_k), one tile at a time, in registers
    P = exp(S - LSE),  LSE = log sum exp S     online: running row maxima and sums
    O = dropout(P) V                           (seqlen_q, head_dim_v)

A block owns tile_m queries of one head and walks over the key blocks they see, last one first:

    one stage                                      two and more
    wait K[j]; start V[j]                          wait K[j], V[j]; start K, V[j - stages + 1]
    S = Q K[j]^T                                   S = Q K[j]^T
    wait V[j]; start K[j - 1]
    epilogues, online softmax, P to 16 bits        epilogues, online softmax, P to 16 bits
    O = rescaled O + P V[j]                        O = rescaled O + P V[j]

Blocks that the band's edge crosses are walked by loops with masks, those inside by a loop without. Follows
FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).

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
from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.device.gemm import SmemOperand, gemm, gemm_rs
from cute_attn.device.math import LOG2_E, optimization_barrier, rematerialize
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.device.seqlen import Seqlens, sequence
from cute_attn.epilogues.chain import EpilogueChain, ScoreState
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.arguments import CUTE_DTYPES, forward_fake_args
from cute_attn.outputs.lse import store_lse
from cute_attn.tiles import ForwardSm80Tile, first_that_fits, padded
from cute_attn.traits import Traits
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import ForwardSchedule, QueryGrid, QueryTile


@dataclass(frozen=True)
class Operands:
    """The three operands of the two products and the MMA that multiplies them."""

    tiled_mma: cute.TiledMma
    q: SmemOperand
    k: SmemOperand
    v: SmemOperand


@dataclass(frozen=True)
class BlockLoad:
    """One head's K or V in global memory, (seqlen_k, head_dim), and its blocks' place in shared memory."""

    row_copy: RowCopy
    g: cute.Tensor
    s: cute.Tensor  # (tile_n, padded head_dim, stage)
    seqlen_k: Int32

    @cute.jit
    def start(self, block: Int32, stage: Int32, whole: Constexpr) -> None:
        """Start loading ``block``; ``whole``: all its keys exist. Others become zeros, since 0 * NaN would be NaN."""
        rows = cute.size(self.s, mode=[0])
        tile = block_of_rows(self.g, block, rows, cute.size(self.s, mode=[1]))
        self.row_copy.copy(tile, self.s[None, None, stage], self.seqlen_k - block * rows, whole)


@dataclass(frozen=True)
class Work:
    """What one block works on, and everything a step needs of it."""

    operands: Operands
    load_k: BlockLoad
    load_v: BlockLoad
    blocks: BlockRange
    state: ScoreState
    thread: Int32
    row0: Int32
    softmax: OnlineSoftmax
    parked: cute.Pointer
    acc_o: cute.Tensor
    acc_o_rows: cute.Tensor  # acc_o as (rows, head_dim_v)


@dataclass(frozen=True)
class ForwardSm80:
    """Forward kernel of (traits, tile); call it to trace the host side, see ``__call__``."""

    traits: Traits
    tile: ForwardSm80Tile

    # ---- what it serves ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        if (traits.op, traits.arch) != ("forward", "sm80"):
            return f"it computes forward-sm80, not {traits.op}-{traits.arch}"
        return None

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ForwardSm80Tile:
        """The tile that is taken when none is named."""
        fits_always = ForwardSm80Tile(tile_m=64, tile_n=32, num_warps=4)
        return first_that_fits([*_preferred_tiles(traits), fits_always], traits, target)

    def for_lengths(self, seqlen_q: int, seqlen_k: int, group: int) -> "ForwardSm80":
        """This kernel with the default tile for such lengths and heads: one serves them all."""
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

    # ---- layouts, copies and the MMA: override one of these to experiment ----

    @property
    def dtype(self) -> Any:
        """Element type of Q, K, V and O."""
        return CUTE_DTYPES[self.traits.dtype]

    @property
    def swizzle_bits(self) -> int | None:
        """As the layouts take it."""
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
        """Both products: warps stacked along the queries."""
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
        # As an argument it takes no register. The cap is the first of the epilogues' arguments.
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
        place = grid.tile(seqlens, self.tile.tile_m)
        row0, info = place.row0, place.info
        if row0 < info.seqlen_q:
            chain = self.epilogues
            packed = self.traits.varlen
            q = sequence(mQ, place.batch, place.head, info.offset_q, packed)
            context = chain.context(score_args, seqlens, info, place.batch, place.head, nheads, softmax_scale)
            state = chain.begin(score_args, context)
            end_row = cutlass.min(row0 + self.tile.tile_m, info.seqlen_q)
            blocks = BlockRange.of_queries(state.band, row0, end_row, self.tile.tile_n)
            s_q, s_k, s_v, s_o, parked = self.shared_memory()
            operands = self.operands(s_q, s_k, s_v, thread)
            load_k = self.block_load(mK, s_k, self.traits.head_dim, place, thread)
            load_v = self.block_load(mV, s_v, self.traits.head_dim_v, place, thread)
            work = self.work(operands, load_k, load_v, blocks, state, row0, scale_log2, parked, thread)
            self.load_queries(q, s_q, info.seqlen_q - row0, work, thread)
            self.main_loop(work)
            place = grid.tile(seqlens, self.tile.tile_m)
            lse = cute.make_rmem_tensor(cute.make_layout(cute.size(work.acc_o_rows, mode=[0])), Float32)
            self.statistics(work, thread).load_stats().normalize(work.acc_o_rows, lse, chain.rescale(state))
            thread = optimization_barrier(thread)
            score_map = ScoreMap.make(operands.tiled_mma, self.tile.tile_m, self.tile.tile_n, thread)
            store_lse(mLSE, lse, score_map, place, self.traits.varlen)
            o = sequence(mO, place.batch, place.head, place.info.offset_q, packed)
            self.store_output(o, s_o, work, place, thread)

    def shared_memory(self):
        """sQ, sK, sV and sO as (rows, cols, stage), and where the parked statistics begin."""
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
            area("parked", Float32),
        )

    def parked_statistics(self, place: cute.Pointer, rows: int, thread: Int32) -> cute.Tensor:
        """This thread's row maxima and sums in shared memory, (rows, 2)."""
        threads = self.tile.num_threads
        layout = cute.make_layout((rows, 2, threads), stride=(1, rows * threads, rows))
        return cute.make_tensor(place, layout)[None, None, thread]

    def operands(self, s_q: cute.Tensor, s_k: cute.Tensor, s_v: cute.Tensor, thread: Int32) -> Operands:
        """Both products' operands in shared memory; V is read transposed."""
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
        self, m: cute.Tensor, s: cute.Tensor, head_dim: int, place: QueryTile, thread: Int32
    ) -> BlockLoad:
        """K or V of one head, to be loaded by blocks of keys."""
        row_copy = RowCopy(self.gmem_load(head_dim), thread, padded(head_dim), head_dim)
        g = sequence(m, place.batch, place.head_kv, place.info.offset_k, self.traits.varlen)
        return BlockLoad(row_copy, g, s, place.info.seqlen_k)

    def work(
        self,
        operands: Operands,
        load_k: BlockLoad,
        load_v: BlockLoad,
        blocks: BlockRange,
        state: ScoreState,
        row0: Int32,
        scale_log2: Float32,
        place: cute.Pointer,
        thread: Int32,
    ) -> Work:
        """Nothing seen yet: an output of zeros and an empty softmax."""
        tile, dv, tiled_mma = self.tile, padded(self.traits.head_dim_v), operands.tiled_mma
        acc_o = cute.make_rmem_tensor(
            tiled_mma.get_slice(thread).partition_shape_C((tile.tile_m, dv)), Float32
        )
        acc_o.fill(0.0)
        acc_o_rows = layouts.row_col_view(acc_o, layouts.row_col_modes(tiled_mma, tile.tile_m, dv))
        rows = cute.size(acc_o_rows, mode=[0])
        parked = self.parked_statistics(place, rows, thread) if tile.stats_in_smem else None
        softmax = OnlineSoftmax.make(rows, scale_log2, self.epilogues.may_mask_rows, parked)
        return Work(operands, load_k, load_v, blocks, state, thread, row0, softmax, place, acc_o, acc_o_rows)

    @cute.jit
    def load_queries(self, q: cute.Tensor, s_q: cute.Tensor, rows: Int32, work: Work, thread: Int32) -> None:
        """Start loading Q; when Q is kept in registers, wait for it and read it."""
        d = self.traits.head_dim
        g_q = cute.local_tile(q, (self.tile.tile_m, padded(d)), (work.row0 // self.tile.tile_m, 0))
        RowCopy(self.gmem_load(d), thread, padded(d), d).copy(g_q, s_q[None, None, 0], rows, False)
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.tile.keeps_q):
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier()
            work.operands.q.load_all()
            if cutlass.const_expr(self.tile.share_qk_smem):
                cute.arch.barrier()

    @cute.jit
    def main_loop(self, work: Work) -> None:
        """All key blocks, last first: masked ones at the band's right edge, inner ones, masked ones at its left."""
        blocks = work.blocks
        self.start_loads(work)
        block = self.steps(work, blocks.end - 1, blocks.full_end, True)
        block = self.steps(work, block, blocks.full_begin, False)
        if cutlass.const_expr(self.traits.windowed):
            self.steps(work, block, blocks.begin, True)
        # Nothing may be on its way to shared memory when O takes it over.
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def start_loads(self, work: Work) -> None:
        """Before the first step: K of the last block, or whole steps as far ahead as there are stages."""
        last = work.blocks.end - 1
        if cutlass.const_expr(self.tile.num_stages == 1):
            if work.blocks.begin < work.blocks.end:
                work.load_k.start(last, 0, False)
            cute.arch.cp_async_commit_group()
        else:
            for ahead in cutlass.range_constexpr(self.tile.num_stages - 1):
                if last - ahead >= work.blocks.begin:
                    stage = self.stage(last - ahead)
                    work.load_k.start(last - ahead, stage, False)
                    work.load_v.start(last - ahead, stage, False)
                cute.arch.cp_async_commit_group()

    @cute.jit
    def steps(self, work: Work, block: Int32, begin: Int32, masked: Constexpr) -> Int32:
        """``block`` and those before it down to ``begin``; returns the next one."""
        while block >= begin:
            if cutlass.const_expr(self.tile.num_stages == 1):
                self.step_one_stage(work, block, masked)
            else:
                self.step_staged(work, block, masked)
            block -= 1
        return block

    @cute.jit
    def step_one_stage(self, work: Work, block: Int32, masked: Constexpr) -> None:
        """One key block, loads and products taking turns."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        work.load_v.start(block, 0, not masked)
        cute.arch.cp_async_commit_group()
        acc_s, loaded = self.scores(work, block, Int32(0))
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        if block > work.blocks.begin:
            work.load_k.start(block - 1, 0, True)
        cute.arch.cp_async_commit_group()
        self.accumulate(work, block, acc_s, loaded, Int32(0), masked)

    @cute.jit
    def step_staged(self, work: Work, block: Int32, masked: Constexpr) -> None:
        """One key block, with later ones on their way."""
        stages: Constexpr = self.tile.num_stages
        stage = self.stage(block)
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.barrier()
        ahead = block - (stages - 1)
        if ahead >= work.blocks.begin:
            work.load_k.start(ahead, self.stage(ahead), True)
            work.load_v.start(ahead, self.stage(ahead), True)
        cute.arch.cp_async_commit_group()
        acc_s, loaded = self.scores(work, block, stage)
        # The same number again, disguised: known to be the same, it would be kept in a register through the softmax.
        stage = self.stage(optimization_barrier(block) + stages)
        self.accumulate(work, block, acc_s, loaded, stage, masked)

    def stage(self, block: Int32) -> Int32:
        """Which stage a block of keys goes through."""
        return Int32(Uint32(block) % Uint32(self.tile.num_stages))

    @cute.jit
    def scores(self, work: Work, block: Int32, stage: Int32):
        """S = Q K^T, and what the epilogues read of global memory meanwhile."""
        op, tile = work.operands, self.tile
        acc_s = cute.make_rmem_tensor(
            op.tiled_mma.get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n)), Float32
        )
        acc_s.fill(0.0)
        loaded = ()
        if cutlass.const_expr(self.epilogues.modifiers):
            loaded = self.epilogues.load(
                work.state, self.score_tile(work, block, acc_s, rematerialize(work.thread))
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

    def score_tile(self, work: Work, block: Int32, acc_s: cute.Tensor, thread: Int32) -> ScoreTile:
        """acc_s in terms of queries and keys."""
        tile = self.tile
        score_map = ScoreMap.make(work.operands.tiled_mma, tile.tile_m, tile.tile_n, thread)
        return score_map.tile(acc_s, work.row0, block * tile.tile_n)

    def by_rows(self, work: Work, p: cute.Tensor) -> cute.Tensor:
        """P, laid out as the scores' accumulator, as (rows, cols)."""
        modes = layouts.row_col_modes(work.operands.tiled_mma, self.tile.tile_m, self.tile.tile_n)
        return layouts.row_col_view(p, modes)

    def statistics(self, work: Work, thread: Int32) -> OnlineSoftmax:
        """The online softmax, with its statistics where they are kept between steps."""
        if not self.tile.stats_in_smem:
            return work.softmax
        parked = self.parked_statistics(work.parked, cute.size(work.acc_o_rows, mode=[0]), thread)
        return dataclasses.replace(work.softmax, row_max=parked[None, 0], row_sum=parked[None, 1])

    @cute.jit
    def accumulate(
        self, work: Work, block: Int32, acc_s: cute.Tensor, loaded: tuple, stage: Int32, masked: Constexpr
    ) -> None:
        """Scores to probabilities, and O += P V."""
        chain, op = self.epilogues, work.operands
        thread = rematerialize(
            work.thread
        )  # or coordinates and addresses would wait in registers from the step before
        tile = self.score_tile(work, block, acc_s, thread)
        chain.forward(work.state, tile, loaded, masked)
        statistics = self.statistics(work, thread)
        softmax = statistics.load_stats()
        softmax.step(tile.acc, work.acc_o_rows, masked)
        statistics.store_stats(softmax)
        p = cute.make_rmem_tensor_like(acc_s, self.dtype)
        p.store(acc_s.load().to(self.dtype))
        chain.drop(work.state, tile, self.by_rows(work, p))
        gemm_rs(op.tiled_mma, work.acc_o, layouts.as_operand_a(p), op.v, stage)

    @cute.jit
    def store_output(
        self, o: cute.Tensor, s_o: cute.Tensor, work: Work, place: QueryTile, thread: Int32
    ) -> None:
        """O through shared memory, to be written in whole 16-byte pieces of rows."""
        dv, tiled_mma, tile_m = self.traits.head_dim_v, work.operands.tiled_mma, self.tile.tile_m
        fragment = cute.make_rmem_tensor_like(work.acc_o, self.dtype)
        fragment.store(work.acc_o.load().to(self.dtype))
        cute.arch.barrier()
        store = layouts.store_copy_c(tiled_mma, self.dtype, "sm80")
        mine = store.get_slice(thread)
        s_o = s_o[None, None, 0]
        cute.copy(store, mine.retile(fragment), mine.partition_D(s_o))
        cute.arch.barrier()
        g_o = cute.local_tile(o, (tile_m, padded(dv)), (place.row0 // tile_m, 0))
        copy_o = RowCopy(self.gmem_store(dv), thread, padded(dv), dv)
        copy_o.copy(s_o, g_o, place.info.seqlen_q - place.row0, False)


def _burden(traits: Traits) -> str:
    """What the epilogues ask of a thread beside its scores: a key of the tables in ``_TILES``."""
    modified = traits.softcap or traits.alibi
    if traits.dropout == "mem_efficient" or (traits.bias and traits.dropout):
        return "most"
    if traits.bias == "fp32":
        return "much"
    if traits.bias or traits.epilogues or (traits.dropout and modified):
        return "more"
    return "some" if traits.dropout or modified else "none"


def _tile(tile_m: int, tile_n: int, num_warps: int, num_stages: int, qk_unroll: int = 0) -> ForwardSm80Tile:
    return ForwardSm80Tile(tile_m, tile_n, num_warps, num_stages, qk_unroll=qk_unroll)


# The largest head_dim_v -> what the epilogues ask for -> tiles, best first; the first that fits the traits and the
# target is the default, and what is not listed is as without epilogues. Chosen by time on an H200 among those that
# spill nothing on any target: 32 queries a warp read keys and values from shared memory half as often as 16, and two
# stages save a barrier. bench/notes.md has the others.
_TILES: dict[int, dict[str, list[ForwardSm80Tile]]] = {
    32: {
        "none": [_tile(128, 128, 4, 2)],
        "some": [_tile(128, 64, 4, 2)],
        "more": [_tile(128, 64, 4, 2, qk_unroll=1)],
        "much": [_tile(128, 64, 4, 2, qk_unroll=1)],
        "most": [_tile(64, 64, 4, 1)],
    },
    64: {
        "none": [_tile(128, 96, 4, 2)],
        "some": [_tile(128, 96, 4, 2, qk_unroll=2)],
        "more": [_tile(128, 96, 4, 2, qk_unroll=1)],
        "much": [_tile(128, 64, 4, 2, qk_unroll=2)],
        "most": [_tile(64, 64, 4, 1)],
    },
    96: {
        "none": [_tile(128, 64, 4, 2)],
        "some": [_tile(128, 64, 4, 2, qk_unroll=1)],
        "more": [_tile(128, 64, 4, 2, qk_unroll=1)],
        "much": [_tile(128, 32, 4, 2, qk_unroll=2)],
        "most": [_tile(64, 64, 4, 1)],
    },
    128: {
        "none": [_tile(128, 64, 4, 2, qk_unroll=4), _tile(128, 64, 4, 1, qk_unroll=4)],
        "more": [_tile(128, 64, 4, 2, qk_unroll=1), _tile(128, 32, 4, 2)],
        "much": [_tile(128, 32, 4, 2, qk_unroll=4)],
        "most": [_tile(64, 64, 4, 1)],
    },
    192: {
        "none": [_tile(128, 64, 8, 1)],
        "much": [_tile(64, 64, 4, 1)],
        "most": [_tile(64, 32, 4, 1)],
    },
    256: {
        "none": [_tile(64, 64, 4, 1)],
        "most": [_tile(64, 32, 4, 1, qk_unroll=4)],
    },
}
_FITS_ALWAYS = _tile(64, 32, 4, 1)


def _preferred_tiles(traits: Traits) -> list[ForwardSm80Tile]:
    """Best first."""
    table = next(table for dim, table in _TILES.items() if traits.head_dim_v <= dim)
    return [*table.get(_burden(traits), table["none"]), *table["most"], _FITS_ALWAYS]
