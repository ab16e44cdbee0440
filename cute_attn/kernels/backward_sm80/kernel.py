"""The Ampere backward: gradients of attention with cp.async, ldmatrix and mma.sync. Runs on sm80, sm86, sm89 and sm90.

    S  = epilogues(softmax_scale * Q K^T)           (seqlen_q, seqlen_k), one tile at a time, in registers
    P  = exp(S - LSE)
    dP = dO V^T
    dS = epilogues'(P * (keep * dP - D))            D = rowsum(dO * O) of the preprocess
    dV = (keep * P)^T dO,  dK = dS^T Q,  dQ = dS K  constant factors are applied when results are stored

A CTA owns tile_n keys of one kv head. K and V stay in shared memory, dK and dV in registers. The mainloop runs over the
query blocks that see these keys, for every query head of the group:

    wait Q[i], dO[i]; start Q, dO[i + 1]
    S = Q K^T; P;  dP = dO V^T; dS                  P and dS in Q's type to shared memory
    dV += P^T dO; dK += dS^T Q
    dQ[i] += dS K                                   fp32 reductions into global memory

Dropout's mask is computed before S, when few registers are live, and kept as one bit an element.

With ``p_in_regs`` the scores are computed transposed and P and dS are the register operands of dV and dK: only dS goes
through shared memory, for dQ. Follows FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).

fp32 operands come in two fp16 parts, with P and dS split alike, for three products in fp16: see
:mod:`cute_attn.device.gemm_hi_lo`; in the precision tf32 in one: see :mod:`cute_attn.device.one_part`. Where they do
not fit their parts, they are multiplied in tf32, three products for one or one, and P and dS stay fp32: see
:mod:`cute_attn.device.gemm_fp32`. Large head dims
compute dQ in passes over its columns; where K, V, Q and dO do not fit shared memory, a tile with ``columns`` streams
them: see :mod:`cute_attn.kernels.backward_sm80.streamed`.

Limits: head dims up to 576, padded to multiples of 32, above 256 of 64, in shared memory and registers; rows 16-byte
aligned with a contiguous last dimension, or unaligned, of any strides, which are read by words or elements and written
by elements.
"""

import dataclasses
import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Float16, Float32, Int32, Int64, Uint32, cute, memory

import layouts
from cute_attn.device.band import Band
from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.device.gemm import below_1024
from cute_attn.device.gemm_hi_lo import P_EXPONENT, all_fit, common_scale
from cute_attn.device.math import optimization_barrier, rematerialize, rematerialize_each
from cute_attn.device.one_part import change_units, running_scale
from cute_attn.device.probabilities import probabilities, score_gradient, start_from
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.device.seqlen import Seqlens, existing_rows, padded_row0, sequence, workspace_rows
from cute_attn.device.unaligned_rows import UnalignedRows
from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.kernels.arguments import CUTE_DTYPES, backward_fake_args, plain_fake, rows_fake
from cute_attn.kernels.backward_sm80.gradients import Gradients, stage_gradient, store_gradient
from cute_attn.kernels.backward_sm80.heuristics import FIT_ALWAYS, PARTS_LEAST_FLOP, preferred_tiles
from cute_attn.kernels.backward_sm80.loads import BlockLoad, first_part, part_of
from cute_attn.kernels.backward_sm80.params import MainloopContext
from cute_attn.kernels.backward_sm80.products import Operands, Products
from cute_attn.kernels.backward_sm80.step import step_content
from cute_attn.kernels.backward_sm80.storage import (
    BAND,
    BLOCKS,
    SPILLED,
    BackwardSm80Storage,
    ScaleStorage,
    factor_of,
    gradient_factors,
)
from cute_attn.kernels.backward_sm80.streamed import Streamed
from cute_attn.kernels.backward_sm80.unaligned import finish_keys, first_cols, start_alike
from cute_attn.kernels.limits import beyond
from cute_attn.kernels.step import StepContent
from cute_attn.outputs import dq_order as dq
from cute_attn.outputs.accumulate import add_fragment
from cute_attn.tiles import BackwardSm80Tile, first_that_fits, padded
from cute_attn.traits import DTYPES, MAX_HEAD_DIM, Traits
from cute_attn.work.block_range import BlockRange
from cute_attn.work.key_tiles import BackwardSchedule, KeyTileOrder, KeyTiles, key_tile_of


