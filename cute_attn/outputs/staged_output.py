"""The Hopper forward's output: stores O from a warpgroup's registers to global memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, cute

import layouts
from cute_attn.device.copy import RowCopy
from cute_attn.device.math import convert_to_16_bits
from cute_attn.device.pipeline import warpgroup_barrier
from cute_attn.device.seqlen import sequence
from cute_attn.work.query_tiles import QueryTile


@dataclass(frozen=True)
class ForwardOutputs:
    """Results in global memory."""

    tma_o: Any  # TmaTiles, or None where threads store O
    mO: cute.Tensor
    mLSE: cute.Tensor


@dataclass(frozen=True)
class OutputStore:
    """Stores a warpgroup's 64 rows of a work tile's O through shared memory.

    Global memory is written by TMA, or by the threads' stores if sequences end inside the tensor.
    """

    kernel: Constexpr
    outputs: ForwardOutputs
    s_o: cute.Tensor  # (64, output_columns of the kernel), the warpgroup's
    group: Int32
    lane: Int32
    column_part: Constexpr = 0  # index of the warpgroup's columns, if warpgroups divide them

    def first_query(self, tile: QueryTile) -> Int32:
        """The first query of the warpgroup's rows."""
        if self.kernel.divides_columns:
            return tile.row0
        return tile.row0 + self.group * (64 // self.kernel.tile.pack_heads)

    @cute.jit
    def wait(self) -> None:
        """Wait until the last O has been read from shared memory; also a barrier for the warpgroup's threads."""
        if cutlass.const_expr(self.kernel.stores_by_tma):
            if self.lane < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        warpgroup_barrier(self.group)

    @cute.jit
    def store(self, acc_o: cute.Tensor, tile: QueryTile) -> None:
        """Store ``acc_o``; a TMA store is pending afterwards."""
        kernel, tma_o, row0 = self.kernel, self.outputs.tma_o, self.first_query(tile)
        self.wait()
        self.to_smem(acc_o)
        if cutlass.const_expr(kernel.stores_by_tma):
            cute.arch.fence_proxy("async.shared", space="cta")
            warpgroup_barrier(self.group)
            if self.lane < 32 and row0 < tile.info.seqlen_q:
                tma_o.store(self.s_o, tma_o.sequence_of_tile(row0, tile, self.column_part), 0)
        else:
            warpgroup_barrier(self.group)
            self.copy_rows(tile, row0)

    @cute.jit
    def to_smem(self, acc_o: cute.Tensor) -> None:
        """Convert ``acc_o`` to 16 bits and store it to shared memory."""
        kernel = self.kernel
        fragment = cute.make_rmem_tensor_like(acc_o, kernel.dtype)
        convert_to_16_bits(acc_o, fragment)
        one_group = layouts.tiled_mma_sm90(
            kernel.dtype, 64, kernel.output_columns, warpgroups=1, a_source="rmem", b_major="mn"
        )
        store = layouts.store_copy_c(one_group, kernel.dtype, "sm90")
        mine = store.get_slice(self.lane)
        cute.copy(store, mine.retile(fragment), mine.partition_D(self.s_o))

    @cute.jit
    def copy_rows(self, tile: QueryTile, row0: Int32) -> None:
        """Copy from shared memory to the rows from query ``row0`` up to the sequence's end."""
        kernel, mO = self.kernel, self.outputs.mO
        cols, heads = kernel.output_columns, kernel.tile.pack_heads
        first_col = self.column_part * cols
        exist = min(kernel.traits.head_dim_v - first_col, cols)
        o = sequence(mO, tile.batch, tile.head, tile.info.offset_q + row0, kernel.traits.varlen)
        rows: Any = 64
        steps: Any = o.stride[0]
        left = tile.info.seqlen_q - row0
        if cutlass.const_expr(heads > 1):
            rows, steps = (heads, 64 // heads), (mO.stride[-2], steps)
            left = cutlass.min(left, 64 // heads) * heads  # all queries left, times heads, may exceed 32 bits
        g_o = cute.make_tensor(o.iterator + first_col, cute.make_layout((rows, cols), stride=(steps, 1)))
        copy = RowCopy(kernel.gmem_store(), self.lane, cols, exist, heads, tile.heads_left)
        copy.copy(self.s_o, g_o, left, False)
