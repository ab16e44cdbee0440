"""A score function of FlexAttention's signature, called once with symbols that record what it does with them."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cute_attn import traits
from cute_attn.epilogues.functions.graph import BOOL, FLOAT, INT, LONG, Graph, Node, ordered

SIGNATURES = {
    "score_mod": ("score", "batch", "head", "query", "key"),
    "mask_mod": ("batch", "head", "query", "key"),
}
LOADED = {
    torch.bool: BOOL,
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32), INT),
    torch.int64: LONG,
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), FLOAT),
}
"""The dtypes of captured tensors, and what their elements are in a graph."""
ACCEPTED = (
    "+ - * / // % ** by a constant, comparisons, & | ^ ~ << >>, where, abs, sign, minimum, maximum, min, max, clamp, "
    "exp, exp2, log, log2, sqrt, rsqrt, square, reciprocal, tanh, sigmoid, relu, sin, cos, floor, ceil, trunc, casts, "
    "logical_and, logical_or, logical_xor, logical_not, and elements of captured tensors"
)


@dataclass(frozen=True)
class Trace:
    """What functions do with a score: the output's graph, and the captured tensors that its loads number.

    Of a function with arguments those, in its order, are in the place of captured tensors.
    """

    graph: Graph
    output: Node
    tensors: tuple[Any, ...]


def kind_of(function: Callable) -> str:
    """Whether a function's parameters are those of a score_mod or of a mask_mod.

    Raises:
        TypeError: of neither.
    """
    parameters = inspect.signature(function).parameters.values()
    wanted = [
        x
        for x in parameters
        if x.default is x.empty and x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
    ]
    for name, arguments in SIGNATURES.items():
        if len(wanted) == len(arguments):
            return name
    raise TypeError(
        f"a function takes {len(wanted)} arguments; accepted: score_mod(score, b, h, q_idx, kv_idx) or "
        "mask_mod(b, h, q_idx, kv_idx)"
    )


def check_function(what: str, function: Any) -> None:
    """Raise TypeError for a ``score_mod`` or ``mask_mod`` that is no function."""
    if not callable(function) or isinstance(function, type):
        given = f"the class {function.__name__}" if isinstance(function, type) else traits.kind_of(function)
        raise TypeError(f"{what} is {given}; accepted: a function of ({', '.join(SIGNATURES[what])})")


def trace(
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    device: torch.device | None = None,
) -> Trace:
    """The graph of ``score_mod``, then ``mask_mod``, which hides keys by -inf.

    Raises:
        TypeError: a function does what has no node; the sentence names it.
        ValueError: it takes an element of a tensor without any.
    """
    recorder = Recorder(device or torch.device("cpu"))
    return _renumbered(recorder, _output(recorder, score_mod, mask_mod))


def trace_with_arguments(
    arguments: Sequence[Any], score_mod: Callable | None, mask_mod: Callable | None
) -> Trace:
    """The same of functions that take tensors and numbers after their signature's arguments, and refer to no others.

    arguments: of any call's dtypes and numbers of dimensions; no size and no number of theirs is recorded.

    Raises:
        TypeError: also where one refers to another tensor.
    """
    recorder = Recorder(torch.device("cpu"), arguments)
    output = _output(recorder, score_mod, mask_mod)
    if len(recorder.tensors) > len(arguments):
        recorder.refuse("refers to a tensor that is none of its arguments", "tensors as arguments")
    return Trace(recorder.graph, output, tuple(arguments))


def _output(recorder: "Recorder", score_mod: Callable | None, mask_mod: Callable | None) -> Node:
    graph = recorder.graph
    output = graph.input("score")
    if score_mod is not None:
        output = recorder.call("score_mod", score_mod)
        if output.kind != FLOAT:
            output = graph.cast(output, FLOAT)
    if mask_mod is not None:
        seen = recorder.call("mask_mod", mask_mod)
        if seen.kind != BOOL:
            raise TypeError(
                f"mask_mod returned {_THE_KINDS[seen.kind]}; accepted: a bool, such as q_idx >= kv_idx"
            )
        output = graph.where(seen, output, graph.const(-math.inf))
    return output


_THE_KINDS = {BOOL: "a bool", INT: "an integer", LONG: "an integer", FLOAT: "a float"}


def _renumbered(recorder: "Recorder", output: Node) -> Trace:
    """The trace with its tensors in the order of their first load, so that equal functions have equal graphs."""
    graph, used, changed = Graph(), dict[int, int](), dict[Node, Node]()
    for node in ordered(output):
        value = node.value
        if node.op == "load":
            value = used.setdefault(value, len(used))
        changed[node] = graph.make(node.op, node.kind, [changed[x] for x in node.args], value, node.parts)
    return Trace(graph, changed[output], tuple(recorder.tensors[i] for i in used))


class Recorder(TorchFunctionMode):
    """Records one trace. As a mode it sees what happens to real tensors with symbols, such as ``table[h, q - k]``."""

    def __init__(self, device: torch.device, arguments: Sequence[Any] = ()) -> None:
        super().__init__()
        self.graph, self.device = Graph(), device
        self.tensors: list[Any] = list(arguments)
        self.arguments = [self._argument(number, x) for number, x in enumerate(arguments)]
        self.what = ""

    def call(self, what: str, function: Any) -> Node:
        """The node that a function returns for the inputs of its signature."""
        check_function(what, function)
        self.what = what
        with self:
            inputs = [Symbol(self, self.graph.input(name)) for name in SIGNATURES[what]]
            return self.node(function(*inputs, *self.arguments), "returned")

    def _argument(self, number: int, x: Any) -> "Symbol | Argument":
        """What stands for an argument of a function behind those of its signature."""
        if isinstance(x, Tensor) and x.dim():
            return Argument(self, x, (), number)
        kind = LOADED.get(x.dtype, FLOAT) if isinstance(x, Tensor) else FLOAT if isinstance(x, float) else INT
        return Symbol(self, self.graph.make("load", kind, (), number))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _has_symbol((args, tuple(kwargs.values()))):
            return func(*args, **kwargs)
        return self.apply(getattr(func, "__name__", str(func)), args, kwargs)

    def apply(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An operation by its name."""
        if name == "__getitem__":
            return self.lookup(*args)
        plain = name.strip("_")
        if name.endswith("_") and not name.endswith("__"):
            self.refuse(f"changes a value in place by {name}")
        made = _OPERATIONS.get(plain) or _OPERATIONS.get(plain.removeprefix("r"))
        if made is None:
            return self.refuse(f"uses {name}")
        reverse = plain not in _OPERATIONS
        try:
            return Symbol(self, made(self, *(args[::-1] if reverse else args), **kwargs))
        except _Refused:
            self.refuse(f"uses {name} with arguments that are not traced")
        except TypeError as error:
            if "unexpected keyword" in str(error) or "positional argument" in str(error):
                self.refuse(f"uses {name} with arguments that are not traced")
            raise

    def refuse(self, what: str, accepted: str = ACCEPTED) -> Any:
        """Raise the sentence."""
        raise TypeError(f"{self.what} {what}; accepted: {accepted}") from None

    # ---- values ----

    def node(self, x: Any, did: str = "uses") -> Node:
        """The node of a symbol, a number, or a tensor of no dimensions."""
        if isinstance(x, Symbol):
            return x.node
        if isinstance(x, bool | int | float):
            return self.graph.const(x)
        if isinstance(x, Tensor) and x.dim() == 0:
            return self.load(x, ())
        if isinstance(x, Tensor | Row):
            shape = tuple(x.shape if isinstance(x, Tensor) else x.tensor.shape[len(x.indices) :])
            return self.refuse(
                f"{did} a tensor of shape {shape} as a whole", "its elements, such as table[h, q_idx]"
            )
        return self.refuse(f"{did} {x!r}", "traced values, numbers and elements of captured tensors")

    def load(self, tensor: Tensor, indices: tuple[Node, ...], number: int | None = None) -> Node:
        """An element of a captured tensor, or of the argument of that number, which may be another one's as well."""
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
        return self.graph.make("load", kind, indices, number)

    def lookup(self, table: Any, index: Any) -> Any:
        """``table[index]``: an element, or what is left to index."""
        if isinstance(table, Symbol):
            return self.refuse("indexes a traced value", "captured tensors as tables")
        row = table if isinstance(table, Row) else Row(self, table, ())
        tensor, first, number = row.tensor, row.indices, row.number
        items = index if isinstance(index, tuple) else (index,)
        nodes = list(first)
        for item in items:
            if isinstance(item, slice | list | None) or item is Ellipsis or isinstance(item, bool):
                return self.refuse(f"indexes a tensor by {item!r}", "traced integers, one for each dimension")
            node = self.node(item, "indexes a tensor by")
            if node.kind not in (INT, LONG):
                return self.refuse(f"indexes a tensor by {_THE_KINDS[node.kind]}", "traced integers")
            if node.op == "const" and node.value < 0 and len(nodes) < tensor.dim():
                size = table.shape[len(nodes) - len(first)]
                node = self.node(size + (node.value if isinstance(size, int) else Symbol(self, node)))
            nodes.append(node)
        if len(nodes) > tensor.dim():
            return self.refuse(
                f"indexes a tensor of {tensor.dim()} dimensions by {len(nodes)} integers", "one each"
            )
        if len(nodes) < tensor.dim():
            kind = Argument if isinstance(table, Argument) else Row
            return kind(self, tensor, tuple(nodes), number)
        return Symbol(self, self.load(tensor, tuple(nodes), number))


