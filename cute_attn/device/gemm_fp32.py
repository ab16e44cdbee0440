"""Matrix products of fp32 operands by mma.sync of tf32, m16n8k8: the counterpart of :mod:`cute_attn.device.gemm`.

The tensor cores read fp32 registers as tf32, 11 significant bits. ``products``, of a product:

    1   operands rounded to tf32
    3   x = high + low, each tf32: A B^T = low high + high low + high high. What is left out, low low, is 2^-24 of the
        result. Ootomo and Yokota 2022, https://arxiv.org/abs/2203.03341; CUTLASS' example 27.

A tensor core rounds its sums toward zero: in long ones these errors do not average out, and exceed what ``low`` saves.
So with three products each step along K is summed from zero, and added to the accumulator in fp32, as that paper does.

ldmatrix moves 8 x 4 fp32 as it moves 8 x 8 16-bit elements, but cannot transpose them. An operand whose rows (M or N)
are contiguous in shared memory is read by single words: lane (g, t) takes row g, and k = 2 t and 2 t + 1 instead of
t and t + 4. Any order of k gives the same product as long as both operands have it. With this one a swizzled tile is
free of bank conflicts, and it is the order in which an accumulator becomes the next product's A operand.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Float16, Float32, Int32, TFloat32, cute
from cutlass.cute.nvgpu import warp

from cute_attn.device.gemm import SmemResult, below_1024, swizzled_bits
from cute_attn.device.math import on_device, rematerialize
from layouts.mma import row_col_modes, row_col_view

K = 8
"""Elements along K of one step."""
_WORDS = 4


@dataclass(frozen=True)
class Fp32Operand:
    """A thread's part of an operand in shared memory.

    Attributes:
        tile: (rows, k, stage); rows are M or N.
        first: the warp's index along M or N.
        warps: warps along M or N, a power of 2.
        is_a: whether it is the A operand.
        by_words: rows are contiguous, not k.
        paired: lane (g, t) takes k = 2 t and 2 t + 1, not t and t + 4. Only ``by_words``.
    """

    tile: cute.Tensor
    thread: Int32
    warps_m: Constexpr
    warps: Constexpr
    is_a: Constexpr
    by_words: Constexpr
    paired: Constexpr

    @property
    def pieces(self) -> int:
        """16 rows each: one m16 of A, or two n8 of B."""
        return cute.size(self.tile, mode=[0]) // (16 * self.warps)

    @property
    def steps(self) -> int:
        """MMA steps along K."""
        return cute.size(self.tile, mode=[1]) // K

    def start(self, stage: Int32) -> Int32:
        """The address of the thread's first word or vector in ``stage``, rematerialized as ``SmemOperand.start``'s."""
        thread = below_1024(rematerialize(self.thread))
        lane, index = thread % 32, thread // 32
        index = index % self.warps_m if self.is_a else index // self.warps_m
        row = index * (16 if self.is_a else 8)
        if self.by_words:
            row, k = row + lane // 4, lane % 4 * (2 if self.paired else 1)
        else:  # lane i has the address of row i % 8 of matrix i // 8
            matrix = lane // 8
            half_row, half_k = (matrix % 2, matrix // 2) if self.is_a else (matrix // 2, matrix % 2)
            row, k = row + lane % 8 + half_row * self._half_row, half_k * 4
        return (self.tile.iterator + cute.crd2idx((row, k, stage), self.tile.layout)).toint()

    @property
    def _half_row(self) -> int:
        """From a row of a piece to the one in its other half."""
        return 8 if self.is_a else 8 * self.warps

    def at_step(self, start: Int32, k: Int32) -> Int32:
        """``start`` moved to step k, a dynamic value."""
        step = self._distance(0, 1) if self.steps > 1 else 0
        row = next((n for n in range(1, self.steps) if self._distance(0, n) != n * step), self.steps)
        atom = self._distance(0, row) if row < self.steps else 0
        in_row = k % row * step
        swizzled = in_row & swizzled_bits(self.tile.layout)
        return (start ^ (swizzled * _WORDS)) + (in_row - swizzled + k // row * atom) * _WORDS

    def _distance(self, row: int, step: int, k: int = 0) -> int:
        """Elements between the thread's first and a later one, without the swizzle."""
        layout = self.tile.layout
        outer = layout.outer if isinstance(layout, cute.ComposedLayout) else layout
        return cute.crd2idx((row, K * step + k, 0), outer)

    def _pointer(self, start: Int32, distance: int, bytes_: int) -> cute.Pointer:
        swizzled = distance & swizzled_bits(self.tile.layout)
        moved = start ^ (swizzled * _WORDS) if swizzled else start
        pointer = cute.make_ptr(Float32, moved, cute.AddressSpace.smem, assumed_align=bytes_)
        return pointer + (distance - swizzled)

    def load(self, start: Int32, piece: int, step: int) -> cute.Tensor:
        """4 fp32 registers of a piece, ``step`` steps after ``start``.

        A: rows g and g + 8 of the first k, then of the second. B: both k of the first n8, then of the second.
        """
        words = cute.make_rmem_tensor(4, Float32)
        pointers = self.pointers(start, piece, step)
        if self.by_words:
            for i in range(4):
                words[i] = cute.make_tensor(pointers[i], cute.make_layout(1))[0]
        else:
            vector = cute.make_layout((8, 1))
            cute.copy(
                cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), Float16),
                cute.make_tensor(cute.recast_ptr(pointers[0], dtype=Float16), vector),
                cute.make_tensor(cute.recast_tensor(words, Float16).iterator, vector),
            )
        return words

    def pointers(self, start: Int32, piece: int, step: int) -> list[cute.Pointer]:
        """Where the thread reads a piece: the row of a matrix for ldmatrix, or each of its 4 words."""
        row = 16 * self.warps * piece
        if not self.by_words:
            return [self._pointer(start, self._distance(row, step), 16)]
        starts, rows = (start, self._second_k(start)), (row, row + self._half_row)
        halves = (
            [(k, r) for k in range(2) for r in range(2)]
            if self.is_a
            else [(k, r) for r in range(2) for k in range(2)]
        )
        return [self._pointer(starts[k], self._distance(rows[r], step), 4) for k, r in halves]

    def _second_k(self, start: Int32) -> Int32:
        """``start`` moved to the lane's second k, a later row of the tile's memory: its swizzle is another one."""
        layout = self.tile.layout
        rows = 1 if self.paired else 4  # the first k has no bit of these
        distance = self._distance(0, 0, rows)
        if not isinstance(layout, cute.ComposedLayout):
            return start + distance * _WORDS
        swizzle = layout.inner
        changed = (distance >> swizzle.num_shift) & swizzled_bits(layout)
        return (start ^ (changed * _WORDS)) + distance * _WORDS


