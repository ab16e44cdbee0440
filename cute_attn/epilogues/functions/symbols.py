"""A trace's placeholders for tensors: scalars, and captured tensors with some dimensions indexed."""

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.epilogues.functions.graph import BOOL, FLOAT, INT, LONG, Node

if TYPE_CHECKING:
    from cute_attn.epilogues.functions.trace import Recorder

LOADED = {
    torch.bool: BOOL,
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32), INT),
    torch.int64: LONG,
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), FLOAT),
}
"""Dtypes of captured tensors -> kinds of their elements in a graph."""
DTYPES = {BOOL: torch.bool, INT: torch.int64, LONG: torch.int64, FLOAT: torch.float32}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Traced(Tensor):
    """Base of a trace's placeholders for tensors. The recorder handles all operations on them, by identity or name.

    A placeholder is a tensor without memory, so a function that tests whether its argument is a tensor finds one.
    """

    recorder: "Recorder"
    made: Tensor | None = None
    """For a number: the tensor that the function made from it."""

    @staticmethod
    def _of(cls: Any, recorder: "Recorder", shape: Sequence[int], dtype: torch.dtype) -> Any:
        made = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=recorder.device)
        made.recorder = recorder
        return made

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a traced value has no attribute {name!r}; accepted: those of a torch.Tensor")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traced = first_traced((args, tuple(kwargs.values())))
        return traced.recorder.operation(func, args, kwargs)  # type: ignore[union-attr]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        traced = first_traced((args, tuple((kwargs or {}).values())))
        return traced.recorder.refuse(f"uses {func}")  # type: ignore[union-attr]


class Symbol(Traced):
    """A scalar of a trace: a tensor of one element, of no dimensions unless the function adds some."""

    node: Node
    own_dtype: torch.dtype
    rank: int
    has_alias = False
    """True if another value, such as a detached value, has the same memory."""

    def __new__(cls, recorder: "Recorder", node: Node, rank: int, dtype: torch.dtype) -> "Symbol":
        made = cls._of(cls, recorder, (1,) * rank, dtype)
        made.node, made.own_dtype, made.rank = node, dtype, rank
        return made


class Row(Traced):
    """A captured tensor with some dimensions indexed, such as ``table[h]``. places: None for the other dimensions."""

    tensor: Tensor
    places: tuple[Node | None, ...]
    number: int | None

    def __new__(
        cls, recorder: "Recorder", tensor: Tensor, places: tuple[Node | None, ...], number: int | None = None
    ) -> "Row":
        shape = [size for size, one in zip(tensor.shape, places, strict=True) if one is None]
        made = cls._of(cls, recorder, shape, tensor.dtype)
        made.tensor, made.places, made.number = tensor, places, number
        return made


class Argument(Row):
    """A tensor argument of a function. Calls may pass other sizes, so sizes are nodes of the graph too."""

    def extent(self, name: str, dim: int | None = None) -> Any:
        """The argument's ``shape``, ``size`` or ``numel``. ``len`` is refused: Python requires it to be an int."""
        if name in ("stride", "is_contiguous"):
            return self.recorder.refuse(
                f"uses {name} of an argument, which calls may have of other strides", "its elements"
            )
        made = self.recorder.graph.make
        axes = (axis for axis, one in enumerate(self.places) if one is None)
        sizes = tuple(self.recorder.symbol(made("extent", INT, (), (self.number, axis))) for axis in axes)
        if name == "__len__":
            return self.recorder.refuse(
                "asks for the len of an argument, whose calls' own have others", "x.shape[0]"
            )
        if name == "numel":
            return functools.reduce(operator.mul, sizes)
        return sizes if dim is None else sizes[dim]


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Yield the tensors and traced values in arguments, or in lists and slices of arguments."""
    if isinstance(x, slice):
        x = (x.start, x.stop, x.step)
    if isinstance(x, tuple | list):
        for one in x:
            yield from tensors_in(one)
    elif isinstance(x, Tensor):
        yield x


def first_traced(x: Any) -> "Symbol | Row | None":
    return next((one for one in tensors_in(x) if isinstance(one, Symbol | Row)), None)


class Kind(NamedTuple):
    """The dtype and rank of a tensor of one element, for torch to check arguments with."""

    dtype: torch.dtype
    rank: int

    def one(self, widened: bool) -> Tensor:
        """The tensor, with value 1. widened: make a float float64, since the CPU lacks some 16-bit operations."""
        dtype = torch.float64 if widened and self.dtype.is_floating_point else self.dtype
        return torch.ones((1,) * self.rank, dtype=dtype)


def rank_of(x: Any) -> int:
    return x.rank if isinstance(x, Symbol) else x.dim() if isinstance(x, Tensor) else 0


def kind_in_torch(x: Any) -> Any:
    """A tensor's kind; anything else as its repr and itself, since 1, 1.0 and True are equal."""
    if isinstance(x, Symbol):
        return Kind(x.own_dtype, x.rank)
    if isinstance(x, Tensor):
        return Kind(x.dtype, x.dim())
    return ("(", tuple(map(kind_in_torch, x))) if isinstance(x, tuple | list) else (repr(x), x)