class _Refused(Exception):
    """An operation is traced, but not with these arguments."""


def _has_symbol(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return any(map(_has_symbol, x))
    return isinstance(x, Symbol | Row)


@dataclass(frozen=True, eq=False)
class Row:
    """A captured tensor with its first indices: ``table[h]``, before ``[q_idx]``."""

    recorder: Recorder
    tensor: Tensor
    indices: tuple[Node, ...]
    number: int | None = None

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape[len(self.indices) :]

    def __getitem__(self, index: Any) -> Any:
        return self.recorder.lookup(self, index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        row = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Row))
        return row.recorder.node(row)


class Argument(Row):
    """A tensor that a function is called with: a call's own one has other sizes, so that these are traced too."""

    @property
    def shape(self) -> Any:
        axes = range(len(self.indices), self.tensor.dim())
        graph = self.recorder.graph
        return tuple(
            Symbol(self.recorder, graph.make("extent", INT, (), (self.number, axis))) for axis in axes
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.recorder.refuse(f"uses {name} of a whole tensor", "its elements, shape and dtype")


class Symbol:
    """A scalar of a trace, with the operators and methods of a tensor of no dimensions."""

    def __init__(self, recorder: Recorder, node: Node) -> None:
        self.recorder, self.node = recorder, node

    shape: ClassVar[torch.Size] = torch.Size(())
    ndim: ClassVar[int] = 0
    requires_grad: ClassVar[bool] = False
    _DTYPES: ClassVar[dict[str, torch.dtype]] = {
        BOOL: torch.bool,
        INT: torch.int32,
        LONG: torch.int64,
        FLOAT: torch.float32,
    }

    @property
    def dtype(self) -> torch.dtype:
        return self._DTYPES[self.node.kind]

    @property
    def device(self) -> torch.device:
        return self.recorder.device

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return self.shape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a symbol outlived its trace")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.recorder.apply(name, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.recorder.lookup(self, index)

    def _needs_its_value(self, *_: Any) -> Any:
        self.recorder.refuse(
            "asks for the number of a traced value (if, and, or, not, int(), float(), range())",
            "torch.where, &, |, ~, .to(dtype)",
        )

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = item = tolist = _needs_its_value
    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Symbol, *args: Any) -> Any:
        return self.recorder.apply(name, (self, *args), {})

    return method


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    *(f"r{x}" for x in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")),
    *("rlshift", "rrshift", "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert"),
):
    setattr(Symbol, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Row, f"__{_name}__", lambda self, *others: self.recorder.node(self))


