"""A traced function as a registered epilogue, and the cache that knows functions which come again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from cutlass import Float32, Int32, cute
from torch import Tensor

from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import _REGISTERED, Epilogue, register_epilogue
from cute_attn.epilogues.functions.definition import evaluate
from cute_attn.epilogues.functions.device import (
    Expressions,
    Positions,
    fake_tensor,
    over_tile,
    rows_of,
    uniform_roots,
)
from cute_attn.epilogues.functions.graph import Node, digest, ordered
from cute_attn.epilogues.functions.lowering import Lowered, lower
from cute_attn.epilogues.functions.trace import Trace, trace
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits


class Captured(NamedTuple):
    """What is compiled in of a captured tensor: torch's name of its dtype, dimensions, whether rows are dense."""

    dtype: str
    rank: int
    unit_stride: bool

    @staticmethod
    def of(tensor: Tensor) -> "Captured":
        """Of one; a number counts as one of one dimension."""
        unit = tensor.dim() == 0 or tensor.stride(-1) == 1
        return Captured(str(tensor.dtype).removeprefix("torch."), max(tensor.dim(), 1), unit)


def _as_kernels_read(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    return tensor.view(1) if tensor.dim() == 0 else tensor


@dataclass(frozen=True)
class FunctionState:
    """Of a work tile: the captured tensors, their rows and values that it has one of, and the last positions."""

    tensors: tuple
    rows: tuple
    values: tuple
    last_q: Int32
    last_k: Int32


class FunctionEpilogue(Epilogue):
    """Base of traced functions' classes, which differ in what they compute alone.

    differentiates: whether it is a backward kernel's. A forward needs no slopes, and stores no rows beyond sequences.
    """

    output: ClassVar[Node]
    lowered: ClassVar[Lowered]
    captured: ClassVar[tuple[Captured, ...]]

    def __init__(self, differentiates: bool = False) -> None:
        self.differentiates = differentiates

    @classmethod
    def of(cls, traits: Traits) -> "FunctionEpilogue":
        return cls(traits.op == "backward")

    def fake_args(self) -> tuple:
        return tuple(fake_tensor(*one) for one in self.captured)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return tuple(_as_kernels_read(x) for x in inputs.extra.get(self.name, ()))

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
        names = ("batch", "head", "query", "key")
        values = {"score": scores, **{name: getattr(coords, name) for name in names}}
        return evaluate(cls.output, values, inputs.extra.get(cls.name, ())).expand_as(scores)


def register_trace(traced: Trace) -> str:
    """The name of a trace's epilogue, made where none has this graph; equal graphs share one, and its kernels."""
    captured = tuple(Captured.of(x) for x in traced.tensors)
    name = f"traced_{digest(traced.output, [repr(tuple(one)) for one in captured])}"
    if name not in _REGISTERED:
        fields = {"output": traced.output, "captured": captured, "__module__": __name__}
        lowered = lower(traced.graph, traced.output)
        register_epilogue(name)(type(name, (FunctionEpilogue,), {**fields, "lowered": lowered}))
    return name


# ---- functions that come again ----


class _Known(NamedTuple):
    """A trace's epilogue, which of the functions' tensors it captured, and what keeps the key's identities alive."""

    name: str
    tensors: tuple[int, ...]
    kept: tuple


_known: dict[tuple, _Known] = {}
_MOST = 1024
_PLAIN = frozenset((int, bool, str, type(None), torch.dtype, torch.device))
_LIBRARIES = frozenset(("torch", "math", "operator"))


def epilogue_of(
    score_mod: Callable | None, mask_mod: Callable | None, device: torch.device | None = None
) -> tuple[str, tuple[Tensor, ...]]:
    """The registered name of functions, and the tensors that they capture; ("", ()) where they leave scores alone.

    Functions are traced once for each value of what they refer to: code, closures, defaults, globals. Tensors count by
    dtype, shape and strides, so that others take their place. Functions that refer to objects of other classes, whose
    attributes may change, are traced each time.

    Raises:
        TypeError, ValueError: as :func:`cute_attn.epilogues.functions.trace.trace`.
    """
    seen = _References()
    known = _known.get(seen.key()) if seen.walk(score_mod) and seen.walk(mask_mod) else None
    if known is not None:
        return known.name, tuple([seen.tensors[i] for i in known.tensors])
    traced = trace(score_mod, mask_mod, device)
    name = ""
    if traced.output.op != "score":
        name = register_trace(traced)
    numbers = {id(x): i for i, x in enumerate(seen.tensors)}
    if seen.complete and all(id(x) in numbers for x in traced.tensors):
        while len(_known) >= _MOST:
            _known.pop(next(iter(_known)))
        _known[seen.key()] = _Known(name, tuple(numbers[id(x)] for x in traced.tensors), tuple(seen.kept))
    return name, traced.tensors


class _References:
    """What functions refer to, as a key, with the tensors in the order of their first reference."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.tensors: list[Tensor] = []
        self.kept: list[Any] = []
        self.complete = True
        self._active: list[Any] = []

    def key(self) -> tuple:
        return tuple(self.parts)

    def walk(self, x: Any) -> bool:
        """Add x; False where it may change without notice."""
        kind = type(x)
        if kind is FunctionType:
            return self._function(x)
        if kind in _PLAIN:
            self.parts += (kind, x)
        elif kind is float:
            self.parts.append(repr(x))
        elif kind is Tensor or kind is torch.nn.Parameter:
            self._tensor(x)
        elif kind is tuple or kind is list:
            self.parts += (kind, len(x))
            for item in x:
                self.walk(item)
        elif kind is BuiltinFunctionType or (
            kind is ModuleType and x.__name__.partition(".")[0] in _LIBRARIES
        ):
            self._identity(x)
        else:
            self.complete = False
        return self.complete

    def _identity(self, x: Any) -> None:
        self.parts.append(id(x))
        self.kept.append(x)

    def _tensor(self, x: Tensor) -> None:
        for i, other in enumerate(self.tensors):
            if other is x:
                self.parts.append(i)
                return
        self.tensors.append(x)
        self.parts += (x.dtype, x.shape, x.stride())

    def _function(self, function: Any) -> bool:
        if any(function is x for x in self._active):  # it calls itself
            return self.complete
        code = function.__code__
        self._identity(code)
        if function.__module__.partition(".")[0] == "torch" and not function.__closure__:
            return self.complete
        self._active.append(function)
        for cell in function.__closure__ or ():
            try:
                self.walk(cell.cell_contents)
            except ValueError:  # empty
                self.complete = False
        if function.__defaults__ or function.__kwdefaults__:
            self.walk(function.__defaults__)
            self.walk(tuple(sorted((function.__kwdefaults__ or {}).items())))
        scope = function.__globals__
        for name in _names_of(code):
            if name in scope:
                self.parts.append(name)
                self.walk(scope[name])
        self._active.pop()
        return self.complete


_names: dict[int, tuple[CodeType, tuple[str, ...]]] = {}


def _names_of(code: CodeType) -> tuple[str, ...]:
    """The globals that a function may name, its inner functions' too."""
    found = _names.get(id(code))
    if found is None:
        names, pending = dict.fromkeys(code.co_names), [code]
        while pending:
            inner = [x for x in pending.pop().co_consts if isinstance(x, CodeType)]
            pending += inner
            for one in inner:
                names |= dict.fromkeys(one.co_names)
        while len(_names) >= _MOST:
            _names.pop(next(iter(_names)))
        found = _names[id(code)] = (code, tuple(names))
    return found[1]
