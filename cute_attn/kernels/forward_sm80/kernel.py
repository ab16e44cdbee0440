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

A loop with masks visits the key blocks on the mask's edge, a loop without masks the others. Follows FlashAttention-2
(Dao 2023, https://arxiv.org/abs/2307.08691).

Above head dim 256 one warp cannot hold a row of O. There ``warps_n`` warps share rows: they divide the keys of a score
tile and the columns of V and O, and exchange row maxima, P, and once at the end row sums in shared memory:

    wait K[j]; start V[j]
    S = Q K[j]^T, epilogues; the warp's row maxima to shared memory
    wait V[j]; start K[j - 1]
    row maxima of all; P = exp(S - max), to shared memory
    barrier
    O = rescaled O + P V[j]

In fp32 both products are of tf32 terms, see ``cute_attn.device.gemm_terms``, or in large calls of fp16 ones, see
``cute_attn.kernels.fp32_sm80``.

Limits: head dims up to 576, padded in shared memory and registers; rows are multiples of 16 bytes, 16-byte aligned.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Constexpr, Float16, Float32, Int32, Int64, Uint32, cute, memory

import layouts
from cute_attn.device.copy import RowCopy
from cute_attn.device.gemm import SmemResult, gemm, gemm_rs
from cute_attn.device.math import add, fmax, optimization_barrier, quad_reduce, rematerialize
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.device.seqlen import Seqlens, sequence
from cute_attn.epilogues.chain import EpilogueChain, ScoreState
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels import fakes
from cute_attn.kernels.copies import Copies
from cute_attn.kernels.forward_sm80.few_rows import tile_for_lengths
from cute_attn.kernels.forward_sm80.heuristics import default_tile
from cute_attn.kernels.forward_sm80.key_groups import GroupResults, KeyGroup
from cute_attn.kernels.forward_sm80.loads import BlockLoad
from cute_attn.kernels.forward_sm80.products import Fp32Products, Products
from cute_attn.kernels.forward_sm80.storage import ForwardParams, MainloopContext, Operands, SharedMemory
from cute_attn.kernels.forward_sm80.warps_along_n import RowExchange
from cute_attn.kernels.limits import beyond
from cute_attn.kernels.step import StepContent, mma_sync_count, product_loop
from cute_attn.outputs.fp32_rows import store_vectors
from cute_attn.outputs.lse import store_lse
from cute_attn.tiles import ForwardSm80Tile, padded
from cute_attn.traits import DTYPES, MAX_HEAD_DIM, Traits, head_dim_multiple
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import ForwardSchedule, QueryGrid, QueryTile

TILES_OF_A_SECTION = 4
"""Work tiles in a section of heads, per multiprocessor. The last section starts with its longest tiles, and must have
enough short ones after them for all CTAs, two per multiprocessor."""


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
        return beyond(traits, dtypes=DTYPES, most=MAX_HEAD_DIM, multiple=head_dim_multiple(traits.dtype))

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ForwardSm80Tile:
        """The tile for calls that name none."""
        return default_tile(traits, target)

    def for_lengths(
        self,
        seqlen_q: int,
        seqlen_k: int,
        group: int,
        target: str = "sm80",
        pairs: int | None = None,
        window: int = 0,
    ) -> "ForwardSm80":
        """This kernel with the tile for sequences of at most these lengths, in place of its default tile.

        ``group``: query heads per key head. ``pairs``, of sequences and query heads, change nothing. In fp32 and for
        large head dims the default tile does not depend on lengths. A variant keeps its tile: layouts may differ.
        """
        traits = self.traits
        if self.single or self.tile.warps_n > 1 or traits.variant:
            return self
        tile = tile_for_lengths(traits, seqlen_q, group, self.tile, target)
        return dataclasses.replace(self, tile=tile)

    @functools.cached_property
    def epilogues(self) -> EpilogueChain:
        """The score epilogues that the traits ask for."""
        return EpilogueChain.of(self.traits, self.tile if self.can_visit_lists else None)

    @property
    def can_visit_lists(self) -> bool:
        """Plain forwards can skip blocks that a block list leaves out."""
        plain = (self.tile.pack_heads, self.tile.key_groups, self.tile.warps_n) == (1, 1, 1)
        return self.traits.op == "forward" and plain and not self.single

    def score_args(self, inputs: ScoreInputs) -> tuple:
        """The epilogues' arguments of one launch."""
        return self.epilogues.host_args(inputs)

    def step_content(self) -> StepContent:
        """A step of the unmasked loop; each of a thread's rows has one exponential more, the factor of O."""
        tile, d, dv = self.tile, padded(self.traits.head_dim), padded(self.traits.head_dim_v)
        warps = tile.num_warps * tile.key_groups
        products, depth = self.products.each, tile.mma_depth(self.traits)
        qk = products * mma_sync_count(tile.tile_m, tile.tile_n, d, warps, depth)
        pv = products * mma_sync_count(tile.tile_m, dv, tile.tile_n, warps, depth)
        elements, rows = tile.tile_m * tile.tile_n // tile.num_threads, tile.tile_m // (8 * tile.warps_m)
        loops = product_loop(qk, d // depth, self.unroll)
        exp2 = elements * (1 + self.traits.softcap) + rows
        return StepContent(qk + pv, exp2, elements, warps, () if tile.keeps_q else loops)

    # ---- layouts, copies and the MMA: override one of these to experiment ----

    @functools.cached_property
    def products(self) -> Products:
        """Both products, for the elements of Q, K and V."""
        return (Fp32Products if self.single else Products)(self.traits, self.tile)

    @property
    def dtype(self) -> Any:
        """Element type of Q, K and V in shared memory."""
        return self.products.dtype

    @property
    def row_widths(self) -> tuple[int, int]:
        """Elements of a row of Q and K, and of V, as they are loaded."""
        return self.traits.head_dim, self.traits.head_dim_v

    @property
    def single(self) -> bool:
        """fp32 elements in shared memory: products are of tf32 terms."""
        return self.traits.dtype == "fp32"

    @property
    def scores_may_be_large(self) -> bool:
        """The softmax then subtracts huge scores before it scales them: fp32 has inputs of any size."""
        return self.epilogues.may_be_large or (self.single and not self.traits.precision)

    @property
    def p_dtype(self) -> Any:
        """The type that P is rounded to; see :class:`OnlineSoftmax`. tf32 has as many bits as fp16."""
        if self.traits.dtype != "fp32":
            return self.dtype
        return Float16 if self.traits.precision else None

    @property
    def p_exponent(self) -> int:
        """P is times 2^p_exponent; see :class:`OnlineSoftmax`."""
        return 0

    @property
    def unroll(self) -> int:
        """Steps along head_dim that Q K^T reads at a time."""
        extent, tile = padded(self.traits.head_dim), self.tile
        return tile.steps_at_once(extent, tile.qk_unroll, 32 // tile.mma_depth(self.traits))

    @property
    def swizzle_bits(self) -> int | None:
        """log2 of the 16-byte vectors that a row is permuted over, or None for the widest swizzle."""
        return None if self.tile.swizzle_bits < 0 else self.tile.swizzle_bits

    def smem_layout(self, rows: int, head_dim: int, stages: int = 1) -> cute.ComposedLayout:
        """(rows, padded head_dim, stages) in shared memory."""
        return layouts.smem_layout(
            rows, padded(head_dim), self.dtype, stages=stages, swizzle_bits=self.swizzle_bits
        )

    def gmem_load(self, head_dim: int) -> cute.TiledCopy:
        """Global to shared memory, by the threads of a group: cp.async of 16 bytes."""
        return layouts.gmem_tiled_copy(
            self.dtype, self.tile.group_threads, padded(head_dim), asynchronous=True
        )

    def gmem_store(self, head_dim: int) -> cute.TiledCopy:
        """Shared to global memory, by the threads of a group: 16-byte stores."""
        return layouts.gmem_tiled_copy(
            self.dtype, self.tile.group_threads, padded(head_dim), asynchronous=False
        )

    def tiled_mma(self) -> cute.TiledMma:
        """MMA of both products, of a group: warps along the queries, and ``warps_n`` along keys and columns of V."""
        return layouts.tiled_mma_sm80(self.dtype, self.tile.num_warps, warps_n=self.tile.warps_n)

    def copies(self) -> Copies:
        """Q, K, V and O in shared memory, as the threads of a group move them."""
        tile, (d, dv), found = self.tile, self.row_widths, Copies(self, self.tile.group_threads)

        def area(name: str, rows: int, dim: int, stages: int = 1, groups: int = 1) -> Any:
            return found.area(name, (rows, padded(dim), stages), "smem_layout", rows, dim, stages, by=groups)

        q = area("q", tile.tile_m, d)
        k, v = (
            area(x, tile.group_keys, n, tile.num_stages, tile.key_groups) for x, n in (("k", d), ("v", dv))
        )
        o = area("o", tile.tile_m, dv)
        found.part("copy-gmem-to-smem", "gmem_load", self.traits.head_dim)
        found.part("copy-smem-to-gmem", "gmem_store", self.traits.head_dim_v)
        found.part("mma", "tiled_mma", warps_n=tile.warps_n)
        found.move("K by cp.async", "LDGSTS", lambda: self.gmem_load(d), k)
        found.move("V by cp.async", "LDGSTS", lambda: self.gmem_load(dv), v)
        found.ldmatrix("Q", "A", self.tiled_mma, q).ldmatrix("K", "B", self.tiled_mma, k)
        found.ldmatrix("V", "B", self.tiled_mma, v, transpose=True).store("O", self.tiled_mma, o)
        return found.move("O from shared memory", "LDS", lambda: self.gmem_store(dv), o, "src")

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.HeadRows,
        mV: fakes.HeadRows,
        mO: fakes.HeadRows,
        mLSE: fakes.RowNumbers,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.ForwardCounters,
        score_args: fakes.ScoreArgs,
        stream: cuda.CUstream,
    ) -> None:
        """Launch."""
        params = self.params((mQ, mK, mV, mO, mLSE), seqlens, softmax_scale, schedule, score_args)
        ctas = params.grid.tiles(seqlens.batch(mQ))
        self.kernel(params).launch(grid=[ctas, 1, 1], block=[self.tile.num_threads, 1, 1], stream=stream)

    def params(
        self,
        tensors: tuple,
        seqlens: Seqlens,
        softmax_scale: Float32,
        schedule: ForwardSchedule,
        score_args: tuple,
        scales: cute.Tensor | None = None,
    ) -> ForwardParams:
        """Parameters of a launch. tensors: mQ to mLSE; scales: see :mod:`cute_attn.kernels.fp32_sm80.kernel`."""
        mQ, mK, mV, mO, mLSE = tensors
        nheads, nheads_kv = (mQ.shape[1], mK.shape[1]) if self.traits.varlen else (mQ.shape[2], mK.shape[2])
        grid = self.query_grid(seqlens, seqlens.batch(mQ), nheads, nheads_kv, schedule)
        # A kernel argument needs no register. With softcap, score_args[0] is the cap.
        scale_log2 = self.epilogues.scale_log2(score_args[0] if self.traits.softcap else softmax_scale)
        own = (mQ, mK, mV, mO, mLSE, seqlens)
        return ForwardParams(*own, softmax_scale, score_args, scale_log2, grid, nheads, scales)

    def query_grid(
        self, seqlens: Seqlens, batch: Int32, nheads: Int32, nheads_kv: Int32, schedule: ForwardSchedule
    ) -> QueryGrid:
        """The work tiles in their order: longest first under a causal mask."""
        m_blocks = cute.ceil_div(seqlens.max_seqlen_q, self.tile.queries)
        grid = QueryGrid.make(m_blocks, nheads, nheads_kv, self.tile.pack_heads)
        if not self.traits.causal:
            return grid
        key_bytes = sum(self.row_widths) * self.dtype.width // 8
        return grid.longest_first(seqlens, batch, key_bytes, schedule.multiprocessors * TILES_OF_A_SECTION)

    # ---- device ----

    @cute.kernel
    def kernel(self, params: ForwardParams) -> None:
        self.run(params)

    @cute.jit
    def run(self, params: ForwardParams) -> None:
        """The CTA's work tile."""
        seqlens, score_args, mQ = params.seqlens, params.score_args, params.mQ
        group = KeyGroup.of(self.tile, cute.arch.thread_idx()[0])
        thread = group.thread
        tile = params.grid.tile(seqlens, self.tile.queries)
        row0, info = tile.row0, tile.info
        if row0 < info.seqlen_q:
            chain = self.epilogues
            q = sequence(mQ, tile.batch, tile.head, info.offset_q, self.traits.varlen)
            _, state = chain.begin_tile(params, tile, tile.head)
            end_row = cutlass.min(row0 + self.tile.queries, info.seqlen_q)
            blocks = chain.key_blocks(state, row0, end_row, self.tile.tile_n)
            shared = self.shared_memory(group)
            operands = self.products.operands(self.tiled_mma(), shared, thread, params.scales)
            width, width_v = self.row_widths
            load_k = self.block_load(params.mK, shared.k, width, tile, group)
            load_v = self.block_load(params.mV, shared.v, width_v, tile, group)
            ctx = self.mainloop_context(
                operands, load_k, load_v, blocks, state, row0, params.scale_log2, shared, group
            )
            self.load_queries(q, mQ, tile, ctx)
            self.main_loop(ctx)
            if cutlass.const_expr(self.tile.key_groups > 1):
                self.merge_groups(ctx)
            if group.is_first:
                tile = params.grid.tile(seqlens, self.tile.queries)
                self.finish(params.mO, params.mLSE, ctx, tile, score_args)

    def shared_memory(self, group: KeyGroup) -> SharedMemory:
        """All areas; each group has separate stages of K and V."""
        (d, dv), tile = self.row_widths, self.tile
        base = memory.SmemAllocator().allocate(tile.smem_bytes(self.traits), byte_alignment=1024)
        areas = tile.smem_areas(self.traits)

        def area(name: str, dtype: Any) -> cute.Pointer:
            return cute.recast_ptr(base + areas[name][0], dtype=dtype)

        def stages(name: str, head_dim: int) -> cute.Tensor:
            start, layout = (
                area(name, self.dtype),
                self.smem_layout(tile.group_keys, head_dim, tile.num_stages),
            )
            if tile.key_groups > 1:
                start += cute.assume(group.index * cute.cosize(layout), divby=512)
            return cute.make_tensor(start, layout)

        p, exchange = None, None
        if tile.warps_n > 1:
            columns = self.products.stored_terms * tile.tile_n
            p_layout = layouts.smem_layout(tile.tile_m, columns, self.dtype, stages=1)
            p = cute.make_tensor(area("p", self.dtype), p_layout)
            exchange = cute.make_tensor(
                area("exchange", Float32), cute.make_layout((tile.tile_m, tile.warps_n))
            )
        return SharedMemory(
            cute.make_tensor(area("q", self.dtype), self.smem_layout(tile.tile_m, d)),
            stages("k", d),
            stages("v", dv),
            cute.make_tensor(area("o", self.dtype), self.smem_layout(tile.tile_m, dv)),
            area("stats", Float32),
            area("merge", Float32),
            area("share", Int32),
            p,
            exchange,
        )

    def row_stats(self, stats: cute.Pointer, rows: int, thread: Int32) -> cute.Tensor:
        """This thread's row maxima and sums in shared memory, (rows, 2)."""
        threads = self.tile.num_threads
        layout = cute.make_layout((rows, 2, threads), stride=(1, rows * threads, rows))
        return cute.make_tensor(stats, layout)[None, None, thread]

    def block_load(
        self, m: cute.Tensor, s: cute.Tensor, head_dim: int, tile: QueryTile, group: KeyGroup
    ) -> BlockLoad:
        """The loads of one head's K or V."""
        g = sequence(m, tile.batch, tile.head_kv, tile.info.offset_k, self.traits.varlen)
        row_copy = RowCopy(self.gmem_load(head_dim), group.thread, padded(head_dim), head_dim)
        return BlockLoad(row_copy, g, s, tile.info.seqlen_k, group)

    def mainloop_context(
        self,
        operands: Operands,
        load_k: Any,
        load_v: Any,
        blocks: BlockRange,
        state: ScoreState,
        row0: Int32,
        scale_log2: Float32,
        shared: SharedMemory,
        group: KeyGroup,
    ) -> MainloopContext:
        """Before the first step: O is zero, row maxima are -inf, row sums are 0."""
        thread = group.thread
        tile, dv, tiled_mma = self.tile, padded(self.traits.head_dim_v), operands.tiled_mma
        acc_o = cute.make_rmem_tensor(
            tiled_mma.get_slice(thread).partition_shape_C((tile.tile_m, dv)), Float32
        )
        acc_o.fill(0.0)
        acc_o_rows = layouts.row_col_view(acc_o, layouts.row_col_modes(tiled_mma, tile.tile_m, dv))
        rows = cute.size(acc_o_rows, mode=[0])
        own_stats = self.row_stats(shared.stats, rows, thread) if tile.stats_in_smem else None
        softmax = OnlineSoftmax.make(
            rows,
            self.products.softmax_scale(operands, scale_log2),
            self.epilogues.may_mask_rows,
            own_stats,
            may_be_large=self.scores_may_be_large,
            p_exponent=self.p_exponent,
            p_dtype=self.p_dtype,
        )
        return MainloopContext(
            *(operands, load_k, load_v, blocks, state, group, thread, row0),
            *(softmax, shared, acc_o, acc_o_rows),
        )

    @cute.jit
    def load_queries(self, q: cute.Tensor, mQ: cute.Tensor, tile: QueryTile, ctx: MainloopContext) -> None:
        """Start loading Q, then the first key blocks; if K reuses Q's memory, wait and read Q before."""
        if ctx.group.is_first:
            d, _ = self.row_widths
            rows = (tile.info.seqlen_q - ctx.row0) * self.tile.pack_heads
            copy = self.row_copy(self.gmem_load(d), d, tile, ctx.thread)
            copy.copy(self.rows(q, mQ, d, ctx.row0), ctx.shared.q[None, None, 0], rows, False)
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.tile.share_qk_smem):
            self.read_queries(ctx, 0)
            cute.arch.barrier()
        self.start_loads(ctx)

    @cute.jit
    def read_queries(self, ctx: MainloopContext, later: Constexpr) -> None:
        """Wait for Q, with ``later`` loads committed after it, and read it if it is kept in registers."""
        cute.arch.cp_async_wait_group(later)
        cute.arch.barrier()
        if cutlass.const_expr(self.tile.keeps_q):
            ctx.operands.q.load_all()

    def row_copy(self, copy: cute.TiledCopy, dim: int, tile: QueryTile, thread: Int32) -> RowCopy:
        """A copy of a work tile's rows."""
        return RowCopy(copy, thread, padded(dim), dim, self.tile.pack_heads, tile.heads_left)

    @cute.jit
    def rows(self, head: cute.Tensor, tensor: cute.Tensor, dim: Constexpr, row0: Int32) -> cute.Tensor:
        """The rows of a work tile, as (tile_m, padded dim): each query's heads, then the next query.

        head: the tile's first head in ``tensor``, Q or O.
        """
        heads: Constexpr = self.tile.pack_heads
        if cutlass.const_expr(heads == 1):
            return cute.local_tile(head, (self.tile.tile_m, padded(dim)), (row0 // self.tile.tile_m, 0))
        step = head.stride[0]
        layout = cute.make_layout(
            ((heads, self.tile.queries), padded(dim)), stride=((tensor.stride[-2], step), 1)
        )
        return cute.make_tensor(head.iterator + cute.assume(Int64(row0) * step, divby=8), layout)

    # ---- the main loop ----

    @cute.jit
    def main_loop(self, ctx: MainloopContext) -> None:
        """All key blocks, last one first: masked at the right edge of the mask, unmasked, masked at its left edge."""
        blocks = ctx.blocks
        # A step's barrier is one of its group, and the first group has loaded Q for all.
        waits_for_q = self.tile.keeps_q or self.tile.key_groups > 1
        if cutlass.const_expr(waits_for_q and not self.tile.share_qk_smem):
            self.read_queries(ctx, max(self.tile.num_stages - 1, 1))
        block = self.steps(ctx, blocks.end - 1, blocks.full_end, True)
        block = self.steps(ctx, block, blocks.full_begin, False)
        if cutlass.const_expr(self.traits.windowed or self.traits.leftpad):
            self.steps(ctx, block, blocks.begin, True)
        # O reuses the shared memory of loads in flight.
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def start_loads(self, ctx: MainloopContext) -> None:
        """Prologue: K of the last block, or K and V of num_stages - 1 blocks."""
        last = ctx.blocks.end - 1
        if cutlass.const_expr(self.tile.num_stages == 1):
            if ctx.blocks.begin < ctx.blocks.end:
                self.find_pages(ctx, last)
                ctx.load_k.start(ctx.blocks.block(last), 0, False)
            cute.arch.cp_async_commit_group()
        else:
            for ahead in cutlass.range_constexpr(self.tile.num_stages - 1):
                if last - ahead >= ctx.blocks.begin:
                    stage = self.stage(last - ahead)
                    self.find_pages(ctx, last - ahead)
                    ctx.load_k.start(ctx.blocks.block(last - ahead), stage, False)
                    ctx.load_v.start(ctx.blocks.block(last - ahead), stage, False)
                cute.arch.cp_async_commit_group()
            if cutlass.const_expr(self.traits.paged):
                if last - (self.tile.num_stages - 1) >= ctx.blocks.begin:
                    self.find_pages(ctx, last - (self.tile.num_stages - 1))

    @property
    def all_but_first_whole(self) -> bool:
        """Blocks after the first visited one need no bounds check, except where lists order them."""
        return not self.epilogues.visits_lists

    def find_pages(self, ctx: MainloopContext, block: Int32) -> None:
        """In a paged cache read the page numbers of the block that is loaded next."""
        if self.traits.paged:
            ctx.load_k.find(block)
            if ctx.load_v.pages is not ctx.load_k.pages:
                ctx.load_v.find(block)

    @cute.jit
    def steps(self, ctx: MainloopContext, block: Int32, begin: Int32, masked: Constexpr) -> Int32:
        """Key blocks ``block`` down to ``begin``; returns the next one."""
        while block >= begin:
            if cutlass.const_expr(self.tile.warps_n > 1):
                self.step_sharing_rows(ctx, block, masked)
            elif cutlass.const_expr(self.tile.num_stages == 1):
                self.step_one_stage(ctx, block, masked)
            else:
                self.step_pipelined(ctx, block, masked)
            block -= 1
        return block

    @cute.jit
    def step_one_stage(self, ctx: MainloopContext, block: Int32, masked: Constexpr) -> None:
        """One key block; each load overlaps the other operand's product."""
        cute.arch.cp_async_wait_group(0)
        ctx.group.barrier()
        ctx.load_v.start(ctx.blocks.block(block), 0, not masked)
        cute.arch.cp_async_commit_group()
        acc_s, loaded = self.scores(ctx, block, Int32(0))
        cute.arch.cp_async_wait_group(0)
        ctx.group.barrier()
        if block > ctx.blocks.begin:
            self.find_pages(ctx, block - 1)
            ctx.load_k.start(ctx.blocks.block(block - 1), 0, self.all_but_first_whole)
        cute.arch.cp_async_commit_group()
        self.accumulate(ctx, block, acc_s, loaded, Int32(0), masked)

    @cute.jit
    def step_pipelined(self, ctx: MainloopContext, block: Int32, masked: Constexpr) -> None:
        """One key block, with the loads of num_stages - 1 later ones in flight."""
        stages: Constexpr = self.tile.num_stages
        stage = self.stage(block)
        cute.arch.cp_async_wait_group(stages - 2)
        ctx.group.barrier()
        ahead = block - (stages - 1)
        if ahead >= ctx.blocks.begin:
            ctx.load_k.start(ctx.blocks.block(ahead), self.stage(ahead), self.all_but_first_whole)
            ctx.load_v.start(ctx.blocks.block(ahead), self.stage(ahead), self.all_but_first_whole)
            self.find_pages(ctx, ahead - 1)
        cute.arch.cp_async_commit_group()
        acc_s, loaded = self.scores(ctx, block, stage)
        # Recomputed, or the stage would stay in a register through the softmax.
        stage = self.stage(optimization_barrier(block) + stages)
        self.accumulate(ctx, block, acc_s, loaded, stage, masked)

    @cute.jit
    def step_sharing_rows(self, ctx: MainloopContext, block: Int32, masked: Constexpr) -> None:
        """One key block, by warps that share rows; each load overlaps the other operand's product."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        ctx.load_v.start(block, 0, not masked)
        cute.arch.cp_async_commit_group()
        acc_s, loaded = self.scores(ctx, block, Int32(0))
        thread = rematerialize(ctx.thread)
        scores = self.score_tile(ctx, block, acc_s, thread)
        partial = ctx.blocks.partial(block) if cutlass.const_expr(masked) else None
        self.epilogues.forward(ctx.state, scores, loaded, masked, partial)
        stored = self.stored_softmax(ctx, thread)
        softmax, exchange = stored.load_stats(), self.row_exchange(ctx, thread)
        maxima = cute.make_rmem_tensor(cute.make_layout(cute.size(scores.acc, mode=[0])), Float32)
        for r in cutlass.range_constexpr(cute.size(maxima)):
            maxima[r] = quad_reduce(softmax.block_max(scores.acc, r), fmax)
        exchange.write(maxima, thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        if block > ctx.blocks.begin:
            ctx.load_k.start(block - 1, 0, True)
        cute.arch.cp_async_commit_group()
        exchange.read(maxima, fmax)
        factors = cute.make_rmem_tensor_like(maxima)
        for r in cutlass.range_constexpr(cute.size(maxima)):
            factors[r] = softmax.exponentiate(scores.acc, r, maxima[r], masked)
        stored.store_stats(softmax)
        self.share_probabilities(ctx, scores, acc_s, thread)
        cute.arch.barrier()
        self.accumulate_shared(ctx, softmax, factors)

    def stage(self, block: Int32) -> Int32:
        """The stage of a key block."""
        return Int32(Uint32(block) % Uint32(self.tile.num_stages))

    @cute.jit
    def scores(self, ctx: MainloopContext, block: Int32, stage: Int32):
        """S = Q K^T, and the epilogues' loads from global memory, issued before it."""
        op, tile = ctx.operands, self.tile
        acc_s = cute.make_rmem_tensor(
            op.tiled_mma.get_slice(0).partition_shape_C((tile.tile_m, tile.group_keys)), Float32
        )
        acc_s.fill(0.0)
        loaded = ()
        if cutlass.const_expr(self.epilogues.modifiers):
            loaded = self.epilogues.load(
                ctx.state, self.score_tile(ctx, block, acc_s, rematerialize(ctx.thread))
            )
        if cutlass.const_expr(tile.keeps_q):
            gemm_rs(op.tiled_mma, acc_s, op.q.terms, op.k, stage)
        else:
            self.products.qk(op, acc_s, stage, self.unroll)
        return acc_s, loaded

    def score_tile(self, ctx: MainloopContext, block: Int32, acc_s: cute.Tensor, thread: Int32) -> ScoreTile:
        """acc_s with its query and key indices."""
        tile = self.tile
        score_map = self.score_map(ctx, thread)
        part = ctx.group.part_of(ctx.blocks.block(block))
        return score_map.tile(acc_s, ctx.row0, part * tile.group_keys)

    def score_map(self, ctx: MainloopContext, thread: Int32) -> ScoreMap:
        """The scores that a thread holds."""
        tile = self.tile
        return ScoreMap.make(
            ctx.operands.tiled_mma, tile.tile_m, tile.group_keys, thread, heads=tile.pack_heads
        )

    def by_rows(self, ctx: MainloopContext, p: cute.Tensor) -> cute.Tensor:
        """P in the layout of the scores' accumulator, as (rows, cols)."""
        modes = layouts.row_col_modes(ctx.operands.tiled_mma, self.tile.tile_m, self.tile.group_keys)
        return layouts.row_col_view(p, modes)

    def stored_softmax(self, ctx: MainloopContext, thread: Int32) -> OnlineSoftmax:
        """The online softmax with its statistics where they stay between steps: in registers or shared memory."""
        if not self.tile.stats_in_smem:
            return ctx.softmax
        stats = self.row_stats(ctx.shared.stats, cute.size(ctx.acc_o_rows, mode=[0]), thread)
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
        partial = ctx.blocks.partial(block) if cutlass.const_expr(masked) else None
        chain.forward(ctx.state, scores, loaded, masked, partial)
        stored = self.stored_softmax(ctx, thread)
        softmax = stored.load_stats()
        if cutlass.const_expr(self.products.scales_output):
            factors = cute.make_rmem_tensor(cute.make_layout(cute.size(scores.acc, mode=[0])), Float32)
            softmax.advance(scores.acc, factors, masked)
            stored.store_stats(softmax)
            chain.drop(ctx.state, scores, scores.acc)
            self.products.pv(op, ctx.acc_o, acc_s, stage, factors)
        else:
            softmax.step(scores.acc, ctx.acc_o_rows, masked)
            stored.store_stats(softmax)
            self.accumulate_half(ctx, scores, acc_s, stage)

    @cute.jit
    def accumulate_half(
        self, ctx: MainloopContext, scores: ScoreTile, acc_s: cute.Tensor, stage: Int32
    ) -> None:
        """O += P V with P in 16 bits."""
        chain, op = self.epilogues, ctx.operands
        p = cute.make_rmem_tensor_like(acc_s, self.dtype)
        p.store(acc_s.load().to(self.dtype))
        chain.drop(ctx.state, scores, self.by_rows(ctx, p))
        gemm_rs(op.tiled_mma, ctx.acc_o, (layouts.as_operand_a(p),), op.v, stage)

    # ---- several warps per row ----

    def row_exchange(self, ctx: MainloopContext, thread: Int32) -> RowExchange:
        """For a thread's rows."""
        score_map = self.score_map(ctx, thread)
        return RowExchange(ctx.shared.exchange, score_map, thread // (32 * self.tile.warps_m))

    @cute.jit
    def share_probabilities(
        self, ctx: MainloopContext, scores: ScoreTile, acc_s: cute.Tensor, thread: Int32
    ) -> None:
        """P with dropout to shared memory, in the operands' dtype or terms."""
        tile, chain = self.tile, self.epilogues
        tiled_mma, shape, s_p = ctx.operands.tiled_mma, (tile.tile_m, tile.tile_n), ctx.shared.p
        assert s_p is not None
        s_p = s_p[None, None, 0]
        if cutlass.const_expr(self.products.scales_output):
            chain.drop(ctx.state, scores, scores.acc)
            self.products.store_p(ctx.operands, acc_s, shape, s_p, thread)
        else:
            p = cute.make_rmem_tensor_like(acc_s, self.dtype)
            p.store(acc_s.load().to(self.dtype))
            chain.drop(ctx.state, scores, self.by_rows(ctx, p))
            SmemResult(tiled_mma, shape, s_p, thread).store((p,))

    @cute.jit
    def accumulate_shared(self, ctx: MainloopContext, softmax: OnlineSoftmax, factors: cute.Tensor) -> None:
        """O = factors * O + P V, for the warp's columns."""
        op = ctx.operands
        if cutlass.const_expr(self.products.scales_output):
            self.products.stored_pv(op, ctx.acc_o, factors)
        else:
            softmax.rescale(ctx.acc_o_rows, factors)
            gemm(op.tiled_mma, ctx.acc_o, op.p, op.v, Int32(0), op.v.steps)

    @cute.jit
    def add_row_sums(self, ctx: MainloopContext, softmax: OnlineSoftmax, thread: Int32) -> None:
        """Row sums over all warps of a row; each lane of a quad has a quarter, and the quad adds them up."""
        exchange = self.row_exchange(ctx, thread)
        sums = cute.make_rmem_tensor_like(softmax.row_sum)
        for r in cutlass.range_constexpr(cute.size(sums)):
            sums[r] = quad_reduce(softmax.row_sum[r], add)
        cute.arch.barrier()
        exchange.write(sums, thread)
        cute.arch.barrier()
        exchange.read(sums, add)
        for r in cutlass.range_constexpr(cute.size(sums)):
            softmax.row_sum[r] = sums[r] * Float32(0.25)

    # ---- after the last step ----

    @cute.jit
    def merge_groups(self, ctx: MainloopContext) -> None:
        """Row statistics and O of all groups to the first one's, in their order."""
        group, softmax = ctx.group, ctx.softmax
        cute.arch.barrier()  # K and V have been read: their memory is free
        if group.index > 0:
            self.group_results(ctx, group.index - 1).store(softmax, ctx.acc_o)
        cute.arch.barrier()
        if group.index == 0:
            for other in cutlass.range(group.count - 1, unroll=1):  # unrolled, its loads would spill
                self.group_results(ctx, other).merge_into(softmax, ctx.acc_o, ctx.acc_o_rows)

    def group_results(self, ctx: MainloopContext, other: Int32) -> GroupResults:
        """The results of a thread of the group ``other`` + 1 in shared memory."""
        rows = cute.size(ctx.acc_o_rows, mode=[0])
        start = ctx.shared.merge + other * self.tile.group_threads * (cute.size(ctx.acc_o) + 2 * rows)
        return GroupResults.make(start, cute.size(ctx.acc_o), rows, ctx.thread, self.tile.group_threads)

    @cute.jit
    def finish(
        self, mO: cute.Tensor, mLSE: cute.Tensor, ctx: MainloopContext, tile: QueryTile, score_args: tuple
    ) -> None:
        """Normalise and store O and LSE."""
        thread = ctx.thread
        lse = cute.make_rmem_tensor(cute.make_layout(cute.size(ctx.acc_o_rows, mode=[0])), Float32)
        softmax = self.stored_softmax(ctx, thread).load_stats()
        if cutlass.const_expr(self.tile.warps_n > 1):
            self.add_row_sums(ctx, softmax, thread)
        own = self.score_map(ctx, thread)
        sinks = self.epilogues.sinks_of_rows(score_args, tile.head, tile.heads_left, own)
        softmax.normalize(ctx.acc_o_rows, lse, self.output_scale(ctx), sinks)
        thread = optimization_barrier(thread)
        store_lse(mLSE, lse, self.score_map(ctx, thread), tile, self.traits.varlen)
        self.store_output(mO, ctx, tile, thread)

    def output_scale(self, ctx: MainloopContext) -> Any:
        """The factor of the output apart from its row's factor."""
        return self.epilogues.rescale(ctx.state)

    @cute.jit
    def store_output(self, mO: cute.Tensor, ctx: MainloopContext, tile: QueryTile, thread: Int32) -> None:
        """O in q's dtype; tile: computed again, so that it occupies no registers in the main loop."""
        o = sequence(mO, tile.batch, tile.head, tile.info.offset_q, self.traits.varlen)
        if cutlass.const_expr(self.single):
            self.store_single(o, ctx, tile, thread)
        else:
            self.store_half(o, mO, ctx, tile, thread)

    @cute.jit
    def store_single(self, o: cute.Tensor, ctx: MainloopContext, tile: QueryTile, thread: Int32) -> None:
        """Store O in fp32; a thread has whole vectors of it."""
        tiled_mma, tile_m, dv = ctx.operands.tiled_mma, self.tile.tile_m, self.traits.head_dim_v
        rows = layouts.row_col_modes(tiled_mma, tile_m, self.tile.tile_n).rows
        row, _ = layouts.thread_row_col(tiled_mma, tile_m, self.tile.tile_n, thread)
        v = self.products.v_operand(tiled_mma, ctx.shared, thread)
        col = v.first_col(thread) + thread % 4 * 8
        store_vectors(o, ctx.acc_o, rows, tile.row0 + row, tile.info.seqlen_q, col, dv)

    @cute.jit
    def store_half(
        self, o: cute.Tensor, mO: cute.Tensor, ctx: MainloopContext, tile: QueryTile, thread: Int32
    ) -> None:
        """O in 16 bits, through shared memory, for 16-byte stores."""
        dv, tiled_mma = self.traits.head_dim_v, ctx.operands.tiled_mma
        fragment = cute.make_rmem_tensor_like(ctx.acc_o, self.dtype)
        fragment.store(ctx.acc_o.load().to(self.dtype))
        ctx.group.barrier()
        store = layouts.store_copy_c(tiled_mma, self.dtype, "sm80")
        mine = store.get_slice(thread)
        s_o = ctx.shared.o[None, None, 0]
        cute.copy(store, mine.retile(fragment), mine.partition_D(s_o))
        ctx.group.barrier()
        g_o = self.rows(o, mO, dv, tile.row0)
        rows = (tile.info.seqlen_q - tile.row0) * self.tile.pack_heads
        self.row_copy(self.gmem_store(dv), dv, tile, thread).copy(s_o, g_o, rows, False)
