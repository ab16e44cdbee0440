"""Matrix products of fp32 numbers as two fp16 parts, by mma.sync m16n8k16.

An operand is x = c (hi + lo), with one power of two c for all of it; see :mod:`cute_attn.kernels.split_fp32`. A product
is hi hi + hi lo + lo hi: three products at the rate of fp16, twice that of tf32, and ldmatrix transposes.

A tensor core rounds its sums toward zero, which does not average out in long ones. So each step of 16 along K is summed
from zero, the smallest terms first, and then added to the accumulator in fp32 (Ootomo and Yokota 2022,
https://arxiv.org/abs/2203.03341), by the same instruction that multiplies it with both operands' c.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Float16, Float32, Int32, cute

from cute_attn.device.gemm import SmemOperand, SmemResult
from cute_attn.device.math import convert_to_16_bits, fabs, fmax
from layouts.mma import row_col_modes, row_col_view

P_EXPONENT = 14
"""Of the scale of probabilities before they are split: up to 4 they do not overflow, and down to 2^-15 keep 22 bits."""
LARGEST_EXPONENT = 14
"""Of the largest score gradient of a step after its scale."""
MOST_EXPONENT = 78
"""Of that scale and of its inverse, so that both are normal numbers, also times the scale of a tensor."""
_INFINITY = 0x7F800000


@dataclass(frozen=True)
class HiLoOperand:
    """A thread's part of an operand in shared memory: stages of hi, each followed by its lo.

    Attributes:
        hi, lo: both read the same tile, (rows, k, 2 * stages), and have a fragment each.
        part: elements from hi to lo, a whole number of periods of the swizzle.
    """

    hi: SmemOperand
    lo: SmemOperand
    part: Constexpr

    @staticmethod
    def make(make_one: Any, part: int, *args: Any) -> "HiLoOperand":
        """Of ``SmemOperand.a`` or ``SmemOperand.b`` and its arguments."""
        return HiLoOperand(make_one(*args), make_one(*args), part)

    @property
    def tile(self) -> cute.Tensor:
        """(rows, k, 2 * stages)."""
        return self.hi.tile

    @property
    def pieces(self) -> int:
        """ldmatrix instructions of a K step and a part."""
        return self.hi.pieces

    @property
    def steps(self) -> int:
        """MMA steps along K."""
        return self.hi.steps

    def start(self, stage: Int32) -> Int32:
        """The address of the thread's first vector of hi in ``stage``."""
        return self.hi.start(2 * stage)

    def at_step(self, start: Int32, k: Int32) -> Int32:
        """``start`` moved to step k, a dynamic value."""
        return self.hi.at_step(start, k)

    def address(self, start: Int32, piece: int, k: int, part: int) -> cute.Pointer:
        """The address of the thread's vector of a piece of hi (``part`` 0) or lo (1), k steps after ``start``."""
        return self.hi.address(start, piece, k) + part * self.part

    def load(self, start: Int32, piece: int, k: int) -> None:
        """Load both parts of a piece into the fragments, k steps after ``start``."""
        for part, own in enumerate((self.hi, self.lo)):
            source = cute.make_tensor(self.address(start, piece, k, part), cute.make_layout(8))
            cute.copy(own.tiled_copy, source, own.view[None, piece, k])

    def load_step(self, start: Int32, k: int) -> None:
        """Load both parts of all pieces, k steps after ``start``."""
        for piece in range(self.pieces):
            self.load(start, piece, k)


@dataclass(frozen=True)
class HiLo:
    """Both parts of a fragment, fp16, with its layout."""

    hi: cute.Tensor
    lo: cute.Tensor


@cute.jit
def split(words: cute.Tensor, factor: Float32) -> HiLo:
    """fp32 registers times ``factor``, a power of two, as two parts."""
    hi = cute.make_rmem_tensor_like(words, Float16)
    lo = cute.make_rmem_tensor_like(words, Float16)
    scaled = cute.make_rmem_tensor_like(words, Float32)
    for i in cutlass.range_constexpr(cute.size(words)):
        scaled[i] = words[i] * factor
    convert_to_16_bits(scaled, hi)
    for i in cutlass.range_constexpr(cute.size(words)):
        scaled[i] = scaled[i] - Float32(hi[i])
    convert_to_16_bits(scaled, lo)
    return HiLo(hi, lo)


@cute.jit
def multiply(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: HiLo, b: HiLo, factor: Float32) -> None:
    """acc += factor * A B^T for one step along K, summed from zero; fragments without the mode of steps."""
    total = cute.make_rmem_tensor(cute.make_layout(acc.shape), Float32)
    total.fill(0.0)
    cute.gemm(tiled_mma, total, a.lo, b.hi, total)
    cute.gemm(tiled_mma, total, a.hi, b.lo, total)
    cute.gemm(tiled_mma, total, a.hi, b.hi, total)
    for n in cutlass.range_constexpr(cute.size(acc, mode=[2])):
        for m in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for i in cutlass.range_constexpr(4):
                acc[i, m, n] = total[i, m, n] * factor + acc[i, m, n]


