"""The key blocks of a query block, the query blocks of a key block, which of them need masks, and splits of them."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32

from cute_attn.device.score_tile import Band
from cute_attn.traits import LISTED_ROWS


@dataclass(frozen=True)
class BlockRange:
    """Key blocks of one query block: [begin, end) are visited, [full_begin, full_end) of them need no mask.

    begin <= full_begin <= full_end <= end always; begin == end if no key is visible. :meth:`of_keys` makes
    a range of query blocks of one key block. With ``listed``, the bounds count steps through a list of blocks, see
    :class:`cute_attn.work.block_range.BlockLists`; each listed block is ``tiles_per_block`` blocks of the tile.
    """

    begin: Int32
    full_begin: Int32
    full_end: Int32
    end: Int32
    first: Int32 | None = None  # the block of the first step, if not ``begin``; needs begin == 0
    listed: cute.Tensor | None = None
    tiles_per_block: Constexpr = 1

    def within(self, seen: "BlockRange", may_skip: Constexpr) -> "BlockRange":
        """The steps of a list in order whose blocks are in ``seen``. may_skip: False if ``seen`` begins at block 0."""
        begin = self.step_from(seen.begin) if may_skip else self.begin
        return self.clipped(begin, self.step_from(seen.end))

    def step_from(self, block: Int32) -> Int32:
        """The first step that visits ``block`` or a later one; of a list, it must be in order."""
        return block if self.listed is None else self._search(block)

    @cute.jit
    def _search(self, block: Int32) -> Int32:
        low, high, probe = self.begin, self.end, self.end - 1  # often all listed keys exist
        while low < high:
            if self.block(probe) < block:
                low = probe + 1
            else:
                high = probe
            probe = (low + high) >> 1
        return low

    def ahead(self, step: Int32) -> Int32:
        """:meth:`block`, for a look-up ahead: before ``begin``, any block of the list."""
        return self.block(step if self.listed is None else cutlass.max(step, self.begin))

    def block(self, step: Int32) -> Int32:
        """The block of a step in [begin, end): from the list, or rotated so that the first step visits ``first``."""
        return self.visit(step)[0]

    def visit(self, step: Int32) -> tuple[Int32, Boolean | None]:
        """(the block of a step, True if the mask hides some keys of a listed block; None without a list)."""
        if self.listed is not None:
            position = step // self.tiles_per_block
            entry, tile = self.listed[position], step - position * self.tiles_per_block
            return (entry >> 1) * self.tiles_per_block + tile, (entry & 1) == 1
        if self.first is None:
            return step, None
        block = step + self.first
        return cutlass.select_(block >= self.end, block - self.end, block), None

    @cute.jit
    def clipped(self, begin: Int32, end: Int32) -> "BlockRange":
        """The blocks in [begin, end), a range within [self.begin, self.end)."""
        full_begin = cutlass.min(cutlass.max(self.full_begin, begin), end)
        full_end = cutlass.min(cutlass.max(self.full_end, full_begin), end)
        return replace(self, begin=begin, full_begin=full_begin, full_end=full_end, end=end)

    @staticmethod
    @cute.jit
    def of_queries(band: Band, first_query: Int32, end_query: Int32, tile_n: Constexpr) -> "BlockRange":
        """The key blocks that any of the queries [first_query, end_query) sees.

        The block of the first query's last key counts as masked, even if all queries see all of it. So, from the
        last block down, each query that sees any key has seen a key before the unmasked blocks. Speculation freezes row
        maxima after the masked blocks, and every such row then has a maximum.
        """
        last_query = end_query - 1
        first_key, end_key = band.first_key(first_query), cutlass.max(band.end_key(last_query), 0)
        end = cute.ceil_div(end_key, tile_n)
        begin = cutlass.min(first_key // tile_n, end)
        end = end if first_key < end_key else begin  # a window may start after the last key
        # Unmasked: before the block of the first query's last key, from the last query's first key on.
        full_end = cutlass.max(band.end_key(first_query) - 1, 0) // tile_n
        full_begin = cute.ceil_div(band.first_key(last_query), tile_n)
        full_end = cutlass.max(cutlass.min(full_end, end), begin)
        full_begin = cutlass.min(cutlass.max(full_begin, begin), full_end)
        return BlockRange(begin, full_begin, full_end, end)

    @staticmethod
    @cute.jit
    def of_keys(
        band: Band, first_key: Int32, end_key: Int32, seqlen_q: Int32, tile_m: Constexpr
    ) -> "BlockRange":
        """The query blocks that see any of the keys [first_key, end_key), a whole key block.

        ``end_key`` may be beyond the sequence: then all query blocks need a mask. Queries from ``seqlen_q`` on need
        no mask, since their P is 0.
        """
        last_key = cutlass.min(end_key, band.seqlen_k) - 1
        first_query, end_query = (
            band.first_query(first_key),
            cutlass.max(band.end_query(last_key, seqlen_q), 0),
        )
        end = cute.ceil_div(end_query, tile_m)
        begin = cutlass.min(first_query // tile_m, end)
        end = end if (first_query < end_query) & (first_key <= last_key) else begin
        # Unmasked: from the first query that sees the last key to the last query that sees the first key.
        full_begin = cute.ceil_div(band.first_query(end_key - 1), tile_m)
        full_end_query = cutlass.max(band.end_query(first_key, seqlen_q), 0)
        full_end = full_end_query // tile_m if full_end_query < seqlen_q else end
        full_end = full_end if end_key <= band.seqlen_k else begin
        full_end = cutlass.max(cutlass.min(full_end, end), begin)
        full_begin = cutlass.min(cutlass.max(full_begin, begin), full_end)
        return BlockRange(begin, full_begin, full_end, end)


def divides(tile: Any) -> bool:
    """True if a listed block is a whole number of the tile's query and key blocks, as lists require."""
    return LISTED_ROWS % tile.tile_m == LISTED_ROWS % tile.tile_n == 0


