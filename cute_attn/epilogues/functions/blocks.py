"""A mask's predicate as device code evaluates it on blocks of queries and keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.device import warp
from cute_attn.epilogues.functions.device import Expressions, uniform_roots
from cute_attn.epilogues.functions.graph import BOOL, FLOAT, LONG, QUERY, Node, ordered
from cute_attn.epilogues.functions.intervals import Interval, Intervals
from cute_attn.epilogues.functions.predicate import Predicate

Values = Sequence[Any]
"""A query's values of ``Predicate.of_queries``, or a key's of ``of_keys``, as :func:`kept` stores them."""


def kept_type(node: Node) -> Any:
    """The type that a value is kept in: a predicate in 32 bits."""
    return {LONG: Int64, FLOAT: Float32}.get(node.kind, Int32)


class Extremes:
    """The least and the largest of values, by one lane after the other and then by a warp."""

    def __init__(self, node: Node, low: Any, high: Any, number: Boolean) -> None:
        """number: whether no value is NaN."""
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
        """The bounds over all lanes; NaN where a value is."""
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
    """A (batch, head)'s captured tensors, and its values that are the same for all queries and keys."""

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
        """The predicate of one query and one key, from their values."""
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
        """[all of a block's queries certainly see all its keys, one of them may see one].

        queries, keys: its indices; of_queries, of_keys: bounds of their values.
        """
        predicate = self.predicate
        known = {x: queries if x.depends_on == QUERY else keys for x in predicate.indices}
        known |= dict(zip(predicate.of_queries, of_queries, strict=True))
        known |= dict(zip(predicate.of_keys, of_keys, strict=True))
        return Intervals(known, self.expressions).of(predicate.sees)
