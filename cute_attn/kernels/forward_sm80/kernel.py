"""The Ampere forward: attention with cp.async, ldmatrix and mma.sync. Runs on sm80 to sm120.

    S = epilogues(softmax_scale * Q K^T)       (seqlen_q, seqlen_k), one tile at a time, in registers
    P = exp(S - LSE),  LSE = log sum exp S     online: running row maxima and sums
    O = dropout(P) V                           (seqlen_q, head_dim_v)

A CTA owns tile_m queries of one head and visits the key blocks that these queries see, last block first:

    one stage                                      two or more stages
    wait K[j]; start V[j]                          wait K[j], V[j]; start K, V[j - stages + 1]
    S = Q K[j]^T                                   S = Q K[j]^T
    wait V[j]; start K[j - 1]
    epilogues, online softmax, P to 16 bits        epilogues, online softmax, P to 16 bits
    O = rescaled O + P V[j]                        O = rescaled O + P V[j]

A loop with masks visits the key blocks on the mask's edge, a loop without masks the other blocks. The algorithm follows
FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).

Above head dim 256 one warp cannot hold a row of O, so ``warps_n`` warps divide rows: see
:mod:`cute_attn.kernels.forward_sm80.warps_along_n`.

In fp32 both products multiply tf32 terms, see ``cute_attn.device.gemm_terms``. Large calls multiply fp16 terms, see
``cute_attn.kernels.fp32_sm80``.

Limits: head dims up to 576, padded in shared memory and registers; rows are multiples of 16 bytes, 16-byte aligned.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Constexpr, Float16, Float32, Int32, Int64, cute, memory

import layouts
from cute_attn.device.copy import RowCopy
from cute_attn.device.math import optimization_barrier
from cute_attn.device.seqlen import Seqlens, sequence
from cute_attn.epilogues.chain import ScoreState
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels import fakes
from cute_attn.kernels.base import (
    PRODUCTS_OF,
    AttentionKernel,
    StepContent,
    beyond,
    mma_sync_count,
    product_loop,
)
from cute_attn.kernels.copies import Copies
from cute_attn.kernels.forward_sm80.heuristics import default_tile, tile_for_lengths
from cute_attn.kernels.forward_sm80.main_loop import MainLoop
from cute_attn.kernels.forward_sm80.products import Fp32Products, Products
from cute_attn.kernels.forward_sm80.storage import BlockLoad, ForwardParams, KeyGroup, Operands, SharedMemory
from cute_attn.kernels.forward_sm80.warps_along_n import SharedRows
from cute_attn.outputs.fragment_rows import store_rows
from cute_attn.outputs.partial import store_lse
from cute_attn.tiles import ForwardSm80Tile, Sizes, padded
from cute_attn.traits import DTYPES, MAX_HEAD_DIM, Traits, head_dim_multiple
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import ForwardSchedule, QueryGrid, QueryTile

TILES_OF_A_SECTION = 4
"""Work tiles per multiprocessor in a section of heads. The last section starts with its longest tiles, and must have
enough short tiles after them for all CTAs, two per multiprocessor."""


@dataclass(frozen=True)
class ForwardSm80(AttentionKernel):
    """The forward kernel for (traits, tile); ``__call__`` launches it."""

    traits: Traits
    tile: ForwardSm80Tile

    numbers: ClassVar[int] = 1
    """Shared-memory stages per stage of Q, K, V and O: two in kernels that store tangents next to values."""

    # ---- support, tiles and arguments ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        multiple = head_dim_multiple(traits.dtype)
        return beyond(traits, "forward-sm80", dtypes=DTYPES, most=MAX_HEAD_DIM, multiple=multiple)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ForwardSm80Tile:
        return default_tile(traits, target)

    def tile_for(self, target: str, sizes: Sizes) -> ForwardSm80Tile:
        """In fp32 and for large head dims the tile ignores lengths. A variant keeps its tile: layouts may differ."""
        if self.single or self.tile.warps_n > 1 or self.traits.variant:
            return self.tile
        return tile_for_lengths(self.traits, sizes.seqlen_q, sizes.group, self.tile, target)

    @property
    def can_visit_lists(self) -> bool:
        """True if the kernel can skip blocks that a list omits; large head dims and fp32 prevent it.

        Without a cache, so do packed heads and key groups.
        """
        op, tile = self.traits.op, self.tile
        plain = op == "kvcache" or (op in ("forward", "jvp") and tile.pack_heads == tile.key_groups == 1)
        return plain and tile.warps_n == 1 and not self.single

    def step_content(self) -> StepContent:
        """Instruction counts of a step of the unmasked loop, with one more exp2 per row for O's factor."""
        tile, d, dv = self.tile, padded(self.traits.head_dim), padded(self.traits.head_dim_v)
        warps = tile.num_warps * tile.key_groups
        products, depth = self.products.each * PRODUCTS_OF[self.numbers], tile.mma_depth(self.traits)
        qk = products * mma_sync_count(tile.tile_m, tile.tile_n, d, warps, depth)
        pv = products * mma_sync_count(tile.tile_m, dv, tile.tile_n, warps, depth)
        elements, rows = tile.tile_m * tile.tile_n // tile.num_threads, tile.tile_m // (8 * tile.warps_m)
        loops = product_loop(qk, d // depth, self.unroll)
        exp2 = elements * (1 + self.traits.softcap) + rows
        return StepContent(qk + pv, exp2, elements, warps, () if tile.q_in_regs else loops)

    # ---- layouts, copies and the MMA: override one of these to experiment ----

    @functools.cached_property
    def products(self) -> Products:
        """The instructions of both products for the element type of Q, K and V."""
        return (Fp32Products if self.single else Products)(self.traits, self.tile)

    @property
    def dtype(self) -> Any:
        """Element type of Q, K and V in shared memory."""
        return self.products.dtype

    @property
    def row_widths(self) -> tuple[int, int]:
        """Elements per loaded row of Q and K, and of V."""
        return self.traits.head_dim, self.traits.head_dim_v

    @property
    def single(self) -> bool:
        """True if elements in shared memory are fp32; products then multiply tf32 terms."""
        return self.traits.dtype == "fp32"

    @property
    def loads_elements(self) -> bool:
        """True if rows start at multiples of 2 bytes, too few for cp.async."""
        return self.traits.alignment * self.traits.element_bytes == 2

    @property
    def scores_may_be_large(self) -> bool:
        """True if scores may be huge, as for fp32 inputs: the softmax then subtracts the maximum before scaling."""
        return self.epilogues.may_be_large or (self.single and not self.traits.precision)

    @property
    def p_dtype(self) -> Any:
        """The type that P is rounded to, see :class:`OnlineSoftmax`; fp16 for tf32, which has as many digits."""
        if self.traits.dtype != "fp32":
            return self.dtype
        return Float16 if self.traits.precision else None

    @property
    def p_exponent(self) -> int:
        """P is multiplied by 2^p_exponent, see :class:`OnlineSoftmax`."""
        return 0

    @property
    def unroll(self) -> int:
        """Number of steps along head_dim whose operands Q K^T reads at a time."""
        extent, tile = padded(self.traits.head_dim), self.tile
        return tile.steps_at_once(extent, tile.qk_unroll, 32 // tile.mma_depth(self.traits))

    @property
    def swizzle_bits(self) -> int | None:
        """log2 of the number of 16-byte vectors of a row that the swizzle permutes, or None for the widest swizzle."""
        return None if self.tile.swizzle_bits < 0 else self.tile.swizzle_bits

    def smem_layout(self, rows: int, head_dim: int, stages: int = 1) -> cute.ComposedLayout:
        """Layout (rows, padded head_dim, stages) in shared memory."""
        return layouts.smem_layout(
            rows, padded(head_dim), self.dtype, stages=stages, swizzle_bits=self.swizzle_bits
        )

    def gmem_load(self, head_dim: int) -> cute.TiledCopy:
        """The copy from global to shared memory by the threads of a group: cp.async of 16 bytes."""
        return layouts.gmem_tiled_copy(
            self.dtype, self.tile.group_threads, padded(head_dim), asynchronous=True
        )

    def gmem_store(self, head_dim: int) -> cute.TiledCopy:
        """The copy from shared to global memory by the threads of a group: 16-byte stores."""
        return layouts.gmem_tiled_copy(
            self.dtype, self.tile.group_threads, padded(head_dim), asynchronous=False
        )

    def tiled_mma(self) -> cute.TiledMma:
        """A group's MMA for both products: warps along queries, and ``warps_n`` along keys and columns of V."""
        return layouts.tiled_mma_sm80(self.dtype, self.tile.num_warps, warps_n=self.tile.warps_n)

    def copies(self) -> Copies:
        """Layouts of Q, K, V and O in shared memory, and the copies by the threads of a group: see :class:`Copies`."""
        tile, (d, dv), found = self.tile, self.row_widths, Copies(self, self.tile.group_threads)

        def area(name: str, rows: int, dim: int, stages: int = 1, groups: int = 1) -> Any:
            return found.area(name, (rows, padded(dim), stages), "smem_layout", rows, dim, stages, by=groups)

        stages = self.numbers * tile.num_stages
        q = area("q", tile.tile_m, d, self.numbers)
        k, v = (area(x, tile.group_keys, n, stages, tile.key_groups) for x, n in (("k", d), ("v", dv)))
        o = area("o", tile.tile_m, dv, self.numbers)
        found.part("copy-gmem-to-smem", "gmem_load", self.traits.head_dim)
        found.part("copy-smem-to-gmem", "gmem_store", self.traits.head_dim_v)
        found.part("mma", "tiled_mma", warps_n=tile.warps_n)
        how = ("by elements", "STS", "dst") if self.loads_elements else ("by cp.async", "LDGSTS", None)
        found.move(f"K {how[0]}", how[1], lambda: self.gmem_load(d), k, how[2])
        found.move(f"V {how[0]}", how[1], lambda: self.gmem_load(dv), v, how[2])
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
        """Parameters of a launch. tensors: mQ to mLSE. scales: see :mod:`cute_attn.kernels.fp32_sm80.kernel`."""
        mQ, mK, mV, mO, mLSE = tensors
        nheads, nheads_kv = mQ.shape[-2], mK.shape[-2]
        grid = self.query_grid(seqlens, seqlens.batch(mQ), nheads, nheads_kv, schedule)
        # A kernel argument needs no register. With softcap, score_args[0] is the cap.
        scale_log2 = self.epilogues.scale_log2(score_args[0] if self.traits.softcap else softmax_scale)
        own = (mQ, mK, mV, mO, mLSE, seqlens)
        return ForwardParams(*own, softmax_scale, score_args, scale_log2, grid, nheads, scales)

    def query_grid(
        self, seqlens: Seqlens, batch: Int32, nheads: Int32, nheads_kv: Int32, schedule: ForwardSchedule
    ) -> QueryGrid:
        """The grid of work tiles in the order of their CTAs: longest first under a causal mask."""
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
        """Compute the CTA's work tile."""
        group = KeyGroup.of(self.tile, cute.arch.thread_idx()[0])
        tile = params.grid.tile(params.seqlens, self.tile.queries)
        if tile.exists:
            q = self.queries(params, tile)
            state, blocks = self.visible(params, tile)
            shared = self.shared_memory(group)
            operands = self.products.operands(self.tiled_mma(), shared, group.thread, params.scales)
            loads = self.loads(params, shared, tile, group)
            loop = self.main_loop(params, tile, operands, loads, blocks, state, shared, group)
            self.load_queries(params, q, tile, loop)
            loop.run()
            if group.is_first:
                self.finish(params, loop, params.grid.tile(params.seqlens, self.tile.queries))

    def queries(self, params: Any, tile: QueryTile) -> Any:
        """Q of a work tile's sequence and head, for :meth:`load_queries`."""
        return sequence(params.mQ, tile.batch, tile.head, tile.info.offset_q, self.traits.varlen)

    def visible(self, params: Any, tile: QueryTile) -> tuple[ScoreState, BlockRange]:
        """The epilogues' state of a work tile, and the key blocks that its queries see."""
        _, state = self.epilogues.begin_tile(params, tile, tile.head)
        end_row = cutlass.min(tile.row0 + self.tile.queries, tile.info.seqlen_q)
        return state, self.epilogues.key_blocks(state, tile.row0, end_row, self.tile.tile_n)

    def loads(self, params: Any, shared: SharedMemory, tile: QueryTile, group: KeyGroup) -> tuple[Any, Any]:
        """The loads of K and V of a work tile's kv head."""
        width, width_v = self.row_widths
        load_k = self.block_load(params.mK, shared.k, width, tile, group)
        return load_k, self.block_load(params.mV, shared.v, width_v, tile, group)

    def shared_memory(self, group: KeyGroup) -> SharedMemory:
        """Allocate all areas of shared memory; each group has its own stages of K and V."""
        (d, dv), tile = self.row_widths, self.tile
        base = memory.SmemAllocator().allocate(tile.smem_bytes(self.traits), byte_alignment=1024)
        areas = tile.smem_areas(self.traits)

        def area(name: str, dtype: Any) -> cute.Pointer:
            return cute.recast_ptr(base + areas[name][0], dtype=dtype)

        def stages(name: str, head_dim: int) -> cute.Tensor:
            start, layout = (
                area(name, self.dtype),
                self.smem_layout(tile.group_keys, head_dim, self.numbers * tile.num_stages),
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
            cute.make_tensor(area("q", self.dtype), self.smem_layout(tile.tile_m, d, self.numbers)),
            stages("k", d),
            stages("v", dv),
            cute.make_tensor(area("o", self.dtype), self.smem_layout(tile.tile_m, dv, self.numbers)),
            area("stats", Float32),
            area("merge", Float32),
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
        """The loads of K or V for one head."""
        g = sequence(m, tile.batch, tile.head_kv, tile.info.offset_k, self.traits.varlen)
        row_copy = RowCopy(self.gmem_load(head_dim), group.thread, padded(head_dim), head_dim)
        return BlockLoad(row_copy, g, s, tile.info.seqlen_k, group)

    def main_loop(
        self,
        params: Any,
        work_tile: QueryTile,
        operands: Operands,
        loads: tuple[Any, Any],
        blocks: BlockRange,
        state: ScoreState,
        shared: SharedMemory,
        group: KeyGroup,
    ) -> MainLoop:
        """The main loop before its first step: O is zero, row maxima are -inf, row sums are 0."""
        thread, tile_m, dv = group.thread, self.tile.tile_m, padded(self.traits.head_dim_v)
        tiled_mma = operands.tiled_mma
        acc_o = cute.make_rmem_tensor(tiled_mma.get_slice(thread).partition_shape_C((tile_m, dv)), Float32)
        acc_o.fill(0.0)
        acc_o_rows = layouts.row_col_view(acc_o, layouts.row_col_modes(tiled_mma, tile_m, dv))
        rows = cute.size(acc_o_rows, mode=[0])
        own_stats = self.row_stats(shared.stats, rows, thread) if self.tile.stats_in_smem else None
        softmax = OnlineSoftmax.make(
            rows,
            self.products.softmax_scale(operands, params.scale_log2),
            self.epilogues.may_mask_rows,
            own_stats,
            may_be_large=self.scores_may_be_large,
            p_exponent=self.p_exponent,
            p_dtype=self.p_dtype,
        )
        return MainLoop(
            *(self, operands, *loads, blocks, state, group, thread, work_tile.row0),
            *(softmax, shared, acc_o, acc_o_rows),
        )

    @cute.jit
    def load_queries(self, params: Any, q: cute.Tensor, tile: QueryTile, loop: MainLoop) -> None:
        """Start loading Q, then the first key blocks."""
        if loop.group.is_first:
            d, _ = self.row_widths
            rows = self.rows_left(tile.info.seqlen_q - loop.row0)
            copy = self.row_copy(self.gmem_load(d), d, tile, loop.thread)
            copy.copy(self.rows(q, params.mQ, d, loop.row0), loop.shared.q[None, None, 0], rows, False)
        cute.arch.cp_async_commit_group()
        loop.start_loads()

    def row_copy(self, copy: cute.TiledCopy, dim: int, tile: QueryTile, thread: Int32) -> RowCopy:
        """``copy`` applied to a work tile's rows of ``dim`` elements."""
        return RowCopy(
            *(copy, thread, padded(dim), dim, self.tile.pack_heads, tile.heads_left),
            *(self.traits.alignment, self.loads_elements),
        )

    def rows_left(self, queries: Int32) -> Int32:
        """Rows of a work tile's packed heads that are in bounds. queries: queries left from the tile's first one on."""
        heads = self.tile.pack_heads  # times all queries left, it may exceed 32 bits
        return queries if heads == 1 else cutlass.min(queries, self.tile.queries) * heads

    @cute.jit
    def rows(self, head: cute.Tensor, tensor: cute.Tensor, dim: Constexpr, row0: Int32) -> cute.Tensor:
        """The rows of a work tile, (tile_m, padded dim). The packed heads of a query are adjacent rows.

        head: the tile's first head of ``tensor``, which is Q or O.
        """
        heads: Constexpr = self.tile.pack_heads
        if cutlass.const_expr(heads == 1):
            return cute.local_tile(head, (self.tile.tile_m, padded(dim)), (row0 // self.tile.tile_m, 0))
        step = head.stride[0]
        layout = cute.make_layout(
            ((heads, self.tile.queries), padded(dim)), stride=((tensor.stride[-2], step), 1)
        )
        start = cute.assume(Int64(row0) * step, divby=self.traits.row_alignment)
        return cute.make_tensor(head.iterator + start, layout)

    @cute.jit
    def finish(self, params: ForwardParams, loop: MainLoop, tile: QueryTile) -> None:
        """Normalise and store O and LSE."""
        thread = loop.thread
        lse = cute.make_rmem_tensor(cute.make_layout(cute.size(loop.acc_o_rows, mode=[0])), Float32)
        softmax = loop.stored_softmax(thread).load_stats()
        if cutlass.const_expr(self.tile.warps_n > 1):
            SharedRows(loop).add_row_sums(softmax, thread)
        own = loop.score_map(thread)
        sinks = self.epilogues.sinks_of_rows(params.score_args, tile.head, tile.heads_left, own)
        softmax.normalize(loop.acc_o_rows, lse, self.output_scale(loop), sinks)
        thread = optimization_barrier(thread)
        store_lse(params.mLSE, lse, loop.score_map(thread), tile, self.traits.varlen)
        self.store_output(params.mO, loop, tile, thread)

    def output_scale(self, loop: MainLoop) -> Any:
        """The factor by which O is multiplied in addition to each row's factor."""
        return self.epilogues.rescale(loop.state)

    @cute.jit
    def store_output(self, mO: cute.Tensor, loop: MainLoop, tile: QueryTile, thread: Int32) -> None:
        """Store O in q's dtype. tile: recomputed after the main loop, where it would occupy registers."""
        o = sequence(mO, tile.batch, tile.head, tile.info.offset_q, self.traits.varlen)
        if cutlass.const_expr(self.single):
            self.store_single(o, loop, tile, thread)
        else:
            self.store_half(o, mO, loop, tile, thread)

    @cute.jit
    def store_single(self, o: cute.Tensor, loop: MainLoop, tile: QueryTile, thread: Int32) -> None:
        """Store O in fp32 from registers; a thread holds whole vectors of O."""
        acc, own = loop.operands.v.output_rows(loop.acc_o, loop.score_map(thread), thread)
        rows = (o, tile.row0, tile.info.seqlen_q, self.traits.head_dim_v)
        store_rows(acc, own, *rows, vector=4)

    @cute.jit
    def store_half(
        self,
        o: cute.Tensor,
        mO: cute.Tensor,
        loop: MainLoop,
        tile: QueryTile,
        thread: Int32,
        acc: cute.Tensor | None = None,
    ) -> None:
        """Store O in 16 bits through shared memory, by 16-byte stores. acc: a result of O's shape to store instead."""
        dv, tiled_mma = self.traits.head_dim_v, loop.operands.tiled_mma
        acc = loop.acc_o if acc is None else acc
        fragment = cute.make_rmem_tensor_like(acc, self.dtype)
        fragment.store(acc.load().to(self.dtype))
        loop.group.barrier()
        store = layouts.store_copy_c(tiled_mma, self.dtype, "sm80")
        mine = store.get_slice(thread)
        s_o = loop.shared.o[None, None, 0]
        cute.copy(store, mine.retile(fragment), mine.partition_D(s_o))
        loop.group.barrier()
        g_o = self.rows(o, mO, dv, tile.row0)
        rows = self.rows_left(tile.info.seqlen_q - tile.row0)
        self.row_copy(self.gmem_store(dv), dv, tile, thread).copy(s_o, g_o, rows, False)
