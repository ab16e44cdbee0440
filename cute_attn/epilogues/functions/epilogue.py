"""A traced function as a registered epilogue."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from cutlass import Float32, Int32, cute
from torch import Tensor

from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import TRACED, Epilogue, is_registered, register_epilogue
from cute_attn.epilogues.functions.definition import evaluate
from cute_attn.epilogues.functions.device import (
    Expressions,
    Positions,
    fake_tensor,
    over_tile,
    rows_of,
    uniform_roots,
)
from cute_attn.epilogues.functions.gradients import add_elements, amount_of, offset_in
from cute_attn.epilogues.functions.graph import KEY, QUERY, SCORE, Graph, Node, digest, ordered
from cute_attn.epilogues.functions.lowering import Lowered, Term, lower, varies
from cute_attn.epilogues.functions.trace import Trace
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits
from cute_attn.work.block_lists import BlockLists
from cute_attn.work.block_range import BlockRange


class Captured(NamedTuple):
    """What is compiled in of a captured tensor: torch's name of its dtype, dimensions, whether rows are dense."""

    dtype: str
    rank: int
    unit_stride: bool

    @staticmethod
    def of(tensor: Tensor | float) -> "Captured":
        """Of one; a tensor of no dimensions counts as one of one. Of a number of the call its type."""
        if not isinstance(tensor, Tensor):
            return Captured(type(tensor).__name__, 0, True)
        unit = tensor.dim() == 0 or tensor.stride(-1) == 1
        return Captured(str(tensor.dtype).removeprefix("torch."), max(tensor.dim(), 1), unit)


def as_kernels_read(tensor: Tensor | float) -> Tensor | float:
    """An argument of :class:`Captured`'s kinds as a launch takes it."""
    if not isinstance(tensor, Tensor):
        return tensor
    tensor = tensor.detach()
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    return tensor.view(1) if tensor.dim() == 0 else tensor


@dataclass(frozen=True)
class FunctionState:
    """Of a work tile: the captured tensors, their rows and values that it has one of, and the last positions.

    lists: of a mask that lists blocks, with the (batch, head) that they are read for.
    targets: of each term the part of its gradient that the work tile adds to, with the gradients' factor.
    """

    tensors: tuple
    rows: tuple
    values: tuple
    last_q: Int32
    last_k: Int32
    lists: tuple = ()
    at: Any = ()
    targets: tuple = ()
    scale: Any = ()


