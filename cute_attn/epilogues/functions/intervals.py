"""Bounds of a traced value over a block of queries and keys, from bounds of its operands.

The bounds hold for the device's arithmetic, even if a value wraps or rounds. An integer's bounds have 64 bits; if they
exceed its type, the value may have wrapped, and counts as unknown. A float's bounds are rounded like the value, which
keeps their order. Bounds of a product are widened, since a compiler may fuse the product with a sum. The bounds of an
unknown value are those of its type. Unknown are a float that may be NaN or infinite, an element at one of several
indices, and the result of an operation without a rule. So a predicate is certainly true, certainly false, or neither.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int64, cute
from cutlass._mlir.dialects import arith

from cute_attn.device.math import fabs
from cute_attn.device.warp import greater, lesser
from cute_attn.epilogues.functions.device import Expressions, floor_quotient, remainder
from cute_attn.epilogues.functions.graph import BOOL, FLOAT, INT, LONG, Node

INT_RANGE = (-(2**31), 2**31 - 1)
LONG_RANGE = (-(2**63), 2**63 - 1)
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
    value = _dynamic(_type_of(kind)(value))
    return Interval(value, value)


def unknown(kind: str) -> Interval:
    """The interval of any value of a kind."""
    ends = {BOOL: (False, True), INT: INT_RANGE, LONG: LONG_RANGE, FLOAT: (float("nan"),) * 2}[kind]
    return Interval(*(_dynamic(_type_of(kind)(x)) for x in ends))


def _type_of(kind: str) -> Any:
    return {BOOL: Boolean, FLOAT: Float32}.get(kind, Int64)


def _dynamic(x: Any) -> Any:
    """x as a run-time value, even if it is a constant."""
    return type(x)(x.ir_value())


def _select(condition: Boolean, a: Any, b: Any) -> Any:
    return type(a)(cutlass.select_(condition, a, b))


class Intervals:
    """Bounds of a graph's nodes.

    known: bounds of varying nodes without operands; expressions: values of the nodes that do not vary.
    """

    def __init__(self, known: dict[Node, Interval], expressions: Expressions) -> None:
        self.known, self.expressions = dict(known), expressions

    def of(self, node: Node) -> Interval:
        if node not in self.known:
            self.known[node] = self._found(node)
        return self.known[node]

    def _found(self, node: Node) -> Interval:
        if not node.depends_on:
            return point(node.kind, node.value if node.op == "const" else self.expressions.of(node))
        args = [self.of(arg) for arg in node.args]
        if node.op == "load":
            return self._element(node, args)
        rule = _RULES.get(node.op)
        return unknown(node.kind) if rule is None else _inside(node, args, rule(node, *args))

    def _element(self, node: Node, indices: Sequence[Interval]) -> Interval:
        """The interval of a captured tensor's element, known only if the whole block reads the same element."""
        one = _all(index.low == index.high for index in indices)
        places = dict(zip(node.args, (index.low for index in indices), strict=True))
        element = self.expressions.of(node, lambda x: places if x is node or x in places else {})
        return _if(one, node.kind, point(node.kind, element))


def _all(conditions: Any) -> Boolean:
    found = _dynamic(Boolean(True))
    for condition in conditions:
        found = found & condition
    return found


def _finite(*intervals: Interval) -> Boolean:
    """True if all bounds of these floats are finite, and so every value between them."""
    return _all((x.low > -float("inf")) & (x.high < float("inf")) for x in intervals)


def _within(limit: int, *intervals: Interval) -> Boolean:
    return _all((x.low >= -limit) & (x.high <= limit) for x in intervals)


def _if(certain: Boolean, kind: str, found: Interval) -> Interval:
    """``found`` if ``certain``, else the interval of all values of the kind."""
    rest = unknown(kind)
    return Interval(_select(certain, found.low, rest.low), _select(certain, found.high, rest.high))


