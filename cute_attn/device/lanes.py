"""Values that the lanes of a warp exchange by shuffles.

On the host threads run one after the other: each computes all values itself, with the same result.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Pointer
from cutlass._mlir import ir
from cutlass._mlir.dialects import nvvm

from cute_attn.device.math import byte_permute, on_device

COLUMN_LANES = (4, 8, 16)
"""Lane bits that tell an accumulator's 8 quads apart: same columns, or rows of a transposed tile."""

QUAD_LANES = (1, 2)
"""Lane bits that tell the 4 lanes of a quad apart: same rows, or columns of a transposed tile."""


def lanes_or(compute: Callable[[Int32], Int32], number: Int32, offsets: tuple[int, ...]) -> Int32:
    """compute(0) | compute(1) | ..., one term for each lane that differs in ``offsets``; all lanes get the result.

    number: the thread's index among those lanes; with offsets (4, 8, 16) it counts the lanes of a column.
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
    """The sum of x over the lanes that differ in ``offsets``, in all of them; on the host x itself."""
    if on_device():
        for offset in offsets:
            x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x


def adds_for(number: Int32) -> Boolean:
    """Lane ``number`` 0 adds a :func:`lanes_sum` for all lanes with it; on the host each lane adds its x."""
    return number == 0 if on_device() else number >= 0


def share_two(
    compute: Callable[[Int32], Any], pick: Callable[[Any, Int32], Int32], odd: Int32, offset: int
) -> tuple[Int32, Int32]:
    """(pick(compute(0), odd), pick(compute(1), odd)), with one ``compute`` in each of two lanes.

    The lanes differ in ``offset``; ``odd`` is 0 in one and 1 in the other. Each picks for both.
    """
    if not on_device():
        return pick(compute(Int32(0)), odd), pick(compute(Int32(1)), odd)
    made = compute(odd)
    own, received = pick(made, odd), cute.arch.shuffle_sync_bfly(pick(made, 1 - odd), offset=offset)
    return cutlass.select_(odd == 0, own, received), cutlass.select_(odd == 0, received, own)


def every_other_byte(low: Int32, high: Int32, odd: Int32) -> Int32:
    """The even bytes of two words, or with ``odd`` 1 the odd ones; ``low``'s bytes first."""
    if on_device():
        return Int32(cute.arch.prmt(low, high, Int32(0x6420) + odd * Int32(0x1111)))
    return cutlass.select_(odd == 0, byte_permute(low, high, 0x6420), byte_permute(low, high, 0x7531))


def exchange_pairs(word: Int32) -> Int32:
    """movmatrix: the transpose of an 8 x 8 matrix of 16-bit elements. Lane i holds row i / 4, columns 2 (i % 4) + 0, 1.

    By whole warps, on the device only.
    """
    shape, kind = "#nvvm.ld_st_matrix_shape<m = 8, n = 8>", "#nvvm.ld_st_matrix_elt_type<b16>"
    exchanged = nvvm.movmatrix(Int32(word).ir_value(), ir.Attribute.parse(shape), ir.Attribute.parse(kind))
    return Int32(exchanged)


def add_to(pointer: Pointer, x: Float32) -> None:
    """Add x to an fp32 in global memory, atomically on the device."""
    if on_device():
        cute.arch.red(pointer, x, op="add", dtype="f32", sem="relaxed", scope="gpu")
    else:
        cell = cute.make_tensor(pointer, cute.make_layout(1))
        cell[0] = cell[0] + x