# ---- operations by torch's names ----

Make = Callable[..., Node]


def _binary(op: str, least: str = INT, of_bools: str = "") -> Make:
    """of_bools: what it is of two bools."""

    def make(t: Recorder, input: Any, other: Any) -> Node:
        a, b = t.node(input), t.node(other)
        if a.kind == b.kind == BOOL and least == INT:
            if not of_bools:
                raise _Refused
            return t.graph.binary(of_bools, a, b, BOOL)
        return t.graph.binary(op, a, b, least)

    return make


def _integers(op: str) -> Make:
    """On integers alone, or for & | ^ on bools."""

    def make(t: Recorder, input: Any, other: Any) -> Node:
        a, b = t.node(input), t.node(other)
        if FLOAT in (a.kind, b.kind):
            raise _Refused
        return t.graph.binary(op, a, b, BOOL if op in ("and", "or", "xor") else INT)

    return make


def _logical(op: str) -> Make:
    def make(t: Recorder, input: Any, other: Any) -> Node:
        return t.graph.binary(op, t.graph.cast(t.node(input), BOOL), t.graph.cast(t.node(other), BOOL), BOOL)

    return make


def _compared(op: str) -> Make:
    return lambda t, input, other: t.graph.compare(op, t.node(input), t.node(other))


def _unary(op: str) -> Make:
    return lambda t, input: t.graph.unary(op, t.node(input))


