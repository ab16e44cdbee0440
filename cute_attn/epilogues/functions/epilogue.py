"""A traced function as a registered epilogue."""

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from torch import Tensor

from cute_attn.device.lanes import add_to
from cute_attn.device.math import fma
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.chain import run_if
from cute_attn.epilogues.functions.definition import AS_TORCH, Precision, evaluate
from cute_attn.epilogues.functions.device import (
    Expressions,
    Positions,
    fake_tensor,
    over_tile,
    rows_of,
    uniform_roots,
)
from cute_attn.epilogues.functions.gradients import (
    Add,
    Bins,
    add_elements,
    amount_of,
    first_of,
    of_this_cta,
    offset_in,
    times_slope,
)
from cute_attn.epilogues.functions.graph import (
    FLOAT,
    KEY,
    QUERY,
    SCORE,
    Graph,
    Node,
    Place,
    digest,
    ordered,
    with_heads_of_rows,
)
from cute_attn.epilogues.functions.lowering import Lowered, Term, lower, varies
from cute_attn.epilogues.functions.operations import bounds, derivative
from cute_attn.epilogues.functions.trace import Trace, as_kernels_read
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.names import TRACED, register_traced
from cute_attn.traits import LISTED_ROWS, Traits
from cute_attn.work.block_range import BlockLists, BlockRange


class Captured(NamedTuple):
    """Compile-time properties of a captured tensor: dtype name, dimensions, and whether the last stride is 1."""

    dtype: str
    rank: int
    unit_stride: bool

    @staticmethod
    def of(tensor: Tensor | float) -> "Captured":
        """The layout of a tensor of at least one dimension, or the type of a number."""
        if not isinstance(tensor, Tensor):
            return Captured(type(tensor).__name__, 0, True)
        unit = tensor.dim() == 0 or tensor.stride(-1) == 1
        return Captured(str(tensor.dtype).removeprefix("torch."), max(tensor.dim(), 1), unit)


def _shape(given: Sequence[Any], number: int) -> tuple[int, ...]:
    x = given[number] if number < len(given) else None
    return tuple(x.shape) if isinstance(x, Tensor) else ()


