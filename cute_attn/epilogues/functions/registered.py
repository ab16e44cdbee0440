"""Functions of scores, registered as epilogues by name, for kernel names, commands and calls that pass arguments.

@score_mod("relative_position", example=lambda batch, nheads, *_: (torch.randn(nheads, 257),))
def relative_position(score, b, h, q_idx, kv_idx, table):
    reach = table.shape[1] // 2
    return score + table[h, (kv_idx - q_idx).clamp(-reach, reach) + reach]
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from cute_attn.epilogues.functions.definition import AS_TORCH, Precision
from cute_attn.epilogues.functions.epilogue import Captured, FunctionEpilogue, as_kernels_read, digest_of
from cute_attn.epilogues.functions.graph import Node
from cute_attn.epilogues.functions.lowering import lower
from cute_attn.epilogues.functions.operations import ELEMENT
from cute_attn.epilogues.functions.reads import Reads
from cute_attn.epilogues.functions.symbols import LOADED
from cute_attn.epilogues.functions.trace import SIGNATURES, check_function, trace_with_arguments
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.names import check_name, register_function

Function = TypeVar("Function", bound=Callable)
Example = Callable[[int, int, int, int], tuple]
_INTS = range(-ELEMENT, ELEMENT + 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class RegisteredFunction(FunctionEpilogue):
    """A registered function.

    Attributes:
        parameters: names of the call's arguments; ``captured`` describes them.
        dimensions: numbers of dimensions of a call's tensors.
        example: see :func:`score_mod`.
        written: the object with the function's name and module.
        functions: (score_mod, mask_mod), one of them None.
        arguments: arguments for tracing the function.
        was_read: the key of its reads at registration, see :class:`.reads.Reads`; None if they have no complete key.
        code_digest: distinguishes the function from others of the same name.
    """

    parameters: tuple[str, ...]
    dimensions: tuple[int, ...]
    example: Example
    written: Any
    functions: tuple[Callable | None, Callable | None]
    arguments: tuple
    was_read: tuple | None
    code_digest: str = field()  # type: ignore[misc]

    def example_args(self, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> tuple:  # type: ignore[override]
        return self.example(batch, nheads, seqlen_q, seqlen_k)

    def given(self, inputs: ScoreInputs) -> tuple:
        """The checked arguments of a call."""
        self._check_unchanged()
        given = inputs.extra.get(self.name, ())
        if len(given) != len(self.parameters):
            wanted = ", ".join(self.parameters) or "none"
            count = f"{len(given)} argument{'s' * (len(given) != 1)}"
            raise TypeError(f"epilogue {self.name!r} is given {count}; accepted: {wanted}")
        return tuple(map(self._checked, given, self.parameters, self.captured, self.dimensions))

    def _checked(self, x: Any, parameter: str, wanted: Captured, dimensions: int) -> Any:
        whose = f"argument {parameter} of epilogue {self.name!r}"
        if wanted.dtype == "float" and isinstance(x, int):
            return float(x)
        if wanted.dtype == "int" and type(x) is int and x not in _INTS:
            raise ValueError(f"{whose} is {x}; accepted: ints from {-ELEMENT} to {ELEMENT}")
        own, own_dimensions = Captured.of(x), x.dim() if isinstance(x, Tensor) else 0
        if (own, own_dimensions) != (wanted, dimensions):
            found = _described(own, own_dimensions, own.unit_stride or dimensions == 0)
            accepted = _described(wanted, dimensions, wanted.unit_stride)
            raise TypeError(f"{whose} is {found}; accepted: {accepted}")
        if isinstance(x, Tensor) and not x.numel():
            raise ValueError(f"{whose} has shape {tuple(x.shape)}; accepted: elements")
        return x

    def check(self, inputs: ScoreInputs) -> None:  # type: ignore[override]
        self.given(inputs)

    def _check_unchanged(self) -> None:
        reads = Reads(*self.functions)
        if reads.complete and reads.key == self.was_read:
            return
        traced = trace_with_arguments(self.arguments, *self.functions)
        if digest_of(traced.output, self.captured) != self.code_digest:
            raise ValueError(
                f"epilogue {self.name!r} refers to a value that has changed since it was registered; accepted: that "
                "value as an argument of the function"
            )

    @functools.cached_property
    def _of_float64(self) -> Node:
        """The traced output for float64 scores. It is traced once, since a changed function has been refused before."""
        return trace_with_arguments(self.arguments, *self.functions, dtype=torch.float64).output

    def evaluated(
        self,
        scores: Any,
        coords: Any,
        args: tuple,
        precision: Precision = AS_TORCH,
        output: Node | None = None,
    ) -> Any:
        """See the base class. float64 scores have a separate trace, since a function may ask for the scores' dtype."""
        if output is None and scores.dtype == torch.float64:
            output = self._of_float64
        return super().evaluated(scores, coords, args, precision, output)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return tuple(as_kernels_read(x) for x in self.given(inputs))


