"""A bias on its way through shared memory: TMA brings a number for each score, each warpgroup reads its own.

Read from global memory by the threads that hold the scores, eight rows of sixteen bytes an instruction, it takes the
L1 cache most of a step's time. TMA passes it by, ldmatrix gives each lane the pairs that it has in its accumulator, of
a transposed one as well.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Constexpr, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warp

import layouts
from cute_attn.device.math import rematerialize
from cute_attn.device.pipeline import Pipeline
from cute_attn.rows.tma import TmaTiles

ROWS = 64
"""Rows of a tile: a warpgroup's."""

ROW_COLS = 64
"""Columns of 16 bits that lie in one row of the widest swizzle."""


@dataclass(frozen=True)
class TmaBiasTile:
    """A warpgroup's tile of 16-bit numbers in shared memory, beside the accumulator of its wgmma."""

    dtype: Constexpr
    cols: Constexpr
    address: Int32  # ``lane_address`` of its stage
    ring: Pipeline
    filling: Int32

    PIECE: ClassVar[int] = 4
    """A thread's columns of the sixteen that are read at once; it has them in two rows."""

    @property
    def pieces(self) -> int:
        """How often sixteen columns are read."""
        return self.cols // 16

    @cute.jit
    def wait(self) -> None:
        """Until the tile is there."""
        self.ring.consumer_wait(self.filling)

    @cute.jit
    def release(self) -> None:
        """By each warp once it has read everything."""
        self.ring.consumer_release(self.filling)

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