@dataclass(frozen=True)
class BlockLists:
    """The key blocks of each query block of a (batch, head), or the query blocks of each key block.

    Attributes:
        counts: int32 (batch, nheads, blocks, 2): for each block's list, the number of rows that need no mask and the
            number of all rows. Rows beyond the sequence do not count; a block that contains any is listed last.
        blocks: int32 (batch, nheads, blocks, most): for each listed block, twice its index, plus 1 if the mask hides
            some of its keys; blocks that need no mask are first. For a cache, whose lengths only the device knows,
            blocks are in order instead, and counts have none without a mask.
    """

    counts: cute.Tensor
    blocks: cute.Tensor

    def of(self, batch: Int32, head: Int32, row0: Int32, tile: Constexpr) -> BlockRange:
        """The blocks, of ``tile`` rows each, that are visited by the block that contains row ``row0``."""
        row = row0 // LISTED_ROWS
        full, end = (cute.ceil_div(self.counts[batch, head, row, i], tile) for i in range(2))
        listed = self.blocks[batch, head, row, None]
        return BlockRange(Int32(0), Int32(0), full, end, listed=listed, tiles_per_block=LISTED_ROWS // tile)


class Partials(NamedTuple):
    """Partial results of split-KV as kernel arguments, fp32.

    The workspace has room for the results of all splits, and the combine kernel merges all of them. A split without key
    blocks has an LSE of -inf.

    Attributes:
        out, lse: with the trait split "fixed" (num_splits, batch, seqlen_q, nheads, head_dim_v) and (num_splits, batch,
            nheads, seqlen_q), where packed rows are one batch. With "folded", out is each CTA's sum so far, (CTAs,
            tile_m, head_dim_v), and lse is unused.
        num_splits: number of splits per query block.
        split_keys: number of keys per split, a multiple of the tile's tile_n, or 0 for splits of equal size.
    """

    out: cute.Tensor
    lse: cute.Tensor
    num_splits: Int32
    split_keys: Int32


@dataclass(frozen=True)
class KeySplit:
    """The key blocks [begin, end) of a work tile, and the place of its result.

    Attributes:
        partial: the index of the partial result.
    """

    begin: Int32
    end: Int32
    partial: Int32

    @staticmethod
    @cute.jit
    def of(blocks: BlockRange, split: Int32, partials: Partials, tile_n: cutlass.Constexpr) -> "KeySplit":
        """Split ``split`` of ``blocks``; splits of ``split_keys`` keys are counted from row 0, visible or not."""
        begin, end = blocks.begin, blocks.end
        if partials.split_keys > 0:
            size = partials.split_keys // tile_n
            begin = cutlass.min(cutlass.max(begin, blocks.step_from(split * size)), end)
            end = cutlass.max(cutlass.min(end, blocks.step_from((split + 1) * size)), begin)
        else:
            # split * count // num_splits, of quotient and remainder: the product may exceed 32 bits.
            count, num_splits = end - begin, partials.num_splits
            size = count // num_splits
            rest = count - size * num_splits
            end = begin + (split + 1) * size + (split + 1) * rest // num_splits
            begin = begin + split * size + split * rest // num_splits
        return KeySplit(begin, end, split)