def _step(op: str) -> Make:
    """floor, ceil, trunc: an integer stays."""

    def make(t: Recorder, input: Any) -> Node:
        x = t.node(input)
        return t.graph.unary(op, x) if x.kind == FLOAT else x

    return make


def _floor_divide(t: Recorder, input: Any, other: Any) -> Node:
    a, b = t.graph.promoted(t.node(input), t.node(other), least=INT)
    if a.kind == FLOAT:
        return t.graph.unary("floor", t.graph.binary("div", a, b))
    return t.graph.binary("floordiv", a, b)


def _remainder(t: Recorder, input: Any, other: Any) -> Node:
    a, b = t.graph.promoted(t.node(input), t.node(other), least=INT)
    if a.kind == FLOAT:
        whole = t.graph.unary("floor", t.graph.binary("div", a, b))
        return t.graph.binary("sub", a, t.graph.binary("mul", whole, b))
    return t.graph.binary("mod", a, b)


def _div(t: Recorder, input: Any, other: Any, *, rounding_mode: str | None = None) -> Node:
    if rounding_mode == "floor":
        return _floor_divide(t, input, other)
    made = t.graph.binary("div", t.node(input), t.node(other), FLOAT)
    if rounding_mode == "trunc" and FLOAT in (t.node(input).kind, t.node(other).kind):
        return t.graph.unary("trunc", made)
    if rounding_mode is not None:
        raise _Refused
    return made


def _pow(t: Recorder, input: Any, exponent: Any) -> Node:
    x, power = t.node(input), t.node(exponent)
    if power.op == "const" and power.value in (0.5, -0.5):
        return t.graph.unary("sqrt" if power.value > 0 else "rsqrt", x)
    if power.op == "const" and power.value in (1, 2, 3, 4):
        result = t.graph.promoted(x, least=power.kind)[0]
        factor = result
        for _ in range(int(power.value) - 1):
            result = t.graph.binary("mul", result, factor)
        return result
    if x.op == "const" and x.value > 0 and FLOAT in (x.kind, power.kind):
        return t.graph.unary("exp2", t.graph.binary("mul", power, t.graph.const(math.log2(x.value)), FLOAT))
    raise _Refused


def _where(t: Recorder, condition: Any, input: Any, other: Any) -> Node:
    return t.graph.where(t.graph.cast(t.node(condition), BOOL), t.node(input), t.node(other))


def _method_where(t: Recorder, first: Any, second: Any, other: Any) -> Node:
    """``torch.where(condition, input, other)`` or ``input.where(condition, other)``."""
    condition, value = (first, second) if t.node(first).kind == BOOL else (second, first)
    return _where(t, condition, value, other)


def _clamp(t: Recorder, input: Any, min: Any = None, max: Any = None) -> Node:
    x = t.node(input)
    for op, bound in (("clamp_min", min), ("clamp_max", max)):
        if bound is not None:
            x = t.graph.binary(op, x, t.node(bound))
    return x


def _invert(t: Recorder, input: Any) -> Node:
    x = t.node(input)
    if x.kind == FLOAT:
        raise _Refused
    return t.graph.make("not", x.kind, (x,))


def _not(t: Recorder, input: Any) -> Node:
    return t.graph.make("not", BOOL, (t.graph.cast(t.node(input), BOOL),))


def _sign(t: Recorder, input: Any) -> Node:
    x, g = t.node(input), t.graph
    one = g.const(1.0 if x.kind == FLOAT else 1)
    below = g.where(g.compare("lt", x, g.const(0)), g.unary("neg", one), g.cast(g.const(0), one.kind))
    return g.where(g.compare("gt", x, g.const(0)), one, below)


def _relu(t: Recorder, input: Any, inplace: bool = False) -> Node:
    x = t.node(input)
    zero = t.graph.cast(t.graph.const(0), x.kind)
    return t.graph.where(t.graph.compare("gt", x, zero), x, zero)


def _square(t: Recorder, input: Any) -> Node:
    return _pow(t, input, 2)


def _reciprocal(t: Recorder, input: Any) -> Node:
    return t.graph.binary("div", t.graph.const(1.0), t.node(input), FLOAT)


