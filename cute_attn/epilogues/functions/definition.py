"""A graph as torch operations on tensors of scores and indices: the reference of a traced function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attn.epilogues.functions.graph import BOOL, FLOAT, Node, ordered

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "clamp_min": lambda x, least: torch.clamp(x, min=least),
    "clamp_max": lambda x, most: torch.clamp(x, max=most),
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    **{name: getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "where")},
    **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh")},
    **{name: getattr(torch, name) for name in ("sigmoid", "sin", "cos", "floor", "ceil", "trunc")},
}


def evaluate(output: Node, inputs: Mapping[str, Tensor], tensors: Sequence[Tensor | float]) -> Tensor:
    """The output for inputs that broadcast to the scores' shape; floats in the scores' dtype, integers in int64.

    Where the output gets no gradient, such as at keys that a mask hides, nothing does, whatever the slopes are there.
    """
    scores = inputs["score"]
    values: dict[Node, Tensor] = {}
    reached = _Reached(torch.broadcast_shapes(*(x.shape for x in inputs.values())))

    def typed(x: Tensor, kind: str) -> Tensor:
        return x.to(scores.dtype if kind == FLOAT else torch.bool if kind == BOOL else torch.int64)

    for node in ordered(output):
        args = [values[arg] for arg in node.args]
        if node.op in inputs:
            value = inputs[node.op]
        elif node.op == "const":
            value = typed(torch.full((), node.value, device=scores.device), node.kind)
        elif node.op == "extent":
            number, axis = node.value
            value = torch.full((), tensors[number].shape[axis], device=scores.device)
        elif node.op == "cast":
            value = typed(args[0], node.kind)
        elif node.op == "load":
            table = tensors[node.value]
            if not isinstance(table, Tensor):
                table = torch.full((), table, dtype=torch.float64, device=scores.device)
            index = [x.clamp(0, size - 1) for x, size in zip(args, table.shape, strict=True)]
            value = typed(table[tuple(index)] if index else table, node.kind)
        else:
            value = _OPERATIONS[node.op](*args)
        values[node] = reached.only(value)
    return reached.noticed(values[output])


class _Reached:
    """In a backward: the scores that get a gradient. Others get none by a slope, which may be NaN there."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape, self.scores = shape, torch.empty(0)

    def noticed(self, output: Tensor) -> Tensor:
        """The output, whose gradient says which."""

        def notice(gradient: Tensor) -> None:
            self.scores = gradient != 0

        return self._hooked(output, notice)

    def only(self, x: Tensor) -> Tensor:
        """A value with a gradient of its own for each score, which are summed afterwards."""
        return self._hooked(x, lambda gradient: torch.where(self.scores, gradient, 0.0))

    def _hooked(self, x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        x = x.expand(self.shape)
        x.register_hook(hook)
        return x
