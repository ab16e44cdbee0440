"""Arithmetic that runs in kernels and in host ``cute.jit`` functions alike, so that CPU tests run the real code."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def on_device() -> bool:
    """Whether the code being traced is inside a kernel rather than in a host function."""
    operation = ir.InsertionPoint.current.block.owner.operation
    while operation is not None:
        if operation.name in ("cuda.kernel", "gpu.module"):
            return True
        operation = operation.parent
    return False


def fmax(a: Float32, b: Float32) -> Float32:
    """The larger of two; the other one where one is NaN."""
    if on_device():
        return Float32(cute.arch.fmax(a, b))
    return Float32(arith.maxnumf(Float32(a).ir_value(), Float32(b).ir_value()))


def exp2(x: Float32) -> Float32:
    """2**x; ex2.approx.ftz on the device (2 ulp)."""
    return cute.math.exp2(x, fastmath=True)


def log(x: Float32) -> Float32:
    """Natural logarithm."""
    return cute.math.log(x, fastmath=True)


def tanh(x: Float32) -> Float32:
    """Hyperbolic tangent to 2e-7 absolute: 1 - 2 / (1 + e^2x).

    Two special-function instructions. tanh.approx takes one, but its 5e-4 relative error times a cap of 50 is an error
    of 2% in a probability.
    """
    return 1.0 - 2.0 * reciprocal(1.0 + exp2(x * (2.0 * LOG2_E)))


def reciprocal(x: Float32) -> Float32:
    """1 / x; rcp.approx on the device (1 ulp)."""
    return cute.arch.rcp_approx(x) if on_device() else 1.0 / x


def quad_reduce(x: Float32, op) -> Float32:
    """Combine over the four neighbouring lanes that share an accumulator row, with the result in each of them."""
    x = op(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return op(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def add(a: Float32, b: Float32) -> Float32:
    """a + b, as an argument of quad_reduce."""
    return a + b


def mul_wide(a: Uint32, b: Uint32) -> tuple[Uint32, Uint32]:
    """(high, low) words of the 64-bit product."""
    product = cutlass.Uint64(a) * cutlass.Uint64(b)
    return Uint32(product >> cutlass.Uint64(32)), Uint32(product)


def byte_permute(x: Int32, selector: int) -> Int32:
    """prmt with x in both operands: nibble i of ``selector`` picks the byte that goes to byte i of the result, and
    with 8 added that byte's sign bit eight times over."""
    if on_device():
        return Int32(cute.arch.prmt(x, x, Int32(selector)))
    result = Int32(0)
    for i in range(4):
        nibble = selector >> (4 * i) & 0xF
        byte = (x >> Int32(8 * (nibble & 3))) & Int32(0xFF)
        if nibble & 8:
            byte = (Int32(0) - (byte >> Int32(7))) & Int32(0xFF)
        result = result | (byte << Int32(8 * i))
    return result


def fabs(x: Float32) -> Float32:
    """|x|; folds into the instruction that uses it."""
    return cute.math.absf(x)


def opaque(x):
    """x (Int32 or Int64), as a value about which the compiler knows nothing: what follows from it is neither reused nor
    hoisted out of a loop, where it would occupy registers."""
    if not on_device():
        return x
    move = "mov.b64 {$w0}, {$r0};" if isinstance(x, Int64) else "mov.b32 {$w0}, {$r0};"
    return type(x)(cute.arch.inline_ptx(move, write_only_types=[type(x)], read_only_args=[x]))


def anew(x: Int32) -> Int32:
    """x, such that neither compiler hoists what follows from it out of a loop.

    A shuffle with itself: ptxas moves ordinary instructions out of loops, opaque to NVVM or not, but no shuffle.
    """
    return Int32(cute.arch.shuffle_sync_bfly(x, offset=0)) if on_device() else x


@cute.jit
def finish_before(x: Float32) -> None:
    """Everything that x >= 0 follows from is computed before what comes next.

    ptxas moves a wait for wgmma ahead of arithmetic that does not depend on it, and so makes it wait beside nothing. It
    does not move it across a branch, and it cannot know that this one is never taken.
    """
    if cutlass.const_expr(on_device()):
        if cute.arch.vote_any_sync(x < 0.0):
            cute.arch.inline_ptx("nanosleep.u32 0;")
