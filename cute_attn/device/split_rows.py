"""Splits rows of fp32 numbers into fp16 terms (:mod:`cute_attn.device.terms`), by eight adjacent threads per row."""

import cutlass
from cutlass import Boolean, Constexpr, Float16, Float32, Int32, Int64, cute

from cute_attn.device.terms import split

VECTOR = 4
"""Number of fp32 elements in 16 bytes."""
LANES = 8
"""Number of adjacent threads per row; each handles 16 of every 128 bytes."""
VECTORS_AHEAD = 32
"""Vectors that a thread of :func:`split_tile` may read before it writes any. The compiler issues as many reads as there
are registers for, and further reads as registers become free."""


@cute.jit
def load_row(x: cute.Tensor, start: Int64, dim: Constexpr, cols: Constexpr, lane: Int32) -> cute.Tensor:
    """Load a thread's elements of a row, (4, vectors), 0 beyond ``dim``; coordinates are clamped, without a branch.

    Args:
        x: rows run along its last mode; the other modes are ignored.
        start: the element at which the row starts.
        dim, cols: columns of the row, without and with padding by zeros to a multiple of 32.
    """
    width: Constexpr = LANES * VECTOR
    values = cute.make_rmem_tensor(cute.make_layout((VECTOR, cols // width)), Float32)
    for j in cutlass.range_constexpr(cute.size(values, mode=[1])):
        col = lane * VECTOR + j * width
        at = start + cutlass.min(col, dim - VECTOR)
        source = x.iterator + cute.assume(at, divby=VECTOR)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), values[None, j])
        if cutlass.const_expr((j + 1) * width > dim):
            for e in cutlass.range_constexpr(VECTOR):
                exists = Boolean(col + e < dim)
                values[e, j] = values[e, j] if exists else Float32(0.0)
    return values


@cute.jit
def split_tile(
    x: cute.Tensor,
    row0: Int32,
    seqlen: Int32,
    target: cute.Tensor,
    dim: Constexpr,
    factor: Float32,
    thread: Int32,
    threads: Constexpr,
    count: Constexpr,
) -> None:
    """Write the terms of x, (seqlen, dim), from row ``row0`` on, to ``target`` in shared memory, without a barrier.

    Args:
        target: (rows, columns of all terms), term by term. Rows beyond ``seqlen`` repeat the last row.
        factor: a power of two.
        thread: index among the ``threads`` that divide the rows.
        count: number of terms.
    """
    rows, cols = cute.size(target, mode=[0]), cute.size(target, mode=[1]) // count
    lane, step = thread % LANES, threads // LANES
    steps: Constexpr = rows // step
    most: Constexpr = max(VECTORS_AHEAD * LANES * VECTOR // cols, 1)
    together: Constexpr = max(n for n in range(1, min(most, steps) + 1) if steps % n == 0)
    for first in cutlass.range(0, steps, together, unroll=1):
        values = []
        for i in cutlass.range_constexpr(together):
            row = row0 + (first + i) * step + thread // LANES
            start = Int64(cutlass.min(row, seqlen - 1)) * x.stride[0]
            values.append(load_row(x, start, dim, cols, lane))
        for i in cutlass.range_constexpr(together):
            row = (first + i) * step + thread // LANES
            for j in cutlass.range_constexpr(cols // (LANES * VECTOR)):
                terms = split(values[i][None, j], Float16, count, factor)
                for t in cutlass.range_constexpr(count):
                    col = lane * VECTOR + (t * cols + j * LANES * VECTOR)
                    offset = cute.assume(cute.crd2idx((row, col), target.layout), divby=VECTOR)
                    to = cute.make_tensor(target.iterator + offset, cute.make_layout(VECTOR))
                    cute.autovec_copy(terms[t], to)
