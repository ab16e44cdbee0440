"""Stores an accumulator from registers to rows in global memory."""

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute

from layouts.mma import row_col_modes, row_col_view, thread_row_col


@cute.jit
def store_rows(
    acc: cute.Tensor,
    mma: Constexpr,
    shape: Constexpr,
    rows: cute.Tensor,
    exist: Int32,
    scale: Float32,
    thread: Int32,
) -> None:
    """Store ``acc * scale`` in the type of ``rows``: its first ``exist`` rows, and as many columns as ``rows`` has.

    An instruction stores the two adjacent columns of a row that a thread holds.

    Args:
        acc: the thread's fp32 fragment of an accumulator of ``shape``, (M, N), of ``mma``.
        rows: (any, width), 16-byte aligned rows of 16-bit elements; width is at most N.
        thread: index among the threads of ``mma``.
    """
    dtype: Constexpr = rows.element_type
    modes: Constexpr = row_col_modes(mma, shape[0], shape[1])
    values = row_col_view(acc, modes)
    row0, col0 = thread_row_col(mma, shape[0], shape[1], thread)
    pair = cute.make_rmem_tensor(cute.make_layout(2), dtype)
    for r in cutlass.range_constexpr(len(modes.rows)):
        row = row0 + modes.rows[r]
        if row < exist:
            first = rows.iterator + cute.assume(Int64(row) * rows.stride[0] + col0, divby=2)
            for c in cutlass.range_constexpr(0, len(modes.cols), 2):
                if col0 + modes.cols[c] < rows.shape[1]:
                    for j in cutlass.range_constexpr(2):
                        pair[j] = (values[r, c + j] * scale).to(dtype)
                    cute.autovec_copy(pair, cute.make_tensor(first + modes.cols[c], cute.make_layout(2)))
