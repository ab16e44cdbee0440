"""fp32 numbers as sums of terms of fewer bits, for tensor cores: the rule, the split and the products.

    x * 2^e = hi + lo    fp16 terms, with one power of two for a whole tensor, a block of score gradients, or P
    x = hi + lo          tf32 terms; they have fp32's exponents and need no scale

With two terms each, a product is lo hi + hi lo + hi hi; the omitted lo lo is 2^-24 of it (Ootomo and Yokota 2022,
https://arxiv.org/abs/2203.03341). With precision tf32 there is only hi, with the 11 significant bits of tf32.

hi = fp16(x * 2^e) and lo = fp16(x * 2^e - hi) have 11 bits each. 2^e puts the tensor's largest element between 2^14 and
2^15. Then hi + lo differs from x * 2^e by at most 2^-23 of x * 2^e for elements down to 2^-1, and by 2^-25 below. So a
row of the tensor keeps fp32's precision if its largest element is not far below the tensor's: ``fits`` has the limit. A
single term hi has all 11 bits for elements down to 2^-14, which is 2^-28 of the tensor's largest. Smaller elements err
by at most 2^-25. If their row's largest element is at least 2^-10, the limit in ``fits``, this is 2^-15 of it.

Score gradients have no bound known in advance: their power of two follows from the largest gradient of all threads.

Magnitudes are the bits of |x|; as integers they have the order of |x|, with inf and NaN as the largest.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Float16, Float32, Int32, Int64, TFloat32, cute

from cute_attn.device.math import convert_to_16_bits, fabs, fmax, on_device

Terms = tuple[cute.Tensor, ...]
"""The terms of an operand in registers, one or more, largest first, all with the same layout."""
PRODUCTS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0))}
"""Number of terms per operand -> the pairs of terms that are multiplied, smallest products first."""

TOP = 14
"""The exponent of the largest element of a tensor, or of a block of score gradients, after the scale."""
P_EXPONENT = 14
"""Exponent of the scale of P: P up to 4 does not overflow, and the low term keeps digits down to 2^-26."""
MOST_BELOW = {2: 13, 1: 24}
"""Number of fp16 terms -> powers of two by which a row's largest element may be below the tensor's."""
MOST_BELOW_OF_PRODUCTS = {2: 17, 1: 24}
"""The same for score gradients, by the rows of V and of dO together: their 2^-40 of the largest is 2^-23 of a row's."""
MOST_SCALE = 48
"""Maximum |e| of a tensor: products of two scales, and the products' inverses, are then normal fp32 numbers."""
MOST_GRADIENT_SCALE = 78
"""Maximum |e| of score gradients: 2^e and its inverse, even times a tensor's scale, are then normal numbers."""
NO_ROW = 0x7FFFFFFF
"""Replaces the smallest row's magnitude for a tensor of zeros."""
_BIAS, _MANTISSA_BITS, _INFINITY = 127, 23, 0x7F800000

# ---- products ----


def split(words: cute.Tensor, dtype: Any, count: int, factor: Float32 | None = None) -> Terms:
    """Split fp32 registers into ``count`` terms of ``dtype``, each with the layout of ``words``.

    Args:
        factor: for Float16 terms, a power of two by which the registers are multiplied first; None for TFloat32.

    Raises:
        ValueError: registers of an instruction are not adjacent: ``cute.gemm`` would read other registers.
    """
    offsets = [cute.crd2idx(i, words.layout[0]) for i in range(cute.size(words, mode=[0]))]
    if offsets != list(range(len(offsets))):
        raise ValueError(f"a fragment has registers {offsets}; accepted: adjacent ones, in order")
    if dtype is TFloat32:
        return _tf32_terms(words, count)
    rest = cute.make_rmem_tensor_like(words, Float32)
    terms = tuple(cute.make_rmem_tensor_like(words, dtype) for _ in range(count))
    for i in range(cute.size(words)):
        rest[i] = words[i] * factor
    for t, term in enumerate(terms):
        convert_to_16_bits(rest, term)
        if t + 1 < count:
            for i in range(cute.size(words)):
                rest[i] = rest[i] - Float32(term[i])
    return terms


def _tf32_terms(words: cute.Tensor, count: int) -> Terms:
    terms = tuple(cute.make_rmem_tensor_like(words) for _ in range(count))
    for i in range(cute.size(words)):
        if count == 1:
            terms[0][i] = rounded_to_tf32(words[i])
        else:
            terms[0][i] = _rounded_to_tf32(words[i])
            terms[1][i] = words[i] - terms[0][i]  # the tensor core ignores bits beyond tf32
    return tuple(cute.recast_tensor(term, TFloat32) for term in terms)


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
    """Like :func:`rounded_to_tf32`, in half the instructions, but some NaNs become -0; x minus that is still NaN."""
    return ((x.bitcast(Int32) + Int32(0x1000)) & Int32(~0x1FFF)).bitcast(Float32)