@dataclass(frozen=True)
class Split:
    """Registers of an operand as tf32: rounded alone (low is None), or with what rounding left over."""

    high: cute.Tensor
    low: cute.Tensor | None


def split(words: cute.Tensor, products: int) -> Split:
    """fp32 registers as tf32, with their layout."""
    high = cute.make_rmem_tensor_like(words)
    low = cute.make_rmem_tensor_like(words) if products == 3 else None
    for i in range(cute.size(words)):
        if low is None:
            high[i] = rounded_to_tf32(words[i])
        else:
            high[i] = _rounded_to_tf32(words[i])
            low[i] = words[i] - high[i]
    return Split(_as_tf32(high), None if low is None else _as_tf32(low))


def rounded_to_tf32(x: Float32) -> Float32:
    """x rounded to the nearest tf32, ties away from 0."""
    if on_device():
        return Float32(
            cute.arch.inline_ptx(
                "cvt.rna.tf32.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
            )
        )
    return _rounded_to_tf32(x)


def _rounded_to_tf32(x: Float32) -> Float32:
    """As :func:`rounded_to_tf32`, in half the instructions, but some NaNs become -0: x minus the result is NaN then."""
    return ((x.bitcast(Int32) + Int32(0x1000)) & Int32(~0x1FFF)).bitcast(Float32)


def _as_tf32(words: cute.Tensor) -> cute.Tensor:
    return cute.recast_tensor(words, TFloat32)


def multiply(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: Split, b: Split) -> None:
    """acc += A B^T for one step along K; acc: (4, M, N), a: (4, M), b: (2, N). The smallest terms first.

    Raises ValueError for registers of an instruction that are not adjacent: ``cute.gemm`` would take others.
    """
    for name, x in (("a", a.high), ("b", b.high)):
        offsets = [cute.crd2idx(i, x.layout[0]) for i in range(cute.size(x, mode=[0]))]
        if offsets != list(range(len(offsets))):
            raise ValueError(
                f"{name} has registers {offsets} of a fragment; accepted: adjacent ones, in order"
            )
    pairs = [(a.high, b.high)]
    if a.low is not None and b.low is not None:
        pairs = [(a.low, b.high), (a.high, b.low), *pairs]
    for x, y in pairs:
        cute.gemm(tiled_mma, acc, x, y, acc)


