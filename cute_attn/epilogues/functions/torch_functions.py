"""Functions of torch on traced values, by torch's names: what each makes of its operands' nodes.

The operations of the table in :mod:`.operations` are made as their rows say, and functions that are composed of others
as :mod:`.composed` says.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from cute_attn.epilogues.functions.composed import COMPOSED
from cute_attn.epilogues.functions.graph import BOOL, FLOAT, INT, LONG, Graph, Node
from cute_attn.epilogues.functions.operations import COMPARED, FLOATS, OPERATIONS, ROUNDED
from cute_attn.epilogues.functions.symbols import LOADED, Argument, Symbol, dtype_name

if TYPE_CHECKING:
    from cute_attn.epilogues.functions.trace import Recorder


class Refused(Exception):
    """Raised if an operation can be traced, but not with these arguments."""


NO_INDICES = frozenset((torch.uint8, torch.int8, torch.int16))
ALIASES = frozenset((
    "contiguous", "to", "as_tensor", "type", "type_as", "float", "double", "half", "bfloat16", "int", "short", "char",
    "byte", "long", "bool", "positive", "conj", "resolve_conj", "detach", "data",
))  # fmt: skip
"""Operations that return the value itself if it already has the requested dtype."""
LOOKUPS = frozenset(("select", "index_select", "gather", "take", "embedding", "bucketize", "searchsorted"))
"""Operations that read tables."""
VIEWS = frozenset((
    "view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "squeeze", "unsqueeze", "flatten", "ravel", "T",
    "mT", "real", "__getitem__",
))  # fmt: skip
"""Operations that give a tensor of one element other dimensions."""
LIKE_ANOTHER = frozenset(("view_as", "reshape_as", "expand_as", "result_type"))
"""Operations that ask another tensor for its shape or dtype."""
SIZES = frozenset(("shape", "size", "numel", "nelement", "__len__", "stride", "is_contiguous"))
VIEWS_OF_TABLES = VIEWS | {
    "t", "transpose", "swapaxes", "permute", "movedim", "unflatten", "select", "narrow", "unbind", "chunk", "split",
    "diagonal", "unfold",
}  # fmt: skip
MAKE_NUMBERS = frozenset(
    (torch.tensor, torch.full, torch.zeros, torch.ones, torch.scalar_tensor, torch.as_tensor)
)
METADATA = SIZES | {
    "ndim", "dim", "ndimension", "dtype", "device", "layout", "itemsize", "element_size", "get_device", "result_type",
    "is_floating_point", "is_complex", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested",
}  # fmt: skip
"""Attributes and methods that follow from dtype, shape, strides and device."""
VALUES = frozenset((
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__", "__iter__", "__contains__", "item",
    "tolist", "numpy", "is_nonzero", "equal", "allclose",
))  # fmt: skip
"""Operations that need the number of a traced value."""


def name_of(func: Any) -> str:
    """The name of a torch function: an attribute, an operator with its library's name, or a method."""
    if isinstance(func, OpOverload):
        func = func.overloadpacket
    if isinstance(func, OpOverloadPacket):
        library, _, name = func._qualified_op_name.partition("::")
        return name if library == "aten" else f"{library}::{name}"
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def is_in_place(name: str) -> bool:
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


@functools.lru_cache(1024)
def is_random(func: Any) -> bool:
    """True if two calls may differ, as with torch.rand or dropout."""
    name = name_of(func)
    packet = (
        getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    )
    overloads = [getattr(packet, one) for one in packet.overloads()] if packet is not None else []
    return any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)


def made_by(func: Any) -> "Make | None":
    """The operation on traced values for a function of torch, if any."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        return MAKES.get(name_of(func).removeprefix("special_"))
    return _by_identity().get(func)


@functools.cache
def _by_identity() -> "dict[Any, Make]":
    """Function or method of torch -> its operation on traced values, by ``MAKES``; also reversed operators."""
    found: dict[Any, Make] = {}
    for name, made in MAKES.items():
        for place in (torch, Tensor, torch.nn.functional, torch.special):
            for one in (name, f"__{name}__"):
                if callable(function := getattr(place, one, None)):
                    found.setdefault(function, made)
    for name in ("sub", "div", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"):
        for function in (getattr(Tensor, f"__r{name}__", None), getattr(torch, f"r{name}", None)):
            if function is not None:
                found.setdefault(function, _reversed(MAKES[name]))
    found[Tensor.data.__get__] = MAKES["detach"]  # type: ignore[attr-defined]
    found[Tensor.where] = lambda t, input, condition, other: _where(t, condition, input, other)
    found[torch.nn.functional.embedding] = _embedding_of_nn
    found[torch.searchsorted] = lambda t, sorted_sequence, input, **options: _bucketize(
        t, input, sorted_sequence, **options
    )
    return found


def _reversed(made: "Make") -> "Make":
    return lambda t, input, other, **options: made(t, other, input, **options)


# ---- operations by torch's names ----

Make = Callable[..., Any]
"""Maps the recorder and an operation's arguments to its node, or to a result of :meth:`Recorder.lookup`."""


