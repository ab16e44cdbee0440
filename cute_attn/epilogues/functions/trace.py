"""Tracing: calls a function with FlexAttention's signature once, with symbols that record its operations."""

import functools
import inspect
import math
import numbers
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cute_attn import traits
from cute_attn.epilogues.functions import torch_functions as of_torch
from cute_attn.epilogues.functions.graph import BOOL, FLOAT, INT, KINDS, LONG, Graph, Node, Place, ordered
from cute_attn.epilogues.functions.symbols import (
    DTYPES,
    LOADED,
    Argument,
    Kind,
    Row,
    Symbol,
    Traced,
    dtype_name,
    first_traced,
    kind_in_torch,
    rank_of,
    tensors_in,
)

SIGNATURES = {
    "score_mod": ("score", "batch", "head", "query", "key"),
    "mask_mod": ("batch", "head", "query", "key"),
}
ACCEPTED = (
    "+ - * / // % **, comparisons, & | ^ ~ << >>, where, abs, sign, minimum, maximum, min, max, clamp, "
    "exp, exp2, log, log2, sqrt, rsqrt, square, reciprocal, tanh, sigmoid, relu, sin, cos, atan, erf, expm1, log1p, "
    "floor, ceil, trunc, round, gelu, silu, softplus, masked_fill and others of docs/functions.md, casts, "
    "logical_and, logical_or, logical_xor, logical_not, and elements of captured tensors"
)


@dataclass(frozen=True)
class Trace:
    """The operations of functions on a score.

    tensors: captured tensors, as numbered by the graph's loads; for functions with arguments, the arguments in order.
    reads: see :class:`Recorder`.
    sources: for each tensor that is a view, the tensor that it is a view of; else None.
    unites: for a mask with lists of blocks, True if lists of query blocks are unions over several heads; else None.
    partial: replaces such a mask in listed blocks that need one. It captures the same tensors except the first.
    """

    graph: Graph
    output: Node
    tensors: tuple[Any, ...]
    reads: str = ""
    sources: tuple[Tensor | None, ...] = ()
    unites: bool | None = None
    partial: "Trace | None" = None


def kind_of(function: Callable) -> str:
    """``score_mod`` or ``mask_mod``, by the function's number of parameters."""
    parameters = inspect.signature(function).parameters.values()
    wanted = [
        x
        for x in parameters
        if x.default is x.empty and x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
    ]
    for name, arguments in SIGNATURES.items():
        if len(wanted) == len(arguments):
            return name
    takes = "1 argument" if len(wanted) == 1 else f"{len(wanted)} arguments"
    raise TypeError(
        f"a function takes {takes}; accepted: score_mod(score, b, h, q_idx, kv_idx) or "
        "mask_mod(b, h, q_idx, kv_idx)"
    )


def check_function(what: str, function: Any) -> None:
    """Raise TypeError for a ``score_mod`` or ``mask_mod`` that is not a function."""
    if not callable(function) or isinstance(function, type):
        given = f"the class {function.__name__}" if isinstance(function, type) else traits.kind_of(function)
        raise TypeError(f"{what} is {given}; accepted: a function of ({', '.join(SIGNATURES[what])})")


def trace(
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    applied: "Applied | None" = None,
) -> Trace:
    """Trace ``score_mod`` and then ``mask_mod``, with -inf for hidden keys. dtype: the scores' dtype.

    applied: see :class:`Recorder`.

    Raises:
        TypeError: an operation of a function has no node; the message names it.
        ValueError: a function reads an element of an empty tensor.
    """
    recorder = Recorder(device or torch.device("cpu"), dtype)
    recorder.applied = applied or operator.call
    return _renumbered(recorder, _output(recorder, score_mod, mask_mod))


def trace_with_arguments(
    arguments: Sequence[Any],
    score_mod: Callable | None,
    mask_mod: Callable | None,
    dtype: torch.dtype = torch.float32,
) -> Trace:
    """Like :func:`trace`, for functions that get all their tensors, and numbers, as further arguments.

    arguments: examples. The graph depends on their dtypes and numbers of dimensions, not on their sizes or values.

    Raises:
        TypeError: also if a function refers to another tensor.
    """
    recorder = Recorder(torch.device("cpu"), dtype, arguments)
    output = _output(recorder, score_mod, mask_mod)
    if len(recorder.tensors) > len(arguments) or recorder.reads:
        recorder.refuse("refers to a tensor that is none of its arguments", "tensors as arguments")
    return Trace(recorder.graph, output, tuple(arguments))


