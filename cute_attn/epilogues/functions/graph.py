"""The graph of a score function: nodes, each made once, with types promoted as in torch. Imports no compiler.

A graph can be evaluated as torch operations (:mod:`.definition`) or as CuTe DSL expressions (:mod:`.device`). Its
operations and their derivatives are in :mod:`.operations`.
"""

import hashlib
from collections.abc import Sequence
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