def multiply(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: Sequence[Terms], b: Sequence[Terms]) -> None:
    """acc += A B^T; a and b: each K step's terms, (mma, M) and (mma, N); acc: (mma, M, N)."""
    for i, j in PRODUCTS[len(a[0])]:
        for x, y in zip(a, b, strict=True):
            cute.gemm(tiled_mma, acc, x[i], y[j], acc)


# ---- the scale of a tensor ----


def magnitude(x: Float32) -> Int32:
    """The bits of |x|."""
    return x.bitcast(Int32) & Int32(0x7FFFFFFF)


@cute.jit
def scale_exponent(largest: Int32) -> Int32:
    """The exponent e for a tensor's largest magnitude; 0 for a tensor of zeros."""
    return Int32(0) if largest == 0 else _exponent_to_top(largest)


def _exponent_to_top(largest: Int32) -> Int32:
    return TOP + _BIAS - (largest >> _MANTISSA_BITS)


def fits(largest: Int32, smallest: Int32, count: int) -> Boolean:
    """True if a tensor keeps the precision of fp32 in two fp16 terms, or of tf32 in one.

    Args:
        largest: the tensor's largest magnitude.
        smallest: the smallest of the rows' largest magnitudes, except rows of zeros; ``NO_ROW`` for a tensor of zeros.
        count: number of terms.
    """
    exponent = scale_exponent(largest)
    near = (smallest >> _MANTISSA_BITS) + MOST_BELOW[count] >= (largest >> _MANTISSA_BITS)
    return (exponent <= MOST_SCALE) & (exponent >= -MOST_SCALE) & near


def products_fit(v: tuple[Int32, Int32], do: tuple[Int32, Int32], count: int) -> Boolean:
    """True if score gradients keep their precision in terms. They are as large as products of V and dO.

    A block of them has one scale. So rows of both tensors may not be small at once, where each by itself still fits.

    Args:
        v, do: the tensors' magnitudes ``largest`` and ``smallest``, as :func:`fits` takes them.
        count: number of terms.
    """
    below = sum((largest >> _MANTISSA_BITS) - (smallest >> _MANTISSA_BITS) for largest, smallest in (v, do))
    exponent = scale_exponent(v[0]) + scale_exponent(do[0]) - 2 * TOP
    near = below <= MOST_BELOW_OF_PRODUCTS[count]
    return (exponent <= MOST_SCALE) & (exponent >= -MOST_SCALE) & near


def power_of_two(exponent: Int32) -> Float32:
    """2^exponent, for exponents of normal numbers."""
    return ((exponent + _BIAS) << _MANTISSA_BITS).bitcast(Float32)


def inverse_of_power_of_two(power: Float32) -> Float32:
    """1 / power, for a power of two, if both are normal numbers."""
    return (Int32(2 * _BIAS << _MANTISSA_BITS) - power.bitcast(Int32)).bitcast(Float32)


@cute.jit
def all_fit(scales: cute.Tensor) -> Boolean:
    """False if any tensor does not fit its terms: its scale is 0. See :mod:`cute_attn.kernels.split_fp32`."""
    fit = Boolean(True)
    for i in cutlass.range_constexpr(4):
        fit = fit & (scales[i] != 0.0)
    return fit


# ---- the scale of score gradients ----


@cute.jit
def scale_of(largest: Int32) -> tuple[Float32, Float32]:
    """The power of two that gives a magnitude the exponent TOP, within MOST_GRADIENT_SCALE; and its inverse."""
    exponent = cutlass.max(_exponent_to_top(largest), -MOST_GRADIENT_SCALE)
    exponent = cutlass.min(exponent, MOST_GRADIENT_SCALE)
    return power_of_two(exponent), power_of_two(-exponent)


@cute.jit
def largest_finite(words: cute.Tensor) -> Int32:
    """The largest finite magnitude in a warp's registers. Called by whole warps.

    An infinity must not decide the scale: all other numbers would become 0.
    """
    largest = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(words)):
        largest = fmax(largest, fabs(words[i]))  # not NaN
    if largest.bitcast(Int32) >= _INFINITY:
        largest = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(words)):
            finite = magnitude(words[i]) < _INFINITY
            largest = fmax(largest, fabs(words[i]) if finite else Float32(0.0))
    return Int32(cute.arch.warp_redux_sync(largest.bitcast(Int32), kind="max"))