@dataclass(frozen=True)
class BackwardSm80:
    """Main backward kernel of (traits, tile); call it to trace the host side, see ``__call__``."""

    traits: Traits
    tile: BackwardSm80Tile

    # ---- what it serves ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        if (traits.op, traits.arch) != ("backward", "sm80"):
            return f"it computes backward-sm80, not {traits.op}-{traits.arch}"
        multiple = 16 // traits.element_bytes
        reason = beyond(traits, dtypes=DTYPES, most=MAX_HEAD_DIM, multiple=multiple, unaligned=True)
        return reason or EpilogueChain.decline(traits)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> BackwardSm80Tile:
        """The tile if none is named."""
        tiles = preferred_tiles(traits, target)
        return first_that_fits(
            [*tiles, FIT_ALWAYS[0]] if traits.element_bytes == 2 else tiles, traits, target
        )

    def parts_pay(self, rows: int, seqlen_k: int) -> bool:
        """Whether a call is large enough for operands in parts; rows: queries of all heads and sequences."""
        dims = 3 * self.traits.head_dim + 2 * self.traits.head_dim_v
        return 2 * rows * seqlen_k * dims >= PARTS_LEAST_FLOP[self.traits.fp16_parts]

    def of_whole_operands(self, target: str) -> "BackwardSm80":
        """The kernel of the same traits with the default tile of whole fp32 operands."""
        tiles = [tile for tile in preferred_tiles(self.traits, target) if not tile.in_parts]
        return dataclasses.replace(self, tile=first_that_fits(tiles, self.traits, target))

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The score epilogues that the traits ask for."""
        return EpilogueChain.of(self.traits)

    def fake_args(self) -> tuple:
        """The arguments of ``__call__`` for compiling, without the stream."""
        args = backward_fake_args(self.traits, self.epilogues.fake_args())
        if self.tile.in_parts:
            ndim = 4 if self.traits.varlen else 5
            args = (*(rows_fake(Float16, ndim) for _ in range(4)), *args[4:])
        return (*args, plain_fake(Float32, 1) if self.tile.speculative else None)

    def score_args(self, inputs: ScoreInputs) -> tuple:
        """The epilogues' arguments of one launch."""
        return self.epilogues.host_args(inputs)

    def step_content(self) -> StepContent:
        """A step that needs no mask."""
        return step_content(self.traits, self.tile, self.products.each)

    # ---- layouts, copies and the MMAs: override one of these to experiment ----

    @property
    def dtype(self) -> Any:
        """Element type of the gradients, and of Q, K, V and dO unless they are parts."""
        return CUTE_DTYPES[self.traits.dtype]

    @property
    def operand_dtype(self) -> Any:
        """Element type of operands in shared memory."""
        return self.products.operand_dtype

    @property
    def num_parts(self) -> int:
        """Parts of an operand."""
        return self.traits.fp16_parts if self.tile.in_parts else 1

    def smem_layout(self, rows: int, cols: int, stages: int | None = 1) -> cute.ComposedLayout:
        """(rows, cols[, stages]) of operands in shared memory."""
        return layouts.smem_layout(rows, cols, self.operand_dtype, stages=stages)

    def gradient_layout(self, cols: int) -> cute.ComposedLayout:
        """(tile_n, cols) of dK or dV in shared memory."""
        return layouts.smem_layout(self.tile.tile_n, cols, self.dtype, stages=None)

    def gmem_copy(self, head_dim: int, asynchronous: bool) -> cute.TiledCopy:
        """Rows between global and shared memory: operands by cp.async, or gradients by stores, of 16 bytes."""
        dtype = self.operand_dtype if asynchronous else self.dtype
        return layouts.gmem_tiled_copy(
            dtype, self.tile.num_threads, padded(head_dim), asynchronous=asynchronous
        )

    @functools.cached_property
    def products(self) -> Products:
        """The five products."""
        return Products(self.traits, self.tile, self.dtype)

    def mma_sdp(self) -> cute.TiledMma:
        """S = Q K^T and dP = dO V^T, or with ``p_in_regs`` their transposes."""
        return self.products.mma_sdp()

    def mma_dkv(self) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q."""
        return self.products.mma_dkv()

    def mma_dq(self) -> cute.TiledMma:
        """dQ = dS K; the convert uses the same MMA."""
        return self.products.mma_dq()

    @property
    def scores_shape(self) -> tuple[int, int]:
        """(M, N) of a scores' accumulator."""
        return self.products.scores_shape

    def operands(self, smem: BackwardSm80Storage, thread: Int32) -> Operands:
        """All products' operands; those that are not K-major are transposed as they are read."""
        mmas = (self.mma_sdp(), self.mma_dkv(), self.mma_dq())
        return self.products.operands(mmas, smem, self.smem_layout, thread)

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mDO: cute.Tensor,
        mLSElog2: cute.Tensor,
        mMinusD: cute.Tensor,
        mDQaccum: cute.Tensor,
        mDK: cute.Tensor,
        mDV: cute.Tensor,
        seqlens: Seqlens,
        softmax_scale: Float32,
        schedule: BackwardSchedule,
        score_args: tuple,
        scales: cute.Tensor | None,
        stream: cuda.CUstream,
    ) -> None:
        """Launch. Shapes: see ``cute_attn.kernels.arguments``.

        With operands ``parts``, mQ, mK, mV and mDO are their parts, (..., parts, padded head dim) in fp16. scales: (4,)
        fp32, what the sums of the parts of each are times, or 0 for a tensor that does not fit its parts; or None.
        """
        if cutlass.const_expr(self.tile.in_parts):
            mQ, mK, mV, mDO = (first_part(m) for m in (mQ, mK, mV, mDO))
        nheads = mQ.shape[-2]
        heads = nheads // cutlass.max(mDK.shape[-2], 1)
        head_splits = cutlass.max(mDK.shape[-2] // cutlass.max(mK.shape[-2], 1), 1)
        head_bytes = Int64(seqlens.max_seqlen_q) * (4 * padded(self.traits.head_dim))
        order = KeyTileOrder.make(seqlens, mDK, schedule, head_bytes, self.tile.tile_n, self.traits.causal)
        # As an argument it takes no register. The cap is the first of the epilogues' arguments.
        scale_log2 = self.epilogues.scale_log2(score_args[0] if self.traits.softcap else softmax_scale)
        inputs = (mQ, mK, mV, mDO, mLSElog2, mMinusD)
        outputs = (mDQaccum, mDK, mDV)
        alike = start_alike(self, mQ, mDO, mK.shape[-2])
        scalars = (softmax_scale, scale_log2, schedule.split_stride, nheads, heads, head_splits, alike)
        rows = seqlens.max_seqlen_k if self.traits.varlen else mK.shape[1]
        # Launches run one after the other: their additions to the same accumulator come in a fixed order.
        for skipped in cutlass.range(
            0, cute.ceil_div(rows, self.tile.tile_n), order.num_splits.divisor, unroll=1
        ):
            self.kernel(inputs, outputs, seqlens, scalars, score_args, order, skipped, scales).launch(
                grid=[order.blocks, self.tile.parts(self.traits), 1],
                block=[self.tile.num_threads, 1, 1],
                stream=stream,
                min_blocks_per_mp=1,  # or ptxas may halve the registers, and spill, for a second block
            )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        inputs: tuple,
        outputs: tuple,
        seqlens: Seqlens,
        scalars: tuple,
        score_args: tuple,
        order: KeyTileOrder,
        skipped: Int32,
        scales: cute.Tensor | None,
    ) -> None:
        # Keys beyond seqused_k have gradients too: zeros.
        key_tile = key_tile_of(order, seqlens, optimization_barrier(cute.arch.block_idx()[0]))
        key0 = (key_tile.first + skipped) * self.tile.tile_n
        exists = key0 < existing_rows(seqlens.cu_seqlens_k, inputs[1], key_tile.batch)
        if cutlass.const_expr(scales is not None):
            exists = exists & (all_fit(scales) == self.tile.in_parts)
        if exists:
            if cutlass.const_expr(self.tile.columns):
                streamed = Streamed(self)
                streamed.run(inputs, outputs, seqlens, scalars, score_args, scales, key_tile, key0)
            else:
                smem = self.shared_memory()
                strides = {"rows_q": inputs[0].stride[-3], "rows_do": inputs[3].stride[-3]}
                smem.spill(block=cute.arch.block_idx()[0], **strides)
                if cutlass.const_expr(self.tile.in_parts):
                    smem.scales.store(scales)  # type: ignore[union-attr]
                gradients = self.key_block(
                    inputs, outputs, seqlens, scalars, score_args, key_tile, key0, smem
                )
                key_tile = key_tile_of(order, seqlens, smem.reload_int("block"))
                key0 = (key_tile.first + skipped) * self.tile.tile_n
                self.store(gradients, inputs, outputs, seqlens, scalars, score_args, key_tile, key0, smem)

    @cute.jit
    def key_block(
        self,
        inputs: tuple,
        outputs: tuple,
        seqlens: Seqlens,
        scalars: tuple,
        score_args: tuple,
        key_tile: KeyTiles,
        key0: Int32,
        smem: BackwardSm80Storage,
    ) -> Gradients:
        """dK and dV of the key block at ``key0``, without constant factors; adds its part of dQ to the accumulator."""
        traits, tile, chain = self.traits, self.tile, self.epilogues
        _, mK, mV, _, _, _ = inputs
        mDQaccum, _, _ = outputs
        softmax_scale, scale_log2, split_stride, nheads, heads, head_splits, alike = scalars
        thread, _, _ = cute.arch.thread_idx()
        operands = self.operands(smem, thread)
        head_kv = key_tile.head_dkv // head_splits
        self.load_keys(mK, smem.k, traits.head_dim, key_tile, head_kv, key0, thread)
        self.load_keys(mV, smem.v, traits.head_dim_v, key_tile, head_kv, key0, thread)
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(not self.products.loads_vectors):
            finish_keys(self, inputs, alike, (smem.k, smem.v), key_tile, (head_kv, heads), key0, thread)
        if cutlass.const_expr(tile.v_in_regs):
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier()
            operands.v.load_all()  # type: ignore[union-attr]
            cute.arch.barrier()
        gradients = Gradients.zeros(self, operands.mma_dkv, thread)
        head0 = key_tile.head_dkv * heads
        for head in cutlass.range(head0, head0 + heads, unroll=1):
            context = chain.context(
                score_args, seqlens, key_tile.info, key_tile.batch, head, nheads, softmax_scale
            )
            state = chain.begin(score_args, context)
            # What is computed from key0 itself would stay in registers for all heads. After a shuffle ptxas takes the
            # loop over query blocks for one that lanes may leave apart, and builds what follows twice.
            key = rematerialize_each(key0, head)
            blocks = BlockRange.of_keys(
                state.band, key, key + tile.tile_n, key_tile.info.seqlen_q, tile.tile_m
            )
            queries = key_tile.queries_of(head) if traits.varlen else key_tile
            row0 = padded_row0(seqlens, queries.info, queries.batch, tile.tile_m)
            accumulator = mDQaccum[0, None, None] if traits.varlen else mDQaccum[0, None, None, None]
            head_dq = workspace_rows(
                accumulator, queries.batch, head, row0, padded(traits.head_dim), traits.varlen
            )
            dq_blocks = head_dq.iterator + Int64(queries.first) * split_stride
            load_q, load_do = self.query_loads(inputs, smem, queries, head, row0, thread, alike)
            ctx = MainloopContext(
                smem, operands, gradients, load_q, load_do, blocks, state, dq_blocks, key0, scale_log2, thread
            )
            self.main_loop(ctx)
        # dK and dV reuse shared memory: all copies and reads have to be complete.
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        return gradients

    @cute.jit
    def store(
        self,
        gradients: Gradients,
        inputs: tuple,
        outputs: tuple,
        seqlens: Seqlens,
        scalars: tuple,
        score_args: tuple,
        key_tile: KeyTiles,
        key0: Int32,
        smem: BackwardSm80Storage,
    ) -> None:
        """Store dK and dV times their constant factors, for the keys within the sequence's memory."""
        _, mDK, mDV = outputs
        softmax_scale, _, _, nheads, heads, _, alike = scalars
        thread, _, _ = cute.arch.thread_idx()
        rescale = self.epilogues.context(
            score_args, seqlens, key_tile.info, key_tile.batch, key_tile.head_dkv, nheads, softmax_scale
        ).gradient_scale
        keys = existing_rows(seqlens.cu_seqlens_k, inputs[1], key_tile.batch) - key0
        mma_dkv = self.mma_dkv()
        of_dk, of_dv = gradient_factors(smem.scales, softmax_scale * rescale, rescale, thread)
        stage_gradient(self, gradients.dk, of_dk, mma_dkv, smem.dk, thread)
        stage_gradient(self, gradients.dv, of_dv, mma_dkv, smem.dv, thread)
        cute.arch.barrier()
        cols = first_cols(self, inputs, alike, key_tile, key_tile.head_dkv * heads)
        store_gradient(self, smem.dk, mDK, self.traits.head_dim, key_tile, key0, keys, thread, cols[0])
        store_gradient(self, smem.dv, mDV, self.traits.head_dim_v, key_tile, key0, keys, thread, cols[1])

    def shared_memory(self) -> BackwardSm80Storage:
        """The areas of shared memory as tensors."""
        tile, areas = self.tile, self.tile.smem_areas(self.traits)
        d, dv = padded(self.traits.head_dim), padded(self.traits.head_dim_v)
        base = memory.SmemAllocator().allocate(tile.smem_bytes(self.traits), byte_alignment=1024)

        def area(name: str, layout: Any, dtype: Any = self.operand_dtype) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + areas[name][0], dtype=dtype), layout)

        plane, parts = self.products.scores_plane, self.num_parts

        def stages(number: int) -> int:
            return tile.pieces * number * parts

        return BackwardSm80Storage(
            k=area("k", self.smem_layout(tile.tile_n, d, parts)),
            v=area("v", self.smem_layout(tile.tile_n, dv, parts)),
            q=area("q", self.smem_layout(tile.queries, d, stages(tile.stages_q))),
            do=area("do", self.smem_layout(tile.queries, dv, stages(tile.stages_do))),
            p=None if tile.p_in_regs else area("p", self.smem_layout(tile.tile_m, tile.tile_n, parts)),
            ds=area("ds", self.smem_layout(*plane, parts)),
            lse=area("lse", cute.make_layout((tile.tile_m, tile.stages_q)), Float32),
            minus_d=area("minus_d", cute.make_layout((tile.tile_m, tile.stages_do)), Float32),
            dk=area("dk", self.gradient_layout(d), self.dtype),
            dv=area("dv", self.gradient_layout(dv), self.dtype),
            spilled=area("spilled", cute.make_layout(len(SPILLED)), Int64),
            scales=self.scale_storage(area),
        )

    def scale_storage(self, area: Any) -> ScaleStorage | None:
        """What operands in parts need in shared memory; area: see ``ScaleStorage.make``."""
        tile = self.tile
        pieces = tile.pieces if self.products.in_one_part else 0
        return ScaleStorage.make(area, tile.num_warps, pieces) if tile.in_parts else None

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
        if cutlass.const_expr(not self.products.loads_vectors):
            rows = UnalignedRows(g, head_dim, thread, self.tile.num_threads)
            rows.start(s[None, None, 0], key0, key_tile.info.seqlen_k - key0, False)
        else:
            row_copy = RowCopy(
                self.gmem_copy(head_dim, True), thread, cols, self.products.loaded_columns(head_dim)
            )
            for part in cutlass.range_constexpr(self.num_parts):
                tile = block_of_rows(part_of(g, part, cols), key0 // tile_n, tile_n, cols)
                row_copy.copy(tile, s[None, None, part], key_tile.info.seqlen_k - key0, False)

    def query_loads(
        self,
        inputs: tuple,
        smem: BackwardSm80Storage,
        key_tile: KeyTiles,
        head: Int32,
        row0: Int32,
        thread: Int32,
        alike: tuple,
    ) -> tuple[BlockLoad, BlockLoad]:
        """Q with LSE, and dO with D, of one head."""
        mQ, _, _, mDO, mLSElog2, mMinusD = inputs
        varlen = self.traits.varlen

        def load(m, head_dim, s, stride, m_row, s_row, alike):
            g = sequence(m, key_tile.batch, head, key_tile.info.offset_q, varlen)
            g_row = workspace_rows(m_row, key_tile.batch, head, row0, 1, varlen)
            seqlen, threads = key_tile.info.seqlen_q, self.tile.num_threads
            columns, vectors = self.products.loaded_columns(head_dim), self.products.loads_vectors
            tensors = (g, vectors, columns, s, smem.number(stride), g_row, s_row)
            return BlockLoad(*tensors, seqlen, thread, threads, self.num_parts, alike)

        return (
            load(mQ, self.traits.head_dim, smem.q, "rows_q", mLSElog2, smem.lse, alike[0]),
            load(mDO, self.traits.head_dim_v, smem.do, "rows_do", mMinusD, smem.minus_d, alike[1]),
        )

    @cute.jit
    def main_loop(self, ctx: MainloopContext) -> None:
        """All query blocks of one query head."""
        blocks = ctx.blocks
        if blocks.begin < blocks.end:
            # Other warps may still read what the previous head left in shared memory.
            cute.arch.barrier()
            band = ctx.state.band
            ctx.smem.spill(dq=ctx.dq_blocks.toint(), **{name: getattr(band, name) for name in BAND})
            ctx.smem.spill(**{name: getattr(blocks, name) for name in BLOCKS})
            if cutlass.const_expr(not self.products.loads_vectors):
                ctx.smem.spill(rows_q=ctx.load_q.g.iterator.toint(), rows_do=ctx.load_do.g.iterator.toint())
            ctx.load_q.start(blocks.begin, self.stage(blocks.begin, self.tile.stages_q))
            ctx.load_do.start(blocks.begin, self.stage(blocks.begin, self.tile.stages_do))
            cute.arch.cp_async_commit_group()
            block, more = blocks.begin, Boolean(True)  # step's barrier lies between spill and reload
            while more:
                self.step(ctx, block)
                block += 1
                more = block < ctx.smem.reload_int("end")

    def stage(self, block: Int32, stages: int) -> Int32:
        """The pipeline stage of a query block."""
        return Int32(Uint32(block) % Uint32(stages)) if stages > 1 else Int32(0)

    @cute.jit
    def step(self, ctx: MainloopContext, block: Int32) -> None:
        """One query block."""
        tile, op = self.tile, ctx.operands
        cute.arch.cp_async_wait_group(0)
        if cutlass.const_expr(not self.products.loads_vectors):
            ctx.load_q.finish(block, self.stage(block, tile.stages_q))
            ctx.load_do.finish(block, self.stage(block, tile.stages_do))
        cute.arch.barrier()
        self.start_next(ctx, block, tile.stages_q == 2, tile.stages_do == 2)
        factors_ds = [self.scores(ctx, block, piece) for piece in range(tile.pieces)]  # in parts
        factor = factors_ds[0]
        cute.arch.barrier()
        if cutlass.const_expr(tile.p_in_regs):
            self.start_next(ctx, block, tile.stages_q == 1, tile.stages_do == 1)
        else:
            products, factors = self.products, partial(factor_of, ctx.smem.scales)
            unroll = products.steps_at_once(tile.tile_m, tile.dkv_unroll)
            stage_do = self.stage(block, tile.stages_do)
            products.multiply(
                op.mma_dkv, ctx.gradients.dv, op.p_t, op.do_t, stage_do, unroll, factor=factors("dv")
            )
            if cutlass.const_expr(tile.stages_do == 1):
                cute.arch.barrier()
                self.start_next(ctx, block, False, True)
            stage_q = self.stage(block, tile.stages_q)
            products.multiply(
                op.mma_dkv, ctx.gradients.dk, op.ds_t, op.q_t, stage_q, unroll, factor=factor * factors("q")
            )
            if cutlass.const_expr(tile.stages_q == 1):
                cute.arch.barrier()
                self.start_next(ctx, block, True, False)
        self.add_dq(ctx, block, tuple(factors_ds))

    @cute.jit
    def start_next(self, ctx: MainloopContext, block: Int32, q: Constexpr, do: Constexpr) -> None:
        """Start loading Q or dO of the next query block, if there is one."""
        block = block + 1
        if block < ctx.smem.reload_int("end"):
            if cutlass.const_expr(q):
                ctx.load_q.start(block, self.stage(block, self.tile.stages_q))
            if cutlass.const_expr(do):
                ctx.load_do.start(block, self.stage(block, self.tile.stages_do))
        if cutlass.const_expr(q or do):
            cute.arch.cp_async_commit_group()

    def band(self, ctx: MainloopContext) -> Band:
        """The mask's band, read again from where :meth:`spill` keeps it."""
        return dataclasses.replace(ctx.state.band, **{name: ctx.smem.reload_int(name) for name in BAND})

    @cute.jit
    def scores(self, ctx: MainloopContext, block: Int32, piece: Constexpr) -> Float32:
        """P and dS of one piece of the queries; with ``p_in_regs`` also its part of dV and dK.

        Returns what dS is times, if it is stored in parts.
        """
        tile, op, chain, traits = self.tile, ctx.operands, self.epilogues, self.traits
        products, factors = self.products, partial(factor_of, ctx.smem.scales)
        stage_q = self.stage(block, tile.stages_q) * tile.pieces + piece
        acc_s = cute.make_rmem_tensor(op.mma_sdp.get_slice(0).partition_shape_C(self.scores_shape), Float32)
        acc_s.fill(0.0)
        loaded, mask = (), ()
        if cutlass.const_expr(bool(traits.dropout)):  # while few registers are live
            mask = chain.dropout_mask(ctx.state, self.score_tile(ctx, block, piece, acc_s))
        if cutlass.const_expr(chain.modifiers):
            loaded = chain.load(ctx.state, self.score_tile(ctx, block, piece, acc_s))
        unroll = products.steps_at_once(padded(traits.head_dim), tile.sdp_unroll)
        if cutlass.const_expr(tile.p_in_regs):
            products.multiply(op.mma_sdp, acc_s, op.k, op.q, stage_q, unroll, factor=factors("s"))
        else:
            products.multiply(op.mma_sdp, acc_s, op.q, op.k, Int32(0), unroll, stage_q, factors("s"))
        products.to_units(acc_s, factors("s"))
        scores = self.score_tile(ctx, block, piece, acc_s)
        saved = chain.forward(ctx.state, scores, loaded, False)
        full_begin, full_end = ctx.smem.reload_int("full_begin"), ctx.smem.reload_int("full_end")
        if (block < full_begin) | (block >= full_end):
            chain.mask.forward(self.band(ctx), scores)
        lse = self.row_numbers(ctx, block, piece, ctx.smem.lse)
        visible_keys = (lambda query: self.band(ctx).visible_keys(query)) if chain.may_be_large else None
        probabilities(scores, lse, ctx.scale_log2, visible_keys)
        stage_do = self.stage(optimization_barrier(block), tile.stages_do) * tile.pieces + piece
        minus_d = None
        # Dropout zeroes elements of dP, not of D; and one part's dP is in other units.
        if cutlass.const_expr(bool(traits.dropout) or products.in_one_part):
            acc_dp = self.dp(ctx, stage_do, None)
            minus_d = self.row_numbers(ctx, block, piece, ctx.smem.minus_d)
        else:
            acc_dp = self.dp(ctx, stage_do, self.row_numbers(ctx, block, piece, ctx.smem.minus_d))
        p = cute.make_rmem_tensor_like(acc_s, self.dtype)
        p.store(acc_s.load().to(self.dtype))
        dp = self.score_tile(ctx, block, piece, acc_dp)
        chain.zero_dropped(mask, self.by_rows(op, p))
        if cutlass.const_expr(tile.in_parts):
            p = products.in_parts(p, Float32(2.0**P_EXPONENT))
        if cutlass.const_expr(op.p_out is None):
            products.multiply_scores(op.mma_dkv, ctx.gradients.dv, p, op.do_t, stage_do, factors("dv"))
        else:
            op.p_out.store(p)  # type: ignore[union-attr]
        chain.zero_dropped(mask, dp.acc)
        score_gradient(scores.acc, dp.acc, minus_d)
        chain.backward(ctx.state, dp, saved)
        factor = Float32(1.0)
        if cutlass.const_expr(tile.in_parts):
            thread = below_1024(rematerialize(ctx.thread))
            scale, factor = self.gradient_scale(ctx.smem.scales, acc_dp, (ctx.gradients.dk,), thread, piece)
            ds = products.in_parts(acc_dp, scale)
        else:
            ds = cute.make_rmem_tensor_like(acc_dp, self.dtype)
            ds.store(acc_dp.load().to(self.dtype))
        op.ds_out.store(ds, piece * tile.queries)
        if cutlass.const_expr(tile.p_in_regs):
            stage_q = self.stage(optimization_barrier(block), tile.stages_q) * tile.pieces + piece
            products.multiply_scores(op.mma_dkv, ctx.gradients.dk, ds, op.q_t, stage_q, factor * factors("q"))
        return factor

    @cute.jit
    def dp(self, ctx: MainloopContext, stage: Int32, start: cute.Tensor | None) -> cute.Tensor:
        """dP = dO V^T + start; ``start``: one number for each of the thread's rows, or None for 0."""
        op = ctx.operands
        acc = cute.make_rmem_tensor(op.mma_sdp.get_slice(0).partition_shape_C(self.scores_shape), Float32)
        if cutlass.const_expr(start is None):
            acc.fill(0.0)
        else:
            start_from(self.by_rows(op, acc), start)
        factor = factor_of(ctx.smem.scales, "dp")
        self.products.multiply_by_v(acc, op, stage, factor)
        self.products.to_units(acc, factor)
        return acc

    @cute.jit
    def gradient_scale(
        self, scales: ScaleStorage, ds: cute.Tensor, dk: Constexpr, thread: Int32, piece: Constexpr = 0
    ) -> tuple[Float32, Float32]:
        """The power of two that dS is split with, and its inverse; with one part dK is in units of it as well."""
        if cutlass.const_expr(self.products.in_one_part):
            scale, inverse, change = running_scale(ds, scales.largest, scales.applied, thread, piece)
            for acc in dk:
                change_units(acc, change)
        else:
            scale, inverse = common_scale(ds, scales.largest, thread)
        return scale, inverse

    def score_tile(self, ctx: MainloopContext, block: Int32, piece: int, acc: cute.Tensor) -> ScoreTile:
        """An accumulator of scores with the query and key indices of its elements."""
        tile = self.tile
        score_map = ScoreMap.make(
            ctx.operands.mma_sdp,
            tile.queries,
            tile.tile_n,
            below_1024(rematerialize(ctx.thread)),
            tile.p_in_regs,
        )
        return score_map.tile(acc, block * tile.tile_m + piece * tile.queries, ctx.key0)

    def by_rows(self, op: Operands, p: cute.Tensor) -> cute.Tensor:
        """A (rows, cols) view of ``p``, laid out as the scores' accumulator."""
        modes = layouts.row_col_modes(op.mma_sdp, *self.scores_shape, self.tile.p_in_regs)
        return layouts.row_col_view(p, modes)

    def row_numbers(self, ctx: MainloopContext, block: Int32, piece: int, s_row: cute.Tensor) -> cute.Tensor:
        """LSE or D of the thread's rows, from shared memory."""
        tile = self.tile
        score_map = ScoreMap.make(
            ctx.operands.mma_sdp,
            tile.queries,
            tile.tile_n,
            below_1024(rematerialize(ctx.thread)),
            tile.p_in_regs,
        )
        rows = score_map.modes.rows
        stage = self.stage(optimization_barrier(block), cute.size(s_row, mode=[1]))
        numbers = cute.make_rmem_tensor(cute.make_layout(len(rows)), Float32)
        mine = s_row.iterator + (stage * tile.tile_m + score_map.thr_row)
        for r, row in enumerate(rows):
            numbers[r] = cute.make_tensor(mine + (piece * tile.queries + row), cute.make_layout(1))[0]
        return numbers

    @cute.jit
    def add_dq(self, ctx: MainloopContext, block: Int32, factors: tuple[Float32, ...]) -> None:
        """Add dS K of this key block to the query block's dQ in global memory; factors: of dS in parts, by pieces."""
        tile, op = self.tile, ctx.operands
        floats = dq.block_floats(self.traits, tile)
        unroll = self.products.steps_at_once(tile.tile_n, tile.dq_unroll)
        for index in cutlass.range_constexpr(tile.dq_passes):
            acc = dq.make_accumulator(op.mma_dq, self.traits, tile)
            acc.fill(0.0)
            of_k = factor_of(ctx.smem.scales, "k")
            self.products.multiply(
                op.mma_dq, acc, op.ds, op.k_ts[index], Int32(0), unroll, factor=factors[0] * of_k
            )
            if cutlass.const_expr(self.products.in_one_part):
                # The rows of a piece are whole M modes of the accumulator.
                pieces = cute.logical_divide(acc, (None, cute.size(acc, mode=[1]) // tile.pieces, None))
                for piece in cutlass.range_constexpr(tile.pieces):
                    self.products.to_units(pieces[None, (None, piece), None], factors[piece] * of_k)
            blocks = cute.make_ptr(
                Float32, ctx.smem.number("dq")[0], cute.AddressSpace.gmem, assumed_align=16
            )
            first = Int64(block) * floats
            if cutlass.const_expr(index > 0):
                first += index * (floats // tile.dq_passes)
            target = blocks + cute.assume(first, divby=4)
            add_fragment(acc, target, below_1024(rematerialize(ctx.thread)), tile.dq_vector)
