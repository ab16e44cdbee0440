"""Lists of the blocks that a sparse mask leaves, for each block of queries or of keys."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Int32

from cute_attn.traits import LISTED_ROWS
from cute_attn.work.block_range import BlockRange


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
