"""The probabilities of a forward, for inspection: a launch of its own after the forward, from its LSE.

    S = epilogues(softmax_scale * Q K^T)       (seqlen_q, seqlen_k), one tile at a time, in registers
    P = exp(S - LSE)                           0 in rows whose LSE is -inf; rounded to 16 bits
    the sign bit of P is set where dropout drops the element

A CTA owns tile_m queries of one head. It loads them once, then for each key block that they see:

    barrier, since all warps read the block before; load K[j]; wait for it
    S = Q K[j]^T; epilogues, mask, P, signs
    store the elements of P that exist, one by one

Key blocks that no query of the CTA sees are not visited: the output must be zeroed before. Loads do not overlap
products, since the stores of P bound the kernel. It uses cp.async, ldmatrix and mma.sync, so it runs on sm80, sm86,
sm89 and sm90.

Limits: fp16 and bf16; head dims up to 256, multiples of 8, padded to multiples of 32 in shared memory; rows of Q and K
16-byte aligned with a contiguous last dimension.
"""

import functools
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute, memory

import layouts
from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.device.gemm import SmemOperand, gemm
from cute_attn.device.math import LOG2_E, clamped, convert_to_16_bits
from cute_attn.device.probabilities import probabilities
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.device.seqlen import Seqlens, sequence
from cute_attn.epilogues.chain import EpilogueChain, ScoreState
from cute_attn.kernels.arguments import CUTE_DTYPES, softmax_fake_args
from cute_attn.kernels.limits import beyond
from cute_attn.kernels.step import StepContent, mma_sync_count, product_loop
from cute_attn.tiles import SoftmaxTile, padded
from cute_attn.traits import Traits
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import QueryGrid, QueryTile


@dataclass(frozen=True)
class QueryBlock:
    """What a thread's score tiles of one work tile share."""

    tile: QueryTile
    state: ScoreState
    score_map: ScoreMap
    lse_log2: cute.Tensor  # (rows): LSE * log2(e)
    scale_log2: Float32  # score_scale * log2(e)