def _output(recorder: "Recorder", score_mod: Callable | None, mask_mod: Callable | None) -> Node:
    graph = recorder.graph
    output = graph.input("score")
    if score_mod is not None:
        output = recorder.call("score_mod", score_mod)
        if output.kind == BOOL:
            raise TypeError(
                "score_mod returned a bool; accepted: a score, such as torch.where(seen, score, -math.inf)"
            )
        if output.kind != FLOAT:
            output = graph.cast(output, FLOAT)
    if mask_mod is not None:
        seen = recorder.call("mask_mod", mask_mod)
        if seen.kind != BOOL:
            raise TypeError(
                f"mask_mod returned {_THE_KINDS[seen.kind]}; accepted: a bool, such as q_idx >= kv_idx"
            )
        with graph.at(seen.place):
            output = graph.where(seen, output, graph.const(-math.inf))
    return output


_MOST_IN_A_ROW = 256
"""Maximum depth of a graph: it is read recursively, up to 3 calls per operation, and Python allows 1,000 calls."""
_THE_KINDS = {BOOL: "a bool", INT: "an integer", LONG: "an integer", FLOAT: "a float"}


def _renumbered(recorder: "Recorder", output: Node) -> Trace:
    """The trace with its tensors in the order of their first load, so that equal functions have equal graphs."""
    graph, used, changed = Graph(), dict[int, int](), dict[Node, Node]()
    for node in ordered(output):
        value = node.value
        if node.op == "load":
            value = used.setdefault(value, len(used))
        args = [changed[x] for x in node.args]
        graph.place = node.place
        changed[node] = graph.make(node.op, node.kind, args, value, node.depends_on, node.dtype)
    graph.place = None
    tensors = tuple(recorder.tensors[i] for i in used)
    sources = tuple(recorder.views.get(id(x), (x, None))[1] for x in tensors)
    return Trace(graph, changed[output], tensors, recorder.reads, sources)


_VALUES_ASKED = {
    "__bool__": ("tests a traced value, as if, and, or and not do", "torch.where, &, |, ~"),
    "__index__": (
        "uses a traced value in range(), or as the index of a list or an array",
        "an element of a tensor, such as table[h]",
    ),
    **dict.fromkeys(
        ("__int__", "__float__"), ("makes a Python number of a traced value", "torch.exp(x), x.to(dtype)")
    ),
    **dict.fromkeys(("__array__", "numpy"), ("hands a traced value to NumPy", "torch's functions")),
}
"""Operation that asks for a traced value's number -> what the function does, and what it may do."""


Applied = Callable[..., Tensor]
"""Maps (function, tensor, further arguments) to the function's result, which is a view or another tensor."""


