"""The device code of a graph's operations, a row for each: of a value, and of its bounds over a block of scores.

Bounds hold for the device's arithmetic, even if a value wraps or rounds. An integer's bounds have 64 bits; if they
exceed its type, the value may have wrapped, and counts as unknown. A float's bounds are rounded like the value, which
keeps their order. Bounds of a product are widened, since a compiler may fuse the product with a sum. The bounds of an
unknown value are those of its type. Unknown are a float that may be NaN or infinite, and the result of an operation
without a rule. So a predicate is certainly true, certainly false, or neither.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import arith

from cute_attn.device.math import LARGEST, LOG2_E, exp2, fabs, fma, log2, reciprocal, tanh_base2
from cute_attn.device.warp import greater, lesser
from cute_attn.epilogues.functions.graph import BOOL, FLOAT, INT, LONG, Node

# ---- values ----


def _floor_divide(a: Any, b: Any) -> Any:
    bits = _bits_of_power(b)
    if bits is not None:
        return arith.shrsi(a.ir_value(), type(a)(bits).ir_value())
    return arith.floordivsi(a.ir_value(), b.ir_value())


def _remainder(a: Any, b: Any) -> Any:
    """The remainder with the divisor's sign, as in Python."""
    if _bits_of_power(b) is not None:
        return arith.andi(a.ir_value(), type(a)(b.value - 1).ir_value())
    return a - b * type(a)(_floor_divide(a, b))


def _bits_of_power(x: Any) -> int | None:
    """n if x is the constant 2**n, else None: a shift or an "and" then replaces a division of nine instructions."""
    value = x.value
    power = isinstance(value, int) and value > 0 and not value & (value - 1)
    return value.bit_length() - 1 if power else None


def _not(a: Any) -> Any:
    return ~a if not isinstance(a, Boolean) else Boolean(arith.xori(a.ir_value(), Boolean(True).ir_value()))


def _signbit(x: Float32) -> Boolean:
    return Int32(arith.bitcast(Int32.mlir_type, x.ir_value())) < 0