@dataclass(frozen=True)
class SoftmaxSm80:
    """Softmax kernel of (traits, tile); ``__call__`` launches it."""

    traits: Traits
    tile: SoftmaxTile

    # ---- support, tiles and arguments ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        if (traits.op, traits.arch) != ("softmax", "sm80"):
            return f"it computes softmax-sm80, not {traits.op}-{traits.arch}"
        if traits.head_dim_v != traits.head_dim:
            return f"head_dim_v is {traits.head_dim_v}; accepted: {traits.head_dim}, head_dim: it reads no V"
        return beyond(traits)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> SoftmaxTile:
        """The tile for calls that name none."""
        return SoftmaxTile()

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The score epilogues that the traits ask for."""
        return EpilogueChain.of(self.traits)

    def fake_args(self) -> tuple:
        """The arguments of ``__call__`` for compiling, without the stream."""
        return softmax_fake_args(self.traits, self.epilogues.fake_args())

    def step_content(self) -> StepContent:
        """A step of the loop over key blocks; the product is a loop over head_dim."""
        tile, d = self.tile, padded(self.traits.head_dim)
        qk = mma_sync_count(tile.tile_m, tile.tile_n, d, tile.num_warps)
        elements = tile.tile_m * tile.tile_n // tile.num_threads
        loops = product_loop(qk, d // 16, 1)
        return StepContent(qk, elements * (1 + self.traits.softcap), elements, tile.num_warps, loops)

    # ---- layouts, copies and the MMA: override one of these to experiment ----

    @property
    def dtype(self) -> Any:
        """Element type of Q, K and P."""
        return CUTE_DTYPES[self.traits.dtype]

    def smem_layout(self, rows: int) -> cute.ComposedLayout:
        """(rows, padded head_dim, 1) in shared memory."""
        return layouts.smem_layout(rows, padded(self.traits.head_dim), self.dtype, stages=1)

    def gmem_load(self) -> cute.TiledCopy:
        """Global to shared memory: cp.async of 16 bytes."""
        head_dim = padded(self.traits.head_dim)
        return layouts.gmem_tiled_copy(self.dtype, self.tile.num_threads, head_dim, asynchronous=True)

    def tiled_mma(self) -> cute.TiledMma:
        """MMA of Q K^T: warps along the queries."""
        return layouts.tiled_mma_sm80(self.dtype, self.tile.num_warps)

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mLSE: cute.Tensor,
        mSoftmax: cute.Tensor,
        seqlens: Seqlens,
        softmax_scale: Float32,
        score_args: tuple,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Shapes: see ``cute_attn.kernels.arguments``."""
        nheads, nheads_kv = mQ.shape[-2], mK.shape[-2]
        m_blocks = cute.ceil_div(seqlens.max_seqlen_q, self.tile.tile_m)
        grid = QueryGrid.make(m_blocks, nheads, nheads_kv)
        self.kernel(mQ, mK, mLSE, mSoftmax, seqlens, softmax_scale, score_args, grid, nheads).launch(
            grid=[m_blocks * nheads * seqlens.batch(mQ), 1, 1],
            block=[self.tile.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # otherwise ptxas spills a register to fit one more CTA
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mLSE: cute.Tensor,
        mSoftmax: cute.Tensor,
        seqlens: Seqlens,
        softmax_scale: Float32,
        score_args: tuple,
        grid: QueryGrid,
        nheads: Int32,
    ) -> None:
        varlen = self.traits.varlen
        thread, _, _ = cute.arch.thread_idx()
        tile = grid.tile(seqlens, self.tile.tile_m)
        row0, info = tile.row0, tile.info
        if row0 < info.seqlen_q:
            q = sequence(mQ, tile.batch, tile.head, info.offset_q, varlen)
            k = sequence(mK, tile.batch, tile.head_kv, info.offset_k, varlen)
            s_q, s_k = self.shared_memory()
            self.load(q, s_q, row0 // self.tile.tile_m, info.seqlen_q, thread)
            rows = self.query_block(mLSE, seqlens, softmax_scale, score_args, tile, nheads, thread)
            end_row = cutlass.min(row0 + self.tile.tile_m, info.seqlen_q)
            blocks = BlockRange.of_queries(rows.state.band, row0, end_row, self.tile.tile_n)
            for block in cutlass.range(blocks.begin, blocks.end, unroll=1):
                cute.arch.barrier()
                self.load(k, s_k, block, info.seqlen_k, thread)
                cute.arch.cp_async_wait_group(0)
                cute.arch.barrier()
                acc_s = self.fragment(Float32)
                acc_s.fill(0.0)
                scores = rows.score_map.tile(acc_s, row0, block * self.tile.tile_n)
                loaded = self.epilogues.load(rows.state, scores)
                self.multiply(acc_s, s_q, s_k, thread)
                self.store(mSoftmax, acc_s, scores, loaded, rows)
            cute.arch.cp_async_wait_group(0)  # Q's load, if no key block was visited

    def shared_memory(self) -> tuple[cute.Tensor, cute.Tensor]:
        """sQ and sK as (rows, padded head_dim, 1)."""
        base = memory.SmemAllocator().allocate(self.tile.smem_bytes(self.traits), byte_alignment=1024)
        areas = self.tile.smem_areas(self.traits)

        def tensor(name: str, rows: int) -> cute.Tensor:
            pointer = cute.recast_ptr(base + areas[name][0], dtype=self.dtype)
            return cute.make_tensor(pointer, self.smem_layout(rows))

        return tensor("q", self.tile.tile_m), tensor("k", self.tile.tile_n)

    def fragment(self, dtype: Any) -> cute.Tensor:
        """Registers for a thread's elements of a score tile."""
        shape = (self.tile.tile_m, self.tile.tile_n)
        return cute.make_rmem_tensor(self.tiled_mma().get_slice(0).partition_shape_C(shape), dtype)

    @cute.jit
    def load(self, g: cute.Tensor, s: cute.Tensor, block: Int32, length: Int32, thread: Int32) -> None:
        """Start loading a block of rows of one head; those at ``length`` and beyond are zeroed."""
        d, rows = self.traits.head_dim, cute.size(s, mode=[0])
        row_copy = RowCopy(self.gmem_load(), thread, padded(d), d)
        g_block = block_of_rows(g, block, rows, padded(d))
        row_copy.copy(g_block, s[None, None, 0], length - block * rows, False)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def multiply(self, acc_s: cute.Tensor, s_q: cute.Tensor, s_k: cute.Tensor, thread: Int32) -> None:
        """acc_s += Q K^T."""
        tiled_mma = self.tiled_mma()
        q = SmemOperand.a(tiled_mma, layouts.ldmatrix_copy_a(tiled_mma, self.dtype), s_q, thread)
        k = SmemOperand.b(tiled_mma, layouts.ldmatrix_copy_b(tiled_mma, self.dtype), s_k, thread)
        gemm(tiled_mma, acc_s, q, k, Int32(0), 1)

    # ---- device code that cute_attn.reference.emulate also runs on the host ----

    @cute.jit
    def query_block(
        self,
        mLSE: cute.Tensor,
        seqlens: Seqlens,
        softmax_scale: Float32,
        score_args: tuple,
        tile: QueryTile,
        nheads: Int32,
        thread: Int32,
    ) -> QueryBlock:
        """The epilogues' state of a work tile and the thread's rows of LSE * log2(e)."""
        chain, info = self.epilogues, tile.info
        context = chain.context(score_args, seqlens, info, tile.batch, tile.head, nheads, softmax_scale)
        score_map = ScoreMap.make(self.tiled_mma(), self.tile.tile_m, self.tile.tile_n, thread)
        if cutlass.const_expr(self.traits.varlen):
            start = Int64(tile.head) * mLSE.stride[0] + info.offset_q
        else:
            start = Int64(tile.batch) * mLSE.stride[0] + Int64(tile.head) * mLSE.stride[1]
        g_lse = cute.make_tensor(mLSE.iterator + start, cute.make_layout(info.seqlen_q))
        lse_log2 = cute.make_rmem_tensor(cute.make_layout(len(score_map.modes.rows)), Float32)
        for r in cutlass.range_constexpr(len(score_map.modes.rows)):
            row = tile.row0 + score_map.query(r)
            lse = -Float32.inf
            if row < info.seqlen_q:
                lse = g_lse[row]
            lse_log2[r] = Float32.inf if lse == -Float32.inf else clamped(lse * LOG2_E)
        scale_log2 = chain.scale_log2(context.score_scale)
        return QueryBlock(tile, chain.begin(score_args, context), score_map, lse_log2, scale_log2)

    @cute.jit
    def store(
        self, mSoftmax: cute.Tensor, acc_s: cute.Tensor, scores: ScoreTile, loaded: tuple, rows: QueryBlock
    ) -> None:
        """Products to probabilities with their signs, and the elements within both lengths to mSoftmax."""
        self.epilogues.forward(rows.state, scores, loaded, True)
        visible_keys = rows.state.band.visible_keys if self.epilogues.may_be_large else None
        probabilities(scores, rows.lse_log2, rows.scale_log2, visible_keys)
        p = cute.make_rmem_tensor_like(acc_s, mSoftmax.element_type)
        convert_to_16_bits(acc_s, p)
        p_rows = rows.score_map.view(p)
        self.epilogues.mark_dropped(rows.state, scores, p_rows)
        tile = rows.tile
        stride_batch, stride_head, stride_row, _ = mSoftmax.stride
        plane = mSoftmax.iterator + (Int64(tile.batch) * stride_batch + Int64(tile.head) * stride_head)
        for r in cutlass.range_constexpr(len(scores.rows)):
            row = scores.row0 + scores.rows[r]
            for c in cutlass.range_constexpr(len(scores.cols)):
                column = scores.col0 + scores.cols[c]
                if row < tile.info.seqlen_q and column < tile.info.seqlen_k:
                    element = plane + (Int64(row) * stride_row + Int64(column))
                    cute.make_tensor(element, cute.make_layout(1))[0] = p_rows[r, c]
