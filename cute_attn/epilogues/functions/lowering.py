"""A graph as kernels compute it: on scaled scores, with cheap operations in place of expensive ones.

A tile holds scores divided by ``context.score_scale``. Factors that do not vary with the score, or not with both the
query and the key, are multiplied with each other first, once per work tile, row or column. So a bias costs one
multiply-add per element, as in an epilogue written by hand.
"""

import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cute_attn.device.math import LN_2, LOG2_E, TANH_UNIT
from cute_attn.epilogues.functions.graph import (
    BOOL,
    FLOAT,
    INT,
    KEY,
    LONG,
    QUERY,
    SCORE,
    WIDTHS,
    Graph,
    Node,
    ordered,
)
from cute_attn.epilogues.functions.operations import (
    OPERATIONS,
    RANGES,
    Bounds,
    bounds,
    derivative,
    exact_bounds,
    within,
)

_QUOTIENTS = {"div": "quotient", "floordiv": "floor_quotient", "mod": "remainder", "fmod": "fmod"}
"""Operations of floats -> the device's operations, on the operands and the divisor's reciprocal."""
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
"""The comparison of b and a that is equal to a comparison of a and b."""
NO_TANGENTS: Mapping[int, int] = {}
_EXACT = 1 << 24
"""Integers up to this magnitude are exact in fp32; positions in sequences are assumed not to exceed it."""


@dataclass(frozen=True, eq=False)
class Slope:
    """A derivative of the new score. unbounded: it may be NaN or infinite where a mask hides the key."""

    node: Node
    unbounded: bool


@dataclass(frozen=True, eq=False)
class Term:
    """Each score's contribution to the gradient of one load's tensor.

    Attributes:
        number: number of the tensor.
        indices: indices of the loaded element.
        slope: the derivative of the new score with respect to the element.
    """

    number: int
    indices: tuple[Node, ...]
    slope: "Slope"


@dataclass(frozen=True, eq=False)
class Lowered:
    """The nodes that an epilogue computes.

    Attributes:
        terms: terms of the gradients of captured tensors.
        forward: the new value of an element of the accumulator, "acc".
        slope: the derivative with respect to the score; None if it is 0.
        tangent: what tangents of captured tensors add to the new score's tangent; None if it is 0.
        unbounded: ``forward`` may be NaN or infinite beyond the sequences. Keys there are masked. Queries
            there have P = 0, unless their score is NaN.
    """

    forward: Node
    slope: Slope | None
    unbounded: bool
    terms: tuple[Term, ...] = ()
    tangent: Slope | None = None


def varies(node: Node) -> bool:
    """True if a value is computed for each element, not once per row, column or work tile."""
    return bool(node.depends_on & SCORE) or node.depends_on & (QUERY | KEY) == QUERY | KEY


def lower(
    graph: Graph, output: Node, wanted: Collection[int] = (), tangents: Mapping[int, int] = NO_TANGENTS
) -> Lowered:
    """Lower a traced graph for the device.

    Args:
        wanted: numbers of the tensors that need a gradient.
        tangents: numbers of the tensors that have a tangent, and of the tensors that are their tangents.
    """
    lowering, one = _Lowering(graph, output), graph.const(1.0)

    def slope(of: Mapping[Node, Node]) -> Slope | None:
        found = derivative(graph, output, of)
        if found is None:
            return None
        node = lowering.of(found)
        return Slope(node, _may_be_nan(node))

    forward = lowering.scaled(lowering.of(output))
    loads = [x for x in ordered(output) if x.op == "load"]
    slopes = [(x, slope({x: one})) for x in loads if x.value in wanted]
    terms = [Term(x.value, tuple(map(lowering.of, x.args)), own) for x, own in slopes if own is not None]
    dots = {
        x: graph.make("load", x.kind, x.args, tangents[x.value], x.depends_on, x.dtype)
        for x in loads
        if x.value in tangents
    }
    of_score, added = slope({graph.input("score"): one}), slope(dots) if dots else None
    return Lowered(forward, of_score, _may_be_nan(forward, True), tuple(terms), added)


def lower_predicate(graph: Graph, predicate: Node) -> Node:
    """Lower the result of a mask_mod for the device."""
    return _Lowering(graph, predicate).of(predicate)


def _quotients(output: Node) -> set[Node]:
    """Divisions that steps need as torch rounds them: 41 times fp32's 1 / 41 is less than 1."""
    nodes, approximate = ordered(output), set[Node]()
    for x in nodes:
        row = OPERATIONS.get(x.op)
        if x.op == "score" or (row and row.is_approximate) or not approximate.isdisjoint(x.args):
            approximate.add(x)
    rows = [(x, OPERATIONS[x.op]) for x in nodes if x.op in OPERATIONS]
    steps = [x for x, row in rows if row.is_step and (x.op != "cast" or x.kind != FLOAT)]
    exact = [arg for x in steps for arg in x.args if arg not in approximate]
    return {x for x in ordered(*exact) if x.op == "div"}


