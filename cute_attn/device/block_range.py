"""Which key blocks a query block visits, and which of them need masks."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32


@dataclass(frozen=True)
class Band:
    """The keys that queries see: key j of query i where i + left <= j < i + right and j < seqlen_k.

    ``has_left`` and ``has_right`` say which bounds exist at all.
    """

    has_left: Constexpr
    has_right: Constexpr
    left: Int32
    right: Int32
    seqlen_k: Int32

    def first_key(self, query: Int32) -> Int32:
        """The first key that ``query`` sees (may be beyond the last)."""
        return cutlass.max(query + self.left, 0) if self.has_left else Int32(0)

    def end_key(self, query: Int32) -> Int32:
        """One past the last key that ``query`` sees (may be negative)."""
        return cutlass.min(query + self.right, self.seqlen_k) if self.has_right else self.seqlen_k


@dataclass(frozen=True)
class BlockRange:
    """Key blocks of one query block: [begin, end) are visited, [full_begin, full_end) of them need no mask.

    begin <= full_begin <= full_end <= end always; a query block that sees nothing has begin == end.
    """

    begin: Int32
    full_begin: Int32
    full_end: Int32
    end: Int32

    @staticmethod
    @cute.jit
    def of_queries(band: Band, first_query: Int32, end_query: Int32, tile_n: Constexpr) -> "BlockRange":
        """The blocks that queries [first_query, end_query) visit between them."""
        last_query = end_query - 1
        first_key, end_key = band.first_key(first_query), cutlass.max(band.end_key(last_query), 0)
        end = cute.ceil_div(end_key, tile_n)
        begin = cutlass.min(first_key // tile_n, end)
        end = end if first_key < end_key else begin  # a window may begin after the last key
        # Unmasked: below the first query's end, and from the last query's first key on.
        full_end = cutlass.max(band.end_key(first_query), 0) // tile_n
        full_begin = cute.ceil_div(band.first_key(last_query), tile_n)
        full_end = cutlass.max(cutlass.min(full_end, end), begin)
        full_begin = cutlass.min(cutlass.max(full_begin, begin), full_end)
        return BlockRange(begin, full_begin, full_end, end)