@dataclass(frozen=True)
class TmaBiasTransposed:
    """A tile (queries, keys) of 16-bit numbers in shared memory, beside a warpgroup's accumulator of (keys, queries).

    It comes and goes with Q: who has waited for Q may read it, and has read it before Q is released.
    """

    dtype: Constexpr
    queries: Constexpr
    address: Int32  # ``lane_address_transposed`` of its stage
    takes_gradient: Constexpr  # the kernel has the scores' gradients in shared memory, and stores them itself

    PIECE: ClassVar[int] = 4
    """A thread's queries of the sixteen that are read at once; it has them for two keys."""

    @property
    def pieces(self) -> int:
        """How often sixteen queries are read."""
        return self.queries // 16

    def wait(self) -> None:
        """Nothing: it is there."""

    def release(self) -> None:
        """Nothing: it is released with Q."""

    @cute.jit
    def read(self, piece: Constexpr, words: cute.Tensor) -> None:
        """Sixteen queries, to the thread's own pairs: ``words`` (pairs of queries, keys) of 32 bits."""
        source = cute.make_ptr(self.dtype, self.address, cute.AddressSpace.smem, assumed_align=16)
        copy = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype)
        target = cute.make_rmem_tensor(cute.make_layout(8), self.dtype)
        rows = cute.make_tensor(source + 16 * ROW_COLS * piece, cute.make_layout(8))
        cute.copy(copy, rows, target)
        pairs = cute.recast_tensor(target, Int32)
        for i in cutlass.range_constexpr(4):  # 8 x 8 each: keys first, then queries
            words[2 * piece + i // 2, i % 2] = pairs[i]


@dataclass(frozen=True)
class TmaBiasOfQueries:
    """What all warpgroups of a backward read: tiles of queries and keys, of which each reads 64 keys."""

    tensor: cute.Tensor  # (queries, keys, stages)
    takes_gradient: Constexpr  # see TmaBiasTransposed

    @property
    def stage_bytes(self) -> int:
        """Of a stage."""
        queries, keys = (cute.size(self.tensor, mode=[i]) for i in (0, 1))
        return queries * keys * self.tensor.element_type.width // 8

    def address_of(self, thread: Int32) -> Int32:
        """Where a thread finds its numbers of the first stage; to be kept in a register, rather than computed again."""
        base, queries = Int32(self.tensor.iterator.toint()), cute.size(self.tensor, mode=[0])
        return rematerialize(lane_address_transposed(base, thread, queries))

    def tile(self, address: Int32, stage: Int32) -> TmaBiasTransposed:
        """A stage's. address: ``address_of`` the thread."""
        queries, place = cute.size(self.tensor, mode=[0]), address + stage * self.stage_bytes
        return TmaBiasTransposed(self.tensor.element_type, queries, place, self.takes_gradient)


def lane_address_transposed(base: Int32, thread: Int32, queries: int) -> Int32:
    """Where a thread finds its eight numbers of the first sixteen queries, for ldmatrix.

    base: the tile's address, a multiple of 1024, where rows of ``ROW_COLS`` keys, a warpgroup's, lie as
    :func:`layouts.wgmma_smem_layout` has them. A warp has sixteen of those keys, and a lane row lane % 8 of the first
    or the last eight queries, the first or the last eight keys. Sixteen queries on, all is the same.
    """
    row, half, last, own_warp = thread & 7, (thread >> 3) & 1, (thread >> 4) & 1, (thread >> 5) & 3
    query, piece = 8 * last + row, 2 * own_warp + half
    return base + ((thread >> 7) * queries + query) * (2 * ROW_COLS) + ((piece ^ row) << 4)


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
class TmaBias:
    """All warpgroups' tiles: each has a ring of its own, so that none waits for another's."""

    tensor: cute.Tensor  # (ROWS, columns, stages, warpgroup)
    address: Int32  # of all that
    barriers: cute.Pointer
    num_stages: Constexpr
    warpgroups: Constexpr

    @staticmethod
    def barrier_bytes(num_stages: int, warpgroups: int) -> int:
        """Shared memory for the barriers."""
        return Pipeline.barrier_bytes(num_stages) * warpgroups

    def ring(self, group: Int32 | int) -> Pipeline:
        """Of one warpgroup."""
        words = Pipeline.barrier_bytes(self.num_stages) // 8
        stage_bytes = ROWS * cute.size(self.tensor, mode=[1]) * self.tensor.element_type.width // 8
        return Pipeline(self.barriers + group * words, self.num_stages, stage_bytes)

    @cute.jit
    def init(self) -> None:
        """By one thread, before anybody waits."""
        for group in cutlass.range_constexpr(self.warpgroups):
            self.ring(group).init(4)

    def tile(self, group: Int32, lane: Int32, filling: Int32) -> TmaBiasTile:
        """What one warpgroup was brought."""
        ring, cols = self.ring(group), cute.size(self.tensor, mode=[1])
        base = self.address + (group * self.num_stages + ring.stage(filling)) * ring.stage_bytes
        return TmaBiasTile(self.tensor.element_type, cols, lane_address(base, lane, cols), ring, filling)

    @cute.jit
    def load(self, tiles: cute.Tensor, tma: TmaTiles, block: Int32, group: Int32, filling: Int32) -> None:
        """By one warp: start loading the columns of ``block`` for one warpgroup, once there is room."""
        ring = self.ring(group)
        ring.producer_acquire(filling)
        tma.load(tiles, block, self.tensor[None, None, None, group], ring, filling)


def bias_tma(bias: cute.Tensor, layout: cute.ComposedLayout, store: Constexpr = False) -> TmaTiles:
    """TMA's view of (batch, nheads, seqlen_q, seqlen_k) as (rows, columns, heads, batch), for tiles of ``layout``.

    layout: (rows, columns), or a stage of it. store: for stores rather than loads.

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
    layout = cute.select(layout, mode=[0, 1])
    extents = (cute.size(layout, mode=[0]), cute.size(layout, mode=[1]))
    op = cpasync.CopyBulkTensorTileS2GOp() if store else cpasync.CopyBulkTensorTileG2SOp()
    atom, coords = cpasync.make_tiled_tma_atom(op, view, layout, extents)
    return TmaTiles(atom, coords, extents, False)


def _broadcast(size: Int32, stride: Any) -> tuple[Int32, Int64]:
    """Extent and stride of a dimension as TMA takes it: one of those that are all the same."""
    single = (Int64(stride) == 0) | (size == 1)
    return (
        cutlass.select_(single, Int32(1), Int32(size)),
        cute.assume(cutlass.select_(single, Int64(8), Int64(stride)), divby=8),
    )


def rows_of(tma: TmaTiles, row0: Int32, head: Int32, batch: Int32, cols: int) -> cute.Tensor:
    """The tiles of one warpgroup's rows, first to last column: (ROWS, cols, n)."""
    plane = cute.domain_offset((row0, 0), _plane(tma, head, batch))
    return cute.local_tile(plane, (ROWS, cols), (0, None))


def columns_of(tma: TmaTiles, block: Int32, head: Int32, batch: Int32, shape: tuple[int, int]) -> cute.Tensor:
    """The tiles of one key block, first to last query: (rows, columns, n)."""
    return cute.local_tile(_plane(tma, head, batch), shape, (None, block))


def _plane(tma: TmaTiles, head: Int32, batch: Int32) -> cute.Tensor:
    """(rows, columns) of one head, or of the only one."""
    heads, batches = tma.tensor.shape[2], tma.tensor.shape[3]
    return tma.tensor[None, None, cutlass.min(head, heads - 1), cutlass.min(batch, batches - 1)]