def _inside(node: Node, args: Sequence[Interval], found: Interval) -> Interval:
    """A rule's result, or :func:`unknown` if an integer may have wrapped, or a float may not be finite."""
    if node.kind == BOOL:
        return found
    if node.kind == FLOAT:
        floats = [x for x, arg in zip(args, node.args, strict=True) if arg.kind == FLOAT]
        return _if(_finite(found, *floats), FLOAT, found)
    if node.kind == INT:
        low, high = INT_RANGE
        return _if((found.low >= low) & (found.high <= high), INT, found)
    if node.op in ("add", "sub", "neg", "abs", "or", "xor"):
        return _if(_within(_ADDED, *args), LONG, found)
    return _if(_within(_MULTIPLIED, *args), LONG, found) if node.op == "mul" else found


# ---- rules: of the node and its operands' bounds ----


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
    found = _corners(lambda x, y: x * y, a, b)
    return found if node.kind != FLOAT else _widened(found, _FUSED)


def _widened(x: Interval, by: float) -> Interval:
    low, high = (fabs(end) * by + _SMALLEST for end in x)
    return Interval(x.low - low, x.high + high)


def _quotient(node: Node, a: Interval, b: Interval, inverse: Interval) -> Interval:
    """A quotient is as far from the product with the reciprocal as both round."""
    return _widened(_corners(lambda x, y: x * y, a, inverse), 2 * _FUSED)


def _floor_quotient(node: Node, a: Interval, b: Interval, inverse: Interval) -> Interval:
    """Known where one positive number divides, and quotients are so small that they are exact."""
    found = Interval(*(floor_quotient(x, b.low, inverse.low) for x in a))
    positive = (b.low > 0.0) & (b.low == b.high)
    return _if(positive & (found.low > -(2.0**22)) & (found.high < 2.0**22), FLOAT, found)


def _remainder(node: Node, a: Interval, b: Interval, inverse: Interval) -> Interval:
    """Exact if both ends have the same quotient, otherwise from 0 to the divisor; unknown with the quotient."""
    whole = _floor_quotient(node, a, b, inverse)
    low, high = (remainder(x, b.low, inverse.low) for x in a)
    one = whole.low == whole.high
    found = Interval(_select(one, low, Float32(0.0)), _select(one, high, b.high))
    return _if(whole.low <= whole.high, FLOAT, found)


def _abs(node: Node, a: Interval) -> Interval:
    zero = type(a.low)(0)
    return Interval(greater(greater(a.low, -a.high), zero), greater(-a.low, a.high))


def _lower(node: Node, a: Interval, b: Interval) -> Interval:
    return Interval(lesser(a.low, b.low), lesser(a.high, b.high))


def _higher(node: Node, a: Interval, b: Interval) -> Interval:
    return Interval(greater(a.low, b.low), greater(a.high, b.high))


def _floor_div(a: Int64, b: Int64) -> Int64:
    return Int64(arith.floordivsi(a.ir_value(), b.ir_value()))


def _divisor(b: Interval) -> tuple[Boolean, Interval]:
    """(True if the divisor is positive, the divisor clamped to positive values)."""
    if b.is_point:
        low = greater(b.low, Int64(1))
        return b.low > 0, Interval(low, low)
    return b.low > 0, Interval(greater(b.low, Int64(1)), greater(b.high, Int64(1)))


def _floordiv(node: Node, a: Interval, b: Interval) -> Interval:
    positive, b = _divisor(b)
    return _if(positive, node.kind, _corners(_floor_div, a, b))


def _mod(node: Node, a: Interval, b: Interval) -> Interval:
    """Bounds of a remainder: exact if both ends have the same quotient, otherwise [0, largest divisor - 1]."""
    positive, b = _divisor(b)
    first, last = _floor_div(a.low, b.low), _floor_div(a.high, b.low)
    one, start = (first == last) & (b.low == b.high), first * b.low
    low = _select(one, a.low - start, Int64(0))
    return _if(positive, node.kind, Interval(low, _select(one, a.high - start, b.high - 1)))


def _and(node: Node, a: Interval, b: Interval) -> Interval:
    if node.kind == BOOL:
        return Interval(a.low & b.low, a.high & b.high)
    first, second = a.low >= 0, b.low >= 0
    either = _select(first, _select(second, lesser(a.high, b.high), a.high), b.high)
    return _if(first | second, node.kind, Interval(Int64(0), either))


def _or(node: Node, a: Interval, b: Interval) -> Interval:
    if node.kind == BOOL:
        return Interval(a.low | b.low, a.high | b.high)
    both = (a.low >= 0) & (b.low >= 0)
    return _if(both, node.kind, Interval(greater(a.low, b.low), a.high + b.high))


