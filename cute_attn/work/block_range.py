"""Which key blocks a query block visits and the other way round, and which of them need masks."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from cute_attn.device.band import Band


@dataclass(frozen=True)
class BlockRange:
    """Key blocks of one query block: [begin, end) are visited, [full_begin, full_end) of them need no mask.

    begin <= full_begin <= full_end <= end always; a query block that sees nothing has begin == end. With
    :meth:`of_keys` they are the query blocks of one key block.
    """

    begin: Int32
    full_begin: Int32
    full_end: Int32
    end: Int32
    first: Int32 | None = None  # where a walk begins, if begin is 0; otherwise it begins there

    def turned(self, step: Int32) -> Int32:
        """The block of step begin, begin + 1, ... of a walk."""
        if self.first is None:
            return step
        block = step + self.first
        return cutlass.select_(block >= self.end, block - self.end, block)

    @staticmethod
    @cute.jit
    def of_queries(band: Band, first_query: Int32, end_query: Int32, tile_n: Constexpr) -> "BlockRange":
        """The blocks that queries [first_query, end_query) visit between them.

        Walked from the last one down, every query that sees a key has seen one before the first block without a mask:
        the block of the first query's last key counts as masked, even if all queries see all of it. What takes its row
        maxima from the masked blocks alone (speculation) has one for every row then.
        """
        last_query = end_query - 1
        first_key, end_key = band.first_key(first_query), cutlass.max(band.end_key(last_query), 0)
        end = cute.ceil_div(end_key, tile_n)
        begin = cutlass.min(first_key // tile_n, end)
        end = end if first_key < end_key else begin  # a window may begin after the last key
        # Unmasked: below the block of the first query's last key, and from the last query's first key on.
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

        ``end_key`` is where the block ends, in the sequence or beyond it: a block that reaches beyond has no query
        block without a mask. Queries beyond ``seqlen_q`` need none, since they have no probabilities.
        """
        last_key = cutlass.min(end_key, band.seqlen_k) - 1
        first_query, end_query = (
            band.first_query(first_key),
            cutlass.max(band.end_query(last_key, seqlen_q), 0),
        )
        end = cute.ceil_div(end_query, tile_m)
        begin = cutlass.min(first_query // tile_m, end)
        end = end if (first_query < end_query) & (first_key <= last_key) else begin
        # Unmasked: from the first query that sees the last key on, up to the last one that sees the first key.
        full_begin = cute.ceil_div(band.first_query(end_key - 1), tile_m)
        full_end_query = cutlass.max(band.end_query(first_key, seqlen_q), 0)
        full_end = full_end_query // tile_m if full_end_query < seqlen_q else end
        full_end = full_end if end_key <= band.seqlen_k else begin
        full_end = cutlass.max(cutlass.min(full_end, end), begin)
        full_begin = cutlass.min(cutlass.max(full_begin, begin), full_end)
        return BlockRange(begin, full_begin, full_end, end)
