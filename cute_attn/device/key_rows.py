"""Addresses of sequences' rows in a cache of keys or values: contiguous or paged, with any order of heads and rows."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute


class CacheTables(NamedTuple):
    """The int32 tables of a cache as kernel arguments; a cache without tables has None instead.

    Attributes:
        page_table: (entries, pages of an entry), or None for a contiguous cache.
        batch_idx: (batch,), each sequence's entry, or None if sequence b is in entry b.
    """

    page_table: cute.Tensor | None
    batch_idx: cute.Tensor | None


@dataclass(frozen=True)
class KeyRows:
    """Maps (sequence, row) to an address. Rows count from the start of an entry, regardless of leftpad.

    A cache is (entries, capacity, nheads_kv, dim) or (pages, page_size, nheads_kv, dim), of any strides. Offsets are
    64-bit.
    """

    tables: CacheTables
    capacity: Int32
    page_size: cute.FastDivmodDivisorV2 | None

    @staticmethod
    def make(cache: cute.Tensor, tables: CacheTables | None) -> "KeyRows":
        """Make the map on the host; ``cache``: of keys or of values."""
        size = cache.shape[1]
        tables = tables or CacheTables(None, None)
        if tables.page_table is None:
            return KeyRows(tables, size, None)
        divisor = cute.FastDivmodDivisorV2(cutlass.max(size, 1))
        return KeyRows(tables, tables.page_table.shape[1] * size, divisor)

    @cute.jit
    def place(self, batch: Int32, row: Int32) -> tuple[Int32, Int32]:
        """(entry or page, row within) of a row, which must be in [0, capacity): it indexes the page table."""
        page, within = self.entry(batch), row
        if cutlass.const_expr(self.tables.page_table is not None):
            page, within = self.page(page, row), self.row_in_page(row)
        return page, within

    @cute.jit
    def entry(self, batch: Int32) -> Int32:
        entry = batch
        if cutlass.const_expr(self.tables.batch_idx is not None):
            entry = self.tables.batch_idx[batch]  # type: ignore[index]
        return entry

    @cute.jit
    def page(self, entry: Int32, row: Int32) -> Int32:
        """The page that contains a row of an entry, read from the page table."""
        page_table: Any = self.tables.page_table
        start = Int64(entry) * page_table.stride[0] + row // self.page_size
        return cute.make_tensor(page_table.iterator + start, cute.make_layout(1))[0]

    @cute.jit
    def row_in_page(self, row: Int32) -> Int32:
        """Index of a row in its page."""
        return row % self.page_size

    @cute.jit
    def row(self, cache: cute.Tensor, place: tuple[Int32, Int32], head: Int32) -> cute.Tensor:
        """The elements (dim,) of one head at a :meth:`place`."""
        page, within = place
        step_page, step_row, step_head, _ = cache.stride
        start = Int64(page) * step_page + Int64(within) * step_row + Int64(head) * step_head
        return cute.make_tensor(cache.iterator + start, cute.make_layout(cache.shape[3]))