def _operand_a(a: Fp32Operand, start: Int32, step: int, products: int) -> Split:
    """All pieces of A in one step, (4, M)."""
    words = cute.make_rmem_tensor(cute.make_layout((4, a.pieces)), Float32)
    for piece in range(a.pieces):
        loaded = a.load(start, piece, step)
        for i in range(4):
            words[i, piece] = loaded[i]
    return split(words, products)


def _times_b(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: Split,
    b: Fp32Operand,
    start: Int32,
    step: int,
    products: int,
) -> None:
    """acc += A B^T for one step along K, by pieces of B."""
    pieces = cute.logical_divide(acc, (None, None, 2))
    for piece in range(b.pieces):
        words = cute.make_tensor(b.load(start, piece, step).iterator, cute.make_layout((2, 2)))
        target = pieces[None, None, (None, piece)]
        if products == 3:
            total = cute.make_rmem_tensor(cute.make_layout(target.shape), Float32)
            total.fill(0.0)
            multiply(tiled_mma, total, a, split(words, products))
            target.store(target.load() + total.load())
        else:
            multiply(tiled_mma, target, a, split(words, products))


@cute.jit
def gemm_fp32(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: Fp32Operand,
    b: Fp32Operand,
    stage: Int32,
    unroll: Constexpr,
    products: Constexpr,
    a_stage: Int32 | int = 0,
) -> None:
    """acc += A B^T with both operands in shared memory; the loop over K is unrolled by ``unroll``."""
    a_start, b_start = a.start(Int32(a_stage)), b.start(stage)
    for first in cutlass.range(0, b.steps, unroll, unroll=1):
        a_here, b_here = a.at_step(a_start, first), b.at_step(b_start, first)
        for k in cutlass.range_constexpr(unroll):
            _times_b(tiled_mma, acc, _operand_a(a, a_here, k, products), b, b_here, k, products)


@cute.jit
def gemm_rs_fp32(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: Fp32Operand,
    stage: Int32,
    products: Constexpr,
) -> None:
    """acc += A B^T with A in registers: an accumulator of fp32, whose columns are K; B is ``paired``."""
    b_start = b.start(stage)
    for k in cutlass.range_constexpr(b.steps):
        _times_b(tiled_mma, acc, split(_accumulator_as_a(a, k), products), b, b_start, k, products)


def _accumulator_as_a(acc: cute.Tensor, k: int) -> cute.Tensor:
    """8 columns of an accumulator ((2, 2), M, N) as an A operand (4, M): k = 2 t of rows g and g + 8, then 2 t + 1."""
    rows = cute.size(acc, mode=[1])
    words = cute.make_rmem_tensor(cute.make_layout((4, rows)), Float32)
    for m in range(rows):
        for half_k in range(2):
            for half_row in range(2):
                words[half_row + 2 * half_k, m] = acc[(half_k, half_row), m, k]
    return words


@dataclass(frozen=True)
class Fp32Result(SmemResult):
    """As :class:`SmemResult`, in fp32."""

    def address(self, start: Int32, row: int, col: int) -> cute.Pointer:
        """The address of the pair ``row`` rows and ``col`` columns after the first."""
        layout = self.tile.layout
        outer = layout.outer if isinstance(layout, cute.ComposedLayout) else layout
        distance = cute.crd2idx((row, col), outer)
        swizzled = distance & swizzled_bits(layout)
        moved = start ^ (_WORDS * swizzled) if swizzled else start
        return cute.make_ptr(Float32, moved, cute.AddressSpace.smem, assumed_align=8) + (distance - swizzled)

    def store(self, fragment: cute.Tensor, col0: int = 0) -> None:
        """Store ``fragment``, with the accumulator's layout, at column ``col0``."""
        modes = row_col_modes(self.tiled_mma, *self.shape)
        view, start = row_col_view(fragment, modes), self.start()
        pair = cute.make_rmem_tensor(2, Float32)
        for r, row in enumerate(modes.rows):
            for c in range(0, len(modes.cols), 2):
                pair[0], pair[1] = view[r, c], view[r, c + 1]
                target = self.address(start, row, modes.cols[c] + col0)
                cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))
