"""A bias loaded through shared memory: TMA loads its tiles, and ldmatrix reads them in the accumulator's layout.

Loads from global memory by the threads that hold the scores, eight rows of 16 bytes per instruction, keep L1 busy for
most of a step. TMA bypasses L1, and ldmatrix gives each lane its accumulator's pairs, transposed or not.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Constexpr, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warp

import layouts
from cute_attn.device.math import rematerialize
from cute_attn.device.pipeline import Accessed, Pipeline
from cute_attn.rows.tma import TmaTiles

ROWS = 64
"""Number of rows of a tile: the rows of one warpgroup."""

ROW_COLS = 64
"""16-bit columns in one row of the 128-byte swizzle."""


@dataclass(frozen=True)
class TmaBiasTile:
    """A warpgroup's bias tile in shared memory, 16-bit, (64 queries, cols), for its wgmma accumulator."""

    dtype: Constexpr
    cols: Constexpr
    address: Int32  # ``lane_address`` in its stage
    pipeline: Pipeline
    use: Int32

    SUBTILE: ClassVar[int] = 4
    """Number of a thread's columns in a ``subtile`` of sixteen columns, in each of its two rows."""

    @property
    def subtiles(self) -> int:
        """Number of sub-tiles of sixteen columns."""
        return self.cols // 16

    @cute.jit
    def wait(self) -> None:
        """Wait until the tile is loaded."""
        self.pipeline.consumer_wait(self.use)

    @cute.jit
    def release(self) -> None:
        """By each warp after its last read: release the tile's stage."""
        self.pipeline.consumer_release(self.use, Accessed.BY_THREADS)

    @cute.jit
    def read(self, subtile: Constexpr, words: cute.Tensor) -> None:
        """Read a sub-tile into the thread's pairs: ``words`` (pairs of columns, rows) of 32 bits."""
        first = 16 * subtile % layouts.atom_cols(self.cols, 16)
        address = (self.address ^ Int32(2 * first)) + Int32(2 * ROWS * (16 * subtile - first))
        source = cute.make_ptr(self.dtype, address, cute.AddressSpace.smem, assumed_align=16)
        _read_matrices(source, False, subtile, words)


@dataclass(frozen=True)
class TmaBiasTransposed:
    """A bias tile in shared memory, 16-bit, (queries, keys), for a warpgroup's accumulator of (keys, queries).

    It is loaded with Q's pipeline: valid after a consumer wait for Q, until Q's release.
    """

    dtype: Constexpr
    queries: Constexpr
    address: Int32  # ``lane_address_transposed`` in its stage
    takes_gradient: Constexpr  # the kernel stores the bias gradient, from shared memory

    SUBTILE: ClassVar[int] = 4
    """Number of a thread's queries in a ``subtile`` of sixteen queries, for each of its two keys."""

    @property
    def subtiles(self) -> int:
        """Number of sub-tiles of sixteen queries."""
        return self.queries // 16

    def wait(self) -> None:
        """Do nothing: the wait for Q covers the bias."""

    def release(self) -> None:
        """Do nothing: Q's release covers the bias."""

    @cute.jit
    def read(self, subtile: Constexpr, words: cute.Tensor) -> None:
        """Read a sub-tile into the thread's pairs: ``words`` (pairs of queries, keys) of 32 bits."""
        source = cute.make_ptr(self.dtype, self.address, cute.AddressSpace.smem, assumed_align=16)
        _read_matrices(source + 16 * ROW_COLS * subtile, True, subtile, words)