@dataclass(frozen=True)
class FunctionState:
    """A work tile's captured tensors, the rows and values that are uniform in it, and the last query and key.

    head, last_head: the work tile's first head and the call's last head, if its rows have different heads.
    first_key: the key that counts as key 0, if it is not the first row of K.
    lists: block lists of a mask, if any; at: the (batch, head) to read them for.
    targets: for each term, the slice of its gradient that the work tile adds to.
    scale: the factor of gradients, or that of scores' tangents before captured tensors' are added.
    bins: for each term, the bins of its gradient, or None.
    """

    tensors: tuple
    rows: tuple
    values: tuple
    last_q: Int32
    last_k: Int32
    head: Any = ()
    last_head: Any = ()
    first_key: Any = ()
    lists: tuple = ()
    at: Any = ()
    targets: tuple = ()
    scale: Any = ()
    bins: tuple = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class FunctionEpilogue(Epilogue):
    """A traced function: an object in place of an epilogue's class. It is freed when no call needs it.

    A backward's epilogue may also add to the gradients of captured tensors. They are arguments after the tensors, fp32
    or, with a dimension of bins, int64. Their leading dimension counts copies; a CTA adds to one copy.

    Attributes:
        name: the name under which it is registered.
        graph, output: the trace.
        captured: properties of each captured tensor.
        lowered: the graph as kernels compute it.
        differentiates: True for kernels that compute derivatives. A forward needs no slopes, and stores no rows beyond
            sequences.
        heads_of_rows: True for kernels whose work tiles have several heads.
        wanted: numbers of the captured tensors whose gradients the epilogue adds to.
        exact: those of them whose gradients have bins, so that the order of additions does not matter.
        with_terms: wanted and exact tensors -> the epilogue that also computes their gradients; tensors that have a
            tangent -> the epilogue that takes it.
    """

    name: str = field()  # type: ignore[misc]
    graph: Graph
    output: Node
    captured: tuple[Captured, ...]
    lowered: Lowered
    differentiates: bool = False
    heads_of_rows: bool = False
    wanted: tuple[int, ...] = ()
    exact: tuple[int, ...] = ()
    with_terms: dict[tuple, Any] = field(default_factory=dict)

    def of(self, traits: Traits) -> "FunctionEpilogue":  # type: ignore[override]
        if traits.op == "kvcache":
            return replace(self, lowered=lower(*with_heads_of_rows(self.output)), heads_of_rows=True)
        return replace(self, differentiates=traits.differentiates)

    def with_gradients(  # type: ignore[override]
        self, wanted: tuple[int, ...], exact: tuple[int, ...] = ()
    ) -> tuple[str, tuple[int, ...]]:
        """See :class:`Epilogue`. Tensors of a mask, and tensors that only compute indices, have no gradient."""
        key = wanted, exact
        if key not in self.with_terms:
            self.with_terms[key] = _with_gradients(self, *key)
        found = self.with_terms[key]
        return (found.name, found.wanted) if found is not None else (self.name, ())

    def with_tangents(self, moved: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:  # type: ignore[override]
        """See :class:`Epilogue`. Scores do not depend on tensors of a mask, nor on those that only compute indices."""
        if moved not in self.with_terms:
            self.with_terms[moved] = _with_tangents(self, moved)
        found, taken = self.with_terms[moved]
        return self.name if found is None else found.name, taken

    def readers(  # type: ignore[override]
        self, number: int, shape: Sequence[int], sizes: Mapping[str, int], rows: int
    ) -> int:
        """See :class:`Epilogue`. An index that is an input, and within the tensor, leads to as many elements."""

        def of(load: Node) -> int:
            indexed = {
                x.op for x, size in zip(load.args, shape, strict=False) if sizes.get(x.op, size + 1) <= size
            }
            left = {name: 1 if name in indexed else size for name, size in sizes.items()}
            return min(left["batch"] * left["query"], rows) * left["head"] * left["key"]

        return sum(of(x) for x in ordered(self.output) if x.op == "load" and x.value == number)

    def held(self, backward: bool) -> int:  # type: ignore[override]
        """Loads per query or key, plus one for a long forward; in a backward plus two per kept slope, or four if long.

        With gradients of tensors, plus two for sums, two if indices vary per score, two if they are slow to compute.
        """
        if not backward:
            return self._loads() + _takes_long(self.lowered.forward, most=12)
        derived = replace(self, differentiates=True)
        kept = len(derived._kept)
        if not self.wanted:
            return self._loads() + 2 * kept * (1 + _takes_long(*derived._all(), most=14))
        indices = [index for term in self.lowered.terms for index in term.indices]
        spread, long = any(map(varies, indices)), _takes_long(*indices, most=14)
        return self._loads() + 2 * (kept + 1 + spread + long)

    @property
    def reads_keys(self) -> bool:  # type: ignore[override]
        """False for functions of only the score and the query, which are as large for far keys as for near keys."""
        return any(x.op == "key" for x in ordered(self.lowered.forward))

    def _loads(self) -> int:
        """The number of loads that vary with only the query or only the key."""
        return sum(x.op == "load" and x.depends_on in (QUERY, KEY) for x in ordered(self.lowered.forward))

    def warn_of_indices(  # type: ignore[override]
        self, inputs: ScoreInputs, sizes: Mapping[str, int]
    ) -> None:
        """Warn of indices that are out of bounds at some position of a call, where kernels read the nearest element.

        Only indices computed from positions are checked, since tensors' values are unknown here. sizes: by input name.
        """
        known = {x: (0, sizes[x.op] - 1) for x in ordered(self.output) if x.op in sizes}
        given = inputs.extra.get(self.name, ())
        for load in (x for x in ordered(self.output) if x.op == "load"):
            for axis, (index, size) in enumerate(zip(load.args, _shape(given, load.value), strict=False)):
                if any(x.kind == FLOAT or x.op in ("load", "extent") for x in ordered(index)):
                    continue
                low, high = bounds(index, dict(known))
                if low < -size or high >= size:
                    warnings.warn(
                        f"a function reads dimension {axis} of a tensor of shape {tuple(given[load.value].shape)} at "
                        f"{low} to {high}; kernels read the nearest element in place of those beyond, where the CPU "
                        "raises IndexError",
                        stacklevel=2,
                    )

    @property
    def source_places(self) -> list[Place]:
        """The source lines that create the function's nodes; a build with line info depends on them."""
        return [x.place for x in ordered(self.output) if x.place is not None]

    def fake_args(self) -> tuple:
        kinds = (("int64", 2) if number in self.exact else ("float32", 1) for number in self.wanted)
        ranks = (self.captured[number].rank for number in self.wanted)
        gradients = (
            fake_tensor(dtype, more + rank, True) for (dtype, more), rank in zip(kinds, ranks, strict=True)
        )
        return (*(fake_tensor(*one) for one in self.captured), *gradients)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return tuple(as_kernels_read(x) for x in inputs.extra.get(self.name, ()))

    @property
    def _slope(self) -> Node | None:
        slope = self.lowered.slope
        return slope.node if slope is not None and self.differentiates else None

    @property
    def _tangent(self) -> Node | None:
        return self.lowered.tangent.node if self.lowered.tangent is not None else None

    def _all(self) -> tuple[Node, ...]:
        slopes = (x for x in (self._slope, self._tangent) if x is not None)
        terms = [x for term in self.lowered.terms for x in (*term.indices, term.slope.node)]
        return (self.lowered.forward, *slopes, *terms)

    @property
    def _kept(self) -> list[Node]:
        """Slopes that vary with the score, which the forward keeps for the backward; the score's own slope is first."""
        slopes = [self._slope, self._tangent, *(term.slope.node for term in self.lowered.terms)]
        return list(dict.fromkeys(x for x in slopes if x is not None and x.depends_on & SCORE))

    def begin(self, args: tuple, context: ScoreContext) -> FunctionState:
        args, gradients = args[: len(self.captured)], args[len(self.captured) :]
        names = {
            "batch": context.batch,
            "head": context.head,
            "unit": context.score_scale,
            "inverse": context.inv_score_scale,
        }
        values = {x: names[x.op] for x in ordered(*self._all()) if x.op in names}
        expressions = Expressions(values, args)
        rows = tuple(expressions.row(row) for row in rows_of(*self._all()))
        found = tuple(expressions.of(root) for root in uniform_roots(*self._all()))
        state = FunctionState(args, rows, found, context.seqlen_q - 1, context.seqlen_k - 1)
        if self.heads_of_rows:
            state = replace(state, head=context.head, last_head=context.nheads - 1)
        if context.first_key is not None:
            state = replace(state, first_key=context.first_key)
        if self.adds_tangents:
            state = replace(state, scale=context.tangent_scale)
        if not self.wanted:
            return state
        copies = {number: of_this_cta(x) for number, x in zip(self.wanted, gradients, strict=True)}
        bins = {number: Bins.of(copies[number]) for number in self.exact}
        copies |= {number: first_of(copies[number]) for number in self.exact}
        expressions = Expressions(dict(zip(uniform_roots(*self._all()), found, strict=True)), copies)
        targets = tuple(expressions.row((term.number, _first(term))) for term in self.lowered.terms)
        own = tuple(bins.get(term.number) for term in self.lowered.terms)
        return replace(state, targets=targets, scale=context.gradient_scale, bins=own)

    def _over(
        self, state: FunctionState, tile: ScoreTile, outputs: Sequence[Node], write: Callable[..., None]
    ) -> None:
        values = dict(zip(uniform_roots(*self._all()), state.values, strict=True))
        rows = dict(zip(rows_of(*self._all()), state.rows, strict=True))
        positions = Positions(ordered(*outputs), self._heads(state, tile))
        if state.first_key != ():
            tile, positions.counts_from = replace(tile, col0=tile.col0 - state.first_key), True
        over_tile(tile, Expressions(values, state.tensors, rows), positions, outputs, write)

    def _heads(self, state: FunctionState, tile: ScoreTile) -> tuple:
        """The head of each row, at most the last head, since a tile may have rows for more; () if all rows have one."""
        if not self.heads_of_rows:
            return ()
        heads = tile.heads or (Int32(0),) * len(tile.rows)
        return tuple(cutlass.min(state.head + head, state.last_head) for head in heads)

    def _finish(self, state: FunctionState, tile: ScoreTile) -> None:
        """Hide queries beyond the sequence from a backward, where their scores may be NaN."""
        if not (self.differentiates and self.lowered.unbounded):
            return
        last = state.last_q - tile.row0

        def hide() -> None:
            for r, row in enumerate(tile.rows):
                for c in range(len(tile.cols)):
                    tile.acc[r, c] = cutlass.select_(row <= last, tile.acc[r, c], -Float32.inf)

        run_if(last < max(tile.rows), hide)

    def forward(self, state: FunctionState, tile: ScoreTile, loaded: tuple = ()) -> tuple:
        shape = cute.make_layout((len(tile.rows), len(tile.cols)))
        saved = tuple(cute.make_rmem_tensor(shape, Float32) for _ in self._kept)

        def write(r: int, c: int, score: Float32, *slopes: Float32) -> None:
            tile.acc[r, c] = score
            for own, slope in zip(saved, slopes, strict=True):
                own[r, c] = slope

        self._over(state, tile, (self.lowered.forward, *self._kept), write)
        self._finish(state, tile)
        return saved

    def backward(self, state: FunctionState, tile: ScoreTile, saved: tuple) -> None:
        slope, kept = self.lowered.slope, dict(zip(self._kept, saved, strict=True))
        if slope is None:
            tile.registers().fill(0.0)
        elif slope.node in kept:
            for r in range(len(tile.rows)):
                for c in range(len(tile.cols)):
                    tile.acc[r, c] = times_slope(tile.acc[r, c], kept[slope.node][r, c], slope)
        elif not slope.node.is_const(1.0):

            def write(r: int, c: int, factor: Float32) -> None:
                tile.acc[r, c] = times_slope(tile.acc[r, c], factor, slope)

            self._over(state, tile, (slope.node,), write)

    @property
    def adds_tangents(self) -> bool:
        return self._tangent is not None

    @property
    def tangents_may_be_nan(self) -> bool:
        return any(x is not None and x.unbounded for x in (self.lowered.slope, self.lowered.tangent))

    def tangents(self, state: FunctionState, tile: ScoreTile, saved: tuple) -> None:
        self.backward(state, tile, saved)
        tangent = self._tangent
        if tangent is None:
            return
        kept = dict(zip(self._kept, saved, strict=True))

        def add(r: int, c: int, *computed: Float32) -> None:
            own = computed[0] if computed else kept[tangent][r, c]
            tile.acc[r, c] = fma(tile.acc[r, c], state.scale, own)

        self._over(state, tile, () if tangent in kept else (tangent,), add)

    @property
    def has_gradients(self) -> bool:
        return bool(self.wanted)

    def add_gradients(self, state: FunctionState, tile: ScoreTile, saved: tuple) -> None:
        kept = dict(zip(self._kept, saved, strict=True))
        for term, target, bins in zip(self.lowered.terms, state.targets, state.bins, strict=True):
            add = add_to if bins is None else bins.add_to
            self._add(state, tile, term, target, kept.get(term.slope.node), add)

    def _add(
        self, state: FunctionState, tile: ScoreTile, term: Term, target: cute.Tensor, kept: Any, add: Add
    ) -> None:
        """Add to a term's gradient. kept: the slopes that the forward kept, or None."""
        indices = term.indices[len(_first(term)) :]
        computed = (*indices, *((term.slope.node,) if kept is None else ()))

        def elements(use: Callable[[Int32, Float32], None]) -> None:
            sums: dict[tuple[int, ...], tuple[tuple[Any, ...], Float32]] = {}

            def write(r: int, c: int, *values: Any) -> None:
                exists = tile.row0 + tile.rows[r] <= state.last_q
                exists = exists & (tile.col0 + tile.cols[c] <= state.last_k)
                slope = values[-1] if kept is None else kept[r, c]
                amount, at = amount_of(term, tile, (r, c), slope, exists), values[: len(indices)]
                same = tuple(map(id, at))  # one value for a row, a column, a diagonal or all
                sums[same] = (at, sums[same][1] + amount) if same in sums else (at, amount)

            self._over(state, tile, computed, write)
            for at, amount in sums.values():
                use(offset_in(target, indices, at), amount)

        spread = any(x.depends_on for x in indices)
        add_elements(target.iterator, state.scale, elements, spread, add)

    def reference(self, scores: Any, coords: Any, inputs: ScoreInputs) -> Any:  # type: ignore[override]
        return self.evaluated(scores, coords, inputs.extra.get(self.name, ()))

    def evaluated(
        self,
        scores: Any,
        coords: Any,
        args: tuple,
        precision: Precision = AS_TORCH,
        output: Node | None = None,
    ) -> Any:
        """The reference with these arguments. output: a node to evaluate instead of the function's output."""
        names = ("batch", "head", "query", "key")
        values = {"score": scores, **{name: getattr(coords, name) for name in names}}
        return evaluate(output or self.output, values, args, precision).expand_as(scores)


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockMaskEpilogue(FunctionEpilogue):
    """A traced mask with lists of the blocks that it leaves visible: two tensors of key blocks, two of query blocks.

    partial: the mask in listed blocks that need one, a function of all captured tensors except the first; None: the
    whole mask. The whole mask is also right for a kernel that visits all blocks.
    unites: True if lists are unions over the query heads of a kv head: those of key blocks, and all lists of a cache.
    Kernels then visit blocks that a head does not list, and there ``partial`` may be true.
    first: number of the first captured tensor that is read.
    """

    lists_blocks = True
    partial: tuple[Graph, Node] | None
    unites: bool
    first: int = 0

    def held(self, backward: bool) -> int:  # type: ignore[override]
        """Two more if the whole mask is applied in listed blocks, since it reads the blocks' kinds."""
        return super().held(backward) + 2 * (self.partial is None or (backward and self.unites))

    def visiting(self) -> "BlockMaskEpilogue":
        if self.partial is None or (self.unites and (self.differentiates or self.heads_of_rows)):
            return self
        graph, output = self.partial
        own = with_heads_of_rows(output) if self.heads_of_rows else (graph, output)
        return replace(self, lowered=lower(*own), first=1)

    @property
    def _slope(self) -> None:
        """None: P is 0 at masked keys, and so is the gradient."""

    def fake_args(self) -> tuple:
        return (*super().fake_args(), *(fake_tensor("int32", 4, True) for _ in range(4)))

    def begin(self, args: tuple, context: ScoreContext) -> FunctionState:
        own = len(self.captured)
        state = super().begin(args[self.first : own], context)
        return replace(state, lists=args[own:], at=(context.batch, context.head))

    def key_blocks(self, state: FunctionState, row0: Int32, rows: int) -> BlockRange:
        batch, head = state.at
        lists = BlockLists(*state.lists[:2])
        if self.heads_of_rows:  # of a cache, whose empty work tiles begin beyond the queries
            row0 = cutlass.min(row0, lists.counts.shape[2] * LISTED_ROWS - 1)
        return lists.of(batch, head, row0, rows)

    def query_blocks(self, state: FunctionState, row0: Int32, rows: int) -> BlockRange:
        batch, head = state.at
        return BlockLists(*state.lists[2:]).of(batch, head, row0, rows)

    def backward(self, state: FunctionState, tile: ScoreTile, saved: Any) -> None:
        """Do nothing: see ``_slope``."""


def _takes_long(*outputs: Node, most: int) -> bool:
    """True for more than ``most`` operations per score, as in T5's buckets of distances."""
    return sum(map(varies, ordered(*outputs))) > most


def _first(term: Term) -> tuple[Node, ...]:
    """A term's leading indices that are uniform in a work tile; the last index is never included."""
    return tuple(itertools.takewhile(lambda x: not x.depends_on, term.indices[:-1]))


def _with_gradients(
    epilogue: FunctionEpilogue, wanted: tuple[int, ...], exact: tuple[int, ...]
) -> FunctionEpilogue | None:
    lowered = lower(epilogue.graph, epilogue.output, wanted)
    wanted = tuple(number for number in wanted if any(term.number == number for term in lowered.terms))
    if not wanted:
        return None
    exact = tuple(number for number in wanted if number in exact)
    numbers = "_".join(f"{number}x" if number in exact else str(number) for number in wanted)
    made = FunctionEpilogue(
        name=f"{TRACED}gradient_{numbers}_{epilogue.name}{epilogue.code_digest}",
        graph=epilogue.graph,
        output=epilogue.output,
        captured=epilogue.captured,
        lowered=lowered,
        wanted=wanted,
        exact=exact,
    )
    return register_traced(made)


def _with_tangents(
    epilogue: FunctionEpilogue, moved: tuple[int, ...]
) -> tuple[FunctionEpilogue | None, tuple[int, ...]]:
    graph, output = epilogue.graph, epilogue.output
    loads = [x for x in ordered(output) if x.op == "load"]
    moved = tuple(i for i in moved if derivative(graph, output, {x: x for x in loads if x.value == i}))
    if not moved:
        return None, ()
    tangents = {number: len(epilogue.captured) + i for i, number in enumerate(moved)}
    dots = tuple(epilogue.captured[number]._replace(unit_stride=True) for number in moved)
    made = FunctionEpilogue(
        name=f"{TRACED}tangent_{'_'.join(map(str, moved))}_{epilogue.name}{epilogue.code_digest}",
        graph=graph,
        output=output,
        captured=(*epilogue.captured, *dots),
        lowered=lower(graph, output, (), tangents),
    )
    return register_traced(made), moved


def register_trace(traced: Trace) -> FunctionEpilogue:
    """Register a trace and return its epilogue. Traces with equal graphs have the same epilogue and kernels."""
    captured = tuple(Captured.of(x) for x in traced.tensors)
    fields: dict[str, Any] = {
        "name": f"{TRACED}{digest_of(traced.output, captured)}",
        "graph": traced.graph,
        "output": traced.output,
        "captured": captured,
        "lowered": lower(traced.graph, traced.output),
    }
    if traced.unites is None:
        return register_traced(FunctionEpilogue(**fields))
    partial = traced.partial
    fields["name"] += "_united" if traced.unites else "_listed"
    fields["name"] += "" if partial is None else "_" + digest(partial.output, [])
    own = None if partial is None else (partial.graph, partial.output)
    return register_traced(BlockMaskEpilogue(**fields, partial=own, unites=traced.unites))


def digest_of(output: Node, captured: Sequence[Captured]) -> str:
    """Digest of the function's graph and of its tensors' properties."""
    return digest(output, [repr(tuple(one)) for one in captured])
