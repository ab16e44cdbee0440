"""Values that the lanes of a warp exchange by shuffles.

On the host threads run one after the other: each computes all values itself, with the same result.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Pointer
from cutlass._mlir import ir
from cutlass._mlir.dialects import nvvm

from cute_attn.device.math import byte_permute, fmax, on_device

COLUMN_LANES = (4, 8, 16)
"""Lane bits that select one of 8 quads: lanes that differ only in these hold the same columns (transposed: rows)."""

QUAD_LANES = (1, 2)
"""Lane bits that select a lane of a quad: lanes that differ only in these hold the same rows (transposed: columns)."""


def lanes_or(compute: Callable[[Int32], Int32], number: Int32, offsets: tuple[int, ...]) -> Int32:
    """compute(0) | compute(1) | ..., one term for each of the lanes that differ in the bits ``offsets``; all get it.

    number: the thread's index among these lanes; with offsets (4, 8, 16), among the lanes with the same columns.
    """
    if not on_device():
        return _or_of(compute, 2 ** len(offsets))
    bits = compute(number)
    for offset in offsets:
        bits = bits | cute.arch.shuffle_sync_bfly(bits, offset=offset)
    return bits


@cute.jit
def _or_of(compute: Constexpr, count: Constexpr) -> Int32:
    result = Int32(0)
    for number in cutlass.range(count):
        result = result | compute(number)
    return result


def lanes_sum(x: Float32, offsets: tuple[int, ...]) -> Float32:
    """The sum of x over the lanes that differ only in the bits ``offsets``; all of them get it. On the host, x."""
    if on_device():
        for offset in offsets:
            x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x


def adds_for(number: Int32) -> Boolean:
    """True if this lane adds a :func:`lanes_sum` to memory: lane 0 of those summed, on the host each lane."""
    return number == 0 if on_device() else number >= 0


def share_two(
    compute: Callable[[Int32], Any], pick: Callable[[Any, Int32], Int32], odd: Int32, offset: int
) -> tuple[Int32, Int32]:
    """(pick(compute(0), odd), pick(compute(1), odd)), where each of two lanes runs only one ``compute``.

    The lanes differ in bit ``offset``; ``odd`` is 0 in one and 1 in the other. Each lane picks for both lanes.
    """
    if not on_device():
        return pick(compute(Int32(0)), odd), pick(compute(Int32(1)), odd)
    made = compute(odd)
    own, received = pick(made, odd), cute.arch.shuffle_sync_bfly(pick(made, 1 - odd), offset=offset)
    return cutlass.select_(odd == 0, own, received), cutlass.select_(odd == 0, received, own)


def every_other_byte(low: Int32, high: Int32, odd: Int32) -> Int32:
    """The even bytes of two words, or the odd bytes if ``odd`` is 1; ``low``'s bytes come first."""
    if on_device():
        return Int32(cute.arch.prmt(low, high, Int32(0x6420) + odd * Int32(0x1111)))
    return cutlass.select_(odd == 0, byte_permute(low, high, 0x6420), byte_permute(low, high, 0x7531))


def exchange_pairs(word: Int32) -> Int32:
    """movmatrix: the transpose of an 8 x 8 matrix of 16-bit elements. Lane i holds row i / 4, columns 2 (i % 4) + 0, 1.

    Must be called by whole warps, on the device.
    """
    shape, kind = "#nvvm.ld_st_matrix_shape<m = 8, n = 8>", "#nvvm.ld_st_matrix_elt_type<b16>"
    exchanged = nvvm.movmatrix(Int32(word).ir_value(), ir.Attribute.parse(shape), ir.Attribute.parse(kind))
    return Int32(exchanged)


def max_to(pointer: Pointer, x: Float32) -> None:
    """Raise an fp32 in global memory to x, atomically on the device."""
    if on_device():
        cute.arch.atomic_fmax(
            pointer, x + 0.0, sem="relaxed", scope="gpu"
        )  # -0.0 would compare as an integer
    else:
        cell = cute.make_tensor(pointer, cute.make_layout(1))
        cell[0] = fmax(cell[0], x)


def add_to(pointer: Pointer, x: Float32) -> None:
    """Add x to an fp32 in global memory, atomically on the device."""
    _add(pointer, x, "f32")


def add_integer(pointer: Pointer, x: Int64) -> None:
    """Add x to an int64 in global memory, atomically on the device."""
    _add(pointer, x, "u64")  # the same bits as for signed integers


def _add(pointer: Pointer, x: Float32 | Int64, dtype: Any) -> None:
    if on_device():
        cute.arch.red(pointer, x, op="add", dtype=dtype, sem="relaxed", scope="gpu")
    else:
        cell = cute.make_tensor(pointer, cute.make_layout(1))
        cell[0] = cell[0] + x