_SIGNED = frozenset(("add", "where", "minimum", "maximum", "clamp_min", "clamp_max"))
"""Operations that do not make NaN of an operand -inf."""


def _may_be_nan(output: Node, is_score: bool = False) -> bool:
    """True if a float may be NaN or infinite at hidden scores: tensors may contain anything there.

    is_score: True to ignore -inf, which hides a key.
    """
    known: dict[tuple[Node, bool], bool] = {}

    def of(x: Node, hides: bool) -> bool:
        if (x, hides) not in known:
            scaled = x.op == "mul" and x.args[1].op in ("inverse", "unit")
            inner = hides and (scaled or x.op in _SIGNED)
            known[x, hides] = _makes_nan(x, hides) or (_is_computed(x) and any(of(y, inner) for y in x.args))
        return known[x, hides]

    return of(output, is_score)


def _is_computed(x: Node) -> bool:
    """True for a float that varies within a head's scores and is not converted from an integer."""
    return bool(x.depends_on) and x.kind == FLOAT and (x.op != "cast" or x.args[0].kind == FLOAT)


def _makes_nan(x: Node, hides: bool) -> bool:
    """True if x may be NaN or infinite even if its operands are finite."""
    if x.op == "const":
        return not math.isfinite(x.value) and not (hides and x.value < 0)
    if _is_computed(x):
        return x.op == "load" or not _is_finite(x)
    inner = ordered(x) if x.kind == FLOAT and not x.depends_on else []
    by_head = any(y.op in ("batch", "head") for y in inner)  # else all scores are
    return by_head and not all(map(_is_finite, inner))


def _is_finite(x: Node) -> bool:
    """True if an operation's result is finite for finite operands; so are loads of values that all scores read."""
    row = OPERATIONS.get(x.op)
    return row is None or row.is_finite


def _once(method: Callable[[Any, Node], Any]) -> Callable[[Any, Node], Any]:
    """Decorator: compute a method once per node. Nodes have several users, so there are many paths through them."""

    @functools.wraps(method)
    def known(self: Any, x: Node) -> Any:
        found = self.found.setdefault(method.__name__, {})
        if x not in found:
            with self.graph.at(x.place):
                found[x] = method(self, x)
        return found[x]

    return known


