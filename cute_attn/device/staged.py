"""A bias on its way through shared memory: TMA brings a number for each score, each warpgroup reads its own.

Read from global memory by the threads that hold the scores, eight rows of sixteen bytes an instruction, it takes the
L1 cache most of a step's time. TMA passes it by, ldmatrix gives each lane the pairs that it has in its accumulator.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Constexpr, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warp

import layouts
from cute_attn.device.pipeline import Ring
from cute_attn.device.tma import Tma

ROWS = 64
"""Rows of a tile: a warpgroup's."""


@dataclass(frozen=True)
class StagedTile:
    """A warpgroup's tile of 16-bit numbers in shared memory, beside the accumulator of its wgmma."""

    dtype: Constexpr
    cols: Constexpr
    address: Int32  # ``lane_address`` of its stage
    ring: Ring
    filling: Int32

    PIECE_COLS: ClassVar[int] = 4
    """A thread's columns of the sixteen that are read at once; it has them in two rows."""

    @property
    def pieces(self) -> int:
        """How often sixteen columns are read."""
        return self.cols // 16

    @cute.jit
    def wait(self) -> None:
        """Until the tile is there."""
        self.ring.wait(self.filling)

    @cute.jit
    def release(self) -> None:
        """By each warp once it has read everything."""
        self.ring.release(self.filling)

    @cute.jit
    def read(self, piece: Constexpr, words: cute.Tensor) -> None:
        """Sixteen columns, to the thread's own pairs: ``words`` (pairs of columns, rows) of 32 bits."""
        dtype, first = self.dtype, 16 * piece % layouts.atom_cols(self.cols, 16)
        address = (self.address ^ Int32(2 * first)) + Int32(2 * ROWS * (16 * piece - first))
        source = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=16)
        copy = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype)
        target = cute.make_rmem_tensor(cute.make_layout(8), dtype)
        cute.copy(copy, cute.make_tensor(source, cute.make_layout(8)), target)
        pairs = cute.recast_tensor(target, Int32)
        for i in cutlass.range_constexpr(4):  # 8 x 8 each: rows first, then columns
            words[2 * piece + i // 2, i % 2] = pairs[i]


def lane_address(base: Int32, lane: Int32, cols: int) -> Int32:
    """Where a lane of a warpgroup finds its eight numbers of the first sixteen columns, for ldmatrix.

    Row lane % 16 of the warp's, the first or the second eight columns. base: the tile's address, a multiple of 1024;
    rows lie as :func:`layouts.wgmma_smem_layout` has them, with pieces of 16 bytes exchanged. What follows in the same
    atom has the column's bytes exclusive-or'd to that.
    """
    width = 2 * layouts.atom_cols(cols, 16)
    swizzle = layouts.choose_swizzle(cols, 16)
    row, half = lane // 32 * 16 + lane % 16, lane // 16 % 2
    exchange = (row >> (3 - swizzle.bits)) & ((1 << swizzle.bits) - 1)
    return base + (row * width + ((half ^ exchange) << 4))


@dataclass(frozen=True)
class StagedBias:
    """All warpgroups' tiles: each has a ring of its own, so that none waits for another's."""

    tensor: cute.Tensor  # (ROWS, columns, stages, warpgroup)
    address: Int32  # of all that
    barriers: cute.Pointer
    num_stages: Constexpr
    warpgroups: Constexpr

    @staticmethod
    def barrier_bytes(num_stages: int, warpgroups: int) -> int:
        """Shared memory for the barriers."""
        return Ring.barrier_bytes(num_stages) * warpgroups

    def ring(self, group: Int32 | int) -> Ring:
        """Of one warpgroup."""
        words = Ring.barrier_bytes(self.num_stages) // 8
        fill_bytes = ROWS * cute.size(self.tensor, mode=[1]) * self.tensor.element_type.width // 8
        return Ring(self.barriers + group * words, self.num_stages, fill_bytes)

    @cute.jit
    def init(self) -> None:
        """By one thread, before anybody waits."""
        for group in cutlass.range_constexpr(self.warpgroups):
            self.ring(group).init(4)

    def tile(self, group: Int32, lane: Int32, filling: Int32) -> StagedTile:
        """What one warpgroup was brought."""
        ring, cols = self.ring(group), cute.size(self.tensor, mode=[1])
        base = self.address + (group * self.num_stages + ring.stage(filling)) * ring.fill_bytes
        return StagedTile(self.tensor.element_type, cols, lane_address(base, lane, cols), ring, filling)

    @cute.jit
    def load(self, tiles: cute.Tensor, tma: Tma, block: Int32, group: Int32, filling: Int32) -> None:
        """By one warp: start loading the columns of ``block`` for one warpgroup, once there is room."""
        ring = self.ring(group)
        ring.acquire(filling)
        tma.load(tiles, block, self.tensor[None, None, None, group], ring, filling)


def bias_tma(bias: cute.Tensor, layout: cute.ComposedLayout) -> Tma:
    """TMA's view of (batch, nheads, seqlen_q, seqlen_k) as (rows, columns, heads, batch), for tiles of ``layout``.

    Where bias is broadcast over heads or batch the view has one of them, and ``rows_of`` takes that. All strides but
    the last are multiples of eight elements, and its first element is aligned to 16 bytes.
    """
    stride_batch, stride_head, stride_row, _ = bias.stride
    (batch, step_batch), (heads, step_head) = (
        _broadcast(bias.shape[0], stride_batch),
        _broadcast(bias.shape[1], stride_head),
    )
    shape = (bias.shape[2], bias.shape[3], heads, batch)
    steps = (cute.assume(Int64(stride_row), divby=8), 1, step_head, step_batch)
    view = cute.make_tensor(bias.iterator.align(16), cute.make_layout(shape, stride=steps))
    extents = (cute.size(layout, mode=[0]), cute.size(layout, mode=[1]))
    atom, coords = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, layout, extents)
    return Tma(atom, coords)


def _broadcast(size: Int32, stride: Any) -> tuple[Int32, Int64]:
    """Extent and stride of a dimension as TMA takes it: one of those that are all the same."""
    single = (Int64(stride) == 0) | (size == 1)
    return (
        cutlass.select_(single, Int32(1), Int32(size)),
        cute.assume(cutlass.select_(single, Int64(8), Int64(stride)), divby=8),
    )


def rows_of(tma: Tma, row0: Int32, head: Int32, batch: Int32, cols: int) -> cute.Tensor:
    """The tiles of one warpgroup's rows, first to last column: (ROWS, cols, n)."""
    heads, batches = tma.tensor.shape[2], tma.tensor.shape[3]
    plane = tma.tensor[None, None, cutlass.min(head, heads - 1), cutlass.min(batch, batches - 1)]
    return cute.local_tile(cute.domain_offset((row0, 0), plane), (ROWS, cols), (0, None))