@cute.jit
def _read_matrices(
    source: cute.Pointer, transpose: Constexpr, subtile: Constexpr, words: cute.Tensor
) -> None:
    """Read four 8 x 8 matrices by ldmatrix into a sub-tile's ``words``: along the accumulator's rows first."""
    copy = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, 4), source.dtype)
    target = cute.make_rmem_tensor(cute.make_layout(8), source.dtype)
    cute.copy(copy, cute.make_tensor(source, cute.make_layout(8)), target)
    pairs = cute.recast_tensor(target, Int32)
    for i in cutlass.range_constexpr(4):
        words[2 * subtile + i // 2, i % 2] = pairs[i]


@dataclass(frozen=True)
class TmaBiasOfQueries:
    """All stages of a backward's bias tiles, (queries, keys) each; a warpgroup reads 64 of the keys."""

    tensor: cute.Tensor  # (queries, keys, stages)
    takes_gradient: Constexpr  # see TmaBiasTransposed

    @property
    def stage_bytes(self) -> int:
        queries, keys = (cute.size(self.tensor, mode=[i]) for i in (0, 1))
        return queries * keys * self.tensor.element_type.width // 8

    def address_of(self, thread: Int32) -> Int32:
        """``lane_address_transposed`` in the first stage, for callers to keep in a register."""
        base, queries = Int32(self.tensor.iterator.toint()), cute.size(self.tensor, mode=[0])
        return rematerialize(lane_address_transposed(base, thread, queries))

    def tile(self, address: Int32, stage: Int32) -> TmaBiasTransposed:
        """The tile of a stage; address: :meth:`address_of` the thread."""
        queries, in_stage = cute.size(self.tensor, mode=[0]), address + stage * self.stage_bytes
        return TmaBiasTransposed(self.tensor.element_type, queries, in_stage, self.takes_gradient)


def lane_address_transposed(base: Int32, thread: Int32, queries: int) -> Int32:
    """The ldmatrix row address of a thread in the first sixteen queries; later ones are at static offsets.

    base: the tile's address, a multiple of 1024. Rows have ``ROW_COLS`` keys of one warpgroup, in the layout of
    :func:`layouts.wgmma_smem_layout`. A warp reads sixteen of those keys; a lane addresses row lane % 8 of the first or
    the last eight queries, at the first or the last eight keys.
    """
    row, half, last, own_warp = thread & 7, (thread >> 3) & 1, (thread >> 4) & 1, (thread >> 5) & 3
    query, subtile = 8 * last + row, 2 * own_warp + half
    return base + ((thread >> 7) * queries + query) * (2 * ROW_COLS) + ((subtile ^ row) << 4)


def lane_address(base: Int32, lane: Int32, cols: int) -> Int32:
    """The ldmatrix row address of a warpgroup's lane in the first sixteen columns.

    It is row lane % 16 of the warp's rows, at the first or the second eight columns. base: the tile's address, a
    multiple of 1024, in the layout of :func:`layouts.wgmma_smem_layout`. For other columns of the swizzle atom, xor the
    address with the column's byte offset.
    """
    width = 2 * layouts.atom_cols(cols, 16)
    swizzle = layouts.choose_swizzle(cols, 16)
    row, half = lane // 32 * 16 + lane % 16, lane // 16 % 2
    exchange = (row >> (3 - swizzle.bits)) & ((1 << swizzle.bits) - 1)
    return base + (row * width + ((half ^ exchange) << 4))


@dataclass(frozen=True)
class TmaBias:
    """All warpgroups' bias tiles. Each warpgroup has a separate pipeline and does not wait for another's tiles."""

    tensor: cute.Tensor  # (ROWS, columns, stages, warpgroup)
    address: Int32  # of ``tensor``
    barriers: cute.Pointer
    num_stages: Constexpr
    warpgroups: Constexpr

    def pipeline(self, group: Int32 | int) -> Pipeline:
        words = Pipeline.barrier_bytes(self.num_stages) // 8
        stage_bytes = ROWS * cute.size(self.tensor, mode=[1]) * self.tensor.element_type.width // 8
        return Pipeline(self.barriers + group * words, self.num_stages, stage_bytes)

    @cute.jit
    def init(self) -> None:
        """By one thread, before any wait: initialize the mbarriers."""
        for group in cutlass.range_constexpr(self.warpgroups):
            self.pipeline(group).init(4)

    def tile(self, group: Int32, lane: Int32, use: Int32) -> TmaBiasTile:
        """The tile of one warpgroup at a use of its pipeline."""
        pipeline, cols = self.pipeline(group), cute.size(self.tensor, mode=[1])
        base = self.address + (group * self.num_stages + pipeline.stage(use)) * pipeline.stage_bytes
        return TmaBiasTile(self.tensor.element_type, cols, lane_address(base, lane, cols), pipeline, use)

    @cute.jit
    def load(self, tiles: cute.Tensor, tma: TmaTiles, block: Int32, group: Int32, use: Int32) -> None:
        """By the producer warp: acquire a stage of one warpgroup's pipeline, and start loading key block ``block``."""
        pipeline = self.pipeline(group)
        pipeline.producer_acquire(use)
        tma.load(tiles, block, self.tensor[None, None, None, group], pipeline, use)


def bias_tma(bias: cute.Tensor, layout: cute.ComposedLayout, store: Constexpr = False) -> TmaTiles:
    """On the host: TMA tiles of (batch, nheads, seqlen_q, seqlen_k), viewed as (rows, columns, heads, batch).

    Args:
        bias: aligned to 16 bytes; the last stride is 1, the others are multiples of eight elements. A
            dimension over which it is broadcast has extent 1 in the view, as ``rows_of`` and ``columns_of`` expect.
        layout: (rows, columns[, stages]) of a tile in shared memory.
        store: make tiles for stores instead of loads.
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
    """Extent and stride of a dimension for TMA; the extent is 1 if the dimension is broadcast."""
    single = (Int64(stride) == 0) | (size == 1)
    return (
        cutlass.select_(single, Int32(1), Int32(size)),
        cute.assume(cutlass.select_(single, Int64(8), Int64(stride)), divby=8),
    )


def rows_of(tma: TmaTiles, row0: Int32, head: Int32, batch: Int32, cols: int) -> cute.Tensor:
    """The tiles of one warpgroup's rows, over all columns: (ROWS, cols, n)."""
    plane = cute.domain_offset((row0, 0), _plane(tma, head, batch))
    return cute.local_tile(plane, (ROWS, cols), (0, None))


def columns_of(tma: TmaTiles, block: Int32, head: Int32, batch: Int32, shape: tuple[int, int]) -> cute.Tensor:
    """The tiles of one key block, over all queries: (rows, columns, n)."""
    return cute.local_tile(_plane(tma, head, batch), shape, (None, block))


def _plane(tma: TmaTiles, head: Int32, batch: Int32) -> cute.Tensor:
    """The (rows, columns) plane of one head and batch; broadcast dimensions are indexed with 0."""
    heads, batches = tma.tensor.shape[2], tma.tensor.shape[3]
    return tma.tensor[None, None, cutlass.min(head, heads - 1), cutlass.min(batch, batches - 1)]
