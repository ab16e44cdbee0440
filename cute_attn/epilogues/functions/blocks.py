"""A traced mask as a predicate of a query and a key, and its device code on blocks of queries and keys."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.device import warp
from cute_attn.epilogues.functions.device import Expressions, Intervals, uniform_roots
from cute_attn.epilogues.functions.device_operations import Interval
from cute_attn.epilogues.functions.graph import BOOL, FLOAT, KEY, LONG, QUERY, SCORE, Graph, Node, ordered
from cute_attn.epilogues.functions.lowering import lower_predicate


@dataclass(frozen=True, eq=False)
class Predicate:
    """True where a query sees a key.

    Attributes:
        traced: the predicate as it was traced.
        sees: the predicate for the device, a function of the values below.
        of_queries: the largest subexpressions of ``sees`` that vary only with the query, except the query's index.
        of_keys: the same for the key.
        indices: the query's and the key's index, if ``sees`` reads them.
        batched, headed: True if the predicate differs between sequences, or between heads.
    """

    traced: Node
    sees: Node
    of_queries: tuple[Node, ...]
    of_keys: tuple[Node, ...]
    indices: tuple[Node, ...]
    batched: bool
    headed: bool


def predicate_of(graph: Graph, output: Node) -> Predicate | None:
    """The mask of an epilogue's graph; None if the graph does more than hide scores, or the mask reads scores."""
    seen = _seen(graph, output)
    if seen is None or any(node.depends_on & SCORE for node in ordered(seen)):
        return None
    sees = lower_predicate(graph, seen)
    ops = {node.op for node in ordered(sees)}
    leaves = _one_sided(sees)
    indices = tuple(x for x in leaves if x.op in ("query", "key"))
    of_queries, of_keys = (
        tuple(x for x in leaves if x.depends_on == part and x not in indices) for part in (QUERY, KEY)
    )
    return Predicate(seen, sees, of_queries, of_keys, indices, "batch" in ops, "head" in ops)


def _seen(graph: Graph, output: Node) -> Node | None:
    if output.op == "score":
        return graph.const(True)
    if output.is_const(-math.inf):
        return graph.const(False)
    hides = output.op == "where" and output.args[1].op == "score" and output.args[2].is_const(-math.inf)
    return output.args[0] if hides and output.args[0].kind == BOOL else None


def _one_sided(root: Node) -> list[Node]:
    """The largest subexpressions that vary with only the query or only the key."""
    found: dict[Node, None] = {}
    pending, known = [root], {root}
    while pending:
        node = pending.pop()
        if node.depends_on in (QUERY, KEY):
            found[node] = None
            continue
        fresh = [x for x in reversed(node.args) if x.depends_on and x not in known]
        known.update(fresh)
        pending += fresh
    return list(found)


Values = Sequence[Any]
"""Values of ``Predicate.of_queries`` for a query, or of ``of_keys`` for a key, in types of :func:`kept_type`."""


def kept_type(node: Node) -> Any:
    """The type in which a node's value is stored; predicates are stored in 32 bits."""
    return {LONG: Int64, FLOAT: Float32}.get(node.kind, Int32)


class Extremes:
    """The minimum and maximum of values: first over the values of each lane, then over a warp."""

    def __init__(self, node: Node, low: Any, high: Any, number: Boolean) -> None:
        """number: True if no value is NaN."""
        self.node, self.low, self.high, self.number = node, low, high, number

    @staticmethod
    def of(node: Node, values: Sequence[Any]) -> "Extremes":
        """The bounds of one lane's values."""
        low = high = values[0]
        number = values[0] == values[0]
        for value in values[1:]:
            low, high = warp.lesser(low, value), warp.greater(high, value)
            number = number & (value == value)
        return Extremes(node, low, high, number)

    def of_warp(self) -> Interval:
        """The bounds over all lanes; NaN if any value is NaN."""
        low, high = warp.least(self.low), warp.largest(self.high)
        if self.node.kind == BOOL:
            return Interval(low != 0, high != 0)
        if self.node.kind != FLOAT:
            return Interval(Int64(low), Int64(high))
        some = warp.any_of(self.number == Boolean(False))
        nan = Float32(float("nan"))
        return Interval(*(warp.picked(some, nan, x) for x in (low, high)))


@dataclass(frozen=True)
class MaskState:
    """The captured tensors, and the values that all queries and keys of one (batch, head) have in common."""

    tensors: tuple
    values: tuple

    @staticmethod
    def begin(predicate: Predicate, tensors: tuple, batch: Int32, head: Int32) -> "MaskState":
        roots, inputs = uniform_roots(predicate.sees), {"batch": batch, "head": head}
        expressions = Expressions({x: inputs[x.op] for x in ordered(*roots) if x.op in inputs}, tensors)
        return MaskState(tensors, tuple(expressions.of(root) for root in roots))


class BlockPredicate:
    """A predicate in one (batch, head)."""

    def __init__(self, predicate: Predicate, state: MaskState) -> None:
        self.predicate = predicate
        values = dict(zip(uniform_roots(predicate.sees), state.values, strict=True))
        self.expressions = Expressions(values, state.tensors)

    def _of(self, nodes: Sequence[Node], known: dict[Node, Any]) -> list[Any]:
        def place(node: Node) -> dict[Node, Any]:
            return known if node.depends_on else self.expressions.values

        return [self.expressions.of(node, place) for node in nodes]

    def of_query(self, query: Int32) -> list[Any]:
        return self._one_sided(self.predicate.of_queries, query)

    def of_key(self, key: Int32) -> list[Any]:
        return self._one_sided(self.predicate.of_keys, key)

    def _one_sided(self, nodes: Sequence[Node], index: Int32) -> list[Any]:
        known = {x: index for x in ordered(*nodes) if x.op in ("query", "key")}
        return [kept_type(node)(value) for node, value in zip(nodes, self._of(nodes, known), strict=True)]

    def sees(self, query: Int32, of_query: Values, key: Int32, of_key: Values) -> Boolean:
        """True if the query sees the key. of_query, of_key: their stored values."""
        predicate = self.predicate
        known = {x: query if x.depends_on == QUERY else key for x in predicate.indices}
        for nodes, values in ((predicate.of_queries, of_query), (predicate.of_keys, of_key)):
            for node, value in zip(nodes, values, strict=True):
                known[node] = value != 0 if node.kind == BOOL else value
        (seen,) = self._of((predicate.sees,), known)
        return seen

    def bounds(
        self, queries: Interval, of_queries: Sequence[Interval], keys: Interval, of_keys: Sequence[Interval]
    ) -> Interval:
        """The predicate's bounds in a block. low: every query sees every key; high: some query may see some key.

        queries, keys: ranges of the block's indices; of_queries, of_keys: bounds of their values.
        """
        predicate = self.predicate
        known = {x: queries if x.depends_on == QUERY else keys for x in predicate.indices}
        known |= dict(zip(predicate.of_queries, of_queries, strict=True))
        known |= dict(zip(predicate.of_keys, of_keys, strict=True))
        return Intervals(known, self.expressions).of(predicate.sees)
