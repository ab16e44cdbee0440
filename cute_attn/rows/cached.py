"""Keys or values of a cache, block by block: contiguous entries, and pages in boxes of rows or row by row."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

import layouts
from cute_attn.device.key_rows import KeyRows
from cute_attn.device.pipeline import Pipeline
from cute_attn.device.seqlen import SeqlenInfo
from cute_attn.rows.tma import TmaTiles

EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000
"""L2 policies of loads, as ``createpolicy.fractional`` makes them."""
WARP = 32


@dataclass(frozen=True)
class BlockPages:
    """Where the boxes of one key block are: lane i has the page of box i."""

    page: Int32
    within: Int32  # the box's row in the page, in boxes


@dataclass(frozen=True)
class PagedTiles:
    """A paged cache, (pages, page_size, nheads_kv, dim), loaded in boxes of ``box`` rows that lie in one page each.

    A swizzle depends on the address alone, so that boxes of multiples of 8 rows below each other make up the tile that
    wgmma reads. For boxes that the sequence does not have a page beyond the last one is loaded: TMA writes zeros and
    counts its bytes, and the table's entry is not used.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor  # (rows of a page, dim, heads, pages)
    pages: Int32
    tile_n: Constexpr
    box: Constexpr
    cols: Constexpr  # padded dim
    width: Constexpr  # columns of a box: those of a swizzle atom
    policy: Int64

    @staticmethod
    def make(op: Any, cache: cute.Tensor, tile_n: int, box: int, cols: int, policy: Int64) -> "PagedTiles":
        """On the host."""
        view = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
        width = layouts.atom_cols(cols, cache.element_type.width)
        layout = layouts.wgmma_smem_layout(box, width, cache.element_type)
        atom, coords = cpasync.make_tiled_tma_atom(op, view, layout, (box, width))
        return PagedTiles(atom, coords, Int32(cache.shape[0]), tile_n, box, cols, width, policy)

    @property
    def tma(self) -> "PagedTiles":
        """What has a TMA descriptor as its ``atom``."""
        return self

    @property
    def boxes(self) -> int:
        """Boxes of a key block."""
        return self.tile_n // self.box

    @cute.jit
    def find(self, rows: KeyRows, batch: Int32, block: Int32, info: SeqlenInfo) -> BlockPages:
        """By a whole warp: the pages of one key block; reads the table where the sequence has rows alone."""
        lane = cute.arch.lane_idx()
        row = block * self.tile_n + lane * self.box
        page, within = self.pages, Int32(0)
        exists = (lane < self.boxes) & (row >= 0) & (row < cutlass.min(info.seqlen_k, rows.capacity))
        if cutlass.const_expr(info.first_key is not None):
            exists = exists & (row + self.box > info.first_key)
        if exists:
            page, within = rows.place(batch, row)
        return BlockPages(page, within // self.box)

    @cute.jit
    def load(
        self, found: BlockPages, head: Int32, target: cute.Tensor, pipeline: Pipeline, use: Int32
    ) -> None:
        """Start loading a key block of one head into its stage of ``target`` (tile_n, cols, stage)."""
        stage = target[None, None, pipeline.stage(use)]
        for i in cutlass.range_constexpr(self.boxes):
            page = cute.arch.shuffle_sync(found.page, i)
            within = cute.arch.shuffle_sync(found.within, i)
            boxes = cute.local_tile(self.tensor[None, None, head, page], (self.box, self.width), (None, None))
            for c in cutlass.range_constexpr(self.cols // self.width):
                own = cute.local_tile(stage, (self.box, self.width), (i, c))
                t_s, t_g = cpasync.tma_partition(
                    self.atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(own, 0, 2),
                    cute.group_modes(boxes[None, None, None, c], 0, 2),
                )
                cute.copy(
                    self.atom,
                    t_g[None, within],
                    t_s,
                    tma_bar_ptr=pipeline.full_barrier(use),
                    cache_policy=self.policy,
                )


@dataclass(frozen=True)
class EntryTiles:
    """A contiguous cache, (entries, capacity, nheads_kv, dim): a key block is one tile of TMA.

    Or packed sequences (total, nheads_kv, dim): there a ``page`` is the sequence's first row.
    """

    tiles: TmaTiles

    @property
    def tma(self) -> TmaTiles:
        """What has a TMA descriptor as its ``atom``."""
        return self.tiles

    @cute.jit
    def find(self, rows: KeyRows, batch: Int32, block: Int32, info: SeqlenInfo) -> BlockPages:
        """The entry and the block."""
        entry = batch
        if cutlass.const_expr(self.tiles.varlen):
            entry = info.offset_k
        elif cutlass.const_expr(rows.tables.batch_idx is not None):
            entry = rows.tables.batch_idx[batch]  # type: ignore[index]
        return BlockPages(entry, block)

    @cute.jit
    def load(
        self, found: BlockPages, head: Int32, target: cute.Tensor, pipeline: Pipeline, use: Int32
    ) -> None:
        """Start loading a key block of one head into its stage of ``target`` (tile_n, cols, stage)."""
        first, entry = (found.page, Int32(0)) if self.tiles.varlen else (Int32(0), found.page)
        tiles = self.tiles.sequence(first, head, entry)
        self.tiles.load(tiles, found.within, target, pipeline, use)


@dataclass(frozen=True)
class RowCopies:
    """A paged cache, (pages, page_size, nheads_kv, dim) of any page size, copied row by row by cp.async.

    Several warps divide a key block's rows. A row's lanes copy 16 bytes each; rows that the sequence does not have
    become zeros. Each warp keeps the pages of all rows of a block: lane i those of rows i, 32 + i, ...
    """

    cache: cute.Tensor
    tile_n: Constexpr
    cols: Constexpr  # padded dim
    dim: Constexpr
    warps: Constexpr

    @property
    def tma(self) -> None:
        """No TMA descriptor."""
        return None

    @staticmethod
    def find(rows: KeyRows, batch: Int32, block: Int32, info: SeqlenInfo, tile_n: int) -> cute.Tensor:
        """By a whole warp: the pages of one key block's rows, -1 for rows that the sequence does not have."""
        pages = cute.make_rmem_tensor(cute.make_layout(-(-tile_n // WARP)), Int32)
        RowCopies._find(pages, rows, batch, block * tile_n, info)
        return pages

    @staticmethod
    @cute.jit
    def _find(pages: cute.Tensor, rows: KeyRows, batch: Int32, row0: Int32, info: SeqlenInfo) -> None:
        end = cutlass.min(info.seqlen_k, rows.capacity)
        for k in cutlass.range_constexpr(cute.size(pages)):
            row = row0 + k * WARP + cute.arch.lane_idx()
            exists = (row >= 0) & (row < end)
            if cutlass.const_expr(info.first_key is not None):
                exists = exists & (row >= info.first_key)
            pages[k] = Int32(-1)
            if exists:
                pages[k] = rows.place(batch, row)[0]

    @property
    def lanes(self) -> int:
        """Lanes of a row: a power of two, those beyond its vectors idle."""
        return next(n for n in (4, 8, 16, 32) if 8 * n >= self.cols)

    @cute.jit
    def load(
        self, pages: cute.Tensor, rows: KeyRows, row0: Int32, head: Int32, stage: cute.Tensor, warp: Int32
    ) -> None:
        """Start copying the key block from ``row0`` on of one head into ``stage`` (tile_n, cols); ``warp``: of them."""
        for k in cutlass.range_constexpr(cute.size(pages)):
            groups: Constexpr = min(WARP, self.tile_n - k * WARP) // (WARP // self.lanes)
            rest: Constexpr = groups % self.warps
            for i in cutlass.range_constexpr(groups // self.warps):  # unrolled, so that addresses overlap
                self.copy_rows(pages, k, rows, row0, head, stage, i * self.warps + warp)
            if cutlass.const_expr(rest > 0):
                if warp < rest:
                    self.copy_rows(pages, k, rows, row0, head, stage, groups - rest + warp)

    @cute.jit
    def copy_rows(
        self,
        pages: cute.Tensor,
        k: Constexpr,
        rows: KeyRows,
        row0: Int32,
        head: Int32,
        stage: cute.Tensor,
        group: Int32,
    ) -> None:
        """Start copying the ``group``-th rows that a warp copies together, of rows [32 k, 32 (k + 1))."""
        lane = cute.arch.lane_idx()
        col, own = lane % self.lanes, group * (WARP // self.lanes) + lane // self.lanes
        page, row = cute.arch.shuffle_sync(pages[k], own), k * WARP + own
        place = (cutlass.max(page, 0), (row0 + row) % rows.page_size)
        if col * 8 < self.cols:
            exists = (page >= 0) & (col * 8 < self.dim)
            source = rows.row(self.cache, place, head).iterator
            self.copy(source + cute.assume(Int64(col) * 8, divby=8), stage, row, col, exists)

    @cute.jit
    def copy(self, source: cute.Pointer, stage: cute.Tensor, row: Int32, col: Int32, exists: Boolean) -> None:
        """Start copying 16 bytes, or zeros."""
        dtype = self.cache.element_type
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128
        )
        target = cute.local_tile(stage, (1, 8), (row, col))[0, None]
        predicate = cute.make_rmem_tensor(cute.make_layout((1, 1)), Boolean)
        predicate[0, 0] = exists
        vector = cute.make_layout(((8, 1), 1))
        cute.copy(
            atom,
            cute.make_tensor(source, vector),
            cute.make_tensor(target.iterator, vector),
            pred=predicate,
        )