class FunctionEpilogue(Epilogue):
    """Base of traced functions' classes, which differ in what they compute alone.

    differentiates: whether it is a backward kernel's. A forward needs no slopes, and stores no rows beyond sequences.
    """

    graph: ClassVar[Graph]
    output: ClassVar[Node]
    lowered: ClassVar[Lowered]
    captured: ClassVar[tuple[Captured, ...]]

    def __init__(self, differentiates: bool = False) -> None:
        self.differentiates = differentiates

    @classmethod
    def of(cls, traits: Traits) -> "FunctionEpilogue":
        return cls(traits.op == "backward")

    @classmethod
    def with_gradients(cls, wanted: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return _with_gradients(cls, wanted)  # type: ignore[arg-type]

    @classmethod
    def held(cls, backward: bool) -> int:
        """In a forward one more where much is computed for each score, in a backward two for a slope."""
        if backward:
            return cls._loads() + 2 * cls.lowered.keeps_slope
        return cls._loads() + _takes_long(cls.lowered.forward, most=12)

    @classmethod
    def _loads(cls) -> int:
        """Elements of tensors for a query, and for a key."""
        return sum(x.op == "load" and x.parts in (QUERY, KEY) for x in ordered(cls.lowered.forward))

    def fake_args(self) -> tuple:
        return tuple(fake_tensor(*one) for one in self.captured)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return tuple(as_kernels_read(x) for x in inputs.extra.get(self.name, ()))

    @property
    def _slope(self) -> Node | None:
        return self.lowered.slope if self.differentiates else None

    def _all(self) -> tuple[Node, ...]:
        return (self.lowered.forward,) if self._slope is None else (self.lowered.forward, self._slope)

    def begin(self, args: tuple, context: ScoreContext) -> FunctionState:
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
        return FunctionState(args, rows, found, context.seqlen_q - 1, context.seqlen_k - 1)

    def _over(
        self, state: FunctionState, tile: ScoreTile, outputs: Sequence[Node], write: Callable[..., None]
    ) -> None:
        values = dict(zip(uniform_roots(*self._all()), state.values, strict=True))
        rows = dict(zip(rows_of(*self._all()), state.rows, strict=True))
        last_q = state.last_q if self.differentiates and self.lowered.clamps_q else None
        last_k = state.last_k if self.differentiates and self.lowered.clamps_k else None
        positions = Positions(ordered(*outputs), last_q, last_k)
        over_tile(tile, Expressions(values, state.tensors, rows), positions, outputs, write)

    def forward(self, state: FunctionState, tile: ScoreTile, loaded: tuple = ()) -> Any:
        outputs = self._all() if self.lowered.keeps_slope else (self.lowered.forward,)
        slopes: Any = ()
        if len(outputs) > 1:
            slopes = cute.make_rmem_tensor(cute.make_layout((len(tile.rows), len(tile.cols))), Float32)

        def write(r: int, c: int, score: Float32, *slope: Float32) -> None:
            tile.acc[r, c] = score
            if slope:
                slopes[r, c] = slope[0]

        self._over(state, tile, outputs, write)
        return slopes

    def backward(self, state: FunctionState, tile: ScoreTile, saved: Any) -> None:
        slope = self.lowered.slope
        if slope is None:
            tile.registers().fill(0.0)
        elif self.lowered.keeps_slope:
            for r in range(len(tile.rows)):
                for c in range(len(tile.cols)):
                    tile.acc[r, c] = tile.acc[r, c] * saved[r, c]
        elif not slope.is_const(1.0):

            def write(r: int, c: int, factor: Float32) -> None:
                tile.acc[r, c] = tile.acc[r, c] * factor

            self._over(state, tile, (slope,), write)

    @classmethod
    def reference(cls, scores: Any, coords: Any, inputs: ScoreInputs) -> Any:
        return cls.evaluated(scores, coords, inputs.extra.get(cls.name, ()))

    @classmethod
    def evaluated(cls, scores: Any, coords: Any, args: tuple) -> Any:
        """The reference with these arguments."""
        names = ("batch", "head", "query", "key")
        values = {"score": scores, **{name: getattr(coords, name) for name in names}}
        return evaluate(cls.output, values, args).expand_as(scores)


class BlockMaskEpilogue(FunctionEpilogue):
    """Base of traced masks with lists of the blocks that they leave: two of key blocks, then two of query blocks.

    partial: what the mask is in listed blocks that need one, of its tensors but the first; None: all of it. The mask
    alone is right as well, for a kernel that visits all blocks.
    unites: whether the query blocks of a key block are those of any query head of its kv head, so that a backward
    visits blocks that a head does not list, where ``partial`` may be true.
    """

    lists_blocks = True
    partial: ClassVar[Lowered | None]
    unites: ClassVar[bool]

    def __init__(self, differentiates: bool = False, visits: bool = False) -> None:
        super().__init__(differentiates)
        self._first = 0
        if visits and self.partial is not None and not (differentiates and self.unites):
            self.lowered, self._first = self.partial, 1  # type: ignore[misc]

    def visiting(self) -> "BlockMaskEpilogue":
        return type(self)(self.differentiates, True)

    @property
    def _slope(self) -> None:
        """None: P is 0 at masked keys, and so is the gradient."""

    def fake_args(self) -> tuple:
        return (*super().fake_args(), *(fake_tensor("int32", 4, True) for _ in range(4)))

    def begin(self, args: tuple, context: ScoreContext) -> FunctionState:
        own = len(self.captured)
        state = super().begin(args[self._first : own], context)
        return replace(state, lists=args[own:], at=(context.batch, context.head))

    def key_blocks(self, state: FunctionState, row0: Int32, rows: int) -> BlockRange:
        batch, head = state.at
        return BlockLists(*state.lists[:2]).of(batch, head, row0, rows)

    def query_blocks(self, state: FunctionState, row0: Int32, rows: int) -> BlockRange:
        batch, head = state.at
        return BlockLists(*state.lists[2:]).of(batch, head, row0, rows)

    def backward(self, state: FunctionState, tile: ScoreTile, saved: Any) -> None:
        """Nothing, as ``_slope`` says."""


def _takes_long(*outputs: Node, most: int) -> bool:
    """Whether more than ``most`` operations are computed for each score, such as for T5's buckets of distances."""
    return sum(map(varies, ordered(*outputs))) > most


@functools.cache
def _with_gradients(cls: type[FunctionEpilogue], wanted: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """:meth:`FunctionEpilogue.with_gradients`. A mask's tensors, and those that make indices alone, have none."""
    lowered = lower(cls.graph, cls.output, wanted)
    wanted = tuple(number for number in wanted if any(term.number == number for term in lowered.terms))
    if not wanted:
        return cls.name, ()
    name = f"{TRACED}gradient_{'_'.join(map(str, wanted))}_{cls.name}{cls.code_digest}"
    if not is_registered(name):
        fields = {"wanted": wanted, "lowered": lowered, "__module__": __name__}
        register_epilogue(name)(type(name, (GradientEpilogue, cls), fields))
    return name, wanted


class GradientEpilogue(FunctionEpilogue):
    """Base of a backward's epilogues that add to the gradients of captured tensors, in fp32, which follow them."""

    wanted: ClassVar[tuple[int, ...]]

    @classmethod
    def held(cls, backward: bool) -> int:
        """Two for each slope, two for sums, two for indices of scores, and two more where these take long."""
        indices = [index for term in cls.lowered.terms for index in term.indices]
        spread, long = any(map(varies, indices)), _takes_long(*indices, most=14)
        return cls._loads() + 2 * (len(cls(True)._kept) + 1 + spread + long)

    @classmethod
    def check(cls, inputs: ScoreInputs) -> None:
        """Nothing: a forward's arguments, which it has checked, and tensors of the package's own."""

    def fake_args(self) -> tuple:
        ranks = (self.captured[number].rank for number in self.wanted)
        return (*super().fake_args(), *(fake_tensor("float32", rank, True) for rank in ranks))

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return tuple(as_kernels_read(x) for x in inputs.extra[self.name])

    def _all(self) -> tuple[Node, ...]:
        terms = [x for term in self.lowered.terms for x in (*term.indices, term.slope)]
        return (*super()._all(), *terms)

    @property
    def _kept(self) -> list[Node]:
        """What the forward computes for the backward: slopes that vary with the score, the scores' own first."""
        slopes = [self._slope, *(term.slope for term in self.lowered.terms)]
        return list(dict.fromkeys(x for x in slopes if x is not None and x.parts & SCORE))

    def begin(self, args: tuple, context: ScoreContext) -> FunctionState:
        count = len(self.captured)
        state = super().begin(args[:count], context)
        values = dict(zip(uniform_roots(*self._all()), state.values, strict=True))
        expressions = Expressions(values, dict(zip(self.wanted, args[count:], strict=True)))
        targets = tuple(expressions.row((term.number, self._first(term))) for term in self.lowered.terms)
        return replace(state, targets=targets, scale=context.gradient_scale)

    @staticmethod
    def _first(term: Term) -> tuple[Node, ...]:
        """A term's indices that a work tile has one of; the last index is left."""
        return tuple(itertools.takewhile(lambda x: not x.parts, term.indices[:-1]))

    def forward(self, state: FunctionState, tile: ScoreTile, loaded: tuple = ()) -> tuple:
        shape = cute.make_layout((len(tile.rows), len(tile.cols)))
        saved = tuple(cute.make_rmem_tensor(shape, Float32) for _ in self._kept)

        def write(r: int, c: int, score: Float32, *slopes: Float32) -> None:
            tile.acc[r, c] = score
            for own, slope in zip(saved, slopes, strict=True):
                own[r, c] = slope

        self._over(state, tile, (self.lowered.forward, *self._kept), write)
        return saved

    def add_gradients(self, state: FunctionState, tile: ScoreTile, saved: tuple) -> None:
        kept = dict(zip(self._kept, saved, strict=True))
        for term, target in zip(self.lowered.terms, state.targets, strict=True):
            self._add(state, tile, term, target, kept.get(term.slope))

    def backward(self, state: FunctionState, tile: ScoreTile, saved: tuple) -> None:
        kept: dict[Node | None, Any] = dict(zip(self._kept, saved, strict=True))
        super().backward(state, tile, kept.get(self.lowered.slope))

    def _add(self, state: FunctionState, tile: ScoreTile, term: Term, target: cute.Tensor, kept: Any) -> None:
        """Add to a term's gradient. kept: the slopes that the forward has computed, or None."""
        indices = term.indices[len(self._first(term)) :]
        computed = (*indices, *((term.slope,) if kept is None else ()))

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

        spread = any(x.parts for x in indices)
        add_elements(target.iterator, state.scale, elements, spread)


def register_trace(traced: Trace) -> str:
    """The name of a trace's epilogue, made where none has this graph; equal graphs share one, and its kernels."""
    return _register(traced, "", FunctionEpilogue, {})


def register_block_mask(traced: Trace, partial: Trace | None, unites: bool) -> str:
    """The same of a mask with lists. partial: of listed blocks, see :class:`BlockMaskEpilogue`, as is unites."""
    suffix = "_united" if unites else "_listed"
    suffix += "" if partial is None else "_" + digest(partial.output, [])
    lowered = None if partial is None else lower(partial.graph, partial.output)
    return _register(traced, suffix, BlockMaskEpilogue, {"partial": lowered, "unites": unites})


def _register(traced: Trace, suffix: str, base: type[FunctionEpilogue], own: dict[str, Any]) -> str:
    captured = tuple(Captured.of(x) for x in traced.tensors)
    name = f"{TRACED}{digest(traced.output, [repr(tuple(one)) for one in captured])}{suffix}"
    if not is_registered(name):
        fields = {"graph": traced.graph, "output": traced.output, "captured": captured, **own}
        lowered = lower(traced.graph, traced.output)
        fields |= {"lowered": lowered, "__module__": __name__}
        register_epilogue(name)(type(name, (base,), fields))
    return name