@cute.jit
def _times_b(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: HiLo,
    b: HiLoOperand,
    start: Int32,
    k: Constexpr,
    factor: Float32,
) -> None:
    """One step along K: for each piece of B its ldmatrix, then the MMAs that read it."""
    pieces = cute.logical_divide(acc, (None, None, 2))
    fragments = [cute.logical_divide(own.fragment, (None, 2, None)) for own in (b.hi, b.lo)]
    for piece in cutlass.range_constexpr(b.pieces):
        b.load(start, piece, k)
        own = HiLo(*(x[None, (None, piece), k] for x in fragments))
        multiply(tiled_mma, pieces[None, None, (None, piece)], a, own, factor)


@cute.jit
def gemm_hi_lo(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: HiLoOperand,
    b: HiLoOperand,
    stage: Int32,
    unroll: Constexpr,
    factor: Float32,
    a_stage: Int32 | int = 0,
) -> None:
    """acc += factor * A B^T with both operands in shared memory; the loop over K is unrolled by ``unroll``."""
    a_start, b_start = a.start(Int32(a_stage)), b.start(stage)
    for first in cutlass.range(0, b.steps, unroll, unroll=1):
        a_here, b_here = a.at_step(a_start, first), b.at_step(b_start, first)
        for k in cutlass.range_constexpr(unroll):
            a.load_step(a_here, k)
            own = HiLo(a.hi.fragment[None, None, k], a.lo.fragment[None, None, k])
            _times_b(tiled_mma, acc, own, b, b_here, k, factor)


@cute.jit
def gemm_rs_hi_lo(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, a: HiLo, b: HiLoOperand, stage: Int32, factor: Float32
) -> None:
    """acc += factor * A B^T with A in registers, as ``layouts.as_operand_a`` has it."""
    b_start = b.start(stage)
    for k in cutlass.range_constexpr(b.steps):
        own = HiLo(a.hi[None, None, k], a.lo[None, None, k])
        _times_b(tiled_mma, acc, own, b, b_start, k, factor)


@dataclass(frozen=True)
class HiLoResult:
    """Stores both parts of a thread's part of an accumulator to shared memory, row-major planes one after the other.

    result: where hi goes, (rows, cols); part: elements from hi to lo.
    """

    result: SmemResult
    part: Constexpr

    def store(self, parts: HiLo, col0: int = 0) -> None:
        """Store ``parts``, with the accumulator's layout, at column ``col0``."""
        result = self.result
        modes = row_col_modes(result.tiled_mma, *result.shape)
        start = result.start()
        for part, fragment in enumerate((parts.hi, parts.lo)):
            view = row_col_view(fragment, modes)
            pairs = cute.recast_tensor(fragment, Int32)
            pairs = cute.make_tensor(pairs.iterator, cute.make_layout(cute.size(fragment) // 2))
            for r, row in enumerate(modes.rows):
                for c in range(0, len(modes.cols), 2):
                    target = result.address(start, row, modes.cols[c] + col0) + part * (self.part // 2)
                    pair = pairs[cute.crd2idx((r, c), view.layout) // 2]
                    cute.make_tensor(target, cute.make_layout(1))[0] = pair


@cute.jit
def largest_finite(words: cute.Tensor) -> Int32:
    """The bits of the largest finite |x| of a warp's registers; as integers they have the order of |x|. By whole warps.

    inf must not decide a scale: with inf's, all other numbers would become 0.
    """
    largest = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(words)):
        largest = fmax(largest, fabs(words[i]))  # not NaN
    if largest.bitcast(Int32) >= _INFINITY:
        largest = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(words)):
            finite = (words[i].bitcast(Int32) & Int32(0x7FFFFFFF)) < _INFINITY
            largest = fmax(largest, fabs(words[i]) if finite else Float32(0.0))
    return Int32(cute.arch.warp_redux_sync(largest.bitcast(Int32), kind="max"))


@cute.jit
def common_scale(words: cute.Tensor, of_warps: cute.Tensor, thread: Int32) -> tuple[Float32, Float32]:
    """:func:`scale_of` the largest finite |x| of all threads' registers, with a barrier.

    In two parts x then errs by at most 2^-23 of itself or 2^-40 of the largest.

    of_warps: (warps,) int32 in shared memory.
    """
    largest = largest_finite(words)
    if thread % 32 == 0:
        of_warps[thread // 32] = largest
    cute.arch.barrier()
    for warp in cutlass.range_constexpr(cute.size(of_warps)):
        largest = cutlass.max(largest, of_warps[warp])
    return scale_of(largest)


@cute.jit
def scale_of(largest: Int32) -> tuple[Float32, Float32]:
    """A power of two that moves ``largest``, bits of a number, to 2^LARGEST_EXPONENT at most, and its inverse."""
    exponent = LARGEST_EXPONENT + 127 - (largest >> 23)
    exponent = cutlass.min(cutlass.max(exponent, -MOST_EXPONENT), MOST_EXPONENT)
    scale, inverse = ((sign * exponent + 127) << 23 for sign in (1, -1))
    return scale.bitcast(Float32), inverse.bitcast(Float32)


@cute.jit
def all_fit(scales: cute.Tensor) -> Boolean:
    """Whether every tensor fits its parts; scales: see :mod:`cute_attn.kernels.split_fp32`."""
    fit = Boolean(True)
    for i in cutlass.range_constexpr(4):
        fit = fit & (scales[i] != 0.0)
    return fit
