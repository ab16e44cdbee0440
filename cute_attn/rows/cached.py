"""Keys or values of a cache by TMA, block by block: contiguous entries, and pages in boxes of rows."""

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

EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000
"""L2 policies of loads, as ``createpolicy.fractional`` makes them."""
WARP = 32
BOXES_AT_ONCE = 4
"""Number of box addresses that a thread holds in registers before it starts the loads."""


@dataclass(frozen=True)
class BlockPages:
    """Places of the boxes of some key blocks; blocks are found from the last one on.

    Lane i has box i % boxes of the (i // boxes)-th block. In a contiguous cache all lanes have the same.
    """

    page: Int32
    within: Int32  # the box's first row in the page; of a contiguous cache the block


@dataclass(frozen=True)
class PagedTiles:
    """A paged cache, (pages, page_size, nheads_kv, dim), loaded in boxes of ``box`` rows that lie in one page each.

    A swizzle depends only on the address, so that boxes of multiples of 8 rows below each other make up the tile that
    wgmma reads. Boxes beyond the sequence are loaded from a page number beyond the last one: TMA writes
    zeros and counts their bytes, and the table's entry is not used.
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
        """On the host. parts: warpgroups that divide the columns: swizzle atoms are as wide as these allow."""
        view = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
        width = layouts.atom_cols(cols // parts, cache.element_type.width)
        layout = layouts.wgmma_smem_layout(box, width, cache.element_type)
        atom, coords = cpasync.make_tiled_tma_atom(op, view, layout, (box, width))
        order = [step.mode for step in coords.stride]
        assert order == [[1], [0], [2], [3]], "a box is at (col, row, head, page)"
        return PagedTiles(atom, coords, Int32(cache.shape[0]), tile_n, box, cols, width, policy)

    @property
    def tma(self) -> "PagedTiles":
        """What has a TMA descriptor as its ``atom``."""
        return self

    @property
    def boxes(self) -> int:
        """Boxes of a key block."""
        return self.tile_n // self.box

    @property
    def blocks_found(self) -> int:
        """Key blocks that a warp looks up at once, a box a lane: one load of the table for all of them."""
        return WARP // self.boxes

    @cute.jit
    def find(self, rows: KeyRows, batch: Int32, block: Int32, info: SeqlenInfo) -> BlockPages:
        """By a whole warp: the pages of ``block`` and of the blocks before it, in the order of the main loop.

        Reads the table only where the sequence has rows.
        """
        lane = cute.arch.lane_idx()
        row = (block - lane // self.boxes) * self.tile_n + lane % self.boxes * self.box
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

        One thread starts all boxes one after the other. With a ``cute.copy`` for each, ptxas makes a loop over the
        warp's threads of each box, and small boxes then need more time to start than to arrive.
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
    """A contiguous cache, (entries, capacity, nheads_kv, dim): a key block is one tile of TMA.

    Or packed sequences (total, nheads_kv, dim): there a ``page`` is the sequence's first row.
    """

    tiles: TmaTiles

    @property
    def tma(self) -> TmaTiles:
        """What has a TMA descriptor as its ``atom``."""
        return self.tiles

    @property
    def blocks_found(self) -> int:
        """Key blocks that are looked up at once."""
        return 1

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
        self, found: BlockPages, n: Int32, head: Int32, target: cute.Tensor, pipeline: Pipeline, use: Int32
    ) -> None:
        """Start loading the found key block of one head into its stage of ``target`` (tile_n, cols, stage)."""
        first, entry = (found.page, Int32(0)) if self.tiles.varlen else (Int32(0), found.page)
        tiles = self.tiles.sequence(first, head, entry)
        self.tiles.load(tiles, found.within, target, pipeline, use)
