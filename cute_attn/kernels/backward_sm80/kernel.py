"""The Ampere backward: gradients of attention with cp.async, ldmatrix and mma.sync. Runs on sm80 to sm120.

    S  = epilogues(softmax_scale * Q K^T)           (seqlen_q, seqlen_k), one tile at a time, in registers
    P  = exp(S - LSE)
    dP = dO V^T
    dS = epilogues'(P * (keep * dP - D))            D = rowsum(dO * O) of the preprocess
    dV = (keep * P)^T dO,  dK = dS^T Q,  dQ = dS K  constant factors are applied when results are stored

A CTA owns tile_n keys of one kv head. K and V stay in shared memory, dK and dV in registers. The mainloop runs over the
query blocks that see these keys, for every query head of the group:

    wait Q[i], dO[i]; start Q, dO[i + 1]
    S = Q K^T; P;  dP = dO V^T; dS                  P and dS are stored to shared memory in Q's type
    dV += P^T dO; dK += dS^T Q
    dQ[i] += dS K                                   fp32 reductions into global memory

Dropout's mask is computed before S, when few registers are live, and kept as one bit per element.

With ``p_in_regs`` the scores are computed transposed and P and dS are the register operands of dV and dK: only dS goes
through shared memory, for dQ. Follows FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).

fp32 operands are stored as two fp16 terms, or with precision tf32 as one; P and dS are split the same way. If operands
do not fit their terms, they are split into as many tf32 terms in registers, and P and dS stay fp32: see
:mod:`cute_attn.device.gemm_terms`. Large head dims compute dQ in passes over its columns; where K, V, Q and dO do not
fit shared memory, a tile with ``columns`` streams them: see :mod:`cute_attn.kernels.backward_sm80.streamed`.

Limits: head dims up to 576, padded in shared memory and registers to multiples of 32 (of 64 above 256); rows 16-byte
aligned with a contiguous last dimension.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Float16, Float32, Int32, Int64, Uint32, cute, memory

import layouts
from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.device.math import optimization_barrier, rematerialize_each
from cute_attn.device.probabilities import probabilities, score_gradient, start_from
from cute_attn.device.score_tile import ScoreContext, ScoreMap, ScoreTile
from cute_attn.device.seqlen import existing_rows, padded_row0, sequence, workspace_rows
from cute_attn.device.terms import Terms, all_fit, change_units, common_scale, running_scale
from cute_attn.epilogues.chain import EpilogueChain, ScoreState
from cute_attn.kernels import dq_order as dq
from cute_attn.kernels import fakes
from cute_attn.kernels.backward_sm80.heuristics import TERMS_LEAST_FLOP, default_tile
from cute_attn.kernels.backward_sm80.loads import BlockLoad, first_term, term_of
from cute_attn.kernels.backward_sm80.params import BackwardParams, Gradients, MainloopContext, ReadAhead
from cute_attn.kernels.backward_sm80.products import Operands, Products, step_content
from cute_attn.kernels.backward_sm80.storage import (
    BAND,
    BLOCKS,
    SPILLED,
    BackwardSm80Storage,
    ScaleStorage,
    gradient_factors,
)
from cute_attn.kernels.backward_sm80.streamed import Streamed
from cute_attn.kernels.base import AttentionKernel, StepContent, beyond
from cute_attn.kernels.copies import Copies
from cute_attn.outputs.accumulate import add_fragment
from cute_attn.tiles import BackwardSm80Tile, padded
from cute_attn.traits import DTYPES, MAX_HEAD_DIM, Traits
from cute_attn.work.block_range import BlockRange
from cute_attn.work.key_tiles import HeadSplits, KeyTileOrder, KeyTiles, key_tile_of


def _operand_fake(kernel: Any) -> cute.Tensor:
    if kernel.tile.in_terms:
        return fakes.rows(Float16, fakes.rank(kernel.traits) + 1)
    return fakes.head_rows(kernel)


Operand = Annotated[cute.Tensor, _operand_fake]
"""mQ, mK, mV or mDO; with operands ``terms``, (..., terms, padded head dim) in fp16."""

TermScales = Annotated[
    cute.Tensor | None, lambda kernel: fakes.plain(Float32, 1) if kernel.tile.speculative else None
]
"""(4,): a factor per operand that undoes its terms' scale, or 0 if the operand does not fit its terms; or None."""