def _xor(node: Node, a: Interval, b: Interval) -> Interval:
    if node.kind == BOOL:
        low = (a.low & _opposite(b.high)) | (b.low & _opposite(a.high))
        return Interval(low, (a.high & _opposite(b.low)) | (b.high & _opposite(a.low)))
    both = (a.low >= 0) & (b.low >= 0)
    return _if(both, node.kind, Interval(Int64(0), a.high + b.high))


def _opposite(x: Boolean) -> Boolean:
    return Boolean(arith.xori(x.ir_value(), Boolean(True).ir_value()))


def _not(node: Node, a: Interval) -> Interval:
    if node.kind == BOOL:
        return _inverted(a)
    return Interval(-a.high - 1, -a.low - 1)


def _shift(op: Callable[[Any, Any], Any]) -> Callable[..., Interval]:
    """A rule for shifts; the result is known for an INT that is shifted by a known number of bits."""

    def rule(node: Node, a: Interval, b: Interval) -> Interval:
        if node.kind != INT:
            return unknown(node.kind)
        bits = lesser(greater(b.low, Int64(0)), Int64(31))
        ends = (Int64(op(x.ir_value(), bits.ir_value())) for x in a)
        return _if((b.low == b.high) & (b.low == bits), INT, Interval(*ends))

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
        return _if(near, node.kind, Interval(*ends))
    return _cast_ends(node.kind, a)


def _where(node: Node, c: Interval, a: Interval, b: Interval) -> Interval:
    """The chosen interval; the union if the condition is undecided, unknown for a float that may be NaN."""
    if node.kind == BOOL:
        low = (c.low & a.low) | (_opposite(c.high) & b.low) | (a.low & b.low)
        return Interval(low, (c.high & a.high) | (_opposite(c.low) & b.high))
    either = Interval(lesser(a.low, b.low), greater(a.high, b.high))
    low = _select(c.low, a.low, _select(c.high, either.low, b.low))
    return Interval(low, _select(c.low, a.high, _select(c.high, either.high, b.high)))


def _lt(a: Interval, b: Interval) -> Interval:
    return Interval(a.high < b.low, _opposite(a.low >= b.high))


def _le(a: Interval, b: Interval) -> Interval:
    return Interval(a.high <= b.low, _opposite(a.low > b.high))


def _eq(a: Interval, b: Interval) -> Interval:
    return Interval((a.low == b.high) & (a.high == b.low), _opposite((a.high < b.low) | (b.high < a.low)))


def _inverted(a: Interval) -> Interval:
    return Interval(_opposite(a.high), _opposite(a.low))


_COMPARISONS: dict[str, Callable[[Interval, Interval], Interval]] = {
    "lt": _lt,
    "le": _le,
    "gt": lambda a, b: _lt(b, a),
    "ge": lambda a, b: _le(b, a),
    "eq": _eq,
    "ne": lambda a, b: _inverted(_eq(a, b)),
}


def _compared(op: str) -> Callable[..., Interval]:
    return lambda node, a, b: _COMPARISONS[op](a, b)


def _step(op: Callable[[Any], Any]) -> Callable[..., Interval]:
    return lambda node, a: Interval(op(a.low), op(a.high))


_RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda node, a, b: Interval(a.low + b.low, a.high + b.high),
    "sub": _sub,
    "distance": _distance,
    "mul": _mul,
    "quotient": _quotient,
    "floor_quotient": _floor_quotient,
    "remainder": _remainder,
    "neg": lambda node, a: Interval(-a.high, -a.low),
    "abs": _abs,
    "minimum": _lower,
    "maximum": _higher,
    "clamp_max": _lower,
    "clamp_min": _higher,
    "floordiv": _floordiv,
    "mod": _mod,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": _not,
    "shl": _shift(arith.shli),
    "shr": _shift(arith.shrsi),
    "cast": _cast,
    "where": _where,
    "floor": _step(cute.math.floor),
    "ceil": _step(cute.math.ceil),
    "trunc": _step(cute.math.trunc),
    "order": lambda node, a, b: _COMPARISONS[node.value](a, b),
    **{name: _compared(name) for name in _COMPARISONS},
}
