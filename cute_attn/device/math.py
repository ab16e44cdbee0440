"""Arithmetic for kernels and for host ``cute.jit`` functions, so that CPU tests run the device code."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith
from cutlass._mlir.dialects import math as mlir_math

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

CUTE_DTYPES = {"fp16": cutlass.Float16, "bf16": BFloat16, "fp32": Float32}
"""The DSL's types by the names that traits have."""


def on_device() -> bool:
    """True if the code being traced is in a kernel, False in a host function."""
    operation = ir.InsertionPoint.current.block.owner.operation
    while operation is not None:
        if operation.name in ("cuda.kernel", "gpu.module"):
            return True
        operation = operation.parent
    return False


LARGEST = 3.4028234663852886e38
"""fp32's largest number."""
LARGE = 2.0**14
"""Limit of scores in log2: in rows with larger ones, differences are computed first and then exponentiated.

A fused multiply-add's rounded addend errs by half of its last digit: 2^-11 at this limit, whole numbers far above it.
"""


def fmax(a: Float32, b: Float32) -> Float32:
    """max(a, b); if one argument is NaN, the other one."""
    if on_device():
        return Float32(cute.arch.fmax(a, b))
    return Float32(arith.maxnumf(Float32(a).ir_value(), Float32(b).ir_value()))


@cute.jit
def clamped(x: Float32) -> Float32:
    """x, with infinities replaced by the largest finite number of the same sign; NaN stays NaN."""
    x = Float32(LARGEST) if x > Float32(LARGEST) else x
    return Float32(-LARGEST) if x < Float32(-LARGEST) else x


def exp2(x: Float32) -> Float32:
    """2**x; ex2.approx.ftz on the device (2 ulp)."""
    return cute.math.exp2(x, fastmath=True)


def log(x: Float32) -> Float32:
    return cute.math.log(x, fastmath=True)


def log2(x: Float32, approximate: bool = True) -> Float32:
    """log2(x). On the device: lg2.approx.ftz, or if not ``approximate`` 1 ulp in about 30 instructions."""
    return cute.math.log2(x, fastmath=approximate)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    return Float32(mlir_math.fma(*(Float32(x).ir_value() for x in (a, b, c))))


