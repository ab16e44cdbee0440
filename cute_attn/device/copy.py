"""Tiles between global and shared memory, with rows and columns that the tensor does not have left out."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Int32, Int64, cute

from cute_attn.device.math import opaque


@dataclass(frozen=True)
class RowCopy:
    """A thread's part of copying (rows, cols) tiles of which only ``valid_cols`` columns exist."""

    tiled_copy: cute.TiledCopy
    thr_row: Int32  # the thread's first row
    thr_col: Int32  # the thread's first column
    row_step: Constexpr  # rows between a thread's vectors
    col_step: Constexpr  # columns between a thread's vectors
    cols: Constexpr
    valid_cols: Constexpr

    @staticmethod
    def make(tiled_copy: cute.TiledCopy, cols: int, valid_cols: int, thread: Int32) -> "RowCopy":
        """For ``thread`` of a ``layouts.gmem_tiled_copy`` of rows of ``cols`` elements."""
        row_step, col_step = (cute.size(extent) for extent in tiled_copy.tiler_mn)
        first = tiled_copy.get_slice(thread).partition_S(cute.make_identity_tensor((row_step, cols)))[0]
        return RowCopy(tiled_copy, Int32(first[0]), Int32(first[1]), row_step, col_step, cols, valid_cols)

    @cute.jit
    def copy(
        self, source: cute.Tensor, target: cute.Tensor, thread: Int32, rows: Int32, whole: Constexpr
    ) -> None:
        """Copy a tile; ``whole`` says that all its rows exist, else only the first ``rows`` do.

        cp.async fills what does not exist with zeros; a store to global memory leaves it out.
        """
        mine = self.tiled_copy.get_slice(thread)
        s, t = mine.partition_S(source), mine.partition_D(target)
        exists = cute.make_rmem_tensor(cute.make_layout((1, 1, cute.size(s, mode=[2]))), Boolean)
        for m in cutlass.range_constexpr(cute.size(s, mode=[1])):
            for k in cutlass.range_constexpr(cute.size(s, mode=[2])):
                exists[0, 0, k] = Boolean(True)
                if cutlass.const_expr((k + 1) * self.col_step > self.valid_cols):
                    exists[0, 0, k] = self.thr_col + k * self.col_step < self.valid_cols
                if cutlass.const_expr(not whole):
                    exists[0, 0, k] = exists[0, 0, k] & (self.thr_row + m * self.row_step < rows)
            if cutlass.const_expr(whole and self.cols == self.valid_cols):
                cute.copy(self.tiled_copy, s[None, m, None], t[None, m, None])
            else:
                cute.copy(self.tiled_copy, s[None, m, None], t[None, m, None], pred=exists[None, 0, None])


@cute.jit
def block_of_rows(tensor: cute.Tensor, block: Int32, rows: Constexpr, cols: Constexpr) -> cute.Tensor:
    """Rows [block * rows, (block + 1) * rows) of a (length, head_dim) tensor, as (rows, cols); bounds are not checked.

    The row stride is opaque: each row's 64-bit offset would otherwise be hoisted out of the caller's loop, two registers
    for each row that a thread copies.
    """
    stride = tensor.stride[0]
    start = Int64(block) * (rows * stride)
    row_stride = cute.assume(opaque(Int64(stride)), divby=8)
    return cute.make_tensor(tensor.iterator + start, cute.make_layout((rows, cols), stride=(row_stride, 1)))