@dataclass(frozen=True)
class BackwardSm80(AttentionKernel):
    """Main backward kernel for (traits, tile); ``__call__`` launches it."""

    traits: Traits
    tile: BackwardSm80Tile

    # ---- supported traits ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        multiple = 16 // traits.element_bytes
        reason = beyond(traits, "backward-sm80", dtypes=DTYPES, most=MAX_HEAD_DIM, multiple=multiple)
        return reason or EpilogueChain.decline(traits)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> BackwardSm80Tile:
        return default_tile(traits, target)

    def terms_pay(self, rows: int, seqlen_k: int) -> bool:
        """True if operands in terms are faster, splitting included; rows: queries of all heads and sequences."""
        dims = 3 * self.traits.head_dim + 2 * self.traits.head_dim_v
        return 2 * rows * seqlen_k * dims >= TERMS_LEAST_FLOP[self.traits.fp32_terms]

    def of_whole_operands(self, target: str) -> "BackwardSm80":
        """This kernel with the default tile for whole fp32 operands."""
        return dataclasses.replace(self, tile=default_tile(self.traits, target, whole=True))

    @property
    def can_visit_lists(self) -> bool:
        """Always False: the kernel visits all blocks."""
        return False

    def step_content(self) -> StepContent:
        """Content of a step that needs no mask."""
        return step_content(self.traits, self.tile, self.products.each)

    # ---- layouts, copies and the MMAs: override one of these to experiment ----

    @property
    def operand_dtype(self) -> Any:
        """Element type of operands in shared memory."""
        return self.products.operand_dtype

    def smem_layout(self, rows: int, cols: int, stages: int | None = 1) -> cute.ComposedLayout:
        """Layout (rows, cols[, stages]) of operands in shared memory."""
        return layouts.smem_layout(rows, cols, self.operand_dtype, stages=stages)

    def gradient_layout(self, cols: int) -> cute.ComposedLayout:
        """Layout (tile_n, cols) of dK or dV in shared memory."""
        return layouts.smem_layout(self.tile.tile_n, cols, self.dtype, stages=None)

    def gmem_copy(self, head_dim: int, asynchronous: bool) -> cute.TiledCopy:
        """Copy of rows between global and shared memory by 16 bytes: operands with cp.async, gradients with stores."""
        dtype = self.operand_dtype if asynchronous else self.dtype
        return layouts.gmem_tiled_copy(
            dtype, self.tile.num_threads, padded(head_dim), asynchronous=asynchronous
        )

    @functools.cached_property
    def products(self) -> Products:
        return Products(self.traits, self.tile, self.dtype)

    def mma_sdp(self) -> cute.TiledMma:
        """S = Q K^T and dP = dO V^T, or with ``p_in_regs`` their transposes."""
        tile = self.tile
        warps_n = 1 if tile.p_in_regs else tile.num_warps // tile.sdp_warps_m
        return layouts.tiled_mma_sm80(self.operand_dtype, tile.num_warps, warps_n=warps_n)

    def mma_dkv(self) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q."""
        tile = self.tile
        warps_n = tile.num_warps // tile.dkv_warps_m
        return layouts.tiled_mma_sm80(self.operand_dtype, tile.num_warps, warps_n=warps_n)

    def mma_dq(self) -> cute.TiledMma:
        """dQ = dS K; the convert uses the same MMA."""
        if self.tile.in_terms:  # its accumulator is that of fp32 operands
            return layouts.tiled_mma_sm80(Float16, self.tile.num_warps, warps_n=self.tile.dq_warps_n)
        return dq.mma_dq(self.traits, self.tile)

    def copies(self) -> Copies:
        """Areas of operands and gradients in shared memory, and the copies by which all threads move them."""
        tile, traits, found = self.tile, self.traits, Copies(self, self.tile.num_threads)
        d, dv, scores = padded(traits.head_dim), padded(traits.head_dim_v), (tile.tile_m, tile.tile_n)

        def operands(**areas: tuple[int, int, int]) -> None:
            for name, (rows, cols, stages) in areas.items():
                shape = (rows, cols, stages * self.products.stored_terms)
                found.area(name, shape, "smem_layout", *shape, of=self.operand_dtype)

        found.part("copy-gmem-to-smem", "gmem_copy", d, True)
        found.part("mma-sdp", "mma_sdp").part("mma-dkv", "mma_dkv").part("mma-dq", "mma_dq")
        if tile.columns:
            chunk = tile.chunk(traits)
            operands(
                queries=(tile.tile_m, chunk, 2), keys=(tile.tile_n, chunk, 2), p=(*scores, 1), ds=(*scores, 1)
            )
            found.area("dk", (tile.tile_n, chunk), "gradient_layout", chunk, at="keys")
            return found
        q, do = (tile.subtiles * stages for stages in (tile.stages_q, tile.stages_do))
        operands(
            k=(tile.tile_n, d, 1), v=(tile.tile_n, dv, 1), q=(tile.queries, d, q), do=(tile.queries, dv, do)
        )
        operands(p=(*scores, 1), ds=(*self.products.scores_plane, 1))
        for name, dim in (("dk", d), ("dv", dv)):
            found.area(name, (tile.tile_n, dim), "gradient_layout", dim)
        at = {name: layout.make for name, layout in found.layouts.items()}
        queries, keys = ("B", "A") if tile.p_in_regs else ("A", "B")
        for name, dim in (("Q", d), ("dO", dv)):
            layout = at[name.lower()]
            found.move(f"{name} by cp.async", "LDGSTS", functools.partial(self.gmem_copy, dim, True), layout)
            found.ldmatrix(name, queries, self.mma_sdp, layout)
            found.ldmatrix(name, "B", self.mma_dkv, layout, transpose=True)
        found.ldmatrix("K", keys, self.mma_sdp, at["k"]).ldmatrix("V", keys, self.mma_sdp, at["v"])
        found.ldmatrix("K", "B", self.mma_dq, at["k"], transpose=True)
        found.ldmatrix("dS", "A", self.mma_dq, at["ds"], transpose=tile.p_in_regs)
        if not tile.p_in_regs:
            found.ldmatrix("dS", "A", self.mma_dkv, at["ds"], transpose=True)
        return found.store("dS", self.mma_sdp, at["ds"])

    def operands(self, smem: BackwardSm80Storage, thread: Int32) -> Operands:
        """The operands of all products. Operands that are not K-major are transposed as they are read."""
        mmas = (self.mma_sdp(), self.mma_dkv(), self.mma_dq())
        return self.products.operands(mmas, smem, self.smem_layout, thread)

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: Operand,
        mK: Operand,
        mV: Operand,
        mDO: Operand,
        mLSElog2: fakes.QueryNumbers,
        mMinusD: fakes.QueryNumbers,
        mDQaccum: fakes.Accumulators,
        mDK: fakes.HeadRows,
        mDV: fakes.HeadRows,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.BackwardCounters,
        score_args: fakes.ScoreArgs,
        scales: TermScales,
        stream: cuda.CUstream,
    ) -> None:
        if cutlass.const_expr(self.tile.in_terms):
            mQ, mK, mV, mDO = (first_term(m) for m in (mQ, mK, mV, mDO))
        nheads = mQ.shape[-2]
        head_bytes = Int64(seqlens.max_seqlen_q) * (4 * padded(self.traits.head_dim))
        order = KeyTileOrder.make(seqlens, mDK, schedule, head_bytes, self.tile.tile_n, self.traits.causal)
        # A kernel argument needs no register. The cap is the first of the epilogues' arguments.
        scale_log2 = self.epilogues.scale_log2(score_args[0] if self.traits.softcap else softmax_scale)
        tensors = (mQ, mK, mV, mDO, mLSElog2, mMinusD, mDQaccum, mDK, mDV)
        scalars = (softmax_scale, scale_log2, schedule.split_stride, nheads, HeadSplits.make(mQ, mK, mDK))
        rows = seqlens.max_seqlen_k if self.traits.varlen else mK.shape[1]
        # Launches run one after the other, so additions to the same accumulator have a fixed order.
        for skipped in cutlass.range(
            0, cute.ceil_div(rows, self.tile.tile_n), order.num_splits.divisor, unroll=1
        ):
            params = BackwardParams(*tensors, seqlens, *scalars, score_args, order, skipped, scales)
            self.kernel(params).launch(
                grid=[order.blocks, self.tile.parts(self.traits), 1],
                block=[self.tile.num_threads, 1, 1],
                stream=stream,
                min_blocks_per_mp=1,  # or ptxas may halve the registers, and spill, for a second block
            )

    # ---- device ----

    @cute.kernel
    def kernel(self, params: BackwardParams) -> None:
        # Keys beyond seqused_k have gradients too: zeros.
        seqlens, scales, key_tile = params.seqlens, params.scales, params.key_tile(cute.arch.block_idx()[0])
        key0 = params.first_key(key_tile, self.tile.tile_n)
        exists = key0 < existing_rows(seqlens.cu_seqlens_k, params.mK, key_tile.batch)
        if cutlass.const_expr(scales is not None):
            exists = exists & (all_fit(scales) == self.tile.in_terms)
        if exists:
            if cutlass.const_expr(self.tile.columns):
                Streamed(self).run(params, key_tile, key0)
            else:
                smem = self.shared_memory()
                strides = {"rows_q": params.mQ.stride[-3], "rows_do": params.mDO.stride[-3]}
                smem.spill(block=cute.arch.block_idx()[0], **strides)
                if cutlass.const_expr(self.tile.in_terms):
                    smem.scales.store(scales)  # type: ignore[union-attr]
                gradients = self.key_block(params, key_tile, key0, smem)
                key_tile = key_tile_of(params.order, seqlens, smem.reload_int("block"))
                key0 = params.first_key(key_tile, self.tile.tile_n)
                self.store(params, gradients, key_tile, key0, smem)

    @cute.jit
    def key_block(
        self, params: BackwardParams, key_tile: KeyTiles, key0: Int32, smem: BackwardSm80Storage
    ) -> Gradients:
        """Compute dK and dV of the key block at ``key0``, without constant factors; add its dS K to dQ."""
        traits, tile, chain, seqlens = self.traits, self.tile, self.epilogues, params.seqlens
        thread, _, _ = cute.arch.thread_idx()
        operands = self.operands(smem, thread)
        heads = params.query_heads(key_tile)
        self.load_keys(params.mK, smem.k, traits.head_dim, key_tile, heads.head_kv, key0, thread)
        self.load_keys(params.mV, smem.v, traits.head_dim_v, key_tile, heads.head_kv, key0, thread)
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(tile.v_in_regs):
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier()
            operands.v.load_all()  # type: ignore[union-attr]
            cute.arch.barrier()
        gradients = self.zero_gradients(operands.mma_dkv, thread)
        for head in cutlass.range(heads.first, heads.end, unroll=1):
            state = chain.begin(params.score_args, self.score_context(params, key_tile, head))
            # Values computed from key0 itself would stay in registers for all heads. After a shuffle ptxas assumes that
            # lanes leave the loop over query blocks at different times, and generates the code behind it twice.
            key = rematerialize_each(key0, head)
            blocks = BlockRange.of_keys(
                state.band, key, key + tile.tile_n, key_tile.info.seqlen_q, tile.tile_m
            )
            queries = key_tile.queries_of(head) if traits.varlen else key_tile
            row0 = padded_row0(seqlens, queries.info, queries.batch, tile.tile_m)
            dq_blocks = params.dq_blocks(queries, head, row0, padded(traits.head_dim), traits.varlen)
            load_q, load_do = self.query_loads(params, smem, queries, head, row0, thread)
            ctx = MainloopContext(
                *(smem, operands, gradients, load_q, load_do, blocks, state, dq_blocks, key0),
                *(params.scale_log2, thread),
            )
            self.main_loop(ctx)
        # dK and dV reuse shared memory: all copies and reads have to be complete.
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        return gradients

    def score_context(self, params: BackwardParams, key_tile: KeyTiles, head: Int32) -> ScoreContext:
        """The epilogues' context for a query head and the sequence of ``key_tile``."""
        return self.epilogues.context(
            params.score_args, params.seqlens, key_tile.info, key_tile.batch, head, params.nheads,
            params.softmax_scale,
        )  # fmt: skip

    # ---- dK and dV ----

    def zero_gradients(self, mma_dkv: cute.TiledMma, thread: Int32) -> Gradients:
        """Accumulators of dK and dV, filled with zeros before the first query block."""
        dk, dv = (
            cute.make_rmem_tensor(
                mma_dkv.get_slice(thread).partition_shape_C((self.tile.tile_n, padded(dim))), Float32
            )
            for dim in (self.traits.head_dim, self.traits.head_dim_v)
        )
        dk.fill(0.0)
        dv.fill(0.0)
        return Gradients(dk, dv)

    @cute.jit
    def store(
        self,
        params: BackwardParams,
        gradients: Gradients,
        key_tile: KeyTiles,
        key0: Int32,
        smem: BackwardSm80Storage,
    ) -> None:
        """Store dK and dV times their constant factors, for the keys within the sequence's memory."""
        traits, scale = self.traits, params.softmax_scale
        thread, _, _ = cute.arch.thread_idx()
        rescale = self.score_context(params, key_tile, key_tile.head_dkv).gradient_scale
        keys = existing_rows(params.seqlens.cu_seqlens_k, params.mK, key_tile.batch) - key0
        mma_dkv = self.mma_dkv()
        of_dk, of_dv = gradient_factors(smem.scales, scale * rescale, rescale, thread)
        self.stage_gradient(gradients.dk, of_dk, mma_dkv, smem.dk, thread)
        self.stage_gradient(gradients.dv, of_dv, mma_dkv, smem.dv, thread)
        cute.arch.barrier()
        self.store_gradient(smem.dk, params.mDK, traits.head_dim, key_tile, key0, keys, thread)
        self.store_gradient(smem.dv, params.mDV, traits.head_dim_v, key_tile, key0, keys, thread)

    @cute.jit
    def stage_gradient(
        self, acc: cute.Tensor, factor: Float32, mma_dkv: cute.TiledMma, s: cute.Tensor, thread: Int32
    ) -> None:
        """Write acc * factor to shared memory, in the gradients' dtype."""
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * factor
        self.products.result(mma_dkv, s, thread).store((self.rounded(acc),))

    @cute.jit
    def store_gradient(
        self,
        s: cute.Tensor,
        m: cute.Tensor,
        head_dim: int,
        key_tile: KeyTiles,
        key0: Int32,
        keys: Int32,
        thread: Int32,
    ) -> None:
        """Store dK or dV from shared to global memory, in vectors of 16 bytes."""
        tile_n, cols = self.tile.tile_n, padded(head_dim)
        g = sequence(m, key_tile.batch, key_tile.head_dkv, key_tile.info.offset_k, self.traits.varlen)
        tile = block_of_rows(g, key0 // tile_n, tile_n, cols)
        RowCopy(self.gmem_copy(head_dim, False), thread, cols, head_dim).copy(s, tile, keys, False)

    # ---- shared memory and loads ----

    def shared_memory(self) -> BackwardSm80Storage:
        """The areas of shared memory as tensors."""
        tile, areas = self.tile, self.tile.smem_areas(self.traits)
        d, dv = padded(self.traits.head_dim), padded(self.traits.head_dim_v)
        base = memory.SmemAllocator().allocate(tile.smem_bytes(self.traits), byte_alignment=1024)

        def area(name: str, layout: Any, dtype: Any = self.operand_dtype) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + areas[name][0], dtype=dtype), layout)

        plane, terms = self.products.scores_plane, self.products.stored_terms

        def stages(number: int) -> int:
            return tile.subtiles * number * terms

        return BackwardSm80Storage(
            k=area("k", self.smem_layout(tile.tile_n, d, terms)),
            v=area("v", self.smem_layout(tile.tile_n, dv, terms)),
            q=area("q", self.smem_layout(tile.queries, d, stages(tile.stages_q))),
            do=area("do", self.smem_layout(tile.queries, dv, stages(tile.stages_do))),
            p=None if tile.p_in_regs else area("p", self.smem_layout(tile.tile_m, tile.tile_n, terms)),
            ds=area("ds", self.smem_layout(*plane, terms)),
            lse=area("lse", cute.make_layout((tile.tile_m, tile.stages_q)), Float32),
            minus_d=area("minus_d", cute.make_layout((tile.tile_m, tile.stages_do)), Float32),
            dk=area("dk", self.gradient_layout(d), self.dtype),
            dv=area("dv", self.gradient_layout(dv), self.dtype),
            spilled=area("spilled", cute.make_layout(len(SPILLED)), Int64),
            scales=self.scale_storage(area),
        )

    def scale_storage(self, area: Any) -> ScaleStorage | None:
        """Shared memory for operands in terms; area: see ``ScaleStorage.make``."""
        tile = self.tile
        subtiles = tile.subtiles if self.products.one_term else 0
        return ScaleStorage.make(area, tile.num_warps, subtiles) if tile.in_terms else None

    @cute.jit
    def load_keys(
        self,
        m: cute.Tensor,
        s: cute.Tensor,
        head_dim: int,
        key_tile: KeyTiles,
        head_kv: Int32,
        key0: Int32,
        thread: Int32,
    ) -> None:
        """Start loading a block of K or V; keys out of the sequence's bounds become zeros."""
        tile_n, cols = self.tile.tile_n, padded(head_dim)
        g = sequence(m, key_tile.batch, head_kv, key_tile.info.offset_k, self.traits.varlen)
        columns = self.products.loaded_columns(head_dim)
        row_copy = RowCopy(self.gmem_copy(head_dim, True), thread, cols, columns)
        for term in cutlass.range_constexpr(self.products.stored_terms):
            tile = block_of_rows(term_of(g, term, cols), key0 // tile_n, tile_n, cols)
            row_copy.copy(tile, s[None, None, term], key_tile.info.seqlen_k - key0, False)

    def query_loads(
        self,
        params: BackwardParams,
        smem: BackwardSm80Storage,
        key_tile: KeyTiles,
        head: Int32,
        row0: Int32,
        thread: Int32,
    ) -> tuple[BlockLoad, BlockLoad]:
        """The loads of one head's Q with LSE, and dO with D."""
        varlen = self.traits.varlen

        def load(m, head_dim, s, stride, m_row, s_row):
            g = sequence(m, key_tile.batch, head, key_tile.info.offset_q, varlen)
            g_row = workspace_rows(m_row, key_tile.batch, head, row0, 1, varlen)
            seqlen, threads = key_tile.info.seqlen_q, self.tile.num_threads
            columns = self.products.loaded_columns(head_dim)
            tensors = (g, columns, s, smem.number(stride), g_row, s_row)
            return BlockLoad(*tensors, seqlen, thread, threads, self.products.stored_terms)

        return (
            load(params.mQ, self.traits.head_dim, smem.q, "rows_q", params.mLSElog2, smem.lse),
            load(params.mDO, self.traits.head_dim_v, smem.do, "rows_do", params.mMinusD, smem.minus_d),
        )

    # ---- the main loop ----

    @cute.jit
    def main_loop(self, ctx: MainloopContext) -> None:
        """Process all query blocks of one query head."""
        blocks = ctx.blocks
        if blocks.begin < blocks.end:
            # Other warps may still read the previous head's data in shared memory.
            cute.arch.barrier()
            band = ctx.state.band
            ctx.smem.spill(dq=ctx.dq_blocks.toint(), **{name: getattr(band, name) for name in BAND})
            ctx.smem.spill(**{name: getattr(blocks, name) for name in BLOCKS})
            ctx.load_q.start(blocks.begin, self.stage(blocks.begin, self.tile.stages_q))
            ctx.load_do.start(blocks.begin, self.stage(blocks.begin, self.tile.stages_do))
            cute.arch.cp_async_commit_group()
            block, more = blocks.begin, Boolean(True)  # step's barrier lies between spill and reload
            while more:
                self.step(ctx, block)
                block += 1
                more = block < ctx.smem.reload_int("end")

    def stage(self, block: Int32, stages: int) -> Int32:
        return Int32(Uint32(block) % Uint32(stages)) if stages > 1 else Int32(0)

    @cute.jit
    def step(self, ctx: MainloopContext, block: Int32) -> None:
        tile = self.tile
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self.start_next(ctx, block, tile.stages_q == 2, tile.stages_do == 2)
        factors_ds = tuple(self.scores(ctx, block, subtile) for subtile in range(tile.subtiles))
        cute.arch.barrier()
        if cutlass.const_expr(tile.p_in_regs):
            self.start_next(ctx, block, tile.stages_q == 1, tile.stages_do == 1)
        else:
            self.multiply_dkv(ctx, block, factors_ds[0])
        self.add_dq(ctx, block, factors_ds)

    @cute.jit
    def multiply_dkv(self, ctx: MainloopContext, block: Int32, factor_ds: Float32) -> None:
        """dV += P^T dO and dK += dS^T Q, with P and dS from shared memory; factor_ds: undoes dS's scale."""
        tile, op, products, gradients = self.tile, ctx.operands, self.products, ctx.gradients
        unroll = products.steps_at_once(tile.tile_m, tile.dkv_unroll)
        stage, factor = self.stage(block, tile.stages_do), ctx.factor("dv")
        products.multiply(op.mma_dkv, gradients.dv, op.p_t, op.do_t, stage, unroll, factor=factor)
        if cutlass.const_expr(tile.stages_do == 1):
            cute.arch.barrier()
            self.start_next(ctx, block, False, True)
        stage, factor = self.stage(block, tile.stages_q), factor_ds * ctx.factor("q")
        products.multiply(op.mma_dkv, gradients.dk, op.ds_t, op.q_t, stage, unroll, factor=factor)
        if cutlass.const_expr(tile.stages_q == 1):
            cute.arch.barrier()
            self.start_next(ctx, block, True, False)

    @cute.jit
    def start_next(self, ctx: MainloopContext, block: Int32, q: Constexpr, do: Constexpr) -> None:
        """Start loading Q or dO of the next query block, if any."""
        block = block + 1
        if block < ctx.smem.reload_int("end"):
            if cutlass.const_expr(q):
                ctx.load_q.start(block, self.stage(block, self.tile.stages_q))
            if cutlass.const_expr(do):
                ctx.load_do.start(block, self.stage(block, self.tile.stages_do))
        if cutlass.const_expr(q or do):
            cute.arch.cp_async_commit_group()

    @cute.jit
    def scores(self, ctx: MainloopContext, block: Int32, subtile: Constexpr) -> Float32:
        """Compute P and dS of one query sub-tile; with ``p_in_regs``, also add their products to dV and dK.

        Returns the factor that undoes the scale of dS in terms; 1 for whole operands.
        """
        tile, op, chain = self.tile, ctx.operands, self.epilogues
        acc_s, ahead = self.multiply_qk(ctx, block, subtile)
        scores = self.score_tile(ctx, block, subtile, acc_s)
        saved = self.exponentiate(ctx, block, subtile, scores, ahead)
        stage_do = self.stage(optimization_barrier(block), tile.stages_do) * tile.subtiles + subtile
        acc_dp, minus_d = self.multiply_dov(ctx, block, subtile, stage_do)
        p, dp = self.rounded(acc_s), self.score_tile(ctx, block, subtile, acc_dp)
        chain.zero_dropped(ahead.dropped, self.by_rows(op, p))
        self.use_probabilities(ctx, self.products.operand_of_p(p), stage_do)
        chain.zero_dropped(ahead.dropped, dp.acc)
        score_gradient(scores.acc, dp.acc, minus_d)
        chain.backward(ctx.state, dp, saved)
        ds, factor = self.operand_of_ds(ctx, acc_dp, (ctx.gradients.dk,), ctx.thread_again, subtile)
        op.ds_out.store(ds, subtile * tile.queries)
        if cutlass.const_expr(tile.p_in_regs):
            stage_q = self.stage(optimization_barrier(block), tile.stages_q) * tile.subtiles + subtile
            of_dk = factor * ctx.factor("q")
            self.products.multiply_scores(op.mma_dkv, ctx.gradients.dk, ds, op.q_t, stage_q, of_dk)
        return factor

    def multiply_qk(self, ctx: MainloopContext, block: Int32, subtile: int) -> tuple[cute.Tensor, ReadAhead]:
        """Compute S = Q K^T; also returns the values that are computed and read before S."""
        tile, op, products = self.tile, ctx.operands, self.products
        stage_q = self.stage(block, tile.stages_q) * tile.subtiles + subtile
        acc_s = self.scores_accumulator(op)
        acc_s.fill(0.0)
        ahead = self.read_ahead(ctx.state, lambda: self.score_tile(ctx, block, subtile, acc_s))
        unroll = products.steps_at_once(padded(self.traits.head_dim), tile.sdp_unroll)
        if tile.p_in_regs:
            products.multiply(op.mma_sdp, acc_s, op.k, op.q, stage_q, unroll, factor=ctx.factor("s"))
        else:
            products.multiply(op.mma_sdp, acc_s, op.q, op.k, Int32(0), unroll, stage_q, ctx.factor("s"))
        products.to_units(acc_s, ctx.factor("s"))
        return acc_s, ahead

    def read_ahead(self, state: ScoreState, score_tile: Callable[[], ScoreTile]) -> ReadAhead:
        """Compute the dropout mask, while few registers are live, and load the modifiers' inputs from global memory.

        score_tile: makes the tile that will hold the scores.
        """
        chain = self.epilogues
        dropped = chain.dropout_mask(state, score_tile()) if self.traits.dropout else ()
        return ReadAhead(dropped, chain.load(state, score_tile()) if chain.modifiers else ())

    @cute.jit
    def exponentiate(
        self, ctx: Any, block: Int32, subtile: Constexpr, scores: ScoreTile, ahead: ReadAhead
    ) -> tuple:
        """Turn S into P: apply the epilogues, the mask if its edge crosses the block, and exp(S - LSE).

        Returns the values that the epilogues' derivatives need.
        """
        chain = self.epilogues
        saved = chain.forward(ctx.state, scores, ahead.loaded, False)
        full_begin, full_end = ctx.full_blocks()
        if (block < full_begin) | (block >= full_end):
            chain.mask.forward(ctx.band(), scores)
        lse = self.row_numbers(ctx, block, subtile, ctx.smem.lse)
        visible_keys = (lambda query: ctx.band().visible_keys(query)) if chain.may_be_large else None
        probabilities(scores, lse, ctx.scale_log2, visible_keys)
        return saved

    def multiply_dov(
        self, ctx: MainloopContext, block: Int32, subtile: int, stage: Int32
    ) -> tuple[cute.Tensor, cute.Tensor | None]:
        """Compute dP = dO V^T; also returns -D of the thread's rows, or None if the accumulator has started from -D."""
        op = ctx.operands
        # Dropout zeroes elements of dP, not of D; and one term's dP is scaled.
        apart = bool(self.traits.dropout) or self.products.one_term
        minus_d = None if apart else self.row_numbers(ctx, block, subtile, ctx.smem.minus_d)
        acc = self.scores_accumulator(op)
        if minus_d is None:
            acc.fill(0.0)
        else:
            start_from(self.by_rows(op, acc), minus_d)
        factor = ctx.factor("dp")
        self.products.multiply_by_v(acc, op, stage, factor)
        self.products.to_units(acc, factor)
        return acc, self.row_numbers(ctx, block, subtile, ctx.smem.minus_d) if apart else None

    def use_probabilities(self, ctx: MainloopContext, p: Terms, stage_do: Int32) -> None:
        """Store P to shared memory for dV, or with ``p_in_regs`` add its product with dO to dV."""
        op = ctx.operands
        if op.p_out is not None:
            op.p_out.store(p)
        else:
            of_dv = ctx.factor("dv")
            self.products.multiply_scores(op.mma_dkv, ctx.gradients.dv, p, op.do_t, stage_do, of_dv)

    def operand_of_ds(
        self, ctx: Any, acc_dp: cute.Tensor, dk: Any, thread: Callable[[], Int32], subtile: int = 0
    ) -> tuple[Terms, Float32]:
        """dS as stored for dK and dQ, and a factor that undoes its scale; dk: accumulators, rescaled with one term."""
        if not self.tile.in_terms:
            return (self.rounded(acc_dp),), Float32(1.0)
        scale, factor = self.gradient_scale(ctx.smem.scales, acc_dp, dk, thread(), subtile)
        return self.products.in_terms(acc_dp, scale), factor

    def rounded(self, acc: cute.Tensor) -> cute.Tensor:
        """An accumulator converted to the gradients' dtype."""
        fragment = cute.make_rmem_tensor_like(acc, self.dtype)
        fragment.store(acc.load().to(self.dtype))
        return fragment

    def scores_accumulator(self, op: Operands) -> cute.Tensor:
        """Registers for the scores of a sub-tile of the queries, or for their gradients."""
        return cute.make_rmem_tensor(
            op.mma_sdp.get_slice(0).partition_shape_C(self.products.scores_shape), Float32
        )

    @cute.jit
    def gradient_scale(
        self, scales: ScaleStorage, ds: cute.Tensor, dk: Constexpr, thread: Int32, subtile: Constexpr = 0
    ) -> tuple[Float32, Float32]:
        """The power of two by which dS is scaled when split, and its inverse. With one term, also rescale dK."""
        if cutlass.const_expr(self.products.one_term):
            scale, inverse, change = running_scale(ds, scales.largest, scales.applied, thread, subtile)
            for acc in dk:
                change_units(acc, change)
        else:
            scale, inverse = common_scale(ds, scales.largest, thread)
        return scale, inverse

    def score_tile(self, ctx: MainloopContext, block: Int32, subtile: int, acc: cute.Tensor) -> ScoreTile:
        """An accumulator of scores with the query and key indices of its elements."""
        tile = self.tile
        return self.score_map(ctx).tile(acc, block * tile.tile_m + subtile * tile.queries, ctx.key0)

    def score_map(self, ctx: MainloopContext) -> ScoreMap:
        """The map of a sub-tile's scores that the thread holds."""
        tile, thread = self.tile, ctx.thread_again()
        return ScoreMap.make(ctx.operands.mma_sdp, tile.queries, tile.tile_n, thread, tile.p_in_regs)

    def by_rows(self, op: Operands, p: cute.Tensor) -> cute.Tensor:
        """A (rows, cols) view of ``p``, laid out as the scores' accumulator."""
        modes = layouts.row_col_modes(op.mma_sdp, *self.products.scores_shape, self.tile.p_in_regs)
        return layouts.row_col_view(p, modes)

    def row_numbers(
        self, ctx: MainloopContext, block: Int32, subtile: int, s_row: cute.Tensor
    ) -> cute.Tensor:
        """LSE or D of the thread's rows, from shared memory."""
        tile, score_map = self.tile, self.score_map(ctx)
        rows = score_map.modes.rows
        stage = self.stage(optimization_barrier(block), cute.size(s_row, mode=[1]))
        numbers = cute.make_rmem_tensor(cute.make_layout(len(rows)), Float32)
        mine = s_row.iterator + (stage * tile.tile_m + score_map.thr_row)
        for r, row in enumerate(rows):
            numbers[r] = cute.make_tensor(mine + (subtile * tile.queries + row), cute.make_layout(1))[0]
        return numbers

    @cute.jit
    def add_dq(self, ctx: MainloopContext, block: Int32, factors: tuple[Float32, ...]) -> None:
        """Add dS K of this key block to the query block's dQ in global memory; factors: undo dS's scales."""
        tile, op = self.tile, ctx.operands
        floats = dq.block_floats(self.traits, tile)
        unroll = self.products.steps_at_once(tile.tile_n, tile.dq_unroll)
        for index in cutlass.range_constexpr(tile.dq_passes):
            acc = dq.make_accumulator(op.mma_dq, self.traits, tile)
            acc.fill(0.0)
            of_k = ctx.factor("k")
            self.products.multiply(
                op.mma_dq, acc, op.ds, op.k_ts[index], Int32(0), unroll, factor=factors[0] * of_k
            )
            if cutlass.const_expr(self.products.one_term):
                # The rows of a sub-tile are whole M modes of the accumulator.
                subtiles = cute.logical_divide(acc, (None, cute.size(acc, mode=[1]) // tile.subtiles, None))
                for subtile in cutlass.range_constexpr(tile.subtiles):
                    self.products.to_units(subtiles[None, (None, subtile), None], factors[subtile] * of_k)
            blocks = cute.make_ptr(
                Float32, ctx.smem.number("dq")[0], cute.AddressSpace.gmem, assumed_align=16
            )
            first = Int64(block) * floats
            if cutlass.const_expr(index > 0):
                first += index * (floats // tile.dq_passes)
            target = blocks + cute.assume(first, divby=4)
            add_fragment(acc, target, ctx.thread_again(), tile.dq_vector)