def _of_row(op: str) -> Make:
    """An operation of the table, on the operands that its row takes."""
    row = OPERATIONS[op]

    def of_one(t: "Recorder", input: Any) -> Node:
        x = t.node(input)
        return x if row.takes == ROUNDED and x.kind != FLOAT else t.graph.unary(op, x)

    def of_two(t: "Recorder", input: Any, other: Any) -> Node:
        a, b = t.node(input), t.node(other)
        if row.takes == COMPARED:
            return t.graph.compare(op, a, b)
        if row.of_bools and a.kind == b.kind == BOOL:
            return t.graph.binary(row.of_bools, a, b, BOOL)
        return t.graph.binary(op, a, b)

    return of_one if row.takes in (FLOATS, ROUNDED) else of_two


def _scaled(made: Make) -> Make:
    """``made`` with a parameter ``alpha``, a factor of the second operand."""

    def make(t: "Recorder", input: Any, other: Any, *, alpha: float = 1) -> Node:
        if isinstance(alpha, Tensor) or alpha != 1:  # torch reads a tensor's number, which has no gradient
            factor = t.graph.detached(t.node(alpha))
            other = t.symbol(t.graph.binary("mul", t.node(other), factor))
        return made(t, input, other)

    return make


def _logical(op: str) -> Make:
    return lambda t, input, other: t.graph.binary(op, _predicate(t, input), _predicate(t, other), BOOL)


def _round(t: "Recorder", input: Any, *, decimals: int = 0) -> Node:
    if not decimals:
        return _of_row("round")(t, input)
    g, factor = t.graph, t.graph.const(10.0 ** abs(decimals))
    before, after = ("mul", "div") if decimals > 0 else ("div", "mul")
    return g.binary(after, g.unary("round", g.binary(before, t.node(input), factor)), factor)


def _fmod(t: "Recorder", input: Any, other: Any) -> Node:
    g = t.graph
    a, b = g.promoted(t.node(input), t.node(other), least=INT)
    if a.kind == FLOAT:
        return g.binary("fmod", a, b)
    size = g.binary("mod", g.unary("abs", a), g.unary("abs", b))
    return g.where(g.compare("lt", a, g.const(0)), g.unary("neg", size), size)


def _div(t: "Recorder", input: Any, other: Any, *, rounding_mode: str | None = None) -> Node:
    if rounding_mode == "floor":
        return _of_row("floordiv")(t, input, other)
    g, a, b = t.graph, t.node(input), t.node(other)
    if rounding_mode == "trunc" and FLOAT not in (a.kind, b.kind):
        whole, zero = g.binary("floordiv", g.unary("abs", a), g.unary("abs", b)), g.const(0)
        differ = g.binary("xor", g.compare("lt", a, zero), g.compare("lt", b, zero), BOOL)
        return g.where(differ, g.unary("neg", whole), whole)
    made = g.binary("div", a, b, FLOAT)
    return g.unary("trunc", made) if rounding_mode == "trunc" else made


_MOST_FACTORS = 64


def _pow(t: "Recorder", input: Any, exponent: Any) -> Node:
    g, x, power = t.graph, t.node(input), t.node(exponent)
    if power.op == "const" and power.value in (0.5, -0.5):
        return g.unary("sqrt" if power.value > 0 else "rsqrt", x)
    if power.op == "const" and power.value in range(1, _MOST_FACTORS + 1):
        return _power(g, g.promoted(x, least=power.kind)[0], int(power.value))
    if FLOAT not in (x.kind, power.kind):
        raise Refused  # a power of integers would need a loop
    if power.op == "const" and -power.value in range(1, _MOST_FACTORS + 1):
        return g.binary("div", g.const(1.0), _power(g, x, -int(power.value)), FLOAT)
    if x.op == "const" and x.value > 0:
        return g.unary("exp2", g.binary("mul", power, g.const(math.log2(x.value)), FLOAT))
    return g.binary("pow", x, power, FLOAT)


