"""A graph as torch operations on tensors of scores and indices: the reference of a traced function.

Values have the dtypes of a call for one score in torch: indices are int64, captured elements have their tensor's dtype,
Python numbers do not affect promotion, and a 16-bit result is rounded. Torch's default dtype is assumed to be float32,
since results of a call do not depend on it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_attn.epilogues.functions.graph import BOOL, FLOAT, Node, ordered
from cute_attn.epilogues.functions.operations import OPERATIONS

Value = Tensor | bool | int | float


@dataclass(frozen=True)
class Precision:
    """How :func:`evaluate` computes: as torch does, or as kernels may differ from that.

    Attributes:
        floats: a dtype that replaces the dtypes of all floats, or None.
        nudge: relative error of floats before steps, comparisons and conversions to integers.
        wraps: True if integers wrap to 32 bits.
    """

    floats: torch.dtype | None = None
    nudge: float = 0.0
    wraps: bool = False

    def of(self, x: Value) -> Value:
        """x in this precision; Python numbers are unchanged."""
        if self.floats is not None and _is_float(x):
            return x.to(self.floats)  # type: ignore[union-attr]
        return x.int().long() if self.wraps and isinstance(x, Tensor) and x.dtype == torch.int64 else x

    def before_step(self, x: Value) -> Value:
        if self.nudge and isinstance(x, Tensor) and x.is_floating_point():
            return x + x.abs() * self.nudge
        return x


AS_TORCH = Precision()


def evaluate(
    output: Node, inputs: Mapping[str, Tensor], tensors: Sequence[Any], precision: Precision = AS_TORCH
) -> Tensor:
    """The output's values for inputs that broadcast to the scores' shape: a predicate, or scores in their dtype.

    Where the output gets no gradient, such as at hidden keys, the inputs get none, even if slopes there are NaN.

    Raises:
        IndexError: on the CPU, a score, hidden or not, reads an element out of a tensor's bounds. On other devices the
            nearest element is read, as in kernels.
    """
    scores = inputs["score"]
    values: dict[Node, Value] = {}
    reached = _Reached(torch.broadcast_shapes(*(x.shape for x in inputs.values())))
    for node in ordered(output):
        args = [values[arg] for arg in node.args]
        if node.op in inputs:
            value: Value = precision.of(inputs[node.op])
        elif node.op == "const":
            value = node.value
        elif node.op == "extent":
            number, axis = node.value
            value = tensors[number].shape[axis]
        elif node.op == "cast":
            x = args[0] if node.kind == FLOAT else precision.before_step(args[0])
            # Without a dtype it is a promotion; torch's operations promote by themselves.
            dtype = getattr(torch, node.dtype) if node.dtype else None
            value = precision.of(x if dtype is None else _tensor(x, scores.device, dtype))
        elif node.op == "load":
            value = precision.of(_element(tensors[node.value], args, scores.device))
        else:
            if OPERATIONS[node.op].is_step:
                args[0] = precision.before_step(args[0])
            value = precision.of(_computed(node, args, scores.device))
        values[node] = reached.only(value)
    found = reached.noticed(_tensor(values[output], scores.device))
    return found if output.kind == BOOL else found.to(scores.dtype)


def _is_float(x: Value) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _tensor(x: Value, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """x as a tensor; a Python number gets four dimensions of size 1, like scores."""
    if isinstance(x, Tensor):
        return x if dtype is None else x.to(dtype)
    if dtype is None:
        dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.float32
    return torch.full((1, 1, 1, 1), x, dtype=dtype, device=device)


def _element(table: Tensor | float, index: Sequence[Value], device: torch.device) -> Value:
    if not isinstance(table, Tensor):
        return table
    if not index:
        return table.view(1, 1, 1, 1)
    places = []
    for axis, (one, size) in enumerate(zip(index, table.shape, strict=True)):
        place = _tensor(one, device).long()
        if device.type == "cpu":
            _check_index(place, table.shape, axis)
        else:
            place = torch.where(place < 0, place + size, place).clamp(0, size - 1)
        places.append(place)
    return table[tuple(places)]


def _check_index(index: Tensor, shape: torch.Size, axis: int) -> None:
    if not index.numel():
        return
    size, ends = shape[axis], [int(x) for x in index.aminmax()]
    for end in ends:
        if not -size <= end < size:
            raise IndexError(
                f"a function reads index {end} of dimension {axis} of its tensor of shape {tuple(shape)}, for one of "
                f"the scores, hidden ones included; accepted: {-size} to {size - 1}"
            )


def _computed(node: Node, args: list[Value], device: torch.device) -> Value:
    """An operation's result; numbers become tensors, and integers floats, where the operation requires it."""
    floats = node.kind == FLOAT or any(isinstance(x, float) for x in args)
    own = args[1:] if node.op == "where" else args
    if floats and not any(map(_is_float, own)):
        own = [_tensor(x, device, torch.float32) for x in own]
    elif node.op in ("sub", "neg") and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in own):
        own = [x.long() if isinstance(x, Tensor) and x.dtype == torch.bool else x for x in own]
    row = OPERATIONS[node.op]
    if not row.numbers:
        typed = [x for x in own if isinstance(x, Tensor)] or [_tensor(own[0], device)]
        own = [
            x if isinstance(x, Tensor) else _tensor(x, device, torch.result_type(typed[0], x)) for x in own
        ]
        return row.torch(*own)
    if node.op == "where":
        own = [_tensor(args[0], device), *own]
    return row.torch(*own)


class _Reached:
    """In a backward, the scores that get a gradient. At other scores gradients are set to 0: slopes may be NaN."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape, self.scores = shape, torch.empty(0)

    def noticed(self, output: Tensor) -> Tensor:
        """The output, with a hook that notes the scores at which its gradient is not 0."""

        def notice(gradient: Tensor) -> None:
            self.scores = gradient != 0

        return self._hooked(output, notice)

    def only(self, x: Value) -> Value:
        """x with a separate gradient per score, set to 0 at scores without one; autograd sums these gradients later."""
        if not isinstance(x, Tensor):
            return x
        return self._hooked(x, lambda gradient: torch.where(self.scores, gradient, 0.0))

    def _hooked(self, x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        x = x.expand(self.shape)
        x.register_hook(hook)
        return x