@cute.jit
def common_scale(words: cute.Tensor, of_warps: cute.Tensor, thread: Int32) -> tuple[Float32, Float32]:
    """:func:`scale_of` the largest finite |x| of all threads' registers, with a barrier.

    In two terms x then errs by at most 2^-23 of itself or 2^-40 of the largest.

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
def running_scale(
    words: cute.Tensor, of_warps: cute.Tensor, applied: cute.Tensor, thread: Int32, subtile: Constexpr
) -> tuple[Float32, Float32, Float32]:
    """(scale, its inverse, the factor that rescales sums from the last scale to this one), with a barrier.

    The scale is :func:`scale_of` the largest finite |x| of all threads' registers, in this and earlier calls. In one
    term x then errs by at most 2^-11 of itself or 2^-39 of the largest. dK is summed in tensor cores with the scale as
    a factor, and is rescaled when the scale changes: a few times per CTA.

    Args:
        of_warps: (warps, subtiles) int32 in shared memory, 0 before the first call: the largest magnitudes so far.
        applied: (warps,) fp32, 1 before the first call: the inverse of the last scale.
        thread: index in the CTA.
        subtile: index of this call among the calls between two other barriers. Each call has a column of ``of_warps``:
            a warp that is ahead must not change numbers that other warps have yet to read.
    """
    warps, subtiles = (cute.size(of_warps, mode=[i]) for i in range(2))
    warp, largest = thread // 32, largest_finite(words)
    if cutlass.const_expr(subtiles > 1):
        cute.arch.sync_warp()  # ``applied`` of the previous sub-tile
    before = applied[warp]
    if thread % 32 == 0:
        for own in cutlass.range_constexpr(subtiles):
            largest = cutlass.max(largest, of_warps[warp, own])
        of_warps[warp, subtile] = largest
    cute.arch.barrier()
    for other in cutlass.range_constexpr(warps):
        largest = cutlass.max(largest, of_warps[other, subtile])
    scale, inverse = scale_of(largest)
    if thread % 32 == 0:
        applied[warp] = inverse
    return scale, inverse, before * scale


@cute.jit
def change_units(acc: cute.Tensor, factor: Float32) -> None:
    """acc *= factor. The factor is usually 1, and the same for all threads of a warp."""
    if factor != 1.0:
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * factor


# ---- rows of terms ----


VECTOR = 4
"""Number of fp32 elements in 16 bytes."""
LANES = 8
"""Number of adjacent threads per row; each handles 16 of every 128 bytes."""
VECTORS_AHEAD = 32
"""Vectors that a thread of :func:`split_tile` may read before it writes any. The compiler issues as many reads as there
are registers for, and further reads as registers become free."""


@cute.jit
def load_row(x: cute.Tensor, start: Int64, dim: Constexpr, cols: Constexpr, lane: Int32) -> cute.Tensor:
    """Load a thread's elements of a row, (4, vectors), 0 beyond ``dim``; coordinates are clamped, without a branch.

    Args:
        x: rows run along its last mode; the other modes are ignored.
        start: the element at which the row starts.
        dim, cols: columns of the row, without and with padding by zeros to a multiple of 32.
    """
    width: Constexpr = LANES * VECTOR
    values = cute.make_rmem_tensor(cute.make_layout((VECTOR, cols // width)), Float32)
    for j in cutlass.range_constexpr(cute.size(values, mode=[1])):
        col = lane * VECTOR + j * width
        at = start + cutlass.min(col, dim - VECTOR)
        source = x.iterator + cute.assume(at, divby=VECTOR)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), values[None, j])
        if cutlass.const_expr((j + 1) * width > dim):
            for e in cutlass.range_constexpr(VECTOR):
                exists = Boolean(col + e < dim)
                values[e, j] = values[e, j] if exists else Float32(0.0)
    return values


@cute.jit
def split_tile(
    x: cute.Tensor,
    row0: Int32,
    seqlen: Int32,
    target: cute.Tensor,
    dim: Constexpr,
    factor: Float32,
    thread: Int32,
    threads: Constexpr,
    count: Constexpr,
) -> None:
    """Write the terms of x, (seqlen, dim), from row ``row0`` on, to ``target`` in shared memory, without a barrier.

    Args:
        target: (rows, columns of all terms), term by term. Rows beyond ``seqlen`` repeat the last row.
        factor: a power of two.
        thread: index among the ``threads`` that divide the rows.
        count: number of terms.
    """
    rows, cols = cute.size(target, mode=[0]), cute.size(target, mode=[1]) // count
    lane, step = thread % LANES, threads // LANES
    steps: Constexpr = rows // step
    most: Constexpr = max(VECTORS_AHEAD * LANES * VECTOR // cols, 1)
    together: Constexpr = max(n for n in range(1, min(most, steps) + 1) if steps % n == 0)
    for first in cutlass.range(0, steps, together, unroll=1):
        values = []
        for i in cutlass.range_constexpr(together):
            row = row0 + (first + i) * step + thread // LANES
            start = Int64(cutlass.min(row, seqlen - 1)) * x.stride[0]
            values.append(load_row(x, start, dim, cols, lane))
        for i in cutlass.range_constexpr(together):
            row = (first + i) * step + thread // LANES
            for j in cutlass.range_constexpr(cols // (LANES * VECTOR)):
                terms = split(values[i][None, j], Float16, count, factor)
                for t in cutlass.range_constexpr(count):
                    col = lane * VECTOR + (t * cols + j * LANES * VECTOR)
                    offset = cute.assume(cute.crd2idx((row, col), target.layout), divby=VECTOR)
                    to = cute.make_tensor(target.iterator + offset, cute.make_layout(VECTOR))
                    cute.autovec_copy(terms[t], to)
