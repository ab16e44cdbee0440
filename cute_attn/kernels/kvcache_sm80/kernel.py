"""The Ampere forward for attention with a cache of keys and values. Runs on every target.

The main loop of :mod:`cute_attn.kernels.forward_sm80.main_loop` with these differences:

- Keys and values come from a cache: contiguous entries, or pages of any size, row by row. Lengths are read on the
  device. Key indices are rows of an entry; leftpad is the first key that a query may see.
- Keys of a query block may be divided among CTAs. With split "fixed" each query block has the same number of splits, or
  splits of the same number of keys, and a CTA for each. The combine kernel merges partial results.
- O is stored from registers: few rows exist in decoding.
- With an ``alignment``, rows start at multiples of 8 or 4 bytes, the size of a cp.async, or at any 16-bit element. In
  the last case elements pass through registers, and a key block's loads do not overlap the products.

For few rows, groups of warps divide the keys (``key_groups``). Each group reads only its keys, so that shared memory
is read once whatever the number of groups. Follows FlashDecoding (Dao et al. 2023,
https://pytorch.org/blog/flash-decoding/).

In fp32, both products split their operands into tf32 terms in registers; the cache is neither copied nor split.

Limits: head dims up to 576 for q and k and 512 for v, in fp32 up to 256. By its strides, a cache may store rows before
heads or heads before rows.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute

import layouts
from cute_attn.device.copy import RowCopy, store_elements
from cute_attn.device.key_rows import KeyRows
from cute_attn.device.math import rematerialize
from cute_attn.device.score_tile import ScoreMap
from cute_attn.device.seqlen import Seqlens, sequence
from cute_attn.epilogues.chain import ScoreState
from cute_attn.kernels import fakes
from cute_attn.kernels.base import beyond_cache
from cute_attn.kernels.forward_sm80.kernel import ForwardSm80
from cute_attn.kernels.forward_sm80.main_loop import MainLoop
from cute_attn.kernels.forward_sm80.products import Fp32Products, Products
from cute_attn.kernels.forward_sm80.storage import BlockLoad, KeyGroup, SharedMemory
from cute_attn.kernels.forward_sm80.warps_along_n import SharedRows
from cute_attn.kernels.kvcache_sm80.heuristics import tile_for_cache
from cute_attn.outputs.partial import RowTarget, store_rows
from cute_attn.tiles import ForwardSm80Tile, padded
from cute_attn.tiles.inference import CacheCall
from cute_attn.traits import DTYPES, LARGE_HEAD_DIM, MAX_HEAD_DIM, MAX_HEAD_DIM_V, Traits
from cute_attn.work.block_range import BlockRange, KeySplit, Partials
from cute_attn.work.query_tiles import QueryGrid, QueryTile


@dataclass(frozen=True)
class CacheParams:
    """Parameters of a launch: tensors, lengths, places of the cache's rows, and the division of work."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mLSE: cute.Tensor
    seqlens: Seqlens
    key_rows: KeyRows
    softmax_scale: Float32
    scale_log2: Float32
    score_args: tuple
    nheads: Int32
    grid: QueryGrid
    partials: Partials | None
    splits: cute.FastDivmodDivisorV2 | None  # number of splits of a query block, with split "fixed"


@dataclass(frozen=True)
class BoundedFp32Products(Fp32Products):
    """The forward's fp32 products, with sums of only one group of O's columns in flight at a time.

    Packed heads and pages leave no registers for more groups.
    """

    ahead: ClassVar[int] = 1


