"""Loads of key blocks from a paged cache by cp.async, row by row."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, Int64, cute

from cute_attn.device.copy import RowCopy, store_elements
from cute_attn.device.key_rows import KeyRows
from cute_attn.device.math import rematerialize
from cute_attn.kernels.forward_sm80.key_groups import KeyGroup


@dataclass(frozen=True)
class PagedLoad:
    """Loads a group's keys of key blocks of one head's K or V of a paged cache, row by row.

    The page numbers of a block's rows are read from the table one block ahead (:meth:`find`), so that no load waits
    for the table.
    """

    row_copy: RowCopy
    cache: cute.Tensor  # (pages, page_size, nheads_kv, head_dim)
    head: Int32
    key_rows: KeyRows
    entry: Int32
    s: cute.Tensor  # (group_keys, padded head_dim, stage)
    first_key: Int32
    seqlen_k: Int32
    group: KeyGroup
    pages: cute.Tensor  # page numbers of the thread's rows of the block that is loaded next

    @cute.jit
    def find(self, block: Int32) -> None:
        """Read the page numbers of ``block``'s rows. Rows that do not exist get the page number of a row that does."""
        first, step = self._rows()
        row = self.group.part_of(block) * cute.size(self.s, mode=[0]) + first[0]
        for m in cutlass.range_constexpr(cute.size(self.pages)):
            existing = cutlass.max(cutlass.min(row + m * step, self.seqlen_k - 1), self.first_key)
            self.pages[m] = self.key_rows.page(self.entry, existing)

    @cute.jit
    def start(self, block: Int32, stage: Int32, whole: Constexpr) -> None:
        """Start loading ``block``, for which :meth:`find` was called last; keys that do not exist are zeroed."""
        copy = self.row_copy
        first, step = self._rows()
        targets = copy.tiled_copy.get_slice(rematerialize(copy.thread)).partition_D(self.s[None, None, stage])
        vector: Constexpr = cute.size(targets, mode=[0, 0])
        beside: Constexpr = cute.size(targets, mode=[0, 1])
        steps: Constexpr = cute.size(targets, mode=[2])
        width: Constexpr = copy.cols // steps
        exists = copy.predicate(targets)
        row0 = self.group.part_of(block) * cute.size(self.s, mode=[0]) + first[0]
        loaded: tuple = ()
        for m in cutlass.range_constexpr(cute.size(self.pages)):
            row = row0 + m * step
            there = (row >= self.first_key) & (row < self.seqlen_k)
            copy.fill_predicate(exists, there, first[1])
            place = (self.pages[m], self.key_rows.row_in_page(row))
            start = self.key_rows.row(self.cache, place, self.head).iterator
            vectors = cute.make_layout(((vector, beside), steps), stride=((1, vector), width))
            source = cute.make_tensor(start + cute.assume(Int64(first[1]), divby=vector * beside), vectors)
            if cutlass.const_expr(copy.by_elements):
                loaded += (copy.load_elements(source, targets[None, m, None], exists),)
                loaded = store_elements(loaded, m + 1 == cute.size(self.pages))
            else:
                cute.copy(copy.tiled_copy, source, targets[None, m, None], pred=exists[None, 0, None])

    def _rows(self) -> tuple:
        """(row, column) of the thread's first element of a block, and the number of rows between its elements."""
        copy = self.row_copy
        step = cute.size(copy.tiled_copy.tiler_mn[0])
        mine = copy.tiled_copy.get_slice(rematerialize(copy.thread))
        return mine.partition_S(cute.make_identity_tensor((step, copy.cols)))[0], step
