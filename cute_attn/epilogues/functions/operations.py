"""The pointwise operations of a graph, a row for each; their device code is in :mod:`.device_operations`.

A new operation is a row here and a row there. Imports no compiler.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cute_attn.epilogues.functions.graph import BOOL, FLOAT, INT, WIDTHS, Graph, Node, ordered

NUMBERS, COMPARED, FLOATS, ROUNDED = "numbers", "compared", "floats", "rounded"
"""Operands: two numbers of one type, also the result's; two numbers, for a bool; one number, as a float unless only its
sign changes; one float, while integers are unchanged. Torch itself refuses those that it does not take."""

Bounds = tuple[float, float]
"""Minimum and maximum of an integer."""
BoundsRule = Callable[..., Bounds]
SlopeRule = Callable[..., Node | None]


class Operation(NamedTuple):
    """One operation.

    Attributes:
        torch: its meaning: a function of tensors.
        takes: the operands of torch's function of this name; "" if :mod:`.torch_functions` makes the node otherwise.
        slope: the derivative, from a :class:`_Derivative`, the node, its operands and their derivatives; None if 0.
        bounds: bounds of an integer result before it wraps, from the operands' bounds; None if unknown.
        of_bools: the operation on two bools; "" if they are integers.
        numbers: True if ``torch`` accepts Python's numbers next to tensors.
        is_step: True if the result may depend on an operand's last digit, if a float is cast to an integer.
        is_finite: True if the result is finite for finite operands.
        is_approximate: True if kernels round the result otherwise than torch.
    """

    torch: Callable[..., Any]
    takes: str = ""
    slope: SlopeRule | None = None
    bounds: BoundsRule | None = None
    of_bools: str = ""
    numbers: bool = True
    is_step: bool = False
    is_finite: bool = True
    is_approximate: bool = False


# ---- derivatives ----


def derivative(graph: Graph, output: Node, tangents: Mapping[Node, Node]) -> Node | None:
    """The output's tangent as a graph, None for 0. tangents: the nodes that have one, the score or loads, and theirs.

    With one node, whose tangent is 1, this is d(output) / d(node). Where the output is -inf the result is any finite
    number: the gradient that it multiplies, or P, is 0 there.
    """
    depending = set(tangents)
    for node in ordered(output):
        if not depending.isdisjoint(node.args):
            depending.add(node)
    return _Derivative(graph, tangents, depending).of(output, True)


class _Derivative:
    """Forward mode: dual numbers need one more node per node."""

    def __init__(self, graph: Graph, tangents: Mapping[Node, Node], depending: set[Node]) -> None:
        self.graph, self.tangents, self.depending = graph, tangents, depending
        self._known: dict[tuple[Node, bool], Node | None] = {}

    def of(self, x: Node, outermost: bool = False) -> Node | None:
        """The derivative of x, or None for 0. outermost: True if the output is -inf wherever x is."""
        if x in self.tangents:
            return self.tangents[x]
        row = OPERATIONS.get(x.op)
        if x not in self.depending or x.kind != FLOAT or row is None or row.slope is None:
            return None
        key = (x, outermost)
        if key not in self._known:
            outermost = outermost and x.op in ("add", "where")
            slopes = [self.of(arg, outermost) for arg in x.args]
            rule = _where_seen if x.op == "where" and outermost else row.slope
            with self.graph.at(x.place):
                self._known[key] = rule(self, x, *x.args, *slopes)
        return self._known[key]

    # ---- arithmetic where None is 0 ----

    def add(self, a: Node | None, b: Node | None) -> Node | None:
        if a is None or b is None:
            return a if b is None else b
        if b.op == "neg":
            return self.graph.binary("sub", a, b.args[0])
        return self.graph.binary("add", a, b)

    def mul(self, slope: Node | None, factor: Node) -> Node | None:
        return None if slope is None else self.graph.binary("mul", slope, factor)

    def neg(self, a: Node | None) -> Node | None:
        return None if a is None else self.graph.unary("neg", a)

    def where(self, condition: Node, a: Node | None, b: Node | None) -> Node | None:
        if a is None and b is None:
            return None
        zero = self.graph.const(0.0)
        return self.graph.where(condition, zero if a is None else a, zero if b is None else b)


def _add(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
    return d.add(da, db)


def _sub(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
    return d.add(da, d.neg(db))


def _mul(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
    return d.add(d.mul(da, b), d.mul(db, a))


def _where(d: _Derivative, x: Node, c: Node, a: Node, b: Node, dc: Any, da: Any, db: Any) -> Node | None:
    return d.where(c, da, db)


def _where_seen(d: _Derivative, x: Node, c: Node, a: Node, b: Node, dc: Any, da: Any, db: Any) -> Node | None:
    for value, slope in ((a, db), (b, da)):
        if value.is_const(-math.inf):
            return slope
    return d.where(c, da, db)


def _div(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
    above = d.add(da, d.neg(d.mul(db, x)))
    return None if above is None else d.graph.binary("div", above, b)


def _remainder(rounding: str) -> SlopeRule:
    """The derivative of a - rounding(a / b) * b."""

    def rule(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
        whole = d.graph.unary(rounding, d.graph.binary("div", a, b))
        return d.add(da, d.neg(d.mul(db, whole)))

    return rule


def _abs(d: _Derivative, x: Node, a: Node, da: Any) -> Node | None:
    zero = d.graph.const(0.0)
    below = d.where(d.graph.compare("lt", a, zero), d.neg(da), None)
    return d.where(d.graph.compare("gt", a, zero), da, below)


def _extreme(first: str, second: str) -> SlopeRule:
    """The derivative of the operand that compares as ``first``; the mean of both if they are equal, as in torch."""

    def rule(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
        mean = d.mul(d.add(da, db), d.graph.const(0.5))
        other = d.where(d.graph.compare(second, a, b), db, mean)
        return d.where(d.graph.compare(first, a, b), da, other)

    return rule


def _clamp(inside: str) -> SlopeRule:
    """The derivative of the value if it is within the bound, as in torch's clamp; else the derivative of the bound."""
    return lambda d, x, a, b, da, db: d.where(d.graph.compare(inside, a, b), da, db)


