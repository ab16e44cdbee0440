"""The band of keys that a query sees: causal mask, sliding window, end of the sequence."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32


@dataclass(frozen=True)
class Band:
    """Query i sees key j if i + left <= j < i + right and first <= j < seqlen_k.

    ``has_left``, ``has_right``: bounds in use. ``first``: the sequence's first key, None for key 0.
    """

    has_left: Constexpr
    has_right: Constexpr
    left: Int32
    right: Int32
    seqlen_k: Int32
    first: Int32 | None = None

    @property
    def has_first(self) -> bool:
        """True if a left bound or a first key may hide leading keys."""
        return self.has_left or self.first is not None

    def first_key(self, query: Int32) -> Int32:
        """The first key that ``query`` sees (may be beyond the last key)."""
        first = Int32(0) if self.first is None else self.first
        return cutlass.max(query + self.left, first) if self.has_left else first

    def end_key(self, query: Int32) -> Int32:
        """One past the last key that ``query`` sees (may be negative)."""
        return cutlass.min(query + self.right, self.seqlen_k) if self.has_right else self.seqlen_k

    def visible_keys(self, query: Int32) -> Int32:
        """Number of keys that ``query`` sees, or 1 if it sees none."""
        return cutlass.max(self.end_key(query) - self.first_key(query), 1)

    def first_query(self, key: Int32) -> Int32:
        """The first query that would see ``key`` (may be beyond the last query)."""
        return cutlass.max(key - self.right + 1, 0) if self.has_right else Int32(0)

    def end_query(self, key: Int32, seqlen_q: Int32) -> Int32:
        """One past the last of ``seqlen_q`` queries that would see ``key`` (may be negative)."""
        return cutlass.min(key - self.left + 1, seqlen_q) if self.has_left else seqlen_q
