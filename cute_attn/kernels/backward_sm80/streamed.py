"""The Ampere backward for large head dims: operands pass through shared memory in chunks of columns.

For its keys, a CTA computes some ``columns`` of dK and dV, and the same columns of dQ. The other columns belong to CTAs
along the grid's second dimension. All CTAs compute S and dP over all columns. For each query block:

    S  = Q K^T          chunk by chunk, Q and K through two stages of shared memory
    dP = dO V^T         likewise; then store P and dS to shared memory
    dV += P^T dO;  dK += dS^T Q;  dQ += dS K          chunk by chunk of the CTA's columns

A chunk is 128 bytes of a row, or 64 if a padded head dim is an odd multiple of 64 bytes. So shared memory does not
depend on the head dims, and registers depend on ``columns``: 64 x 64 scores and any head dim fit every target.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, cute, memory
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_attn.device.gemm import below_1024
from cute_attn.device.math import rematerialize, rematerialize_each
from cute_attn.device.probabilities import score_gradient
from cute_attn.device.score_tile import Band
from cute_attn.device.seqlen import existing_rows, padded_row0, sequence, workspace_rows
from cute_attn.epilogues.chain import ScoreState
from cute_attn.kernels import dq_order as dq
from cute_attn.kernels.backward_sm80.params import BackwardParams, HeadContext
from cute_attn.kernels.backward_sm80.products import Operands, Products
from cute_attn.kernels.backward_sm80.storage import BackwardSm80Storage, gradient_factors
from cute_attn.outputs.accumulate import add_fragment
from cute_attn.tiles import padded
from cute_attn.work.block_range import BlockRange
from cute_attn.work.key_tiles import KeyTiles


@dataclass(frozen=True)
class StreamedContext(HeadContext):
    """One query head of a CTA's key block."""

    smem: BackwardSm80Storage
    operands: Operands
    q: cute.Tensor  # (seqlen_q, head_dim) in global memory, as are the next ones
    do: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    lse: cute.Tensor  # of the padded rows
    minus_d: cute.Tensor
    dq: cute.Pointer
    state: ScoreState
    blocks: BlockRange
    seqlen_q: Int32
    seqlen_k: Int32
    key0: Int32
    part: Int32
    scale_log2: Float32
    thread: Int32

    def band(self) -> Band:
        return self.state.band

    def full_blocks(self) -> tuple[Int32, Int32]:
        """The query blocks [begin, end) that need no mask."""
        return self.blocks.full_begin, self.blocks.full_end