def _pow(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
    """0 with respect to the base if the exponent is 0, and to the exponent if the base is 0, as in torch."""
    g, zero = d.graph, d.graph.const(0.0)
    lower = g.binary("pow", a, g.binary("sub", b, g.const(1.0)))
    by_base = g.where(g.compare("eq", b, zero), zero, g.binary("mul", b, lower))
    by_exponent = g.where(g.compare("eq", x, zero), zero, g.binary("mul", x, g.unary("log", a)))
    return d.add(d.mul(da, by_base), d.mul(db, by_exponent))


def _times(g: Graph, x: Node, factor: float) -> Node:
    return g.binary("mul", x, g.const(factor))


def _over(g: Graph, number: float, x: Node) -> Node:
    return g.binary("div", g.const(number), x)


def _one_plus(g: Graph, x: Node) -> Node:
    return g.binary("add", g.const(1.0), x)


def _one_minus(g: Graph, x: Node) -> Node:
    return g.binary("sub", g.const(1.0), x)


def _bell(g: Graph, a: Node) -> Node:
    """exp(-a^2)."""
    return g.unary("exp", g.unary("neg", g.binary("mul", a, a)))


# ---- bounds of integers ----

RANGES: dict[str, Bounds] = {
    name: (0, 2**bits - 1) if name == "uint8" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for name, bits in WIDTHS.items()
}
_POSITION, _SIZE, ELEMENT = 1 << 24, 1 << 30, 1 << 29
"""Assumed bounds of positions, and of the dimensions and 32-bit elements of captured tensors: sums with positions fit
in 32 bits, and products with positions are computed in 64."""
_ANY = (-math.inf, math.inf)


def within(x: Bounds, of: Bounds) -> bool:
    return of[0] <= x[0] and x[1] <= of[1]


def bounds(node: Node, known: dict[Node, Bounds] | None = None) -> Bounds:
    """Bounds of an integer, or of a predicate as one, traced or lowered."""
    known = {} if known is None else known
    if node.kind == BOOL:
        return (0, 1)
    if node not in known:
        args = [bounds(arg, known) for arg in node.args if arg.kind != FLOAT]
        exact, own = exact_bounds(node, args), RANGES[node.dtype or "int64"]
        known[node] = exact if within(exact, own) else own
    return known[node]


def exact_bounds(node: Node, args: Sequence[Bounds]) -> Bounds:
    """Bounds of a result before it is wrapped."""
    if node.op == "const":
        return (node.value, node.value)
    if node.op in ("query", "key", "batch", "head"):
        return (0, _POSITION)
    if node.op == "extent":
        return (0, _SIZE)
    if node.op == "load" or not args:
        dtype = node.dtype or "int32"
        return (-ELEMENT, ELEMENT) if dtype == "int32" else RANGES[dtype]
    if node.op == "cast" and node.dtype == "int64" and node.args[0].op == "load" and node.args[0].kind == INT:
        # A function that converts to 64 bits has large elements. A call's own number has no dtype.
        return RANGES[node.args[0].dtype] if node.args[0].dtype else args[0]
    row = OPERATIONS.get("sub" if node.op == "distance" else node.op)
    return _ANY if row is None or row.bounds is None else row.bounds(*args)


def _corners(op: Callable[[float, float], float]) -> BoundsRule:
    def rule(a: Bounds, b: Bounds) -> Bounds:
        found = [op(x, y) for x in a for y in b]
        return (min(found), max(found))

    return rule


def _largest(*xs: Bounds) -> float:
    return max(abs(end) for x in xs for end in x)


def _added(a: Bounds, b: Bounds) -> Bounds:
    return (a[0] + b[0], a[1] + b[1])


def _subtracted(a: Bounds, b: Bounds) -> Bounds:
    return (a[0] - b[1], a[1] - b[0])


def _lower(a: Bounds, b: Bounds) -> Bounds:
    return (min(a[0], b[0]), min(a[1], b[1]))


def _higher(a: Bounds, b: Bounds) -> Bounds:
    return (max(a[0], b[0]), max(a[1], b[1]))


def _floordiv_bounds(a: Bounds, b: Bounds) -> Bounds:
    if b[0] > 0:
        return _corners(lambda x, y: x if math.isinf(x) else x // y)(a, b)
    return (-_largest(a), _largest(a))


def _mod_bounds(a: Bounds, b: Bounds) -> Bounds:
    if b[0] > 0:
        return (0, min(b[1] - 1, a[1]) if a[0] >= 0 else b[1] - 1)
    return (1 - _largest(b), _largest(b) - 1)


def _bits_bounds(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of or and xor: they set no bit above the operands', except the sign."""
    most = 2 ** int(_largest(a, b)).bit_length() - 1
    return (0 if min(a[0], b[0]) >= 0 else -most - 1, most)


def _and_bounds(a: Bounds, b: Bounds) -> Bounds:
    positive = [x[1] for x in (a, b) if x[0] >= 0]
    return (0, min(positive)) if positive else _bits_bounds(a, b)


def _shl_bounds(a: Bounds, b: Bounds) -> Bounds:
    return _corners(lambda x, y: x * 2**y)(a, b) if within(b, (0, 63)) else _ANY


def _shr_bounds(a: Bounds, b: Bounds) -> Bounds:
    return (min(a[0], 0), max(a[1], 0)) if b[0] >= 0 else _ANY


# ---- the rows ----


def _torch(name: str) -> Callable[..., Any]:
    """Torch's function of this name. It is looked up when it is called: lists of kernels do not load torch."""

    def function(*args: Any, **options: Any) -> Any:
        import torch

        return getattr(torch, name)(*args, **options)

    return function


def _is_tensor(x: Any) -> bool:
    return not isinstance(x, (bool, int, float))


def _dividend(a: Any, b: Any) -> Any:
    """A number as a tensor if a float tensor divides it: torch differentiates only the remainder of tensors."""
    is_float = _is_tensor(b) and b.is_floating_point()
    return _torch("full_like")(b, a) if is_float and not _is_tensor(a) else a


def _modulo(a: Any, b: Any) -> Any:
    return _dividend(a, b) % b


def _floor_divided(a: Any, b: Any) -> Any:
    """a // b, with a derivative of 0."""
    a = _dividend(a, b)
    return _torch("div")(a, b, rounding_mode="floor") if _is_tensor(a) else a // b


def _function(
    meaning: Callable, slope: Callable[[Graph, Node, Node], Node], is_finite: bool = True
) -> Operation:
    """A function of a float. slope: its derivative, from (graph, value, operand)."""

    def rule(d: _Derivative, x: Node, a: Node, da: Any) -> Node | None:
        return d.mul(da, slope(d.graph, x, a))

    return Operation(meaning, FLOATS, rule, numbers=False, is_finite=is_finite, is_approximate=True)


OPERATIONS: dict[str, Operation] = {
    "add": Operation(operator.add, NUMBERS, _add, _added, "or"),
    "sub": Operation(operator.sub, NUMBERS, _sub, _subtracted),
    "mul": Operation(operator.mul, NUMBERS, _mul, _corners(operator.mul), "and"),
    "div": Operation(operator.truediv, "", _div, is_finite=False),
    "floordiv": Operation(_floor_divided, NUMBERS, None, _floordiv_bounds, is_step=True, is_finite=False),
    "mod": Operation(_modulo, NUMBERS, _remainder("floor"), _mod_bounds, is_step=True, is_finite=False),
    "fmod": Operation(_torch("fmod"), "", _remainder("trunc"), numbers=False, is_step=True),
    "pow": Operation(operator.pow, "", _pow, is_finite=False, is_approximate=True),
    "neg": Operation(operator.neg, FLOATS, lambda d, x, a, da: d.neg(da), lambda a: (-a[1], -a[0])),
    "abs": Operation(abs, FLOATS, _abs, lambda a: (max(a[0], -a[1], 0), _largest(a))),
    "minimum": Operation(_torch("minimum"), NUMBERS, _extreme("lt", "gt"), _lower, "and", numbers=False),
    "maximum": Operation(_torch("maximum"), NUMBERS, _extreme("gt", "lt"), _higher, "or", numbers=False),
    "clamp_min": Operation(lambda x, y: x.clamp(min=y), "", _clamp("ge"), _higher, numbers=False),
    "clamp_max": Operation(lambda x, y: x.clamp(max=y), "", _clamp("le"), _lower, numbers=False),
    "and": Operation(operator.and_, NUMBERS, None, _and_bounds, "and"),
    "or": Operation(operator.or_, NUMBERS, None, _bits_bounds, "or"),
    "xor": Operation(operator.xor, NUMBERS, None, _bits_bounds, "xor"),
    "not": Operation(_torch("bitwise_not"), "", None, lambda a: (-a[1] - 1, -a[0] - 1), numbers=False),
    "shl": Operation(operator.lshift, NUMBERS, None, _shl_bounds, is_finite=False),
    "shr": Operation(operator.rshift, NUMBERS, None, _shr_bounds, is_finite=False),
    **{
        name: Operation(getattr(operator, name), COMPARED, is_step=True)
        for name in ("lt", "le", "gt", "ge", "eq", "ne")
    },
    "where": Operation(_torch("where"), "", _where, lambda c, a, b: (min(a[0], b[0]), max(a[1], b[1]))),
    "cast": Operation(lambda x, dtype: x.to(dtype), "", lambda d, x, a, da: da, lambda a: a, is_step=True),
    "detach": Operation(_torch("detach"), numbers=False),
    "signbit": Operation(_torch("signbit"), numbers=False, is_finite=False),
    **{
        name: Operation(_torch(name), ROUNDED, numbers=False, is_step=True)
        for name in ("floor", "ceil", "trunc", "round")
    },
    "exp": _function(_torch("exp"), lambda g, x, a: x, is_finite=False),
    "exp2": _function(_torch("exp2"), lambda g, x, a: _times(g, x, math.log(2)), is_finite=False),
    "log": _function(_torch("log"), lambda g, x, a: _over(g, 1.0, a), is_finite=False),
    "log2": _function(_torch("log2"), lambda g, x, a: _over(g, 1 / math.log(2), a), is_finite=False),
    "sqrt": _function(_torch("sqrt"), lambda g, x, a: _over(g, 0.5, x), is_finite=False),
    "rsqrt": _function(
        _torch("rsqrt"), lambda g, x, a: g.binary("div", _times(g, x, -0.5), a), is_finite=False
    ),
    "tanh": _function(_torch("tanh"), lambda g, x, a: _one_minus(g, g.binary("mul", x, x))),
    "sigmoid": _function(_torch("sigmoid"), lambda g, x, a: g.binary("mul", x, _one_minus(g, x))),
    "sin": _function(_torch("sin"), lambda g, x, a: g.unary("cos", a)),
    "cos": _function(_torch("cos"), lambda g, x, a: g.unary("neg", g.unary("sin", a))),
    "atan": _function(_torch("atan"), lambda g, x, a: _over(g, 1.0, _one_plus(g, g.binary("mul", a, a)))),
    "erf": _function(_torch("erf"), lambda g, x, a: _times(g, _bell(g, a), 2 / math.sqrt(math.pi))),
    "expm1": _function(_torch("expm1"), lambda g, x, a: _one_plus(g, x), is_finite=False),
    "log1p": _function(_torch("log1p"), lambda g, x, a: _over(g, 1.0, _one_plus(g, a)), is_finite=False),
}
"""The operations by the names of nodes."""