class Recorder(TorchFunctionMode):
    """Records one trace. As a mode it also sees operations on real tensors, such as ``table[h, q - k]``.

    Attributes:
        reads: name of an operation that changed a tensor, or read a value that its tensors' dtype, shape, strides and
            device do not determine, such as ``item``; "" if none. The trace is then valid only for this call.
        views: by id, tensors that the function made by indexing or as views, each with the tensor that it views.
        applied: applies a function to a captured tensor, where the trace itself needs the result.
        line: the function's current line, if the stack does not contain it; else None.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, arguments: Sequence[Any] = ()) -> None:
        super().__init__()
        self.graph, self.device, self.dtype = Graph(), device, dtype
        self.what = self.reads = ""
        self.applied: Applied = operator.call
        self.line: Place | None = None
        self._is_open = False
        self._refusal: TypeError | None = None
        self._is_refused = False
        self._depths: dict[Node, int] = {}
        self._dtypes: dict[Node, torch.dtype] = {}
        # None without autograd, where values have no derivative that could be another.
        self._has_gradients: bool | None = None
        self.views: dict[int, tuple[Tensor, Tensor]] = {}
        self.tensors: list[Any] = list(arguments)
        self.arguments = [self._argument(number, x) for number, x in enumerate(arguments)]

    def call(self, what: str, function: Any) -> Node:
        """Call a function with symbols for the inputs of its signature, and return its result's node."""
        check_function(what, function)
        self.what, self._is_open = what, True
        self._check_arguments(function)
        self._has_gradients = True if torch.is_grad_enabled() else None
        try:
            with self:
                inputs = [self.symbol(self.graph.input(name)) for name in SIGNATURES[what]]
                found = function(*inputs, *self.arguments)
                if isinstance(found, Symbol) and found.rank:
                    self.refuse(f"returned a value of shape {tuple(found.shape)}", "one of no dimensions")
                output = self.node(found, "returned")
        except Exception as error:
            # Python's operators replace a TypeError by another one.
            if self._refusal is not None:
                raise self._refusal from None
            if isinstance(error, KeyError) and first_traced(error.args) is not None:
                line = traceback.extract_tb(error.__traceback__)[-1]
                raise TypeError(
                    f"{what} looks up a traced value in a dict; accepted: an element of a tensor, such as table[h] "
                    f"(line {line.lineno} of {os.path.basename(line.filename)})"
                ) from None
            raise
        finally:
            self._is_open, self.graph.place = False, None
        if self._refusal is not None and self._is_refused:  # the function caught it, and did something else
            raise self._refusal
        return output

    def _check_arguments(self, function: Any) -> None:
        wanted = (*SIGNATURES[self.what], *(f"argument {i + 1}" for i in range(len(self.arguments))))
        try:
            inspect.signature(function).bind(*wanted)
        except ValueError:  # no signature is known
            return
        except TypeError:
            given = inspect.signature(function)
            raise TypeError(f"{self.what} takes {given}; accepted: ({', '.join(wanted)})") from None

    def symbol(self, node: Node, rank: int = 0, dtype: torch.dtype | None = None) -> "Symbol":
        """A traced value, as a tensor of one element. dtype: for a number, if it is not the node's dtype."""
        if self._depth(node) > _MOST_IN_A_ROW:
            self.refuse(
                "chains too many operations", f"up to {_MOST_IN_A_ROW}, each on the result of the last"
            )
        return Symbol(self, node, rank, dtype or self.dtype_of(node))

    def as_tensor(self, x: Any) -> Any:
        """A number as a traced value; anything else as it is."""
        return self.symbol(self.graph.const(x)) if isinstance(x, int | float) else x

    def dtype_of(self, node: Node) -> torch.dtype:
        """A value's dtype, promoted from its operands as in torch: numbers and integers do not affect a float's."""
        if node.dtype:
            return getattr(torch, node.dtype)
        if node.kind != FLOAT:
            return DTYPES[node.kind]
        if node not in self._dtypes:
            found = [
                self.dtype_of(x)
                for x in node.args
                if x.kind == FLOAT and x.op != "const" and (x.op != "cast" or x.dtype)
            ]
            own = self.dtype if node.op == "score" else DTYPES[FLOAT]
            self._dtypes[node] = functools.reduce(torch.promote_types, found) if found else own
        return self._dtypes[node]

    def _depth(self, node: Node) -> int:
        if node not in self._depths:
            self._depths[node] = 1 + max(map(self._depth, node.args), default=0)
        return self._depths[node]

    def _argument(self, number: int, x: Any) -> "Symbol | Argument":
        """The symbol for an argument of the function that follows its signature's inputs."""
        if isinstance(x, Tensor) and x.dim():
            return Argument(self, x, (None,) * x.dim(), number)
        kind = LOADED.get(x.dtype, FLOAT) if isinstance(x, Tensor) else FLOAT if isinstance(x, float) else INT
        dtype = dtype_name(x.dtype) if isinstance(x, Tensor) else ""
        return self.symbol(self.graph.make("load", kind, (), number, dtype=dtype))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (args, tuple(kwargs.values()))
        first = first_traced(given)
        if first is None:
            return self._on_tensors(func, args, kwargs)
        if first.made is not None and _needs_tensors(func, given):
            return self._on_tensors(func, _as_made(args), {x: _as_made(y) for x, y in kwargs.items()})
        return self.operation(func, args, kwargs)

    def _on_tensors(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation on the function's tensors, or on torch's state, and note what it reads."""
        if func is torch._C._set_grad_enabled and self._has_gradients is not None:
            self._has_gradients = args[0]
        if of_torch.is_random(func):
            self.refuse(
                f"draws random numbers by {of_torch.name_of(func)}",
                "numbers that are drawn before, as a table",
            )
        result = func(*args, **kwargs)
        makes_tensors = isinstance(result, Tensor) or (
            isinstance(result, tuple | list) and result and all(isinstance(x, Tensor) for x in result)
        )
        name = of_torch.name_of(func)
        writes = "out" in kwargs or kwargs.get("inplace") or of_torch.is_in_place(name)
        if writes or not (makes_tensors or name in of_torch.METADATA):
            self.reads = self.reads or name
        if name in of_torch.VIEWS_OF_TABLES or name in of_torch.METADATA:
            self._note_numbers(name, (args[1:], tuple(kwargs.values())))
        if makes_tensors and name in of_torch.VIEWS_OF_TABLES and args and isinstance(args[0], Tensor):
            for made in (result,) if isinstance(result, Tensor) else result:
                self._note_view(made, args[0])
        return self._number(func, result, args, kwargs) if func in of_torch.MAKE_NUMBERS else result

    def _note_view(self, made: Tensor, source: Tensor) -> None:
        """Note that ``made`` is a view of ``source``, or a copy, unless its gradient is lost, as by torch.no_grad."""
        if torch.is_grad_enabled():
            self.views[id(made)] = (made, self.views.get(id(source), (source, source))[1])

    def _note_numbers(self, name: str, given: Any) -> None:
        """Note tensors whose numbers torch itself reads, such as a slice's bound: the next call may have others."""
        if name not in of_torch.LIKE_ANOTHER and next(tensors_in(given), None) is not None:
            self.reads = self.reads or name

    def _number(self, func: Any, made: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A symbol for ``made`` if it holds one float or bool: a number of the graph, not a captured tensor."""
        kind = LOADED.get(made.dtype)
        if (
            made.numel() != 1
            or kind not in (BOOL, FLOAT)
            or made.requires_grad
            or next(tensors_in((args, tuple(kwargs.values()))), None) is not None
        ):
            return made
        value = func(*args, **{**kwargs, "device": "cpu"}).item()  # rounded to its dtype
        node = of_torch.typed(self, self.graph.cast(self.graph.const(value), kind), made.dtype)
        number = self.symbol(node, made.dim(), made.dtype)
        number.made = made
        return number

    def operation(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record an operation on traced values. Identity, not the name, selects it: users may choose torch's names."""
        if func is Tensor.__repr__ or func is Tensor.__format__:
            return f"<traced {args[0].node.kind}>" if isinstance(args[0], Symbol) else "<traced tensor>"
        if not self._is_open:
            # Python's operators would replace a TypeError by another one.
            raise RuntimeError(
                f"{of_torch.name_of(func)} uses a traced value after the end of {self.what}, which kept it"
            )
        if self._has_gradients is not None and torch.is_grad_enabled() != self._has_gradients:
            self.refuse(
                "runs where something else than torch.no_grad has turned gradients off, such as a "
                "torch.autograd.Function, whose backward would be ignored",
                "torch's own operations",
            )
        self.graph.place = self.line or _place_of(sys._getframe(1))
        name = of_torch.name_of(func)
        first = args[0] if args else next(iter(kwargs.values()))
        if name == "__getitem__" and not isinstance(args[0], Symbol):
            return self.lookup(*args)
        if name in of_torch.METADATA:
            if isinstance(first, Argument) and name in of_torch.SIZES:
                return first.extent(name, *args[1:], **kwargs)
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if name in of_torch.VALUES:
            self.refuse(
                *_VALUES_ASKED.get(name, (f"asks for the number of a traced value by {name}", ACCEPTED))
            )
        named = of_torch.is_in_place(name)
        made = of_torch.MAKES.get(name[:-1]) if named else of_torch.made_by(func)
        in_place = named or bool(kwargs.get("inplace"))
        is_known = made is not None and (not named or func is getattr(Tensor, name))
        # A value may change in place if no other value has its memory, and gradients are not off.
        is_writable = isinstance(first, Symbol) and not first.has_alias and self._has_gradients is not False
        if in_place and not (is_known and is_writable):
            self.refuse(f"changes a value in place by {name}")
        if name in of_torch.VIEWS and isinstance(first, Symbol):
            return self._view(name, func, args, kwargs)
        if args and type(first) is Row and first_traced((args[1:], tuple(kwargs.values()))) is None:
            return self._of_rows(name, func, args, kwargs)
        if made is None:
            if isinstance(first, Row):
                self.refuse(f"uses {name} of a whole tensor", "its elements, shape and dtype")
            return self.refuse(f"uses {name}")
        try:
            node = made(self, *args, **kwargs)
        except (of_torch.Refused, TypeError) as error:
            if isinstance(error, of_torch.Refused) or _WRONG_ARGUMENTS.search(str(error)):
                if name not in of_torch.LOOKUPS:
                    self._check_with_torch(name, func, args, kwargs)
                self.refuse(f"uses {name} with arguments that are not traced")
            raise
        if name in of_torch.LOOKUPS:
            return node
        if isinstance(node, Symbol):
            rank, node = node.rank, node.node
        else:
            rank = max(map(rank_of, (*args, *kwargs.values())))
        if in_place:
            self._write(first, node, name)
        dtype = self._check_with_torch(name, func, args, kwargs)
        if in_place:
            return first
        if dtype and node.kind == FLOAT and node.op != "const" and self.dtype_of(node) != dtype:
            node = of_torch.cast(self, node, dtype)  # its replacement may promote otherwise
        detaches = name in ("detach", "data")
        if name in of_torch.ALIASES and isinstance(first, Symbol) and not _copies(args, kwargs):
            if node is first.node or (first.own_dtype == dtype and not detaches):
                return first
            first.has_alias = first.has_alias or detaches
        result = self.symbol(self._differentiable(node), rank, dtype if node.op == "const" else None)
        result.has_alias = detaches
        return result

    def _check_with_torch(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Refuse operands whose dtypes torch refuses, such as floats for ``&``; return the dtype of torch's result."""
        given = tuple(map(kind_in_torch, args)), tuple((x, kind_in_torch(y)) for x, y in kwargs.items())
        found = _in_torch(func, *given)
        if isinstance(found, str):
            self.refuse(f"uses {name}, which torch refuses: {found}", "operands that torch takes")
        return found

    def _view(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> "Symbol":
        """A traced value as a tensor of one element with other dimensions."""
        self._note_numbers(name, (args[1:], tuple(kwargs.values())))
        with torch._C.DisableTorchFunction():
            shape = func(Kind(torch.float64, args[0].rank).one(False), *args[1:], **kwargs).shape
        if shape.numel() != 1:
            self.refuse(f"makes a tensor of shape {tuple(shape)} of a traced value by {name}", "one element")
        if len(shape) == args[0].rank:
            return args[0]
        args[0].has_alias = True
        view = self.symbol(args[0].node, len(shape))
        view.has_alias = True
        return view

    def _of_rows(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Apply an operation on a row to all rows of the tensor, and return the same row of the result."""
        row = args[0]
        fixed = [axis for axis, node in enumerate(row.places) if node is not None]

        def of_one(x: Tensor) -> Any:
            return func(x, *args[1:], **kwargs)

        made = of_one
        for place in reversed(range(len(fixed))):
            made = torch.vmap(made, fixed[place] - place)
        try:
            found = self.applied(made, row.tensor)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            return self.refuse(
                f"uses {name} of a row of a tensor ({reason})", "its elements, shape and dtype"
            )
        if name in of_torch.VIEWS_OF_TABLES:
            self._note_numbers(name, (args[1:], tuple(kwargs.values())))
            self._note_view(found, row.tensor)
        nodes = [row.places[axis] for axis in fixed]
        return self._element_or_row(Row, found, (*nodes, *[None] * (found.dim() - len(nodes))))

    def _differentiable(self, node: Node) -> Node:
        return node if self._has_gradients is not False else self.graph.detached(node)

    def _write(self, x: "Symbol", node: Node, name: str) -> None:
        """Change x in place to the value of ``node``; it keeps its dtype, as in torch."""
        if KINDS.index(node.kind) > KINDS.index(x.node.kind) and (node.kind, x.node.kind) != (LONG, INT):
            was, new = _THE_KINDS[x.node.kind], _THE_KINDS[node.kind]
            self.refuse(f"writes {new} in place of {was} by {name}", "results of the value's own dtype")
        x.node, x.made = self.graph.cast(node, x.node.kind, x.node.dtype), None

    def refuse(self, what: str, accepted: str = ACCEPTED, *, as_torch: bool = False) -> Any:
        """Raise TypeError. as_torch: torch raises TypeError too, such as for ``x == None``, and Python catches it."""
        self._is_refused = self._is_refused or not as_torch
        at = self.line or _place_of(sys._getframe(1))
        line = "" if at is None or at[0] == __file__ else f" (line {at[1]} of {os.path.basename(at[0])})"
        self._refusal = self._refusal or TypeError(f"{self.what} {what}; accepted: {accepted}{line}")
        raise self._refusal from None

    # ---- values ----

    def node(self, x: Any, did: str = "uses") -> Node:
        """The node of a symbol, a number, or a tensor of no dimensions."""
        if isinstance(x, Symbol):
            if x.recorder is not self:
                self.refuse(f"{did} a traced value of another call", "those of its own arguments")
            return x.node
        if isinstance(x, bool | int | float):
            return self.graph.const(x)
        if isinstance(x, numbers.Real):  # NumPy's
            return self.graph.const(x.item())  # type: ignore[attr-defined]
        if isinstance(x, Tensor) and not isinstance(x, Row) and x.numel() == 1:
            return self.load(x, (self.graph.const(0),) * x.dim())
        if isinstance(x, Tensor):
            with torch._C.DisableTorchFunction():
                shape = tuple(x.shape)
            return self.refuse(
                f"{did} a tensor of shape {shape} as a whole", "its elements, such as table[h, q_idx]"
            )
        accepted = "traced values, numbers and elements of captured tensors"
        return self.refuse(f"{did} {x!r}", accepted, as_torch=True)

    def load(self, tensor: Tensor, indices: tuple[Node, ...], number: int | None = None) -> Node:
        """An element of a captured tensor, or of argument ``number``; the same tensor may be several arguments."""
        kind = LOADED.get(tensor.dtype)
        if kind is None or tensor.is_nested or tensor.layout is not torch.strided:
            accepted = f"dense ones of {', '.join(map(str, LOADED))}"
            return self.refuse(f"captures a tensor of {tensor.dtype}, {tensor.layout}", accepted)
        if not tensor.numel():
            raise ValueError(
                f"{self.what} captures a tensor of shape {tuple(tensor.shape)}; accepted: one with elements"
            )
        if number is None:
            captured = range(len(self.arguments), len(self.tensors))
            number = next((i for i in captured if self.tensors[i] is tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return self.graph.make("load", kind, indices, number, dtype=dtype_name(tensor.dtype))

    def lookup(self, table: Any, index: Any) -> Any:
        """``table[index]``: an element, or a row with dimensions left to index."""
        row = table if isinstance(table, Row) else Row(self, table, (None,) * table.dim())
        tensor, dimensions = row.tensor, row.places.count(None)
        items = list(index) if isinstance(index, tuple) else [index]
        for item in items:
            if isinstance(item, list | bool):
                return self.refuse(f"indexes a tensor by {item!r}", "traced integers and slices")
        used = sum(item is not None and item is not Ellipsis for item in items)
        whole = [place for place, item in enumerate(items) if item is Ellipsis] or [len(items)]
        if len(whole) > 1:
            return self.refuse("indexes a tensor by Ellipsis twice", "one")
        if used > dimensions:
            return self.refuse(
                f"indexes a tensor of {dimensions} dimensions by {used} integers", "one for each dimension"
            )
        items[whole[0] : whole[0] + 1] = [slice(None)] * (dimensions - used)
        cut: list[slice | None] = []  # torch applies these first: slices, and new dimensions
        nodes: list[Node | None] = []
        for axis, own in enumerate(row.places):
            while own is None and items[0] is None:
                cut.append(items.pop(0))
                nodes.append(None)
            item = slice(None) if own is not None else items.pop(0)
            cut.append(item if isinstance(item, slice) else slice(None))
            nodes.append(own if isinstance(item, slice) else self._index(table, row, axis, item))
        cut += items
        nodes += items
        if any(one != slice(None) for one in cut):
            if isinstance(table, Argument):
                return self.refuse("cuts an argument, whose calls' own have other sizes", "traced integers")
            self._note_numbers("__getitem__", tuple(cut))
            tensor = self.applied(operator.getitem, row.tensor, tuple(cut))
            self._note_view(tensor, row.tensor)
        rank = max(map(rank_of, index if isinstance(index, tuple) else (index,)), default=0)
        kind = Argument if isinstance(table, Argument) else Row
        return self._element_or_row(kind, tensor, tuple(nodes), row.number, rank)

    def _index(self, table: Any, row: "Row", axis: int, item: Any) -> Node:
        node = self.node(item, "indexes a tensor by")
        if node.kind not in (INT, LONG):
            return self.refuse(f"indexes a tensor by {_THE_KINDS[node.kind]}", "traced integers")
        if isinstance(item, Symbol) and item.own_dtype in of_torch.NO_INDICES:
            return self.refuse(
                f"indexes a tensor by a {item.own_dtype}, which torch takes for a mask or refuses",
                "int32 and int64, such as x.int()",
            )
        if node.op == "const" and node.value < 0:
            size = table.shape[row.places[:axis].count(None)]
            node = self.node(size + (node.value if isinstance(size, int) else self.symbol(node)))
        return node

    def _element_or_row(
        self,
        kind: type,
        tensor: Tensor,
        index: tuple[Node | None, ...],
        number: int | None = None,
        rank: int = 0,
    ) -> Any:
        """The element, or a ``kind`` if indices are left. rank: the element's; indices may be tensors of size 1."""
        nodes = tuple(x for x in index if x is not None)
        if len(nodes) < len(index):
            if rank:
                return self.refuse(f"indexes some dimensions by a tensor of {rank} dimensions", "x.squeeze()")
            return kind(self, tensor, index, number)
        return self.symbol(self._differentiable(self.load(tensor, nodes, number)), rank)


def _place_of(frame: FrameType | None) -> Place | None:
    """The innermost line of user code that led to an operation; if the traced function is torch's, its line.

    frame: the operation's frame. Returns None if another thread calls a function of torch.
    """
    outermost = frame
    while frame is not None and frame.f_code is not Recorder.call.__code__:
        if not frame.f_globals.get("__name__", "").startswith(_INNER):
            return _line_of(frame)
        outermost, frame = frame, frame.f_back
    return None if frame is None or outermost is None else _line_of(outermost)


_INNER = ("torch.", f"{__package__}.")
"""Prefixes of modules that are not user code: torch and this package."""


def _line_of(frame: FrameType) -> Place:
    return _absolute(frame.f_code.co_filename), frame.f_lineno


@functools.lru_cache(1024)
def _absolute(file: str) -> str:
    return file if file.startswith("<") else os.path.abspath(file)


@functools.lru_cache(4096)
def _in_torch(func: Any, args: tuple, kwargs: tuple) -> torch.dtype | str | None:
    """The dtype of an operation's result for values of these kinds, or why torch refuses it; None if unknown."""

    def given(x: Any, widened: bool) -> Any:
        if isinstance(x, Kind):
            return x.one(widened)
        return tuple(given(y, widened) for y in x[1]) if x[0] == "(" else x[1]

    reason = ""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for widened in (False, True):
            try:
                found = func(
                    *(given(x, widened) for x in args), **{name: given(x, widened) for name, x in kwargs}
                )
            except (RuntimeError, TypeError, ValueError) as error:
                reason = str(error).partition("\n")[0].strip().rstrip(".")
            else:
                return None if widened else getattr(found, "dtype", None)
    return reason


_WRONG_ARGUMENTS = re.compile("unexpected keyword|positional argument|keyword-only argument")


def _copies(args: tuple, kwargs: dict[str, Any]) -> bool:
    """True if ``to`` copies; ``copy`` is the second of its bools, after ``non_blocking``."""
    return bool(kwargs.get("copy")) or [x for x in args if isinstance(x, bool)][1:] == [True]


def _needs_tensors(func: Any, given: Any) -> bool:
    """True if all traced values are numbers that were tensors, and func asks for a value or has a larger tensor."""
    tensors = list(tensors_in(given))
    if any(one.made is None for one in tensors if isinstance(one, Traced)):
        return False
    return of_torch.name_of(func) in of_torch.VALUES or any(
        not isinstance(x, Traced) and x.numel() > 1 for x in tensors
    )


def _as_made(x: Any) -> Any:
    """Arguments in which the tensors that the function made replace the symbols of their numbers."""
    if isinstance(x, tuple | list):
        return type(x)(map(_as_made, x))
    return x.made if isinstance(x, Symbol) else x


def as_kernels_read(tensor: Tensor | float) -> Tensor | float:
    """A captured tensor or number as passed to a launch: bools become uint8, and a scalar tensor gets a dimension."""
    if not isinstance(tensor, Tensor):
        return tensor
    tensor = tensor.detach()
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    return tensor.view(1) if tensor.dim() == 0 else tensor
