"""Reductions over the lanes of a warp: votes, minimum and maximum.

On the host, where threads run one after the other, a warp has one lane.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.device.math import on_device

LANES = 32


def width() -> int:
    return LANES if on_device() else 1


def lane() -> Int32:
    """The thread's lane index."""
    return Int32(cute.arch.lane_idx()) if on_device() else Int32(0)


def ballot(x: Boolean) -> Int32:
    return Int32(cute.arch.vote_ballot_sync(x)) if on_device() else Int32(x)


def count(bits: Int32) -> Int32:
    """Number of lanes set in a :func:`ballot`."""
    return Int32(cute.arch.popc(bits)) if on_device() else bits


def count_before(bits: Int32) -> Int32:
    """Number of ``bits`` set for lanes before this one."""
    return count(bits & Int32(cute.arch.lanemask_lt())) if on_device() else Int32(0)


def any_of(x: Boolean) -> Boolean:
    """True if x is true in any lane of the warp."""
    return Boolean(cute.arch.vote_any_sync(x)) if on_device() else x


def least(x: Any) -> Any:
    """The minimum of x over the lanes; all lanes get it. x: Int32, Int64 or Float32, not NaN."""
    return _reduced(x, "min")


def largest(x: Any) -> Any:
    """The maximum of x over the lanes; see :func:`least`."""
    return _reduced(x, "max")


def _reduced(x: Any, kind: str) -> Any:
    if not on_device():
        return x
    if isinstance(x, Int32):
        return Int32(cute.arch.warp_redux_sync(x, kind=kind))
    for step in range(LANES.bit_length() - 1):
        other = cute.arch.shuffle_sync_bfly(x, offset=1 << step)
        x = lesser(x, other) if kind == "min" else greater(x, other)
    return x


def lesser(a: Any, b: Any) -> Any:
    """The smaller of two numbers, neither of which is NaN."""
    return picked(a < b, a, b)


def greater(a: Any, b: Any) -> Any:
    """The greater of two numbers, neither of which is NaN."""
    return picked(a > b, a, b)


def picked(condition: Any, a: Any, b: Any) -> Any:
    """a if the condition holds, else b; both have the same type."""
    kind = type(a)
    assert kind in (Int32, Int64, Float32)
    return kind(cutlass.select_(condition, a, b))
