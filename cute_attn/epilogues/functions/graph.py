"""The graph of a score function: nodes, each made once, with types promoted as in torch, and the graph's derivative.

A graph can be evaluated as torch operations (:mod:`.definition`) or as CuTe DSL expressions (:mod:`.device`), and
:func:`derivative` converts a graph to another graph. Imports no compiler.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

BOOL, INT, LONG, FLOAT = "bool", "int", "long", "float"
KINDS = (BOOL, INT, LONG, FLOAT)
"""Types in the order of promotion. On the device: a predicate, 32 bits, 64 bits, fp32."""

SCORE, QUERY, KEY = 1, 2, 4
"""Bits of the inputs with which a node's value varies; with no bit set, the value is uniform in a work tile."""
INPUTS = {
    "score": (FLOAT, SCORE),
    "batch": (INT, 0),
    "head": (INT, 0),
    "query": (INT, QUERY),
    "key": (INT, KEY),
}
Place = tuple[str, int]
"""An absolute path, or a name such as ``<stdin>``, and a line."""


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One value of a graph. Two nodes are equal only if they are the same object.

    Attributes:
        op: "const", "load", "extent" (a tensor's size), a name of ``INPUTS``, or an operation.
        kind: one of ``KINDS``.
        args: operands; the indices of a load.
        value: a constant's value; the number of a load's tensor; an extent's tensor number and dimension.
        depends_on: bits of ``SCORE``, ``QUERY`` and ``KEY``.
        dtype: torch's name of the dtype if the value is an integer, a load, or a cast that a function requests.
            Else, and for a Python number, "": a float's dtype then follows from its operands.
        place: the source line that first creates the node, or None. It does not affect a graph's identity.
    """

    op: str
    kind: str
    args: tuple["Node", ...]
    value: Any
    depends_on: int
    dtype: str = ""
    place: Place | None = None

    def is_const(self, value: float | None = None) -> bool:
        """True for a constant, or with ``value`` for that constant."""
        return self.op == "const" and (value is None or self.value == value)


class _At:
    """See :meth:`Graph.at`. A generator-based context manager would make traces a tenth slower."""

    __slots__ = ("before", "graph", "place")

    def __init__(self, graph: "Graph", place: Place | None) -> None:
        self.graph, self.place = graph, place

    def __enter__(self) -> None:
        self.before = self.graph.place
        self.graph.place = self.place or self.before

    def __exit__(self, *error: object) -> None:
        self.graph.place = self.before


class Graph:
    """Makes nodes, each once, with constants folded where that is exact for every operand.

    Attributes:
        place: the place of nodes that are made next.
    """

    def __init__(self) -> None:
        self._made: dict[tuple, Node] = {}
        self.place: Place | None = None

    def at(self, place: Place | None) -> "_At":
        """A context manager that gives new nodes this place; None keeps the current place."""
        return _At(self, place)

    def make(
        self,
        op: str,
        kind: str,
        args: Sequence[Node] = (),
        value: Any = None,
        depends_on: int = 0,
        dtype: str = "",
    ) -> Node:
        """The node with these fields. ``depends_on`` includes the operands'; integers are promoted as in torch."""
        if kind in (INT, LONG) and op not in _OF_NO_DTYPE and not (op == "cast" and args[0].kind == BOOL):
            dtype = dtype or _promoted_dtype(args)
        key = (op, kind, tuple(map(id, args)), type(value), repr(value), dtype)
        found = self._made.get(key)
        if found is None:
            for arg in args:
                depends_on |= arg.depends_on
            found = self._made[key] = Node(op, kind, tuple(args), value, depends_on, dtype, self.place)
        return found

    def input(self, name: str) -> Node:
        kind, depends_on = INPUTS[name]
        return self.make(name, kind, depends_on=depends_on)

    def const(self, value: bool | int | float) -> Node:
        kind = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT
        if kind == INT and not -(2**31) <= value < 2**31:
            kind = LONG
        return self.make("const", kind, value=value)

    def cast(self, x: Node, kind: str, dtype: str = "") -> Node:
        """x as another kind: a number other than 0 becomes True; a float becomes an integer without its fraction.

        dtype: the dtype that a function requests; "" if an operation of torch promotes x.
        """
        if x.kind == kind and (kind == BOOL or dtype in ("", x.dtype)):
            return x
        if x.op == "const":
            return self.make("const", kind, value={BOOL: bool, FLOAT: float}.get(kind, int)(x.value))
        if kind == BOOL:
            return self.compare("ne", x, self.const(0))
        return self.make("cast", kind, (x,), dtype=dtype)

    def promoted(self, *args: Node, least: str = BOOL) -> tuple[Node, ...]:
        """All args converted to the highest kind among them, at least ``least``."""
        kind = max((least, *(x.kind for x in args)), key=KINDS.index)
        return tuple(self.cast(x, kind) for x in args)

    def compare(self, op: str, a: Node, b: Node) -> Node:
        """The predicate lt, le, gt, ge, eq or ne of a and b."""
        a, b = self.promoted(a, b, least=INT)
        return self.make(op, BOOL, (a, b))

    def binary(self, op: str, a: Node, b: Node, least: str = INT) -> Node:
        """An operation on two values of one type, with a result of that type."""
        a, b = self.promoted(a, b, least=least)
        if op == "mul":
            for x, y in ((a, b), (b, a)):
                if x.is_const(1):
                    return y
        whole = op == "floordiv" and a.kind != FLOAT
        if (op in ("add", "sub") and b.is_const(0)) or ((op == "div" or whole) and b.is_const(1)):
            return a
        if op == "add" and a.is_const(0):
            return b
        return self.make(op, a.kind, (a, b))

    def unary(self, op: str, x: Node) -> Node:
        """neg or abs of a number, or a function of a float, with integers converted."""
        signed = op in ("neg", "abs")
        (x,) = self.promoted(x, least=INT if signed else FLOAT)
        if signed and x.op == "const":
            return self.const(-x.value if op == "neg" else abs(x.value))
        return self.make(op, x.kind, (x,))

    def detached(self, x: Node) -> Node:
        """x without a derivative, as from torch's detach."""
        if x.kind != FLOAT or x.op in ("const", "detach"):
            return x
        return self.make("detach", FLOAT, (x,), dtype=x.dtype)

    def where(self, condition: Node, a: Node, b: Node) -> Node:
        """a where the condition holds, else b."""
        a, b = self.promoted(a, b)
        if condition.op == "const" or a is b:
            return a if a is b or condition.value else b
        return self.make("where", a.kind, (condition, a, b))


_OF_NO_DTYPE = frozenset(("const", "extent", "load"))
"""Operations without promotion: Python's numbers, and loads, whose dtype is given."""
WIDTHS = {"uint8": 8, "int8": 8, "int16": 16, "int32": 32, "int64": 64}


def _promoted_dtype(args: Sequence[Node]) -> str:
    """The dtype of an operation's integer result; bools and Python's numbers do not affect it."""
    found = {x.dtype for x in args if x.dtype in WIDTHS}
    if found == {"uint8", "int8"}:
        return "int16"
    return max(found, key=lambda name: WIDTHS[name], default="int64")


def with_heads_of_rows(output: Node) -> tuple[Graph, Node]:
    """The same function for work tiles whose rows have different heads: the head varies with the query."""
    graph = Graph()
    made: dict[Node, Node] = {}
    for x in ordered(output):
        with graph.at(x.place):
            args = [made[arg] for arg in x.args]
            depends_on = QUERY if x.op == "head" else x.depends_on
            made[x] = graph.make(x.op, x.kind, args, x.value, depends_on, x.dtype)
    return graph, made[output]


def ordered(*outputs: Node) -> list[Node]:
    """Every node that the outputs need, operands first."""
    found: dict[Node, None] = {}
    pending = list(reversed(outputs))
    while pending:
        node = pending[-1]
        fresh = [arg for arg in reversed(node.args) if arg not in found]
        if node in found or not fresh:
            found[pending.pop()] = None
        else:
            pending += fresh
    return list(found)


def digest(output: Node, tensors: Sequence[str]) -> str:
    """16 hexadecimal digits that identify a graph; ``tensors`` describes the tensors of its loads, by number."""
    nodes = ordered(output)
    number = {node: i for i, node in enumerate(nodes)}
    lines = [f"{x.op} {x.kind} {x.dtype} {[number[arg] for arg in x.args]} {x.value!r}" for x in nodes]
    return hashlib.sha256("\n".join([*tensors, *lines]).encode()).hexdigest()[:16]


# ---- the derivative ----


def derivative(graph: Graph, output: Node, by: Node | None = None) -> Node | None:
    """d(output) / d(by) as a graph, None for 0. by: a load, or None for the score.

    Where the output is -inf the derivative is any finite number: the gradient that it multiplies is 0 there.
    """
    by = graph.input("score") if by is None else by
    depending = {by}
    for node in ordered(output):
        if not depending.isdisjoint(node.args):
            depending.add(node)
    return _Derivative(graph, by, depending).of(output, True)


class _Derivative:
    """Forward mode: with only one variable, dual numbers need one more node per node."""

    def __init__(self, graph: Graph, by: Node, depending: set[Node]) -> None:
        self.graph, self.by, self.depending = graph, by, depending
        self._known: dict[tuple[Node, bool], Node | None] = {}

    def of(self, x: Node, outermost: bool = False) -> Node | None:
        """The derivative of x, or None for 0. outermost: True if the output is -inf wherever x is."""
        if x is self.by:
            return self.graph.const(1.0)
        if x not in self.depending or x.kind != FLOAT or x.op not in _RULES:
            return None  # constants, integers, and steps: floor, ceil, trunc
        key = (x, outermost)
        if key not in self._known:
            outermost = outermost and x.op in ("add", "where")
            slopes = [self.of(arg, outermost) for arg in x.args]
            rule = _Derivative._where_seen if x.op == "where" and outermost else _RULES[x.op]
            with self.graph.at(x.place):
                self._known[key] = rule(self, x, *x.args, *slopes)
        return self._known[key]

    def _where_seen(self, x: Node, c: Node, a: Node, b: Node, dc: Any, da: Any, db: Any) -> Node | None:
        for value, slope in ((a, db), (b, da)):
            if value.is_const(-math.inf):
                return slope
        return self.where(c, da, db)

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


Rule = Callable[..., Node | None]


def _div(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
    above = d.add(da, d.neg(d.mul(db, x)))
    return None if above is None else d.graph.binary("div", above, b)


def _remainder(rounding: str) -> Rule:
    """The derivative of a - rounding(a / b) * b."""

    def rule(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
        whole = d.graph.unary(rounding, d.graph.binary("div", a, b))
        return d.add(da, d.neg(d.mul(db, whole)))

    return rule


def _abs(d: _Derivative, x: Node, a: Node, da: Any) -> Node | None:
    zero = d.graph.const(0.0)
    below = d.where(d.graph.compare("lt", a, zero), d.neg(da), None)
    return d.where(d.graph.compare("gt", a, zero), da, below)


def _extreme(chosen: str) -> Rule:
    """The derivative of the larger or smaller operand; the mean of both where they are equal, as in torch."""

    def rule(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
        mean = d.mul(d.add(da, db), d.graph.const(0.5))
        first, second = ("gt", "lt") if chosen == "maximum" else ("lt", "gt")
        other = d.where(d.graph.compare(second, a, b), db, mean)
        return d.where(d.graph.compare(first, a, b), da, other)

    return rule


def _clamp(inside: str) -> Rule:
    """The derivative of the value where it is within the bound, as in torch's clamp; else that of the bound."""
    return lambda d, x, a, b, da, db: d.where(d.graph.compare(inside, a, b), da, db)


def _pow(d: _Derivative, x: Node, a: Node, b: Node, da: Any, db: Any) -> Node | None:
    """0 with respect to the base if the exponent is 0, and to the exponent if the base is 0, as in torch."""
    g, zero = d.graph, d.graph.const(0.0)
    lower = g.binary("pow", a, g.binary("sub", b, g.const(1.0)))
    by_base = g.where(g.compare("eq", b, zero), zero, g.binary("mul", b, lower))
    by_exponent = g.where(g.compare("eq", x, zero), zero, g.binary("mul", x, g.unary("log", a)))
    return d.add(d.mul(da, by_base), d.mul(db, by_exponent))


def _function(slope: Callable[[Graph, Node, Node], Node]) -> Rule:
    """The rule of a function of one operand. slope: the function's derivative, from (graph, value, operand)."""
    return lambda d, x, a, da: d.mul(da, slope(d.graph, x, a))


def _times(g: Graph, x: Node, factor: float) -> Node:
    return g.binary("mul", x, g.const(factor))


def _one_plus(g: Graph, x: Node) -> Node:
    return g.binary("add", g.const(1.0), x)


def _one_minus(g: Graph, x: Node) -> Node:
    return g.binary("sub", g.const(1.0), x)


_RULES: dict[str, Rule] = {
    "cast": lambda d, x, a, da: da,
    "add": lambda d, x, a, b, da, db: d.add(da, db),
    "sub": lambda d, x, a, b, da, db: d.add(da, d.neg(db)),
    "mul": lambda d, x, a, b, da, db: d.add(d.mul(da, b), d.mul(db, a)),
    "div": _div,
    "fmod": _remainder("trunc"),
    "mod": _remainder("floor"),
    "pow": _pow,
    "neg": lambda d, x, a, da: d.neg(da),
    "abs": _abs,
    "where": lambda d, x, c, a, b, dc, da, db: d.where(c, da, db),
    "minimum": _extreme("minimum"),
    "maximum": _extreme("maximum"),
    "clamp_min": _clamp("ge"),
    "clamp_max": _clamp("le"),
    "exp": _function(lambda g, x, a: x),
    "exp2": _function(lambda g, x, a: _times(g, x, math.log(2))),
    "log": _function(lambda g, x, a: g.binary("div", g.const(1.0), a)),
    "log2": _function(lambda g, x, a: g.binary("div", g.const(1 / math.log(2)), a)),
    "sqrt": _function(lambda g, x, a: g.binary("div", g.const(0.5), x)),
    "rsqrt": _function(lambda g, x, a: g.binary("div", _times(g, x, -0.5), a)),
    "tanh": _function(lambda g, x, a: _one_minus(g, g.binary("mul", x, x))),
    "sigmoid": _function(lambda g, x, a: g.binary("mul", x, _one_minus(g, x))),
    "sin": _function(lambda g, x, a: g.unary("cos", a)),
    "cos": _function(lambda g, x, a: g.unary("neg", g.unary("sin", a))),
    "atan": _function(lambda g, x, a: g.binary("div", g.const(1.0), _one_plus(g, g.binary("mul", a, a)))),
    "erf": _function(
        lambda g, x, a: _times(
            g, g.unary("exp", g.unary("neg", g.binary("mul", a, a))), 2 / math.sqrt(math.pi)
        )
    ),
    "expm1": _function(lambda g, x, a: _one_plus(g, x)),
    "log1p": _function(lambda g, x, a: g.binary("div", g.const(1.0), _one_plus(g, a))),
}
"""The derivative of each operation except steps, from the node, its operands and their derivatives."""