def _power(g: Graph, x: Node, count: int) -> Node:
    """The product of ``count`` factors x."""
    if count == 1:
        return x
    half = _power(g, x, count // 2)
    square = g.binary("mul", half, half)
    return g.binary("mul", square, x) if count % 2 else square


def _where(t: "Recorder", condition: Any, input: Any, other: Any) -> Node:
    return t.graph.where(_predicate(t, condition), t.node(input), t.node(other))


def _predicate(t: "Recorder", input: Any) -> Node:
    return t.graph.cast(t.node(input), BOOL)


def _clamp(t: "Recorder", input: Any, min: Any = None, max: Any = None) -> Node:
    x = t.node(input)
    for op, bound in (("clamp_min", min), ("clamp_max", max)):
        if bound is not None:
            x = t.graph.binary(op, x, t.node(bound))
    return x


def _invert(t: "Recorder", input: Any) -> Node:
    x = t.node(input)
    return t.graph.make("not", x.kind, (x,))


def _sign(t: "Recorder", input: Any) -> Node:
    x, g = t.node(input), t.graph
    one = typed(t, g.const(1.0), input.dtype) if x.kind == FLOAT else g.const(1)
    below = g.where(g.compare("lt", x, g.const(0)), g.unary("neg", one), g.cast(g.const(0), one.kind))
    return g.where(g.compare("gt", x, g.const(0)), one, below)


def _cast_to(dtype: torch.dtype) -> Make:
    return lambda t, input: cast(t, t.node(input), dtype)


def cast(t: "Recorder", x: Node, dtype: torch.dtype) -> Node:
    """x as ``dtype``. A 32-bit integer is not widened for int64, since its value is the same."""
    if x.op == "score" and dtype == t.dtype:
        return x
    kind = LOADED[dtype]
    if kind == LONG and x.kind in (BOOL, INT):
        kind = INT
    if dtype in NO_INDICES and x.kind == FLOAT:
        x = t.graph.cast(x, INT, "int32")
    return t.graph.cast(x, kind, dtype_name(dtype))


def _to(t: "Recorder", input: Any, *args: Any, dtype: Any = None, device: Any = None, **_: Any) -> Node:
    dtypes = [x for x in (*args, dtype) if isinstance(x, torch.dtype)]
    dtypes += [x.dtype for x in args if isinstance(x, Tensor)]
    x = t.node(input)
    if not dtypes:
        return x
    if dtypes[0] not in LOADED:
        raise Refused
    return cast(t, x, dtypes[0])


def _type(t: "Recorder", input: Any, dtype: Any = None) -> Node:
    """Cast to ``dtype``, or to the dtype of a tensor; refused without an argument, where torch returns a string."""
    if not isinstance(dtype, torch.dtype | Tensor):
        raise Refused
    return _to(t, input, dtype)


def typed(t: "Recorder", number: Node, dtype: torch.dtype | None) -> Node:
    """A number with a tensor's dtype; unlike a Python number, it affects promotion."""
    wide = dtype == torch.float64 or (dtype == torch.float32 and number.kind == FLOAT)
    if not wide or number.op != "const" or not math.isfinite(number.value):  # -inf hides, whatever its dtype
        return number
    return t.graph.make("cast", FLOAT, (number,), dtype=dtype_name(dtype))  # type: ignore[arg-type]


def _signbit(t: "Recorder", input: Any) -> Node:
    g, x = t.graph, t.node(input)
    return g.make("signbit", BOOL, (x,)) if x.kind == FLOAT else g.compare("lt", x, g.const(0))


_MOST_BOUNDARIES = 64


def _bucketize(
    t: "Recorder", input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Symbol:
    """The number of boundaries below the input, from a comparison with each boundary; NaN is above all of them."""
    if boundaries.dim() != 1 or isinstance(boundaries, Argument) or len(boundaries) > _MOST_BOUNDARIES:
        raise Refused
    g, found = t.graph, t.graph.const(0)
    for place in range(len(boundaries)):
        one = t.lookup(boundaries, place).node
        above = g.compare("lt" if right else "le", t.node(input), one)
        found = g.binary("add", found, g.cast(g.make("not", BOOL, (above,)), INT, "int64"))
    return t.symbol(g.cast(found, INT, "int32") if out_int32 else found)


def _select(t: "Recorder", input: Any, dim: int, index: Any) -> Any:
    return t.lookup(input, (*[slice(None)] * (dim % input.dim()), index))


def _gather(t: "Recorder", input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if max(index.dim(), 1) != input.dim():
        raise Refused
    axis = dim % input.dim()
    return t.lookup(input, tuple(index if axis == i else 0 for i in range(input.dim())))


def _take(t: "Recorder", input: Any, index: Any) -> Any:
    return t.lookup(t.applied(torch.reshape, input, (-1,)) if input.dim() != 1 else input, index)


def _embedding(
    t: "Recorder",
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if padding_idx != -1 or scale_grad_by_freq or sparse:  # another gradient
        raise Refused
    return t.lookup(weight, indices)


def _embedding_of_nn(
    t: "Recorder",
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    **others: Any,
) -> Any:
    if (padding_idx, max_norm) != (None, None):
        raise Refused
    others.pop("norm_type", None)
    return _embedding(t, weight, input, **others)


def _filled(value: Any) -> Make:
    """new_ones(()), zeros_like(x) and the like, in x's dtype by default. value: None if the value is an argument."""

    def make(t: "Recorder", input: Any, *args: Any, dtype: Any = None, size: Any = (), **others: Any) -> Node:
        if value is None:
            fill = others["fill_value"] if "fill_value" in others else args[-1]
            args = args if "fill_value" in others else args[:-1]
        else:
            fill = value
        if any(tuple(x) if isinstance(x, tuple | list) else True for x in (*args, size)):
            raise Refused
        kind = t.node(input).kind if dtype is None else LOADED.get(dtype)
        if kind is None:
            raise Refused
        return typed(t, t.graph.cast(t.node(fill), kind), input.dtype if dtype is None else dtype)

    return make


_CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8, "long": torch.int64,
    "bool": torch.bool,
}  # fmt: skip
_OTHER_NAMES = {
    "subtract": "sub", "multiply": "mul", "floor_divide": "floordiv", "remainder": "mod", "negative": "neg",
    "absolute": "abs", "min": "minimum", "max": "maximum", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "lshift": "shl", "bitwise_left_shift": "shl", "rshift": "shr", "bitwise_right_shift": "shr",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "expit": "sigmoid",
    "arctan": "atan", "fix": "trunc",
}  # fmt: skip
"""torch's other names -> names of operations in the table."""
_ROWS = {op: _of_row(op) for op, row in OPERATIONS.items() if row.takes}
_ROWS |= {name: _ROWS[op] for name, op in _OTHER_NAMES.items()}
MAKES: dict[str, Make] = {
    **{name: lambda t, *args, of=of, **options: of(*args, **options) for name, of in COMPOSED.items()},
    **_ROWS,
    **{name: _scaled(_ROWS[name]) for name in ("add", "sub", "subtract")},
    "rsub": _reversed(_scaled(_ROWS["sub"])),
    **dict.fromkeys(("truediv", "true_divide", "div", "divide"), _div),
    "fmod": _fmod,
    "pow": _pow,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": lambda t, input, min: _clamp(t, input, min),
    "clamp_max": lambda t, input, max: _clamp(t, input, None, max),
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor")},
    "logical_not": lambda t, input: t.graph.make("not", BOOL, (_predicate(t, input),)),
    **dict.fromkeys(("invert", "bitwise_not"), _invert),
    "round": _round,
    "signbit": _signbit,
    **dict.fromkeys(("sign", "sgn"), _sign),
    "where": _where,
    **{name: _cast_to(dtype) for name, dtype in _CASTS.items()},
    **dict.fromkeys(("to", "as_tensor"), _to),
    **dict.fromkeys(("type", "type_as"), _type),
    "detach": lambda t, input: t.graph.detached(t.node(input)),
    **dict.fromkeys(
        ("pos", "positive", "clone", "contiguous", "conj", "resolve_conj"),
        lambda t, input, *_, **__: t.node(input),
    ),
    "bucketize": _bucketize,
    "select": _select,
    "index_select": lambda t, input, dim, index: torch.unsqueeze(
        _select(t, input, dim, index.squeeze()), dim
    ),
    "gather": _gather,
    "take": _take,
    "embedding": _embedding,
    **dict.fromkeys(("ones_like", "new_ones"), _filled(1)),
    **dict.fromkeys(("zeros_like", "new_zeros"), _filled(0)),
    **dict.fromkeys(("full_like", "new_full", "new_tensor"), _filled(None)),
}

KNOWN_NAMES = (
    METADATA
    | VIEWS_OF_TABLES
    | MAKES.keys()
    | {x for x in dir(math) if not x.startswith("_")}
    | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    | {"tensor", "full", "zeros", "ones", "scalar_tensor"}
    | {"Tensor", "no_grad", "enable_grad", "nn", "functional", "special", "data", "inf", "nan", "newaxis"}
)
"""Names of attributes that mean the same in every call: operations, metadata, and constants of torch and math."""