def _bits(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: op(a.ir_value(), b.ir_value())


def _quotient(a: Float32, b: Float32, inverse: Float32) -> Float32:
    """a / b as torch rounds it. inverse: 1 / b, to 1 ulp."""
    near = a * inverse
    found = fma(fma(-near, b, a), inverse, near)
    return cutlass.select_(found == found, found, near)  # NaN if a number or the quotient is infinite


def _fmod(a: Float32, b: Float32, inverse: Float32) -> Float32:
    """a - trunc(a / b) * b without rounding; each of two rounds takes 23 digits off a quotient below 2^46."""
    size, divisor = fabs(a), fabs(b)
    rest = size
    for _ in range(2):
        rest = fma(-cute.math.trunc(_quotient(rest, divisor, fabs(inverse))), divisor, rest)
    rest = cutlass.select_(rest < 0.0, rest + divisor, rest)
    rest = cutlass.select_((divisor > LARGEST) & (size <= LARGEST), size, rest)
    return cutlass.select_(a < 0.0, -rest, rest)


def _is_opposite(rest: Float32, b: Float32) -> Boolean:
    return cutlass.select_(b < 0.0, rest > 0.0, rest < 0.0)


def _float_remainder(a: Float32, b: Float32, inverse: Float32) -> Float32:
    """a - floor(a / b) * b."""
    rest = _fmod(a, b, inverse)
    return cutlass.select_(_is_opposite(rest, b), rest + b, rest)


def _floor_quotient(a: Float32, b: Float32, inverse: Float32) -> Float32:
    """floor(a / b), from the remainder as in torch."""
    rest = _fmod(a, b, inverse)
    whole = cute.math.roundeven(_quotient(a - rest, b, inverse))
    whole = cutlass.select_(_is_opposite(rest, b), whole - 1.0, whole)
    return cutlass.select_(b == 0.0, a * inverse, whole)


_TURN = 6.283185307179586
_TURN_HIGH = 6.28125  # so few digits that its multiples are exact
_TURN_LOW = _TURN - _TURN_HIGH


def _reduced(x: Float32) -> Float32:
    """x minus a multiple of 2 pi: the device's sine and cosine are exact only near 0."""
    turns = cute.math.floor(x * (1.0 / _TURN) + 0.5)
    return fma(turns, Float32(-_TURN_LOW), fma(turns, Float32(-_TURN_HIGH), x))


_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7."""


def _erf(x: Float32) -> Float32:
    size = fabs(x)
    t = reciprocal(fma(size, Float32(0.3275911), Float32(1.0)))
    rest = Float32(_ERF[0])
    for factor in _ERF[1:]:
        rest = fma(rest, t, Float32(factor))
    value = 1.0 - rest * t * exp2(size * size * -LOG2_E)
    return cutlass.select_(x < 0.0, -value, value)


# ---- bounds ----

_RANGES = {
    BOOL: (False, True),
    INT: (-(2**31), 2**31 - 1),
    LONG: (-(2**63), 2**63 - 1),
    FLOAT: (float("nan"), float("nan")),
}
_ADDED, _MULTIPLIED = 2**62 - 1, 2**31
"""Maximum magnitudes of operands whose sum, or product, fits in 64 bits."""
_FUSED = 2.0**-22
"""A bound on the relative distance of an fp32 product from the rounded product: twice fp32's epsilon."""
_SMALLEST = 1e-37


class Interval(NamedTuple):
    """Minimum and maximum of a value: Int64, Float32, or Boolean with False < True.

    Both are NaN if nothing is known of a Float32: no comparison with NaN holds.
    """

    low: Any
    high: Any

    @property
    def is_point(self) -> bool:
        """True if both bounds are known at trace time to be the same value."""
        return self.low is self.high


def point(kind: str, value: Any) -> Interval:
    found = _of_kind(kind, value)
    return Interval(found, found)


def unknown(kind: str) -> Interval:
    """The interval of any value of a kind."""
    return Interval(*(_of_kind(kind, end) for end in _RANGES[kind]))


def _of_kind(kind: str, x: Any) -> Any:
    """x in the type of a kind's bounds, as a run-time value even if it is a constant."""
    of = {BOOL: Boolean, FLOAT: Float32}.get(kind, Int64)
    return of(of(x).ir_value())


def _select(condition: Boolean, a: Any, b: Any) -> Any:
    return type(a)(cutlass.select_(condition, a, b))


def all_of(conditions: Any) -> Boolean:
    found = _of_kind(BOOL, True)
    for condition in conditions:
        found = found & condition
    return found


def known_if(certain: Boolean, kind: str, found: Interval) -> Interval:
    """``found`` if ``certain``, else the interval of all values of the kind."""
    rest = unknown(kind)
    return Interval(_select(certain, found.low, rest.low), _select(certain, found.high, rest.high))


def bounds_of(node: Node, args: Sequence[Interval]) -> Interval:
    """The interval of an operation's result, from the operands'; :func:`unknown` if an integer may have wrapped."""
    rule = on_device(node).bounds
    if rule is None:
        return unknown(node.kind)
    found = rule(node, *args)
    if node.kind == BOOL:
        return found
    if node.kind == FLOAT:
        floats = [x for x, arg in zip(args, node.args, strict=True) if arg.kind == FLOAT]
        finite = ((x.low > -float("inf")) & (x.high < float("inf")) for x in (found, *floats))
        return known_if(all_of(finite), FLOAT, found)
    if node.kind == INT:
        low, high = _RANGES[INT]
        return known_if((found.low >= low) & (found.high <= high), INT, found)
    if node.op not in ("add", "sub", "neg", "abs", "or", "xor", "mul"):
        return found
    limit = _MULTIPLIED if node.op == "mul" else _ADDED
    return known_if(all_of((x.low >= -limit) & (x.high <= limit) for x in args), LONG, found)


def _sub(node: Node, a: Interval, b: Interval) -> Interval:
    return Interval(a.low - b.high, a.high - b.low)


def _distance(node: Node, a: Interval, b: Interval) -> Interval:
    """Bounds of the distance between two integers, possibly converted to a float."""
    return _cast_ends(node.kind, _sub(node, a, b))


def _corners(op: Callable[[Any, Any], Any], a: Interval, b: Interval) -> Interval:
    """The interval of an operation that is monotonic in each operand, from the intervals' ends."""
    firsts, seconds = ([x.low] if x.is_point else [x.low, x.high] for x in (a, b))
    found = [op(x, y) for x, y in itertools.product(firsts, seconds)]
    return Interval(functools.reduce(lesser, found), functools.reduce(greater, found))


def _mul(node: Node, a: Interval, b: Interval) -> Interval:
    found = _corners(operator.mul, a, b)
    return found if node.kind != FLOAT else _widened(found, _FUSED)


def _widened(x: Interval, by: float) -> Interval:
    low, high = (fabs(end) * by + _SMALLEST for end in x)
    return Interval(x.low - low, x.high + high)


def _quotient_bounds(node: Node, a: Interval, b: Interval, inverse: Interval) -> Interval:
    """A quotient is as far from the product with the reciprocal as both round."""
    return _widened(_corners(operator.mul, a, inverse), 2 * _FUSED)


def _floor_quotient_bounds(node: Node, a: Interval, b: Interval, inverse: Interval) -> Interval:
    """Known where one positive number divides, and quotients are so small that they are exact."""
    found = Interval(*(_floor_quotient(x, b.low, inverse.low) for x in a))
    positive = (b.low > 0.0) & (b.low == b.high)
    return known_if(positive & (found.low > -(2.0**22)) & (found.high < 2.0**22), FLOAT, found)


def _float_remainder_bounds(node: Node, a: Interval, b: Interval, inverse: Interval) -> Interval:
    """Exact if both ends have the same quotient, otherwise from 0 to the divisor; unknown with the quotient."""
    whole = _floor_quotient_bounds(node, a, b, inverse)
    low, high = (_float_remainder(x, b.low, inverse.low) for x in a)
    one = whole.low == whole.high
    found = Interval(_select(one, low, Float32(0.0)), _select(one, high, b.high))
    return known_if(whole.low <= whole.high, FLOAT, found)


def _abs_bounds(node: Node, a: Interval) -> Interval:
    zero = type(a.low)(0)
    return Interval(greater(greater(a.low, -a.high), zero), greater(-a.low, a.high))


def _lower(node: Node, a: Interval, b: Interval) -> Interval:
    return Interval(lesser(a.low, b.low), lesser(a.high, b.high))


def _higher(node: Node, a: Interval, b: Interval) -> Interval:
    return Interval(greater(a.low, b.low), greater(a.high, b.high))


def _divided(a: Int64, b: Int64) -> Int64:
    return Int64(arith.floordivsi(a.ir_value(), b.ir_value()))


def _divisor(b: Interval) -> tuple[Boolean, Interval]:
    """(True if the divisor is positive, the divisor clamped to positive values)."""
    low = greater(b.low, Int64(1))
    return b.low > 0, Interval(low, low if b.is_point else greater(b.high, Int64(1)))


def _floordiv_bounds(node: Node, a: Interval, b: Interval) -> Interval:
    positive, b = _divisor(b)
    return known_if(positive, node.kind, _corners(_divided, a, b))


def _mod_bounds(node: Node, a: Interval, b: Interval) -> Interval:
    """Bounds of a remainder: exact if both ends have the same quotient, otherwise [0, largest divisor - 1]."""
    positive, b = _divisor(b)
    first, last = _divided(a.low, b.low), _divided(a.high, b.low)
    one, start = (first == last) & (b.low == b.high), first * b.low
    low = _select(one, a.low - start, Int64(0))
    return known_if(positive, node.kind, Interval(low, _select(one, a.high - start, b.high - 1)))


def _and(node: Node, a: Interval, b: Interval) -> Interval:
    if node.kind == BOOL:
        return Interval(a.low & b.low, a.high & b.high)
    first, second = a.low >= 0, b.low >= 0
    either = _select(first, _select(second, lesser(a.high, b.high), a.high), b.high)
    return known_if(first | second, node.kind, Interval(Int64(0), either))


def _or(node: Node, a: Interval, b: Interval) -> Interval:
    if node.kind == BOOL:
        return Interval(a.low | b.low, a.high | b.high)
    both = (a.low >= 0) & (b.low >= 0)
    return known_if(both, node.kind, Interval(greater(a.low, b.low), a.high + b.high))


def _xor(node: Node, a: Interval, b: Interval) -> Interval:
    if node.kind == BOOL:
        low = (a.low & _not(b.high)) | (b.low & _not(a.high))
        return Interval(low, (a.high & _not(b.low)) | (b.high & _not(a.low)))
    both = (a.low >= 0) & (b.low >= 0)
    return known_if(both, node.kind, Interval(Int64(0), a.high + b.high))


def _opposite(node: Node, a: Interval) -> Interval:
    if node.kind == BOOL:
        return Interval(_not(a.high), _not(a.low))
    return Interval(-a.high - 1, -a.low - 1)


def _shift(op: Callable[[Any, Any], Any]) -> Callable[..., Interval]:
    """A rule for shifts; the result is known for an INT that is shifted by a known number of bits."""

    def rule(node: Node, a: Interval, b: Interval) -> Interval:
        if node.kind != INT:
            return unknown(node.kind)
        bits = lesser(greater(b.low, Int64(0)), Int64(31))
        ends = (Int64(op(x.ir_value(), bits.ir_value())) for x in a)
        return known_if((b.low == b.high) & (b.low == bits), INT, Interval(*ends))

    return rule


def _cast_ends(kind: str, a: Interval) -> Interval:
    if kind != FLOAT:
        return a
    return point(FLOAT, a.low) if a.is_point else Interval(Float32(a.low), Float32(a.high))


def _cast(node: Node, a: Interval) -> Interval:
    given = node.args[0].kind
    if given == BOOL:
        a = Interval(Int64(a.low), Int64(a.high))
    elif given == FLOAT:
        near = (a.low > -(2.0**30)) & (a.high < 2.0**30)
        ends = (Int64(_select(near, x, Float32(0.0))) for x in a)
        return known_if(near, node.kind, Interval(*ends))
    return _cast_ends(node.kind, a)


def _where(node: Node, c: Interval, a: Interval, b: Interval) -> Interval:
    """The chosen interval; the union if the condition is undecided, unknown for a float that may be NaN."""
    if node.kind == BOOL:
        low = (c.low & a.low) | (_not(c.high) & b.low) | (a.low & b.low)
        return Interval(low, (c.high & a.high) | (_not(c.low) & b.high))
    either = Interval(lesser(a.low, b.low), greater(a.high, b.high))
    low = _select(c.low, a.low, _select(c.high, either.low, b.low))
    return Interval(low, _select(c.low, a.high, _select(c.high, either.high, b.high)))


def _lt(node: Node, a: Interval, b: Interval) -> Interval:
    return Interval(a.high < b.low, _not(a.low >= b.high))


def _le(node: Node, a: Interval, b: Interval) -> Interval:
    return Interval(a.high <= b.low, _not(a.low > b.high))


def _eq(node: Node, a: Interval, b: Interval) -> Interval:
    return Interval((a.low == b.high) & (a.high == b.low), _not((a.high < b.low) | (b.high < a.low)))


# ---- the rows ----


class OnDevice(NamedTuple):
    """An operation's code: of its value from the operands' values, and of its :class:`Interval` from theirs.

    bounds: a function of the node and the operands' intervals; None if nothing is known of the result.
    """

    value: Callable[..., Any]
    bounds: Callable[..., Interval] | None = None


def _rounding(op: Callable[[Any], Any]) -> OnDevice:
    return OnDevice(op, lambda node, a: Interval(op(a.low), op(a.high)))


_ROWS: dict[str, OnDevice] = {
    "add": OnDevice(operator.add, lambda node, a, b: Interval(a.low + b.low, a.high + b.high)),
    "sub": OnDevice(operator.sub, _sub),
    "distance": OnDevice(operator.sub, _distance),
    "mul": OnDevice(operator.mul, _mul),
    "div": OnDevice(lambda a, b: a * reciprocal(b)),
    "quotient": OnDevice(_quotient, _quotient_bounds),
    "floor_quotient": OnDevice(_floor_quotient, _floor_quotient_bounds),
    "remainder": OnDevice(_float_remainder, _float_remainder_bounds),
    "fmod": OnDevice(_fmod),
    "neg": OnDevice(operator.neg, lambda node, a: Interval(-a.high, -a.low)),
    "abs": OnDevice(lambda a: fabs(a) if isinstance(a, Float32) else cutlass.max(a, -a), _abs_bounds),
    "floordiv": OnDevice(_floor_divide, _floordiv_bounds),
    "mod": OnDevice(_remainder, _mod_bounds),
    "minimum": OnDevice(cutlass.min, _lower),
    "maximum": OnDevice(cutlass.max, _higher),
    "clamp_min": OnDevice(cutlass.max, _higher),
    "clamp_max": OnDevice(cutlass.min, _lower),
    "lt": OnDevice(operator.lt, _lt),
    "le": OnDevice(operator.le, _le),
    "gt": OnDevice(operator.gt, lambda node, a, b: _lt(node, b, a)),
    "ge": OnDevice(operator.ge, lambda node, a, b: _le(node, b, a)),
    "eq": OnDevice(operator.eq, _eq),
    "ne": OnDevice(operator.ne, lambda node, a, b: _opposite(node, _eq(node, a, b))),
    "and": OnDevice(_bits(arith.andi), _and),
    "or": OnDevice(_bits(arith.ori), _or),
    "xor": OnDevice(_bits(arith.xori), _xor),
    "not": OnDevice(_not, _opposite),
    "shl": OnDevice(_bits(arith.shli), _shift(arith.shli)),
    "shr": OnDevice(_bits(arith.shrsi), _shift(arith.shrsi)),
    "where": OnDevice(cutlass.select_, _where),
    "cast": OnDevice(lambda a: a, _cast),
    "exp2": OnDevice(exp2),
    "log2": OnDevice(log2),
    "tanh2": OnDevice(tanh_base2),
    "sigmoid2": OnDevice(lambda x: reciprocal(1.0 + exp2(x))),
    "sqrt": OnDevice(lambda x: cute.math.sqrt(x, fastmath=True)),
    "rsqrt": OnDevice(lambda x: cute.math.rsqrt(x, fastmath=True)),
    "sin": OnDevice(lambda x: cute.math.sin(_reduced(x), fastmath=True)),
    "cos": OnDevice(lambda x: cute.math.cos(_reduced(x), fastmath=True)),
    "floor": _rounding(cute.math.floor),
    "ceil": _rounding(cute.math.ceil),
    "trunc": _rounding(cute.math.trunc),
    "round": OnDevice(cute.math.roundeven),
    "erf": OnDevice(_erf),
    "signbit": OnDevice(_signbit),
    **{name: OnDevice(getattr(cute.math, name)) for name in ("atan", "expm1", "log1p")},
}


def on_device(node: Node) -> OnDevice:
    """The row of a node's operation; of the comparison, for an "order"."""
    return _ROWS[node.value if node.op == "order" else node.op]
