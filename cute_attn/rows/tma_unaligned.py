"""TMA of heads that start anywhere within rows that start at multiples of 16 bytes.

TMA wants an address and strides in multiples of 16 bytes, but a box may begin at any element. So the heads of a row are
one long row of elements, in which a head's box begins at its first one. Columns of a box beyond the head dim hold what
follows it in memory, the next head's elements as a rule: they have to be cleared before they enter a sum.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from cute_attn.device.pipeline import WARPGROUP, warpgroup_barrier
from cute_attn.rows.tma import TmaTiles

ROW_BYTES = 16
_VECTOR = 8  # elements of 16 bits that a thread clears at once


@dataclass(frozen=True)
class UnalignedTiles(TmaTiles):
    """A tensor whose heads TMA loads by tiles of rows: (rows, elements of all heads[, batch])."""

    first: Int32 | None = None  # element of the tensor, in the row that begins at a multiple of 16 bytes
    head_stride: Int32 | None = None  # elements

    @staticmethod
    def make_unaligned(
        op: Any, tensor: cute.Tensor, smem_layout: Any, shape: tuple[int, int], varlen: bool
    ) -> "UnalignedTiles":
        """On the host; tensor: (batch, rows, heads, head_dim), or varlen (rows, heads, head_dim), of 16 bits.

        All strides but the heads' are multiples of 16 bytes, the last one is 1.
        """
        size = tensor.element_type.width // 8
        address = tensor.iterator.toint()
        beyond = Int32(address & (ROW_BYTES - 1))
        first, start = beyond // size, address - Int64(beyond)
        whole = [cute.assume(step, divby=ROW_BYTES // size) for step in tensor.stride[:-2]]
        heads, head_dim = tensor.shape[-2:]
        head_stride = Int32(tensor.stride[-2])
        columns = first + (heads - 1) * head_stride + head_dim
        layout = cute.make_layout(
            (tensor.shape[-3], columns, *tensor.shape[:-3]), stride=(whole[-1], 1, *whole[:-1])
        )
        pointer = cute.make_ptr(tensor.element_type, start, cute.AddressSpace.gmem, assumed_align=ROW_BYTES)
        atom, coords = cpasync.make_tiled_tma_atom(op, cute.make_tensor(pointer, layout), smem_layout, shape)
        return UnalignedTiles(atom, coords, shape, varlen, first=first, head_stride=head_stride)

    @cute.jit
    def sequence(self, first_row: Int32, head: Int32, batch: Int32, column: Constexpr = 0) -> cute.Tensor:
        """All tiles of one head from ``first_row`` on, the ``column``-th along columns: (rows, columns, n)."""
        where = () if cutlass.const_expr(self.varlen) else (batch,)
        begin = self.first + head * self.head_stride
        plane = cute.domain_offset((first_row, begin), self.tensor[(None, None, *where)])
        return cute.local_tile(plane, self.shape, (None, column))


@cute.jit
def clear_columns(tile: cute.Tensor, head_dim: Constexpr, group: Int32) -> None:
    """Zero the columns from ``head_dim`` on of a tile in shared memory, (rows, columns), for wgmma.

    By all threads of a warpgroup, with a barrier of them.
    """
    rows, cols = (cute.size(tile, mode=[i]) for i in range(2))
    begin: Constexpr = head_dim // _VECTOR
    vectors: Constexpr = cols // _VECTOR - begin
    if cutlass.const_expr(vectors > 0):
        lane = cute.arch.thread_idx()[0] % WARPGROUP
        vector = cute.make_rmem_tensor(cute.make_layout(_VECTOR), tile.element_type)
        for i in cutlass.range(lane, rows * vectors, WARPGROUP, unroll=1):
            column = begin + i % vectors
            part = cute.local_tile(tile, (1, _VECTOR), (i // vectors, column))
            vector.fill(0.0)
            if cutlass.const_expr(head_dim % _VECTOR != 0):
                if column == begin:
                    cute.autovec_copy(part[0, None], vector)
                    for e in cutlass.range_constexpr(head_dim % _VECTOR, _VECTOR):
                        vector[e] = tile.element_type(0.0)
            cute.autovec_copy(vector, part[0, None])
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup_barrier(group)