def _cast_to(kind: str) -> Make:
    return lambda t, input: _cast(t, t.node(input), kind)


def _cast(t: Recorder, x: Node, kind: str) -> Node:
    """An integer of 32 bits is not widened: its value is the same."""
    return x if (x.kind, kind) == (INT, LONG) else t.graph.cast(x, kind)


_DTYPE_KINDS = {**LOADED, torch.uint8: None, torch.int8: None, torch.int16: None}


def _to(t: Recorder, input: Any, *args: Any, dtype: Any = None, device: Any = None, **_: Any) -> Node:
    dtypes = [x for x in (*args, dtype) if isinstance(x, torch.dtype)]
    dtypes += [x.dtype for x in args if isinstance(x, Symbol | Tensor)]
    x = t.node(input)
    if not dtypes:
        return x
    kind = _DTYPE_KINDS.get(dtypes[0])
    if kind is None:
        raise _Refused  # narrower integers would wrap
    return _cast(t, x, INT if kind == LONG and x.kind == BOOL else kind)


def _filled(value: Any) -> Make:
    """new_ones(()), zeros_like(x) and such: of the dtype of x unless one is named. value: None for an argument."""

    def make(t: Recorder, input: Any, *args: Any, dtype: Any = None, size: Any = (), **others: Any) -> Node:
        if value is None:
            fill = others["fill_value"] if "fill_value" in others else args[-1]
            args = args if "fill_value" in others else args[:-1]
        else:
            fill = value
        if any(tuple(x) if isinstance(x, tuple | list) else True for x in (*args, size)):
            raise _Refused
        kind = t.node(input).kind if dtype is None else LOADED.get(dtype)
        if kind is None:
            raise _Refused
        return t.graph.cast(t.node(fill), kind)

    return make


def _same(t: Recorder, input: Any, *_: Any, **__: Any) -> Node:
    return t.node(input)


_OPERATIONS: dict[str, Make] = {
    "add": _binary("add", of_bools="or"),
    "sub": _binary("sub"),
    "subtract": _binary("sub"),
    "mul": _binary("mul", of_bools="and"),
    "multiply": _binary("mul", of_bools="and"),
    "truediv": _div,
    "true_divide": _div,
    "div": _div,
    "divide": _div,
    "floordiv": _floor_divide,
    "floor_divide": _floor_divide,
    "mod": _remainder,
    "remainder": _remainder,
    "pow": _pow,
    "minimum": _binary("minimum", of_bools="and"),
    "maximum": _binary("maximum", of_bools="or"),
    "min": _binary("minimum", of_bools="and"),
    "max": _binary("maximum", of_bools="or"),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda t, input, min: _clamp(t, input, min),
    "clamp_max": lambda t, input, max: _clamp(t, input, None, max),
    **{name: _integers(name) for name in ("and", "or", "xor")},
    **{f"bitwise_{name}": _integers(name) for name in ("and", "or", "xor")},
    **{name: _integers("shl") for name in ("lshift", "bitwise_left_shift")},
    **{name: _integers("shr") for name in ("rshift", "bitwise_right_shift")},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor")},
    "logical_not": _not,
    "invert": _invert,
    "bitwise_not": _invert,
    **{name: _compared(name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{long: _compared(op) for long, op in (("less", "lt"), ("less_equal", "le"), ("greater", "gt"))},
    **{long: _compared(op) for long, op in (("greater_equal", "ge"), ("not_equal", "ne"))},
    **{name: _unary(name) for name in ("neg", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh")},
    **{name: _unary(name) for name in ("sigmoid", "sin", "cos", "abs")},
    "negative": _unary("neg"),
    "absolute": _unary("abs"),
    **{name: _step(name) for name in ("floor", "ceil", "trunc")},
    "where": _method_where,
    "sign": _sign,
    "sgn": _sign,
    "relu": _relu,
    "square": _square,
    "reciprocal": _reciprocal,
    "float": _cast_to(FLOAT),
    "double": _cast_to(FLOAT),
    "int": _cast_to(INT),
    "long": _cast_to(LONG),
    "bool": _cast_to(BOOL),
    "to": _to,
    "type": _to,
    "type_as": _to,
    **dict.fromkeys(("pos", "positive", "clone", "contiguous"), _same),
    **{name: _filled(1) for name in ("ones_like", "new_ones")},
    **{name: _filled(0) for name in ("zeros_like", "new_zeros")},
    **{name: _filled(None) for name in ("full_like", "new_full", "new_tensor")},
}
