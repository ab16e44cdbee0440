"""Loads keys or values of a contiguous or paged cache by TMA, block by block; pages are loaded in boxes of rows."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

import layouts
from cute_attn.device.key_rows import KeyRows
from cute_attn.device.pipeline import Pipeline
from cute_attn.device.seqlen import SeqlenInfo
from cute_attn.rows.tma import TmaTiles, descriptor_address, start_box
from cute_attn.work.block_range import BlockRange

EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000
"""L2 cache policies of loads, encoded as by ``createpolicy.fractional``."""
WARP = 32
BOXES_AT_ONCE = 4
"""Number of box addresses that a thread holds in registers before it starts the loads."""


@dataclass(frozen=True)
class BlockPages:
    """Where the boxes of some key blocks are, from the last key block down.

    Lane i holds box i % boxes of the (i // boxes)-th block. In a contiguous cache all lanes hold the same block.
    """

    page: Int32
    within: Int32  # the box's first row in the page; of a contiguous cache the block


@dataclass(frozen=True)
class PagedTiles:
    """A paged cache, (pages, page_size, nheads_kv, dim), loaded in boxes of ``box`` rows, each within one page.

    A swizzle depends only on the address. So boxes of multiples of 8 rows, one after another, form the tile that wgmma
    reads. Boxes beyond the sequence are loaded from a page index beyond the last page: TMA writes zeros and counts
    their bytes, and the page table is not read.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor  # (rows of a page, dim, heads, pages)
    pages: Int32
    tile_n: Constexpr
    box: Constexpr
    cols: Constexpr  # padded dim
    width: Constexpr  # columns of a box: one swizzle atom
    policy: Int64

    @staticmethod
    def make(
        op: Any, cache: cute.Tensor, tile_n: int, box: int, cols: int, policy: Int64, parts: int = 1
    ) -> "PagedTiles":
        """Make the tiles on the host. parts: warpgroups that divide the columns, which limits the swizzle atoms."""
        view = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
        width = layouts.atom_cols(cols // parts, cache.element_type.width)
        layout = layouts.wgmma_smem_layout(box, width, cache.element_type)
        atom, coords = cpasync.make_tiled_tma_atom(op, view, layout, (box, width))
        order = [step.mode for step in coords.stride]
        assert order == [[1], [0], [2], [3]], "a box is at (col, row, head, page)"
        return PagedTiles(atom, coords, Int32(cache.shape[0]), tile_n, box, cols, width, policy)

    @property
    def boxes(self) -> int:
        """Number of boxes per key block."""
        return self.tile_n // self.box

    @property
    def blocks_found(self) -> int:
        """Number of key blocks that a warp looks up by one load of the table, one box per lane."""
        return WARP // self.boxes

    @cute.jit
    def find(
        self, rows: KeyRows, batch: Int32, blocks: BlockRange, step: Int32, info: SeqlenInfo
    ) -> BlockPages:
        """By a whole warp: find the pages of the block of ``step`` and of the steps before it.

        Reads only those table entries that hold rows of the sequence.
        """
        lane = cute.arch.lane_idx()
        block = blocks.ahead(step - lane // self.boxes)
        row = block * self.tile_n + lane % self.boxes * self.box
        page, within = self.pages, Int32(0)
        exists = (row >= 0) & (row < cutlass.min(info.seqlen_k, rows.capacity))
        if cutlass.const_expr(info.first_key is not None):
            exists = exists & (row + self.box > info.first_key)
        if exists:
            page, within = rows.place(batch, row)
        return BlockPages(page, within)

    @cute.jit
    def load(
        self, found: BlockPages, n: Int32, head: Int32, target: cute.Tensor, pipeline: Pipeline, use: Int32
    ) -> None:
        """Start loading the n-th found block of one head into its stage of ``target`` (tile_n, cols, stage).

        One thread starts all boxes one after the other. With a ``cute.copy`` for each box, ptxas makes each of them a
        loop over the warp's threads, and small boxes then need more time to start than to arrive.
        """
        stage = target[None, None, pipeline.stage(use)]
        descriptor, start = descriptor_address(self.atom), stage.iterator.toint()
        barrier = pipeline.full_barrier(use).toint()
        for first in cutlass.range_constexpr(0, self.boxes, BOXES_AT_ONCE):
            some = tuple(range(first, min(first + BOXES_AT_ONCE, self.boxes)))
            lanes = tuple(n * self.boxes + i for i in some)
            pages = tuple(cute.arch.shuffle_sync(found.page, lane) for lane in lanes)
            rows = tuple(cute.arch.shuffle_sync(found.within, lane) for lane in lanes)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(len(some)):
                    for col in cutlass.range_constexpr(0, self.cols, self.width):
                        address = start + 2 * cute.crd2idx((some[i] * self.box, col), stage.layout)
                        where = (Int32(col), rows[i], head, pages[i])
                        start_box(address, descriptor, where, barrier, self.policy)


@dataclass(frozen=True)
class EntryTiles:
    """A contiguous cache, (entries, capacity, nheads_kv, dim): each key block is one TMA tile.

    Also packed sequences (total, nheads_kv, dim), for which ``page`` is the sequence's first row.
    """

    tiles: TmaTiles

    @property
    def atom(self) -> cute.CopyAtom:
        return self.tiles.atom

    @property
    def blocks_found(self) -> int:
        """Number of key blocks that are looked up at once."""
        return 1

    def find(
        self, rows: KeyRows, batch: Int32, blocks: BlockRange, step: Int32, info: SeqlenInfo
    ) -> BlockPages:
        """Return the block of ``step`` with the sequence's cache entry or, if packed, first row."""
        return BlockPages(info.offset_k if self.tiles.varlen else rows.entry(batch), blocks.ahead(step))

    @cute.jit
    def load(
        self, found: BlockPages, n: Int32, head: Int32, target: cute.Tensor, pipeline: Pipeline, use: Int32
    ) -> None:
        """Start loading the found key block of one head into its stage of ``target`` (tile_n, cols, stage)."""
        first, entry = (found.page, Int32(0)) if self.tiles.varlen else (Int32(0), found.page)
        tiles = self.tiles.sequence(first, head, entry)
        self.tiles.load(tiles, found.within, target, pipeline, use)