@dataclass(frozen=True)
class KvcacheSm80(ForwardSm80):
    """Kernel for attention with a cache, for (traits, tile); ``__call__`` launches it."""

    # ---- support, tiles and arguments ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        most = LARGE_HEAD_DIM if traits.dtype == "fp32" else MAX_HEAD_DIM
        if most >= traits.head_dim_v > MAX_HEAD_DIM_V:
            return f"head_dim_v is {traits.head_dim_v}; accepted: up to {MAX_HEAD_DIM_V}, as merging has it"
        return beyond_cache(traits, "sm80", lacks=("varlen_k", "latent"), most=most, dtypes=DTYPES)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ForwardSm80Tile:
        """The tile for one query per sequence; calls choose a tile by their lengths."""
        return tile_for_cache(traits, CacheCall(), target)

    def for_cache(self, call: CacheCall, target: str) -> "KvcacheSm80":
        """This kernel with the tile for ``call`` instead of its default tile."""
        return dataclasses.replace(self, tile=tile_for_cache(self.traits, call, target))

    # ---- layouts, copies and the MMA ----

    @functools.cached_property
    def products(self) -> Products:
        return (BoundedFp32Products if self.single else Products)(self.traits, self.tile)

    def gmem_load(self, head_dim: int) -> cute.TiledCopy:
        """Like the forward's; with an ``alignment``, each 16 bytes are copied in narrower vectors."""
        elements = self.traits.alignment
        if not elements:
            return super().gmem_load(head_dim)
        return layouts.gmem_tiled_copy(
            self.dtype,
            self.tile.group_threads,
            padded(head_dim),
            asynchronous=not self.loads_elements,
            bits=self.dtype.width * elements,
            thread_bits=128,
        )

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.CacheRows,
        mV: fakes.CacheRows,
        mO: fakes.HeadRows,
        mLSE: fakes.RowNumbers,
        seqlens: fakes.Lengths,
        tables: fakes.Tables,
        softmax_scale: Float32,
        schedule: fakes.ForwardCounters,
        score_args: fakes.ScoreArgs,
        partials: fakes.PartialResults,
        stream: cuda.CUstream,
    ) -> None:
        tile = self.tile
        nheads, nheads_kv = mQ.shape[-2], mK.shape[-2]
        m_blocks = cute.ceil_div(seqlens.max_seqlen_q, tile.queries)
        grid = QueryGrid.make(m_blocks, nheads, nheads_kv, tile.pack_heads)
        blocks, splits = grid.tiles(seqlens.batch(mQ)), None
        if cutlass.const_expr(self.traits.split == "fixed"):
            blocks *= partials.num_splits  # type: ignore[union-attr]
            splits = cute.FastDivmodDivisorV2(partials.num_splits)  # type: ignore[union-attr]
        # A kernel argument needs no register. With softcap, score_args[0] is the cap.
        scale_log2 = self.epilogues.scale_log2(score_args[0] if self.traits.softcap else softmax_scale)
        params = CacheParams(
            *(mQ, mK, mV, mO, mLSE, seqlens, KeyRows.make(mK, tables)),
            *(softmax_scale, scale_log2, score_args, nheads),
            *(grid, partials, splits),
        )
        self.kernel(params).launch(
            grid=[blocks, 1, 1],
            block=[tile.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=tile.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    # ---- device ----

    @cute.kernel
    def kernel(self, params: CacheParams) -> None:
        group = KeyGroup.of(self.tile, cute.arch.thread_idx()[0])
        shared = self.shared_memory(group)
        index, split = cute.arch.block_idx()[0], Int32(0)
        if cutlass.const_expr(self.traits.split == "fixed"):
            index, split = divmod(index, params.splits)
        tile = params.grid.at(index, params.seqlens, self.tile.queries)
        if tile.exists:
            state, blocks = self.visible(params, tile)
            if cutlass.const_expr(self.traits.split == "fixed"):
                own = KeySplit.of(blocks, split, params.partials, self.tile.tile_n)
                blocks = blocks.clipped(own.begin, own.end)
            loop = self.attend(params, shared, group, tile, state, blocks)
            if group.is_first:
                self.finish_tile(params, loop, tile, split)

    @cute.jit
    def finish_tile(self, params: CacheParams, loop: MainLoop, tile: QueryTile, split: Int32) -> None:
        """Store the result of a work tile or of a split."""
        traits = self.traits
        if cutlass.const_expr(traits.split == "fixed"):
            target = RowTarget.split(params.partials, split, tile, traits.varlen)
        else:
            width = min(traits.row_alignment, 2)
            target = RowTarget.whole(params.mO, params.mLSE, tile, traits.varlen, width)
        self.store(loop, tile, self.normalize(params, loop, tile), target)

    def attend(
        self,
        params: CacheParams,
        shared: SharedMemory,
        group: KeyGroup,
        tile: QueryTile,
        state: ScoreState,
        blocks: BlockRange,
    ) -> MainLoop:
        """Compute O and row statistics of a work tile with ``blocks``; at the end the first key group has them."""
        q, loads = self.queries(params, tile), self.loads(params, shared, tile, group)
        operands = self.products.operands(self.tiled_mma(), shared, group.thread, None)
        loop = self.main_loop(params, tile, operands, loads, blocks, state, shared, group)
        self.load_queries(params, q, tile, loop)
        loop.run()
        return loop

    def loads(
        self, params: CacheParams, shared: SharedMemory, tile: QueryTile, group: KeyGroup
    ) -> tuple[Any, Any]:
        traits, key_rows, info = self.traits, params.key_rows, tile.info
        entry = key_rows.entry(tile.batch)
        copy_k, copy_v = (
            RowCopy(
                *(self.gmem_load(dim), group.thread, padded(dim), dim),
                alignment=traits.alignment,
                by_elements=self.loads_elements,
            )
            for dim in (traits.head_dim, traits.head_dim_v)
        )
        if not traits.paged:
            g_k, g_v = (sequence(m, entry, tile.head_kv, Int32(0), False) for m in (params.mK, params.mV))
            bounds = (info.seqlen_k, group, info.first_key)
            return BlockLoad(copy_k, g_k, shared.k, *bounds), BlockLoad(copy_v, g_v, shared.v, *bounds)
        first = Int32(0) if info.first_key is None else info.first_key
        pages_k = self.page_numbers(copy_k)
        pages_v = self.page_numbers(copy_v)
        if cute.size(pages_v) == cute.size(pages_k):
            pages_v = pages_k  # the same rows
        head, bounds = (tile.head_kv, key_rows, entry), (first, info.seqlen_k, group)
        return (
            PagedLoad(copy_k, params.mK, *head, shared.k, *bounds, pages_k),
            PagedLoad(copy_v, params.mV, *head, shared.v, *bounds, pages_v),
        )

    def page_numbers(self, copy: RowCopy) -> cute.Tensor:
        """Registers for the page numbers of a thread's rows of a key block."""
        rows = self.tile.group_keys // cute.size(copy.tiled_copy.tiler_mn[0])
        return cute.make_rmem_tensor(cute.make_layout(rows), Int32)

    def normalize(self, params: CacheParams, loop: MainLoop, tile: QueryTile) -> cute.Tensor:
        """Normalise O; returns LSE. Partial results get their sinks when they are merged."""
        chain, own = self.epilogues, self.output_map(loop)
        sinks = chain.sinks_of_rows(params.score_args, tile.head, tile.heads_left, own)
        lse = cute.make_rmem_tensor(cute.make_layout(cute.size(loop.acc_o_rows, mode=[0])), Float32)
        softmax = loop.stored_softmax(loop.thread).load_stats()
        if cutlass.const_expr(self.tile.warps_n > 1):
            SharedRows(loop).add_row_sums(softmax, loop.thread)
        softmax.normalize(loop.acc_o_rows, lse, chain.rescale(loop.state), sinks)
        return lse

    def store(self, loop: MainLoop, tile: QueryTile, lse: cute.Tensor, target: RowTarget) -> None:
        """Store O and LSE to ``target``."""
        acc, score_map = loop.acc_o_rows, self.output_map(loop)
        if cutlass.const_expr(self.single):
            acc, score_map = loop.operands.v.output_rows(loop.acc_o, score_map, loop.thread)
        store_rows(target, acc, lse, score_map, tile, self.traits.head_dim_v)

    def output_map(self, loop: MainLoop) -> ScoreMap:
        """Rows and columns of O that a thread holds."""
        columns = padded(self.traits.head_dim_v)
        return ScoreMap.make(
            loop.operands.tiled_mma, self.tile.tile_m, columns, loop.thread, heads=self.tile.pack_heads
        )


@dataclass(frozen=True)
class PagedLoad:
    """Loads a group's keys of key blocks of one head's K or V of a paged cache, row by row.

    The page numbers of a block's rows are read from the table one block ahead (:meth:`find`), so that no load waits
    for the table.
    """

    row_copy: RowCopy
    cache: cute.Tensor  # (pages, page_size, nheads_kv, head_dim)
    head: Int32
    key_rows: KeyRows
    entry: Int32
    s: cute.Tensor  # (group_keys, padded head_dim, stage)
    first_key: Int32
    seqlen_k: Int32
    group: KeyGroup
    pages: cute.Tensor  # page numbers of the thread's rows of the block that is loaded next

    @cute.jit
    def find(self, block: Int32) -> None:
        """Read the page numbers of ``block``'s rows. Rows that do not exist get the page number of a row that does."""
        first, step = self._rows()
        row = self.group.part_of(block) * cute.size(self.s, mode=[0]) + first[0]
        for m in cutlass.range_constexpr(cute.size(self.pages)):
            existing = cutlass.max(cutlass.min(row + m * step, self.seqlen_k - 1), self.first_key)
            self.pages[m] = self.key_rows.page(self.entry, existing)

    @cute.jit
    def start(self, block: Int32, stage: Int32, whole: Constexpr) -> None:
        """Start loading ``block``, for which :meth:`find` was called last; keys that do not exist are zeroed."""
        copy = self.row_copy
        first, step = self._rows()
        targets = copy.tiled_copy.get_slice(rematerialize(copy.thread)).partition_D(self.s[None, None, stage])
        vector: Constexpr = cute.size(targets, mode=[0, 0])
        beside: Constexpr = cute.size(targets, mode=[0, 1])
        steps: Constexpr = cute.size(targets, mode=[2])
        width: Constexpr = copy.cols // steps
        exists = copy.predicate(targets)
        row0 = self.group.part_of(block) * cute.size(self.s, mode=[0]) + first[0]
        loaded: tuple = ()
        for m in cutlass.range_constexpr(cute.size(self.pages)):
            row = row0 + m * step
            there = (row >= self.first_key) & (row < self.seqlen_k)
            copy.fill_predicate(exists, there, first[1])
            place = (self.pages[m], self.key_rows.row_in_page(row))
            start = self.key_rows.row(self.cache, place, self.head).iterator
            vectors = cute.make_layout(((vector, beside), steps), stride=((1, vector), width))
            source = cute.make_tensor(start + cute.assume(Int64(first[1]), divby=vector * beside), vectors)
            if cutlass.const_expr(copy.by_elements):
                loaded += (copy.load_elements(source, targets[None, m, None], exists),)
                loaded = store_elements(loaded, m + 1 == cute.size(self.pages))
            else:
                cute.copy(copy.tiled_copy, source, targets[None, m, None], pred=exists[None, 0, None])

    def _rows(self) -> tuple:
        """(row, column) of the thread's first element of a block, and the number of rows between its elements."""
        copy = self.row_copy
        step = cute.size(copy.tiled_copy.tiler_mn[0])
        mine = copy.tiled_copy.get_slice(rematerialize(copy.thread))
        return mine.partition_S(cute.make_identity_tensor((step, copy.cols)))[0], step