def product_minus(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b - c, rounded once. On the device the compiler fuses it: an explicit fma would restrict scheduling."""
    return a * b - c if on_device() else fma(a, b, -c)


def product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded: the compiler does not fuse it with a following addition."""
    if not on_device():
        return a * b
    multiply = "mul.rn.f32 {$w0}, {$r0}, {$r1};"
    return Float32(cute.arch.inline_ptx(multiply, write_only_types=[Float32], read_only_args=[a, b]))


def rounded_to(x: Float32, dtype: Any) -> Float32:
    """x rounded to the 16-bit ``dtype``, as fp32."""
    if dtype is BFloat16 and not on_device():
        return (bf16_bits(x) << Int32(16)).bitcast(Float32)
    return Float32(dtype(x))


TANH_UNIT = 2.0 * LOG2_E
"""The argument of :func:`tanh_base2` is tanh's argument times this factor."""


def tanh_base2(x: Float32) -> Float32:
    """tanh(x / TANH_UNIT) to 2e-7 absolute: 1 - 1 / (1/2 + 2^x / 2). TANH_UNIT folds into an existing factor of x.

    Two special-function instructions. tanh.approx is a single one, but its relative error of 5e-4 changes a probability
    by 2% at a cap of 50.
    """
    return 1.0 - reciprocal(0.5 * exp2(x) + 0.5)


def reciprocal(x: Float32) -> Float32:
    """1 / x; rcp.approx on the device (1 ulp)."""
    return cute.arch.rcp_approx(x) if on_device() else 1.0 / x


def quad_reduce(x: Float32, op) -> Float32:
    """Reduce x by ``op`` over the four lanes of an accumulator row; all four get the result."""
    x = op(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return op(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def add(a: Float32, b: Float32) -> Float32:
    """a + b, as an argument of quad_reduce."""
    return a + b


def mul_wide(a: Uint32, b: Uint32) -> tuple[Uint32, Uint32]:
    """(high, low) words of the 64-bit product."""
    product = cutlass.Uint64(a) * cutlass.Uint64(b)
    return Uint32(product >> cutlass.Uint64(32)), Uint32(product)


def byte_permute(low: Int32, high: Int32, selector: int) -> Int32:
    """prmt: nibble i of ``selector`` selects byte i of the result, 0 to 3 from ``low``, 4 to 7 from ``high``; 8
    more selects the byte's sign bit, replicated."""
    if on_device():
        return Int32(cute.arch.prmt(low, high, Int32(selector)))
    result = Int32(0)
    for i in range(4):
        nibble = selector >> (4 * i) & 0xF
        byte = ((high if nibble & 4 else low) >> Int32(8 * (nibble & 3))) & Int32(0xFF)
        if nibble & 8:
            byte = (Int32(0) - (byte >> Int32(7))) & Int32(0xFF)
        result = result | (byte << Int32(8 * i))
    return result


def bf16_bits(x: Float32) -> Int32:
    """x rounded to bf16, in the low half of a word; for hosts whose compiler library lacks the conversion."""
    bits = x.bitcast(Int32)
    return ((bits + Int32(0x7FFF) + ((bits >> Int32(16)) & Int32(1))) >> Int32(16)) & Int32(0xFFFF)


def fabs(x: Float32) -> Float32:
    """|x|; folds into the instruction that uses it."""
    return cute.math.absf(x)


def uniform(x: Uint32) -> Uint32:
    """x, the same in all lanes of a warp, marked as warp-uniform so that it may live in a uniform register."""
    return Uint32(cute.arch.make_warp_uniform(Int32(x))) if on_device() else x


def optimization_barrier(x):
    """x (Int32, Int64 or Float32) through a ``mov`` that NVVM cannot see through: values computed from it are neither
    shared with earlier code nor hoisted out of a loop, where they would occupy registers."""
    if not on_device():
        return x
    move = "mov.b64 {$w0}, {$r0};" if isinstance(x, Int64) else "mov.b32 {$w0}, {$r0};"
    return type(x)(cute.arch.inline_ptx(move, write_only_types=[type(x)], read_only_args=[x]))


def rematerialize(x: Int32) -> Int32:
    """x, with values computed from it rematerialized in each iteration: neither NVVM nor ptxas hoists them from a loop.

    Uses a shuffle with offset 0: ptxas hoists the ``mov`` of :func:`optimization_barrier`, but not a shuffle.
    """
    return Int32(cute.arch.shuffle_sync_bfly(x, offset=0)) if on_device() else x


def rematerialize_each(x: Int32, n: Int32) -> Int32:
    """:func:`rematerialize` in a loop over n >= 0, without a shuffle, which would wait in wgmma's queue.

    Adds n's sign bit: it is 0, but the compiler does not know that. For a thread index use ``rematerialize`` once
    before the loop: otherwise ptxas reads the special register in each iteration, through the same queue.
    """
    return x + Int32(Uint32(n) >> Uint32(31))


@cute.jit
def convert_to_16_bits(wide: cute.Tensor, target: cute.Tensor) -> None:
    """Convert fp32 registers to ``target``'s dtype, with the same layout.

    Works in vectors of up to 8: a vector whose length is not a power of two is converted element by element.
    """
    size = cute.size(wide)
    if cutlass.const_expr(target.element_type is BFloat16 and not on_device()):
        halves = cute.recast_tensor(target, Int16)
        for i in cutlass.range_constexpr(size):
            halves[i] = Int16(bf16_bits(wide[i]))
    else:
        some = next(n for n in (8, 4, 2, 1) if size % n == 0)
        vectors = cute.make_layout((some, size // some))
        source, result = cute.make_tensor(wide.iterator, vectors), cute.make_tensor(target.iterator, vectors)
        for i in cutlass.range_constexpr(size // some):
            result[None, i].store(source[None, i].load().to(target.element_type))


@cute.jit
def converted(wide: cute.Tensor, dtype: Any) -> cute.Tensor:
    """An fp32 fragment converted to ``dtype``, 16 bits, with the same layout.

    The optimization barrier keeps pairs together: elements used one by one would be converted one by one, more slowly.
    """
    fragment = cute.make_rmem_tensor_like(wide, dtype)
    convert_to_16_bits(wide, fragment)
    pairs = cute.recast_tensor(fragment, Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = optimization_barrier(pairs[i])
    return fragment
