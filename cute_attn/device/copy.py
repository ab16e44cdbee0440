"""Predicated copies of tiles between global and shared memory."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Int32, Int64, cute

from cute_attn.device.math import on_device, optimization_barrier, rematerialize

ELEMENTS_IN_FLIGHT = 32
"""Elements that a thread loads one by one before it stores them to shared memory."""


@dataclass(frozen=True)
class RowCopy:
    """Copies a thread's vectors of (rows, cols) tiles; the first ``valid_cols`` columns are in bounds.

    If ``heads`` heads alternate as rows, the rows of heads from ``heads_left`` on are out of bounds as well. Rows in
    global memory start at multiples of ``alignment`` elements, or of 16 bytes if it is 0. ``by_elements``: load element
    by element, because rows start at multiples of fewer than the 4 bytes that cp.async copies at least.
    """

    tiled_copy: cute.TiledCopy
    thread: Int32
    cols: Constexpr
    valid_cols: Constexpr
    heads: Constexpr = 1
    heads_left: Int32 | None = None
    alignment: Constexpr = 0
    by_elements: Constexpr = False

    @cute.jit
    def copy(
        self,
        source: cute.Tensor,
        target: cute.Tensor,
        rows: Int32,
        whole: Constexpr,
        first_row: Int32 | None = None,
    ) -> None:
        """Copy a tile. If ``whole``, all rows are in bounds, otherwise the rows [``first_row`` or 0, ``rows``).

        Out of bounds, cp.async writes zeros, and a store to global memory writes nothing. Addresses are rematerialized
        at each call, so that they occupy no registers through a mainloop.
        """
        row_step = cute.size(self.tiled_copy.tiler_mn[0])
        mine = self.tiled_copy.get_slice(rematerialize(self.thread))
        s, t = mine.partition_S(source), mine.partition_D(target)
        first = mine.partition_S(cute.make_identity_tensor((row_step, self.cols)))[0]
        exists = self.predicate(s)
        loaded: tuple = ()
        for m in cutlass.range_constexpr(cute.size(s, mode=[1])):
            there = Boolean(True)
            if cutlass.const_expr(not whole):
                there = there & (first[0] + m * row_step < rows)
            if cutlass.const_expr(first_row is not None):
                there = there & (first[0] + m * row_step >= first_row)
            if cutlass.const_expr(self.heads > 1):
                there = there & ((first[0] + m * row_step) % self.heads < self.heads_left)
            self.fill_predicate(exists, there, first[1])
            if cutlass.const_expr(self.by_elements):
                loaded += (self.load_elements(s[None, m, None], t[None, m, None], exists),)
                loaded = store_elements(loaded, m + 1 == cute.size(s, mode=[1]))
            elif cutlass.const_expr(whole and self.cols == self.valid_cols):
                cute.copy(self.tiled_copy, s[None, m, None], t[None, m, None])
            else:
                cute.copy(self.tiled_copy, s[None, m, None], t[None, m, None], pred=exists[None, 0, None])

    def predicate(self, mine: cute.Tensor) -> cute.Tensor:
        """Registers for :meth:`fill_predicate`, a Boolean per vector of a row: (adjacent vectors, 1, steps).

        mine: a thread's elements of a tile, ((elements, adjacent vectors), rows, steps).
        """
        shape = (cute.size(mine, mode=[0, 1]), 1, cute.size(mine, mode=[2]))
        return cute.make_rmem_tensor(cute.make_layout(shape), Boolean)

    @cute.jit
    def fill_predicate(self, exists: cute.Tensor, row_exists: Boolean, first_col: Int32) -> None:
        """Set ``exists``: which vectors of a row are in bounds; first_col: the thread's first column."""
        col_step: Constexpr = cute.size(self.tiled_copy.tiler_mn[1])
        beside: Constexpr = cute.size(exists, mode=[0])
        vector: Constexpr = self.vector
        for k in cutlass.range_constexpr(cute.size(exists, mode=[2])):
            for e in cutlass.range_constexpr(beside):
                exists[e, 0, k] = row_exists
                if cutlass.const_expr((k + 1) * col_step > self.valid_cols):
                    exists[e, 0, k] = (first_col + (k * col_step + e * vector) < self.valid_cols) & row_exists

    @property
    def vector(self) -> int:
        """Number of elements that one instruction copies."""
        return self.alignment or 128 // self.tiled_copy.value_type.width

    @cute.jit
    def load_elements(
        self, source: cute.Tensor, target: cute.Tensor, exists: cute.Tensor
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Load a thread's elements of a row, (adjacent, steps), zeros out of bounds; return them and ``target``."""
        values = cute.make_rmem_tensor(
            cute.make_layout((cute.size(source, mode=[0]), cute.size(source, mode=[1]))), source.element_type
        )
        values.fill(source.element_type(0.0))
        for k in cutlass.range_constexpr(cute.size(source, mode=[1])):
            for e in cutlass.range_constexpr(cute.size(source, mode=[0])):
                if exists[e, 0, k]:
                    values[e, k] = source[e, k]
        return values, target


def store_elements(loaded: tuple, last: bool) -> tuple:
    """Store the rows in ``loaded`` to shared memory if they are many or ``last``; returns the rows not stored.

    Later loads wait for these stores: loading a whole block at once would need too many registers.
    """
    if not last and sum(cute.size(values) for values, _ in loaded) < ELEMENTS_IN_FLIGHT:
        return loaded
    for values, target in loaded:
        for k in range(cute.size(values, mode=[1])):
            cute.autovec_copy(values[None, k], target[None, k])
    if on_device():
        cute.arch.sync_warp()
    return ()


@cute.jit
def zero_rows(tile: cute.Tensor, begin: Int32, end: Int32, thread: Int32, threads: Constexpr) -> None:
    """Zero rows [begin, end) of ``tile`` (rows, cols), 16-bit in shared memory, by ``threads`` threads."""
    vectors = cute.size(tile, mode=[1]) // 8
    zeros = cute.make_rmem_tensor(cute.make_layout(8), tile.element_type)
    zeros.fill(0.0)
    for i in cutlass.range(thread, (end - begin) * vectors, threads, unroll=1):
        row = cute.local_tile(tile, (1, 8), (begin + i // vectors, i % vectors))
        cute.autovec_copy(zeros, row[0, None])


@cute.jit
def block_of_rows(
    tensor: cute.Tensor, block: Int32, rows: Constexpr, cols: Constexpr, alignment: Constexpr = 0
) -> cute.Tensor:
    """Rows [block * rows, (block + 1) * rows) of a (length, head_dim) tensor, as (rows, cols); bounds are not checked.

    The row stride passes an optimization barrier: otherwise each row's 64-bit offset is hoisted out of the caller's
    loop, at two registers for each row that a thread copies. alignment: rows start at multiples of this number of
    elements, or of 16 bytes if it is 0.
    """
    stride = tensor.stride[0]
    start = Int64(block) * (rows * stride)
    multiple: Constexpr = alignment or 128 // tensor.element_type.width
    row_stride = cute.assume(optimization_barrier(Int64(stride)), divby=multiple)
    return cute.make_tensor(tensor.iterator + start, cute.make_layout((rows, cols), stride=(row_stride, 1)))
