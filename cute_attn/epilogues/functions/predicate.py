"""A traced mask as a predicate of a query and a key, with the values that vary with only one of them."""

import math
from dataclasses import dataclass

from cute_attn.epilogues.functions.graph import BOOL, KEY, QUERY, SCORE, Graph, Node, ordered
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