class _Lowering:
    def __init__(self, graph: Graph, output: Node) -> None:
        self.found: dict[str, dict[Node, Any]] = {}
        self.graph, self.quotients = graph, _quotients(output)
        self.acc = graph.make("acc", FLOAT, depends_on=SCORE)
        self.inverse = graph.make("inverse", FLOAT)
        self._bounds: dict[Node, Bounds] = {}

    @functools.cached_property
    def score(self) -> Node:
        """The score's node. It is made when it is first read, so that its place is the line that reads it."""
        return self.mul(self.acc, self.graph.make("unit", FLOAT))

    @_once
    def of(self, node: Node) -> Node:
        """The node's value, not scaled like the tile."""
        operands = self._branches(*node.args) if node.op == "where" and node.kind == FLOAT else node.args
        g, args = self.graph, [self.of(arg) for arg in operands]
        if node.op == "score":
            return self.score
        if node.op == "detach":
            return args[0]
        if {arg.op for arg in args} == {"query", "key"} and len(args) == 2:
            if node.op == "sub":
                return g.make("distance", INT, args)
            if node.op in _MIRRORED:
                ordered_op = node.op if args[0].op == "query" else _MIRRORED[node.op]
                return g.make("order", BOOL, sorted(args, key=lambda x: x.op != "query"), ordered_op)
        if node.kind in (INT, LONG) and node.args and node.op != "load":
            return self._integer(node, args)
        if node.kind == BOOL and len(args) == 2:
            args = [*_of_one_width(g, args)]
        if node.op == "cast" and node.kind == FLOAT:
            return args[0] if args[0].kind == FLOAT else self._float(args[0])
        if node.kind == FLOAT:
            if node.op == "mul":
                return self.mul(*args)
            if node.op in _QUOTIENTS and (
                node.op != "div" or (node in self.quotients and not _is_power_of_2(args[1]))
            ):
                return g.make(_QUOTIENTS[node.op], FLOAT, (*args, self._reciprocal(args[1])))
            if node.op == "div" and not varies(args[1]):
                return self.mul(args[0], self._reciprocal(args[1]))
            if node.op == "tanh":
                return g.make("tanh2", FLOAT, (self._times(args[0], TANH_UNIT),))
            if node.op == "sigmoid":
                return g.make("sigmoid2", FLOAT, (self._times(args[0], -LOG2_E),))
            if node.op == "exp":
                return g.make("exp2", FLOAT, (self._times(args[0], LOG2_E),))
            if node.op == "pow":
                return self._pow(*args)
            if node.op == "log":
                return self._times(g.make("log2", FLOAT, args), LN_2)
        dtype = node.dtype if node.op == "load" else ""
        return g.make(node.op, node.kind, args, node.value, node.depends_on, dtype)

    def _branches(self, condition: Node, a: Node, b: Node) -> tuple[Node, ...]:
        """The operands of ``where``; one of the same condition within a branch, as autograd needs it, has no choice."""
        return (condition, self._decided(condition, a, 1), self._decided(condition, b, 2))

    def _decided(self, condition: Node, branch: Node, chosen: int) -> Node:
        made: dict[Node, Node] = {}
        for x in ordered(branch):
            args = [made[arg] for arg in x.args]
            if x.op == "where" and x.args[0] is condition:
                made[x] = args[chosen]
            elif all(map(operator.is_, args, x.args)):
                made[x] = x
            else:
                with self.graph.at(x.place):
                    made[x] = self.graph.make(x.op, x.kind, args, x.value, x.depends_on, x.dtype)
                if x in self.quotients:
                    self.quotients.add(made[x])
        return made[branch]

    def _pow(self, x: Node, power: Node) -> Node:
        """x to a power, from the logarithm of |x|; for a negative x the result is NaN unless the power is whole."""
        g, zero = self.graph, self.graph.const(0.0)
        if power.op == "const" and not power.value.is_integer():
            return g.unary("exp2", self.mul(g.unary("log2", x), power))
        found = g.unary("exp2", self.mul(g.unary("log2", g.unary("abs", x)), power))
        half = self._times(power, 0.5)
        is_odd = g.compare("ne", g.unary("floor", half), half)
        negative = g.where(is_odd, g.unary("neg", found), found)
        whole = g.compare("eq", g.unary("floor", power), power)
        negative = g.where(whole, negative, g.const(math.nan))
        found = g.where(g.compare("lt", x, zero), negative, found)
        return g.where(g.compare("eq", power, zero), g.const(1.0), found)

    def _times(self, x: Node, factor: float) -> Node:
        return self.mul(x, self.graph.const(factor))

    def _reciprocal(self, x: Node) -> Node:
        if x.op == "const" and x.value:
            return self.graph.const(1.0 / x.value)
        return self.graph.binary("div", self.graph.const(1.0), x)

    def mul(self, a: Node, b: Node) -> Node:
        """a * b; factors that vary less are multiplied with each other first."""
        g = self.graph
        if _rank(a) < _rank(b):
            a, b = b, a
        if a.op == b.op == "const":
            return g.const(a.value * b.value)
        if a.op == "mul" and _rank(a.args[1]) < _rank(a):
            inner = self.mul(a.args[1], b) if _rank(b) < _rank(a) else None
            if inner is not None:
                return g.binary("mul", a.args[0], inner)
        return g.binary("mul", a, b)

    @_once
    def scaled(self, x: Node) -> Node:
        """x divided by the tile's scale. Sums without the score are scaled as a whole, after positions cancel."""
        g = self.graph
        if x is self.score:
            return self.acc
        if x.is_const() and math.isinf(x.value):
            return x
        if (
            x.op in ("add", "sub", "neg", "minimum", "maximum", "clamp_min", "clamp_max")
            and x.depends_on & SCORE
        ):
            if any(map(self._is_free, x.args)):
                return g.make(x.op, FLOAT, [self.scaled(arg) for arg in x.args])
        if x.op == "where" and all(map(self._is_free, x.args[1:])):
            return g.make("where", FLOAT, [x.args[0], *(self.scaled(arg) for arg in x.args[1:])])
        if x.op == "div" and self._is_free(x.args[0]):
            return g.make("div", FLOAT, (self.scaled(x.args[0]), x.args[1]))
        if x.op == "mul" and self._is_free(x.args[1]):
            if x.args[1] is self.score:
                return g.binary("mul", x.args[0], self.acc)
            return g.binary("mul", x.args[0], self.scaled(x.args[1]))
        if x.op == "mul" and self._is_free(x.args[0]):
            return g.binary("mul", self.scaled(x.args[0]), x.args[1])
        return self.mul(x, self.inverse)

    @_once
    def _is_free(self, x: Node) -> bool:
        """True if :meth:`scaled` adds no operation per element."""
        if x is self.score or not varies(x):
            return True
        if x.op in ("add", "sub", "neg") and x.depends_on & SCORE:
            return all(map(self._is_free, x.args))
        if x.op == "where":
            return all(map(self._is_free, x.args[1:]))
        if x.op == "div":
            return self._is_free(x.args[0])
        return x.op == "mul" and any(map(self._is_free, x.args))

    # ---- integers ----

    def _integer(self, node: Node, args: list[Node]) -> Node:
        """An integer as torch computes it, wrapped to its dtype: in 32 bits if they can hold it, else in 64."""
        # A bool as a number does not affect promotion.
        g, dtype = self.graph, RANGES[node.dtype or "int64"]
        if node.op == "cast" and args[0].kind in (INT, LONG) and within(self.bounds(node.args[0]), dtype):
            return g.cast(args[0], node.kind if args[0].kind == INT or node.dtype != "int64" else LONG)
        exact = exact_bounds(node, [self.bounds(arg) for arg in node.args if arg.kind != FLOAT])
        kind = node.kind
        if node.op != "cast":
            shifts = node.op in ("shl", "shr") and not within(self.bounds(node.args[1]), (0, 31))
            wide = node.dtype == "int64" and (shifts or not within(exact, RANGES["int32"]))
            first = int(node.op == "where")
            args = [*args[:first], *_of_one_width(g, args[first:], LONG if wide else kind)]
            kind = args[-1].kind
        made = self._shifted(node, args) if node.op in ("shl", "shr") else None
        if made is None:
            made = g.make(node.op, kind, args, node.value, node.depends_on)
        if within(exact, dtype) or node.dtype in ("", "int32", "int64"):
            return made
        return self._wrapped(made, node.dtype)

    def _shifted(self, node: Node, args: Sequence[Node]) -> Node | None:
        """A shift by bits that may be out of range, where torch returns the sign, or 0; None if they cannot be."""
        g, (x, bits), dtype = self.graph, args, node.dtype or "int64"
        most = WIDTHS[dtype] - (node.op == "shl" or dtype != "uint8")
        if within(self.bounds(node.args[1]), (0, most)):
            return None
        last, zero = (g.cast(g.const(value), bits.kind) for value in (most, 0))
        outside = g.binary("or", g.compare("lt", bits, zero), g.compare("gt", bits, last), BOOL)
        shifted = g.make(node.op, x.kind, (x, g.where(outside, last, bits)), None, node.depends_on)
        return shifted if node.op == "shr" else g.where(outside, g.cast(zero, x.kind), shifted)

    def _wrapped(self, x: Node, dtype: str) -> Node:
        """A 32-bit integer wrapped to ``dtype``: its low bits, sign-extended unless the dtype is uint8."""
        g, unused = self.graph, self.graph.const(32 - WIDTHS[dtype])
        if dtype == "uint8":
            return g.make("and", INT, (x, g.const(255)))
        return g.make("shr", INT, (g.make("shl", INT, (x, unused)), unused))

    def bounds(self, node: Node) -> Bounds:
        return bounds(node, self._bounds)

    def _float(self, x: Node) -> Node:
        """x in fp32; positions are converted separately, since a conversion costs as much as four additions."""
        if self._is_exact(x):
            return self._exact(x)
        return self.graph.cast(x, FLOAT)

    @_once
    def _exact(self, x: Node) -> Node:
        if x.op == "const":
            return self.graph.const(float(x.value))
        if x.op == "distance":
            return self.graph.make("distance", FLOAT, x.args)
        if not varies(x):
            return self.graph.cast(x, FLOAT)
        if x.op == "neg":  # an integer has no negative 0
            return self.graph.make("sub", FLOAT, (self.graph.const(0.0), self._exact(x.args[0])))
        return self.graph.make(x.op, FLOAT, [self._exact(arg) for arg in x.args])

    @_once
    def _is_exact(self, x: Node) -> bool:
        """True if fp32 arithmetic computes x from positions and numbers without rounding."""
        if x.kind != INT:
            return False
        if x.op in ("query", "key", "batch", "head"):
            return True
        if x.op == "const":
            return abs(x.value) < _EXACT
        return x.op in ("distance", "add", "sub", "neg", "abs", "minimum", "maximum") and all(
            map(self._is_exact, x.args)
        )


def _is_power_of_2(x: Node) -> bool:
    return x.op == "const" and abs(math.frexp(x.value)[0]) == 0.5


def _rank(x: Node) -> int:
    """Cost rank of a value: 0 a constant, 1 per work tile, 2 per row or column, 3 per element."""
    if x.op == "const":
        return 0
    return 3 if varies(x) else 2 if x.depends_on else 1


def _of_one_width(graph: Graph, args: Sequence[Node], least: str = INT) -> Sequence[Node]:
    """The arguments; integers are converted to 64 bits if one of them, or ``least``, has 64 bits."""
    if all(x.kind in (INT, LONG) for x in args):
        kind = LONG if LONG in (least, *(x.kind for x in args)) else INT
        return [x if x.kind == kind else graph.cast(x, kind) for x in args]
    return args
