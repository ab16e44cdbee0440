"""Lists of the blocks that a sparse mask leaves, for each block of queries or of keys."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Int32

from cute_attn.traits import LISTED_ROWS
from cute_attn.work.block_range import BlockRange


def divides(tile: Any) -> bool:
    """Required of a tile with lists: a listed block is a whole number of its query and of its key blocks."""
    return LISTED_ROWS % tile.tile_m == LISTED_ROWS % tile.tile_n == 0


@dataclass(frozen=True)
class BlockLists:
    """The key blocks of each query block of a (batch, head), or the query blocks of each key block.

    Attributes:
        counts: int32 (batch, nheads, blocks, 2): how many rows of a block's list need no mask, and how many it has; the
            block that reaches beyond the sequence is its last, and only its rows within count.
        blocks: int32 (batch, nheads, blocks, most): twice each block's number, and 1 more where the mask hides keys of
            it; those without any mask first.
    """

    counts: cute.Tensor
    blocks: cute.Tensor

    def of(self, batch: Int32, head: Int32, row0: Int32, tile: Constexpr) -> BlockRange:
        """Blocks that the block of row ``row0`` visits, in blocks of ``tile`` rows."""
        row = row0 // LISTED_ROWS
        full, end = (cute.ceil_div(self.counts[batch, head, row, i], tile) for i in range(2))
        listed = self.blocks[batch, head, row, None]
        return BlockRange(Int32(0), Int32(0), full, end, listed=listed, tiles_per_block=LISTED_ROWS // tile)
