"""Copies of rows whose elements may lie anywhere: one element at a time in global memory, any strides, any head dim."""

import math

import cutlass
from cutlass import Constexpr, Int32, Int64, cute

_VECTOR_BITS = 128
_WARP = 32
_ATOM_ROWS = 8  # after which a swizzle repeats
_ROWS_AT_ONCE = 4  # of a warp, whose loads overlap


@cute.jit
def load_elements(
    g: cute.Tensor, row0: Int32, rows: Int32, s: cute.Tensor, thread: Int32, num_threads: Constexpr
) -> None:
    """Load a tile of shared memory, 16 bytes of a row at a time. Complete after the next barrier.

    Args:
        g: (length, head_dim) in global memory.
        row0: the tile's first row.
        rows: how many rows exist from there on; those beyond, and columns beyond head_dim, become zeros, and are not
            read, since 0 * NaN would be NaN.
        s: (rows, columns) in shared memory, 16 bytes of a row contiguous.
    """
    length: Constexpr = _VECTOR_BITS // s.element_type.width
    tile_rows, cols = (cute.size(s, mode=[i]) for i in range(2))
    per_row: Constexpr = cols // length
    vector = cute.make_rmem_tensor(cute.make_layout(length), s.element_type)
    last = cutlass.max(rows, 1) - 1
    for i in cutlass.range(thread, tile_rows * per_row, num_threads, unroll=1):
        row, col = i // per_row, i % per_row * length
        source = g.iterator + Int64(row0 + cutlass.min(row, last)) * g.stride[0]
        for e in cutlass.range_constexpr(length):
            vector[e] = s.element_type(0.0)
            if (row < rows) & (col + e < g.shape[1]):
                vector[e] = cute.make_tensor(source + Int64(col + e) * g.stride[1], cute.make_layout(1))[0]
        offset = cute.crd2idx((row, col), s.layout)
        target = cute.make_ptr(
            s.element_type, (s.iterator + offset).toint(), cute.AddressSpace.smem, assumed_align=16
        )
        cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(length)))


@cute.jit
def store_elements(
    s: cute.Tensor,
    g: cute.Tensor,
    row0: Int32,
    rows: Int32,
    thread: Int32,
    num_threads: Constexpr,
    first_col: Int32 | int = 0,
) -> None:
    """Store the first ``rows`` rows of a tile in shared memory, which lie from ``first_col`` on, from ``row0`` of ``g``
    on: a warp stores a row, and adjacent lanes adjacent elements."""
    warps: Constexpr = num_threads // _WARP
    block: Constexpr = max(math.lcm(warps, _ATOM_ROWS), _ROWS_AT_ONCE * warps)  # rows of an iteration
    tile_rows, width = (cute.size(s, mode=[i]) for i in range(2))
    warp, lane, last = thread // _WARP, thread % _WARP, cutlass.min(rows, tile_rows)
    # Rows whole periods of the swizzle apart are constant distances apart: a few addresses serve all of them.
    phases = sorted({m % _ATOM_ROWS for m in range(0, block, warps)})
    unswizzled = s.layout.outer if isinstance(s.layout, cute.ComposedLayout) else s.layout
    firsts = {
        (phase, col): s.iterator + cute.crd2idx((warp + phase, first_col + lane + col), s.layout)
        for phase in phases
        for col in range(0, width, _WARP)
    }
    for begin in cutlass.range(0, last, block, unroll=1):
        start = g.iterator + (Int64(row0 + begin + warp) * g.stride[0] + Int64(lane) * g.stride[1])
        for m in cutlass.range_constexpr(0, block, warps):
            for col in cutlass.range_constexpr(0, width, _WARP):
                distance = cute.crd2idx((begin + (m - m % _ATOM_ROWS), 0), unswizzled)
                source = cute.make_tensor(firsts[m % _ATOM_ROWS, col] + distance, cute.make_layout(1))
                if (begin + m + warp < last) & (col + lane < Int32(g.shape[1])):
                    target = start + (m * Int64(g.stride[0]) + col * Int64(g.stride[1]))
                    cute.make_tensor(target, cute.make_layout(1))[0] = source[0]