def _described(one: Captured, dimensions: int, unit_stride: bool) -> str:
    if not one.rank:
        return f"an {one.dtype}" if one.dtype == "int" else f"a {one.dtype}"
    last = "" if unit_stride else ", its last stride not 1"
    return f"a {dimensions}-d tensor of {one.dtype}{last}"


def score_mod(name: str, *, example: Example | None = None) -> Callable[[Function], Function]:
    """Function decorator: register a function of a score as an epilogue, forward and backward, for every kernel.

    The function is a score_mod of FlexAttention: it maps ``(score, b, h, q_idx, kv_idx)``, all scalars, to the new
    score. Further parameters are tensors, which it reads by element, and numbers. A call passes them:
    ``attention(..., epilogues={name: (table, 0.5)})``. They must have the example's dtypes and numbers of dimensions;
    other sizes and values need no new compilation. ``name`` is accepted in kernel names too.

    Args:
        name: the epilogue's name in traits and calls.
        example: a function of (batch, nheads, seqlen_q, seqlen_k) that returns the further arguments of a call of these
            sizes, as a tuple with CPU tensors, for checks, timings and tuning by name. None: no further parameters.

    Raises:
        TypeError: the function cannot be traced, refers to a tensor that is not one of its arguments, or has
            parameters that do not match the example.
        ValueError: the name is taken by another function or class, or cannot be a word of a kernel's name.
    """
    return _registering("score_mod", name, example)


def mask_mod(name: str, *, example: Example | None = None) -> Callable[[Function], Function]:
    """Like :func:`score_mod`, for a function of ``(b, h, q_idx, kv_idx)`` that returns True for visible keys."""
    return _registering("mask_mod", name, example)


def _registering(what: str, name: str, example: Example | None) -> Callable[[Function], Function]:
    check_name(name, what)

    def register(function: Function) -> Function:
        check_function(what, function)
        parameters = _parameters_of(what, name, function)
        arguments = _arguments_of(f"example of {what} {name!r}", example, parameters)
        pair = (function, None) if what == "score_mod" else (None, function)
        traced = trace_with_arguments(arguments, *pair)
        captured, reads = tuple(Captured.of(x) for x in arguments), Reads(*pair)
        made = RegisteredFunction(
            name=name,
            graph=traced.graph,
            output=traced.output,
            captured=captured,
            lowered=lower(traced.graph, traced.output),
            parameters=parameters,
            dimensions=tuple(x.dim() if isinstance(x, Tensor) else 0 for x in arguments),
            example=example or (lambda *sizes: ()),
            written=_written(function),
            functions=pair,
            arguments=tuple(x.to("meta") if isinstance(x, Tensor) else x for x in arguments),
            was_read=reads.key if reads.complete else None,
            code_digest=digest_of(traced.output, captured),
        )
        register_function(name, made)
        return function

    return register


def _written(function: Callable) -> Any:
    """The object with a function's name and module: the function, a partial's function, or an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def _arguments_of(whose: str, example: Example | None, parameters: tuple[str, ...]) -> tuple:
    """The checked arguments that ``example`` returns. whose: the subject of error messages."""
    if example is not None and not callable(example):
        raise TypeError(
            f"{whose} is {example!r}; accepted: a function of (batch, nheads, seqlen_q, seqlen_k)"
        )
    with torch.random.fork_rng(devices=()):  # a program's random numbers stay as they are
        arguments = () if example is None else example(2, 4, 128, 128)
    if not isinstance(arguments, tuple) or len(arguments) != len(parameters):
        if example is None:
            raise TypeError(
                f"{whose} is None; accepted for arguments ({', '.join(parameters)}): a function of (batch, nheads, "
                "seqlen_q, seqlen_k) that returns them in a tuple"
            )
        given = f"{len(arguments)} arguments" if isinstance(arguments, tuple) else repr(arguments)
        wanted = f"a tuple of {', '.join(parameters)}" if parameters else "none"
        raise TypeError(f"{whose} returns {given}; accepted: {wanted}")
    for parameter, x in zip(parameters, arguments, strict=True):
        if isinstance(x, Tensor):
            right = x.dtype in LOADED and x.layout is torch.strided and not x.is_nested
        else:
            right = type(x) is float or (type(x) is int and x in _INTS)
        if not right:
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in LOADED)
            given = f"a tensor of {x.dtype}, {x.layout}" if isinstance(x, Tensor) else repr(x)
            raise TypeError(
                f"{whose} returns {given} for {parameter}; accepted: floats, ints from {-ELEMENT} to {ELEMENT}, and "
                f"dense tensors of {dtypes}"
            )
    return arguments


def _parameters_of(what: str, name: str, function: Callable) -> tuple[str, ...]:
    """Names of a function's parameters that follow those in ``SIGNATURES``."""
    parameters = list(inspect.signature(function).parameters.values())
    own = len(SIGNATURES[what])
    if len(parameters) < own or any(x.kind is not x.POSITIONAL_OR_KEYWORD for x in parameters):
        raise TypeError(
            f"{what} {name!r} takes {inspect.signature(function)}; accepted: "
            f"({', '.join(SIGNATURES[what])}) and then names of tensors and numbers"
        )
    return tuple(x.name for x in parameters[own:])
