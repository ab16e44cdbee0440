"""Splits fp32 tensors into fp16 terms, for kernels that multiply terms. Runs on every target.

    x * 2^e = hi + lo,   2^e such that the tensor's largest element is between 2^14 and 2^15

With precision tf32 there is no lo.

The split takes two launches. The first computes each tensor's largest magnitude, and the smallest of its rows' largest
magnitudes; each CTA writes both numbers for its rows. In the second launch each CTA reduces these few numbers, which is
faster than a launch in between, and writes the terms and the scale's inverse 2^-e for later kernels. If terms do not
preserve the tensor's precision (:func:`cute_attn.device.terms.fits`), it writes 0 and no terms; for dO also if they
would not preserve that of score gradients (``products_fit``). The host reads no number. For the forward's Q only the
scale is written: the main kernel splits rows of Q as it reads them.

All rows are measured, even those outside all sequences: a large number in such a row never changes a result, but may
cost time, since another kernel then has to compute the result.

A CTA handles rows at equal distances, eight adjacent threads per row. Both kernels are bound by memory bandwidth.

Limits: fp32; head dims up to 576; rows 16-byte aligned with a contiguous last dimension and any other strides.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Constexpr, Float16, Float32, Int32, Int64, cute, memory
from cutlass.cute.runtime import make_fake_tensor

from cute_attn.device.seqlen import RowPlaces
from cute_attn.device.terms import (
    LANES,
    NO_ROW,
    VECTOR,
    fits,
    load_row,
    magnitude,
    power_of_two,
    products_fit,
    scale_exponent,
    split,
)
from cute_attn.kernels import fakes
from cute_attn.kernels.base import beyond, more_than
from cute_attn.tiles import padded
from cute_attn.tiles.helpers import SplitFp32Tile
from cute_attn.traits import MAX_HEAD_DIM, MEASURED_TENSORS, SPLIT_TENSORS, Traits, head_dim_multiple


def _tensors_fake(kernel: Any) -> tuple:
    return tuple(fakes.rows(Float32, fakes.rank(kernel.traits)) for _ in kernel.dims)


def _terms_fake(kernel: Any) -> tuple:
    split = kernel.dims[MEASURED_TENSORS[kernel.traits.op] :]
    return tuple(fakes.rows(Float16, fakes.rank(kernel.traits) + 1) for _ in split)


def _partials_fake(kernel: Any) -> cute.Tensor:
    shape = (len(kernel.dims), 2, cute.sym_int())
    return make_fake_tensor(Int32, shape, stride=(cute.sym_int64(), cute.sym_int64(), 1))


@dataclass(frozen=True)
class SplitFp32:
    """The split kernels for (traits, tile); ``__call__`` launches them."""

    traits: Traits
    tile: SplitFp32Tile

    # ---- supported traits ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        used = ("head_dim_v", "precision", "varlen")
        more = more_than(traits, tuple(SPLIT_TENSORS), used, "no score features")
        multiple = head_dim_multiple("fp32")
        return more or beyond(traits, dtypes=("fp32",), most=MAX_HEAD_DIM, multiple=multiple)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> SplitFp32Tile:
        return SplitFp32Tile()

    @property
    def dims(self) -> tuple[int, ...]:
        """The head dims of the tensors, in order."""
        return tuple(getattr(self.traits, name) for name in SPLIT_TENSORS[self.traits.op])

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mX: Annotated[tuple, _tensors_fake],
        mTerms: Annotated[tuple, _terms_fake],
        mPartials: Annotated[cute.Tensor, _partials_fake],
        mScales: fakes.Scales,
        stream: cuda.CUstream,
    ) -> None:
        """Launch both kernels.

        Args:
            mX: (q, k, v), or (q, k, v, dO).
            mTerms: contiguous fp16 terms of each tensor except the forward's q: (..., 2, padded dim) for rows (...,
                dim), hi, then lo; with precision tf32 (..., 1, padded dim).
            mPartials: int32 (tensors, 2, blocks): each CTA's two magnitudes.
            mScales: (tensors,): 2^-e, or 0 if the tensor is not split.
        """
        places = tuple(RowPlaces.make(x) for x in mX)
        launch = {
            "grid": [self.tile.blocks, len(mX), 1],
            "block": [self.tile.num_threads, 1, 1],
            "stream": stream,
        }
        self.measure(mX, places, mPartials).launch(**launch)
        self.split(mX, places, mTerms, mPartials, mScales).launch(**launch)

    # ---- device ----

    @cute.kernel
    def measure(self, mX: tuple, places: tuple, mPartials: cute.Tensor) -> None:
        """The first kernel: compute two magnitudes of each CTA's rows, see :meth:`measure_rows`."""
        thread, numbers = cute.arch.thread_idx()[0], self.shared_numbers()
        block, which, _ = cute.arch.block_idx()
        for i in cutlass.range_constexpr(len(mX)):
            if which == i:
                largest, smallest = self.measure_rows(mX[i], places[i], self.dims[i], block, thread)
                largest, smallest = self.reduce(largest, smallest, numbers, thread)
                if thread == 0:
                    mPartials[i, 0, block] = largest
                    mPartials[i, 1, block] = smallest

    @cute.kernel
    def split(
        self, mX: tuple, places: tuple, mTerms: tuple, mPartials: cute.Tensor, mScales: cute.Tensor
    ) -> None:
        """The second kernel: write the terms of each CTA's rows, and the scales."""
        thread, numbers = cute.arch.thread_idx()[0], self.shared_numbers()
        block, which, _ = cute.arch.block_idx()
        measured = len(mX) - len(mTerms)
        partial = cutlass.min(thread, self.tile.blocks - 1)
        for i in cutlass.range_constexpr(len(mX)):
            if which == i:
                largest, smallest = self.reduce(
                    mPartials[i, 0, partial], mPartials[i, 1, partial], numbers, thread
                )
                exponent, serves = scale_exponent(largest), fits(largest, smallest, self.traits.fp32_terms)
                if cutlass.const_expr(i == 3):  # dO, after V
                    cute.arch.barrier()  # all have read ``numbers``
                    v = self.reduce(mPartials[2, 0, partial], mPartials[2, 1, partial], numbers, thread)
                    serves = serves & products_fit(v, (largest, smallest), self.traits.fp32_terms)
                if thread == 0 and block == 0:
                    mScales[i] = power_of_two(-exponent) if serves else Float32(0.0)
                if cutlass.const_expr(i >= measured):
                    if serves:
                        factor, target = power_of_two(exponent), mTerms[i - measured]
                        self.split_rows(mX[i], places[i], target, self.dims[i], factor, block, thread)

    def shared_numbers(self) -> cute.Tensor:
        """Shared memory (2, warps) for the numbers that the warps of a CTA exchange."""
        tile = self.tile
        base = memory.SmemAllocator().allocate(tile.smem_bytes(self.traits), byte_alignment=16)
        return cute.make_tensor(
            cute.recast_ptr(base, dtype=Int32), cute.make_layout((2, tile.num_threads // 32))
        )

    @cute.jit
    def reduce(self, largest: Int32, smallest: Int32, numbers: cute.Tensor, thread: Int32):
        """Reduce ``largest`` to its maximum and ``smallest`` to its minimum over the CTA; return both."""
        largest = Int32(cute.arch.warp_redux_sync(largest, kind="max"))
        smallest = Int32(cute.arch.warp_redux_sync(smallest, kind="min"))
        if thread % 32 == 0:
            numbers[0, thread // 32] = largest
            numbers[1, thread // 32] = smallest
        cute.arch.barrier()
        for warp in cutlass.range_constexpr(cute.size(numbers, mode=[1])):
            largest = cutlass.max(largest, numbers[0, warp])
            smallest = cutlass.min(smallest, numbers[1, warp])
        return largest, smallest

    @cute.jit
    def measure_rows(self, x: cute.Tensor, places: RowPlaces, dim: Constexpr, block: Int32, thread: Int32):
        """(largest magnitude, smallest of the rows' largest magnitudes) over every ``blocks``-th group of rows.

        Both cover the rows of the thread's group of eight adjacent threads; rows of zeros do not count in the second.
        """
        lane, rows = thread % LANES, self.tile.rows
        largest, smallest = Int32(0), Int32(NO_ROW)
        for first in cutlass.range(block * rows, places.count, self.tile.blocks * rows, unroll=1):
            row = first + thread // LANES
            values = self.load(x, places, cutlass.min(row, places.count - 1), dim, lane)
            most = Int32(0)
            for i in cutlass.range_constexpr(cute.size(values)):
                most = cutlass.max(most, magnitude(values[i]))
            for step in cutlass.range_constexpr(LANES.bit_length() - 1):
                most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << step))
            largest = cutlass.max(largest, most)
            smallest = cutlass.min(smallest, most if most > 0 else Int32(NO_ROW))
        return largest, smallest

    # ---- device code that tests also run on the host ----

    @cute.jit
    def split_rows(
        self,
        x: cute.Tensor,
        places: RowPlaces,
        target: cute.Tensor,
        dim: Constexpr,
        factor: Float32,
        block: Int32,
        thread: Int32,
    ) -> None:
        """Write the terms of every ``blocks``-th group of rows; columns beyond ``dim`` are 0.

        Rows are split from the last to the first: the last rows were measured last and are still in L2.
        """
        lane, rows, cols = thread % LANES, self.tile.rows, padded(dim)
        count: Constexpr = self.traits.fp32_terms
        for first in cutlass.range(block * rows, places.count, self.tile.blocks * rows, unroll=1):
            row = places.count - 1 - (first + thread // LANES)
            if row >= 0:
                values = self.load(x, places, row, dim, lane)
                start = target.iterator + cute.assume(Int64(row) * (count * cols), divby=VECTOR)
                for j in cutlass.range_constexpr(cute.size(values, mode=[1])):
                    terms = split(values[None, j], Float16, count, factor)
                    for t in cutlass.range_constexpr(count):
                        col = cute.assume(lane * VECTOR, divby=VECTOR) + (t * cols + j * LANES * VECTOR)
                        cute.autovec_copy(terms[t], cute.make_tensor(start + col, cute.make_layout(VECTOR)))

    def load(self, x: cute.Tensor, places: RowPlaces, row: Int32, dim: int, lane: Int32) -> cute.Tensor:
        """Load a thread's elements of a row."""
        return load_row(x, places.start(x, row), dim, padded(dim), lane)