@dataclass(frozen=True)
class Streamed:
    """The device code of a ``BackwardSm80`` with ``columns`` in its tile."""

    kernel: Any

    @property
    def tile(self) -> Any:
        return self.kernel.tile

    @property
    def products(self) -> Products:
        return self.kernel.products

    @property
    def chunk(self) -> int:
        """Columns per chunk."""
        return self.tile.chunk(self.kernel.traits)

    @property
    def chunks(self) -> int:
        """Number of chunks in a CTA's columns."""
        return self.tile.columns // self.chunk

    def counts(self) -> tuple[int, int]:
        """Number of chunks in all columns of Q and K, and of V."""
        traits = self.kernel.traits
        return padded(traits.head_dim) // self.chunk, padded(traits.head_dim_v) // self.chunk

    # ---- shared memory ----

    def shared_memory(self) -> BackwardSm80Storage:
        """The areas of shared memory as tensors: two stages of chunks, in which Q and dO alternate, and K and V.

        dk and dv are one chunk, in the keys' memory. With operands in two terms, lo follows hi in each stage, and in P
        and dS.
        """
        tile, kernel = self.tile, self.kernel
        areas = tile.smem_areas(kernel.traits)
        base = memory.SmemAllocator().allocate(tile.smem_bytes(kernel.traits), byte_alignment=1024)

        def area(name: str, layout: Any, dtype: Any = kernel.operand_dtype) -> cute.Tensor:
            return cute.make_tensor(cute.recast_ptr(base + areas[name][0], dtype=dtype), layout)

        terms = kernel.products.stored_terms
        queries = area("queries", kernel.smem_layout(tile.tile_m, self.chunk, 2 * terms))
        keys = area("keys", kernel.smem_layout(tile.tile_n, self.chunk, 2 * terms))
        gradient = area("keys", kernel.gradient_layout(self.chunk), kernel.dtype)
        return BackwardSm80Storage(
            k=keys,
            v=keys,
            q=queries,
            do=queries,
            p=area("p", kernel.smem_layout(tile.tile_m, tile.tile_n, terms)),
            ds=area("ds", kernel.smem_layout(tile.tile_m, tile.tile_n, terms)),
            lse=area("lse", cute.make_layout((tile.tile_m, 1)), Float32),
            minus_d=area("minus_d", cute.make_layout((tile.tile_m, 1)), Float32),
            dk=gradient,
            dv=gradient,
            spilled=None,
            scales=kernel.scale_storage(area),
        )

    # ---- a CTA ----

    @cute.jit
    def run(self, params: BackwardParams, key_tile: KeyTiles, key0: Int32) -> None:
        """Compute and store the CTA's columns of its keys' dK and dV; add its dS K to dQ's accumulator."""
        kernel, tile, seqlens, varlen = self.kernel, self.tile, params.seqlens, self.kernel.traits.varlen
        thread, _, _ = cute.arch.thread_idx()
        part = cute.arch.make_warp_uniform(cute.arch.block_idx()[1])
        smem = self.shared_memory()
        operands = kernel.operands(smem, thread)
        if cutlass.const_expr(tile.in_terms):
            smem.scales.store(params.scales)  # type: ignore[union-attr]
        dk, dv = self.gradients(operands.mma_dkv), self.gradients(operands.mma_dkv)
        batch, info = key_tile.batch, key_tile.info
        heads = params.query_heads(key_tile)
        for head in cutlass.range(heads.first, heads.end, unroll=1):
            state = kernel.epilogues.begin(params.score_args, kernel.score_context(params, key_tile, head))
            key = rematerialize_each(key0, head)  # as in ``BackwardSm80.key_block``
            blocks = BlockRange.of_keys(state.band, key, key + tile.tile_n, info.seqlen_q, tile.tile_m)
            row0 = padded_row0(seqlens, info, batch, tile.tile_m)
            dq_blocks = params.dq_blocks(key_tile, head, row0, padded(kernel.traits.head_dim), varlen)
            ctx = StreamedContext(
                smem, operands, sequence(params.mQ, batch, head, info.offset_q, varlen),
                sequence(params.mDO, batch, head, info.offset_q, varlen),
                sequence(params.mK, batch, heads.head_kv, info.offset_k, varlen),
                sequence(params.mV, batch, heads.head_kv, info.offset_k, varlen),
                workspace_rows(params.mLSElog2, batch, head, row0, 1, varlen),
                workspace_rows(params.mMinusD, batch, head, row0, 1, varlen),
                dq_blocks, state, blocks, info.seqlen_q, info.seqlen_k, key0, part,
                params.scale_log2, thread,
            )  # fmt: skip
            for block in cutlass.range(blocks.begin, blocks.end, unroll=1):
                self.query_block(ctx, block, dk, dv)
        cute.arch.cp_async_wait_group(0)
        rescale = kernel.score_context(params, key_tile, key_tile.head_dkv).gradient_scale
        keys = existing_rows(seqlens.cu_seqlens_k, params.mK, batch) - key0
        of_dk, of_dv = gradient_factors(smem.scales, params.softmax_scale * rescale, rescale, thread)
        for gradient, m, factor in ((dk, params.mDK, of_dk), (dv, params.mDV, of_dv)):
            g = sequence(m, batch, key_tile.head_dkv, info.offset_k, varlen)
            self.store(gradient, factor, g, smem, key0, keys, part, thread)

    def gradients(self, mma_dkv: cute.TiledMma) -> list[cute.Tensor]:
        """An accumulator for each chunk of the CTA's columns, all zero."""
        shape = mma_dkv.get_slice(0).partition_shape_C((self.tile.tile_n, self.chunk))
        found = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.chunks)]
        for acc in found:
            acc.fill(0.0)
        return found

    # ---- a query block ----

    @cute.jit
    def query_block(self, ctx: StreamedContext, block: Int32, dk: Constexpr, dv: Constexpr) -> None:
        """Compute P and dS, and add their products with the CTA's columns to dV, dK and dQ."""
        tile, op, products = self.tile, ctx.operands, self.products
        of_qk, of_v = self.counts()
        cute.arch.barrier()  # other warps may still read the last block's chunks, P and dS
        self.load_statistics(ctx, block)
        self.start(ctx, block, Int32(0))
        shape = op.mma_sdp.get_slice(0).partition_shape_C((tile.tile_m, tile.tile_n))
        acc_s, acc_dp = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        acc_s.fill(0.0)
        acc_dp.fill(0.0)
        unroll = products.steps_at_once(self.chunk, tile.sdp_unroll)
        for t in cutlass.range(0, of_qk, unroll=1):
            self.wait_and_start(ctx, block, t)
            products.multiply(op.mma_sdp, acc_s, op.q, op.k, t % 2, unroll, t % 2, ctx.factor("s"))
        for t in cutlass.range(of_qk, of_qk + of_v, unroll=1):
            self.wait_and_start(ctx, block, t)
            products.multiply(op.mma_sdp, acc_dp, op.q, op.k, t % 2, unroll, t % 2, ctx.factor("dp"))
        products.to_units(acc_s, ctx.factor("s"))
        products.to_units(acc_dp, ctx.factor("dp"))
        factor = self.scores(ctx, block, acc_s, acc_dp, dk)
        for j in cutlass.range_constexpr(self.chunks):
            first = of_qk + of_v + 2 * j
            self.wait_and_start(ctx, block, Int32(first))
            along = products.steps_at_once(tile.tile_m, tile.dkv_unroll)
            stage = Int32(first % 2)
            products.multiply(op.mma_dkv, dv[j], op.p_t, op.q_t, stage, along, factor=ctx.factor("dv"))
            self.wait_and_start(ctx, block, Int32(first + 1))
            stage = Int32((first + 1) % 2)
            products.multiply(
                op.mma_dkv, dk[j], op.ds_t, op.q_t, stage, along, factor=factor * ctx.factor("q")
            )
            column = ctx.part * self.chunks + j
            if column < of_qk:
                self.add_dq(ctx, block, column, stage, factor * ctx.factor("k"))

    @cute.jit
    def wait_and_start(self, ctx: StreamedContext, block: Int32, t: Int32) -> None:
        """Wait for load ``t`` of a query block, and start the next load into the stage that was read before."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        of_qk, of_v = self.counts()
        if t + 1 < of_qk + of_v + 2 * self.chunks:
            self.start(ctx, block, t + 1)

    @cute.jit
    def start(self, ctx: StreamedContext, block: Int32, t: Int32) -> None:
        """Start load ``t`` of a query block. Loads: Q and K; dO and V; per chunk of the CTA, dO, then Q and K."""
        of_qk, of_v = self.counts()
        own = t - (of_qk + of_v)
        column = t
        if t >= of_qk:
            column = t - of_qk
        if own >= 0:
            column = ctx.part * self.chunks + own // 2
        of_do = (t >= of_qk) & ((own < 0) | (own % 2 == 0))
        col0, row0 = column * self.chunk, block * self.tile.tile_m
        for term in cutlass.range_constexpr(self.kernel.products.stored_terms):
            index = t % 2 * self.kernel.products.stored_terms + term
            queries, keys = (s[None, None, index] for s in (ctx.smem.q, ctx.smem.k))
            if of_do:
                self.load(ctx.do, term, row0, ctx.seqlen_q - row0, col0, queries, ctx.thread)
                if own < 0:
                    self.load(ctx.v, term, ctx.key0, ctx.seqlen_k - ctx.key0, col0, keys, ctx.thread)
            else:
                self.load(ctx.q, term, row0, ctx.seqlen_q - row0, col0, queries, ctx.thread)
                self.load(ctx.k, term, ctx.key0, ctx.seqlen_k - ctx.key0, col0, keys, ctx.thread)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load(
        self,
        g: cute.Tensor,
        term: Constexpr,
        row0: Int32,
        rows: Int32,
        col0: Int32,
        s: cute.Tensor,
        thread: Int32,
    ) -> None:
        """Start loading a chunk of a term; elements out of bounds become zeros, since 0 * NaN would be NaN."""
        if cutlass.const_expr(self.tile.in_terms):  # its derived values leave the products' registers free
            thread = below_1024(rematerialize(thread))
        length = 128 // s.element_type.width
        per_row = self.chunk // length
        step = self.tile.num_threads // per_row
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), s.element_type, num_bits_per_copy=128
        )
        row, col = thread // per_row, thread % per_row * length
        in_columns = col0 + col < g.shape[1]
        exists = cute.make_rmem_tensor(cute.make_layout((1, 1)), Boolean)
        for m in cutlass.range_constexpr(0, cute.size(s, mode=[0]), step):
            exists[0, 0] = in_columns & (row + m < rows)
            source = Int64(row0 + row + m) * g.stride[0] + Int64(col0 + col)
            if cutlass.const_expr(term > 0):
                source += term * g.shape[1]
            target = cute.crd2idx((row + m, col), s.layout)
            vector = cute.make_layout(((length, 1), 1))
            cute.copy(
                atom,
                cute.make_tensor(g.iterator + cute.assume(source, divby=length), vector),
                cute.make_tensor((s.iterator + target).align(16), vector),
                pred=exists,
            )

    @cute.jit
    def load_statistics(self, ctx: StreamedContext, block: Int32) -> None:
        """Load LSE and -D of a query block."""
        if ctx.thread < self.tile.tile_m:
            row = block * self.tile.tile_m + ctx.thread
            ctx.smem.lse[ctx.thread, 0] = ctx.lse[row]
            ctx.smem.minus_d[ctx.thread, 0] = ctx.minus_d[row]

    @cute.jit
    def scores(
        self, ctx: StreamedContext, block: Int32, acc_s: cute.Tensor, acc_dp: cute.Tensor, dk: Constexpr
    ) -> Float32:
        """Compute P and dS from S and dP, and store them to shared memory. Returns a factor that undoes dS's scale."""
        kernel, chain, op = self.kernel, self.kernel.epilogues, ctx.operands
        scores = kernel.score_tile(ctx, block, 0, acc_s)
        ahead = kernel.read_ahead(ctx.state, lambda: scores)
        saved = kernel.exponentiate(ctx, block, 0, scores, ahead)
        p, dp = kernel.rounded(acc_s), kernel.score_tile(ctx, block, 0, acc_dp)
        chain.zero_dropped(ahead.dropped, kernel.by_rows(op, p))
        op.p_out.store(self.products.operand_of_p(p))  # type: ignore[union-attr]
        chain.zero_dropped(ahead.dropped, dp.acc)
        score_gradient(scores.acc, dp.acc, kernel.row_numbers(ctx, block, 0, ctx.smem.minus_d))
        chain.backward(ctx.state, dp, saved, adds=ctx.part == 0)  # other CTAs have the same scores
        ds, factor = kernel.operand_of_ds(ctx, acc_dp, dk, lambda: ctx.thread)
        op.ds_out.store(ds)
        return factor

    @cute.jit
    def add_dq(
        self, ctx: StreamedContext, block: Int32, column: Int32, stage: Int32, factor: Float32
    ) -> None:
        """Add dS K of a chunk of columns to the query block's dQ in global memory; factor: undoes the terms' scales."""
        kernel, tile, op = self.kernel, self.tile, ctx.operands
        acc = dq.make_accumulator(op.mma_dq, kernel.traits, tile)
        acc.fill(0.0)
        unroll = self.products.steps_at_once(tile.tile_n, tile.dq_unroll)
        self.products.multiply(op.mma_dq, acc, op.ds, op.k_t, stage, unroll, factor=factor)
        self.products.to_units(acc, factor)
        floats = dq.block_floats(kernel.traits, tile)
        first = Int64(block) * floats + Int64(column) * (tile.tile_m * self.chunk)
        add_fragment(acc, ctx.dq + cute.assume(first, divby=4), ctx.thread, tile.dq_vector)

    @cute.jit
    def store(
        self,
        gradient: Constexpr,
        factor: Float32,
        g: cute.Tensor,
        smem: BackwardSm80Storage,
        key0: Int32,
        keys: Int32,
        part: Int32,
        thread: Int32,
    ) -> None:
        """Store the CTA's columns of dK or dV, chunk by chunk through shared memory."""
        kernel, tile = self.kernel, self.tile
        length: Constexpr = 16 // kernel.traits.element_bytes
        per_row: Constexpr = self.chunk // length
        s = smem.dk
        for j in cutlass.range_constexpr(self.chunks):
            cute.arch.barrier()  # the last chunk has been read
            kernel.stage_gradient(gradient[j], factor, kernel.mma_dkv(), s, thread)
            cute.arch.barrier()
            col0 = (part * self.chunks + j) * self.chunk
            left = g.shape[1] - col0
            vector = cute.make_rmem_tensor(cute.make_layout(length), kernel.dtype)
            for i in cutlass.range(thread, tile.tile_n * per_row, tile.num_threads, unroll=1):
                row, col = i // per_row, i % per_row * length
                if (row < keys) & (col < left):
                    offset = cute.assume(cute.crd2idx((row, col), s.layout), divby=length)
                    cute.autovec_copy(cute.make_tensor(s.iterator + offset, cute.make_layout(length)), vector)
                    first = Int64(key0 + row) * g.stride[0] + Int64(col0 + col)
                    target = g.iterator + cute.assume(first, divby=length)
                    cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(length)))
