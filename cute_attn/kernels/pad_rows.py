"""Copies rows of any alignment to padded rows that attention kernels can load, and back. Runs on every target.

    pad      y[row, col] = x[row, col], and 0 in the columns of y beyond those of x
    unpad    y[row, col] = x[row, col] for the columns of y

Attention kernels load rows whose size and start are multiples of 16 bytes. Rows of other head dims (59, 123, 201),
strides or addresses are first copied to padded rows, in one launch for q, k and v, and in the backward also for dO and
O. A second launch, after the attention kernels, copies their outputs to the call's head dim. Columns of zeros change no
score and no gradient, and the attention kernels use the call's softmax scale.

A CTA copies a multiple of eight rows of one tensor. Its padded rows are thus one run of memory that starts at a
multiple of 16 bytes, and so are its unpadded rows, of any head dim, in a contiguous tensor. Adjacent threads store
adjacent 8 bytes of such a run from elements that they load one by one; all loads precede the stores. A thread finds a
row by two divisions with factors made on the host. If unpadded output rows do not form such a run, adjacent threads
store adjacent elements. The copies are bound by memory bandwidth.

Rows of packed queries outside all sequences are padded like all others. A call leaves these rows of O unchanged, so
only rows of O between the first and the last cumulative length are written.

Limits: fp16, bf16 and fp32; head dims up to 576; padded tensors are contiguous, other tensors have any strides.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Int32, Int64, Uint32, cute

from cute_attn.device.seqlen import RowPlaces
from cute_attn.kernels import fakes
from cute_attn.kernels.base import beyond, more_than
from cute_attn.tiles.helpers import PadRowsTile
from cute_attn.traits import DTYPES, MAX_HEAD_DIM, PADDED_TENSORS, Traits, aligned_head_dim


def _rows_fakes(kernel: Any, *, padded: bool) -> tuple:
    dtype, make = fakes.CUTE_DTYPES[kernel.traits.dtype], fakes.rows if padded else fakes.strided
    return tuple(make(dtype, fakes.rank(kernel.traits)) for _ in kernel.dims)


def _bounds_fake(kernel: Any) -> cute.Tensor | None:
    return fakes.numbers(kernel.traits.varlen and kernel.traits.op == "forward_unpad")


@dataclass(frozen=True)
class PadRows:
    """The padding copies for (traits, tile); ``__call__`` launches them."""

    traits: Traits
    tile: PadRowsTile

    # ---- supported traits ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        more = more_than(traits, tuple(PADDED_TENSORS), ("head_dim_v", "varlen"), "no score features")
        return more or beyond(traits, dtypes=DTYPES, most=MAX_HEAD_DIM, multiple=1)

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> PadRowsTile:
        return PadRowsTile()

    @property
    def pads(self) -> bool:
        """True for copies to padded rows, False for copies back to the call's head dim."""
        return self.traits.op.endswith("_pad")

    @property
    def dims(self) -> tuple[int, ...]:
        """The head dims of the unpadded tensors, in order."""
        return tuple(getattr(self.traits, name) for name in PADDED_TENSORS[self.traits.op])

    def rows(self, dim: int) -> int:
        """Number of rows per CTA in a tensor of head dim ``dim``."""
        return self.tile.rows(self.traits, dim)

    def blocks(self, places: RowPlaces, dim: int) -> Int32:
        """Number of CTAs for a tensor of head dim ``dim``. The grid may have more; their row numbers might overflow."""
        return cute.ceil_div(places.count, self.rows(dim))

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mSource: Annotated[tuple, lambda kernel: _rows_fakes(kernel, padded=not kernel.pads)],
        mTarget: Annotated[tuple, lambda kernel: _rows_fakes(kernel, padded=kernel.pads)],
        which: Int32,
        mCuSeqlens: Annotated[cute.Tensor | None, _bounds_fake],
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel; the grid's y extent is the number of tensors.

        Args:
            mSource, mTarget: tensors of rows, see ``PADDED_TENSORS``. Padded tensors are contiguous with 16-byte
                aligned rows; unpadded tensors have any head dim and strides.
            which: bit i is set if tensor i is copied.
            mCuSeqlens: cumulative lengths of the packed rows of O; None for other copies.
        """
        places = tuple(RowPlaces.make(x) for x in (mSource if self.pads else mTarget))
        blocks = Int32(0)
        for i in cutlass.range_constexpr(len(mSource)):
            if which & (1 << i) != 0:
                blocks = cutlass.max(blocks, self.blocks(places[i], self.dims[i]))
        self.kernel(mSource, mTarget, places, which, mCuSeqlens).launch(
            grid=[cutlass.max(blocks, 1), len(mSource), 1], block=[self.tile.num_threads, 1, 1], stream=stream
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self, mSource: tuple, mTarget: tuple, places: tuple, which: Int32, mCuSeqlens: cute.Tensor
    ) -> None:
        thread = cute.arch.thread_idx()[0]
        block, tensor, _ = cute.arch.block_idx()
        for i in cutlass.range_constexpr(len(mSource)):
            if tensor == i and which & (1 << i) != 0:
                if cutlass.const_expr(self.pads):
                    self.pad(mSource[i], mTarget[i], places[i], self.dims[i], block, thread)
                else:
                    first, end = self.owned(mTarget[i], places[i], mCuSeqlens)
                    self.unpad(mSource[i], mTarget[i], places[i], self.dims[i], first, end, block, thread)

    # ---- device code that tests also run on the host ----

    @cute.jit
    def owned(self, y: cute.Tensor, places: RowPlaces, cu_seqlens: cute.Tensor):
        """(first, end) of the rows to write; each head of a query is a row."""
        first, end = Int32(0), places.count
        if cutlass.const_expr(cu_seqlens is not None):
            heads = Int32(y.shape[1])
            first = cu_seqlens[0] * heads
            end = cu_seqlens[cute.size(cu_seqlens) - 1] * heads
        return first, end

    @cute.jit
    def pad(
        self, x: cute.Tensor, y: cute.Tensor, places: RowPlaces, dim: Constexpr, block: Int32, thread: Int32
    ) -> None:
        """Copy a CTA's rows of x to padded rows of y; called by each thread."""
        wide, rows, vector = self.wide(dim), self.rows(dim), self.tile.vector(self.traits)
        row0, threads = block * rows, self.tile.num_threads
        if block < self.blocks(places, dim):
            steps: Constexpr = -(-rows * (wide // vector) // threads)
            values = cute.make_rmem_tensor(cute.make_layout((vector, steps)), y.element_type)
            stride = Int64(x.stride[cute.rank(x) - 1])
            if stride == 1:
                self.load(x, places, dim, 1, row0, thread, values)
            else:
                self.load(x, places, dim, stride, row0, thread, values)
            for i in cutlass.range_constexpr(steps):
                row, col = quotient(thread + i * threads, wide // vector)
                if (row < rows) & (row0 + row < places.count):
                    store_vector(values[None, i], y, Int64(row0 + row) * wide + col * vector)

    @cute.jit
    def load(
        self,
        x: cute.Tensor,
        places: RowPlaces,
        dim: Constexpr,
        stride: Int64,
        row0: Int32,
        thread: Int32,
        values: cute.Tensor,
    ) -> None:
        """Load a thread's vectors of padded rows, starting at ``row0``. stride: distance of elements of a row in x."""
        vector, steps = cute.size(values, mode=[0]), cute.size(values, mode=[1])
        values.fill(values.element_type(0.0))
        for i in cutlass.range_constexpr(steps):
            row, col = quotient(thread + i * self.tile.num_threads, self.wide(dim) // vector)
            start = places.start(x, cutlass.min(row0 + row, places.count - 1)) + Int64(col * vector) * stride
            for e in cutlass.range_constexpr(vector):
                if col * vector + e < dim:
                    values[e, i] = element(x, start + e * stride)[0]

    @cute.jit
    def unpad(
        self,
        x: cute.Tensor,
        y: cute.Tensor,
        places: RowPlaces,
        dim: Constexpr,
        first: Int32,
        end: Int32,
        block: Int32,
        thread: Int32,
    ) -> None:
        """Copy a CTA's padded rows of x to its rows of y that are in [first, end); called by each thread."""
        row0, stop = block * self.rows(dim), (block + 1) * self.rows(dim)
        if block < self.blocks(places, dim):
            if (first <= row0) & (stop <= end) & is_run(y, dim):
                self.unpad_run(x, y, dim, row0, thread)
            else:
                first, end = cutlass.max(first, row0), cutlass.min(end, stop)
                self.unpad_elements(x, y, places, dim, first, end, thread)

    @cute.jit
    def unpad_run(self, x: cute.Tensor, y: cute.Tensor, dim: Constexpr, row0: Int32, thread: Int32) -> None:
        """Copy to a CTA's rows, which start at ``row0`` and are contiguous in memory."""
        vector, threads, wide = self.tile.vector(self.traits), self.tile.num_threads, self.wide(dim)
        source, target = Int64(row0) * wide, Int64(row0) * dim
        elements: Constexpr = self.rows(dim) * dim
        steps: Constexpr = -(-elements // (vector * threads))
        values = cute.make_rmem_tensor(cute.make_layout((vector, steps)), y.element_type)
        for i in cutlass.range_constexpr(steps):
            at = cutlass.min((thread + i * threads) * vector, elements - vector)
            row, col = quotient(at, dim)
            for e in cutlass.range_constexpr(vector):
                values[e, i] = element(x, source + (row * wide + col))[0]
                col += 1
                row, col = (row + 1, 0) if col == dim else (row, col)
        for i in cutlass.range_constexpr(steps):
            at = (thread + i * threads) * vector
            if at < elements:
                store_vector(values[None, i], y, target + at)

    @cute.jit
    def unpad_elements(
        self,
        x: cute.Tensor,
        y: cute.Tensor,
        places: RowPlaces,
        dim: Constexpr,
        first: Int32,
        end: Int32,
        thread: Int32,
    ) -> None:
        """Copy to rows [first, end) of a CTA, at any alignment; the range may be empty."""
        for at in cutlass.range(thread, (end - first) * dim, self.tile.num_threads, unroll=2):
            row, col = quotient(at, dim)
            start = places.start(y, first + row) + Int64(col) * y.stride[cute.rank(y) - 1]
            element(y, start)[0] = element(x, Int64(first + row) * self.wide(dim) + col)[0]

    def wide(self, dim: int) -> int:
        """The head dim that ``dim`` is padded to."""
        return aligned_head_dim(self.traits.dtype, dim)


def element(x: cute.Tensor, offset: Int64) -> cute.Tensor:
    """The element of ``x`` at ``offset`` from the first, as a tensor."""
    return cute.make_tensor(x.iterator + offset, cute.make_layout(1))


def store_vector(values: cute.Tensor, y: cute.Tensor, offset: Int64) -> None:
    """Store ``values`` in ``y`` at ``offset``, an address that is a multiple of their size."""
    vector = cute.size(values)
    address = (y.iterator + offset).toint()
    target = cute.make_ptr(
        y.element_type, address, y.memspace, assumed_align=vector * y.element_type.width // 8
    )
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(vector)))


def quotient(number: Int32, divisor: int) -> tuple[Int32, Int32]:
    """``divmod`` of a non-negative number by a compile-time divisor."""
    whole = Int32(Uint32(number) // Uint32(divisor))
    return whole, number - whole * divisor


def is_run(y: cute.Tensor, dim: int) -> Boolean:
    """True if ``y`` is contiguous from an 8-byte aligned address, so that 8-byte stores may span rows."""
    found = Boolean((y.iterator.toint() & 7) == 0)
    expected = Int64(1)
    for mode in reversed(range(cute.rank(y))):
        found = found & (Int64(y.stride[mode]) == expected)
        expected = expected * (dim if mode == cute.rank(y) - 1 else y.shape[mode])
    return found
