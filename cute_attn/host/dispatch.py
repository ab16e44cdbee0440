"""The operators' derivatives, and whether something transforms them."""

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
"""The arguments that have a gradient."""

NO_GRADIENT = (
    "alibi_slopes or an epilogue's tensor requires a gradient, which the operator does not give; accepted: tensors "
    "without one, tensors of functions, or CPU tensors outside torch.compile and torch.func"
)


NO_TANGENT = "alibi_slopes has a tangent, which the operator does not follow; accepted: tensors without one"


def not_in_jvp(what: str, accepted: str) -> NotImplementedError:
    """The error for a call that has no forward-mode derivative."""
    return NotImplementedError(f"{what} in a forward-mode derivative of attention; accepted{accepted}")


def transforms_are_active() -> bool:
    """True within a torch.func transform, except one that a compiler applies."""
    if torch.compiler.is_compiling():
        return False
    top = torch._C._functorch.peek_interpreter_stack()
    return top is not None and top.key() != torch._C._functorch.TransformType.Functionalize


def beyond_transforms() -> AbstractContextManager:
    """A context for making tensors that outlive a torch.func transform, within which torch makes temporary wrappers."""
    return temporarily_clear_interpreter_stack() if transforms_are_active() else contextlib.nullcontext()


LEVEL = 0
"""The level of all dual tensors: torch does not nest levels of ``forward_ad``."""


def unpacked(tensors: Iterable[Any]) -> tuple[tuple, tuple]:
    """``tensors`` without tangents, and for each tensor its tangent if visible here, otherwise None.

    Under a transform other than ``jvp``, tangents of an outer transform are not visible.
    """
    given, top = tuple(tensors), torch._C._functorch.peek_interpreter_stack()
    if top is not None and top.key() != torch._C._functorch.TransformType.Jvp:
        return given, (None,) * len(given)
    pairs: list[Any] = [(None, None) if x is None else forward_ad.unpack_dual(x, level=LEVEL) for x in given]
    return tuple(primal for primal, _ in pairs), tuple(tangent for _, tangent in pairs)


def refuse_derivatives(named: Iterable[tuple[str, Tensor | None]], function: str) -> None:
    """Raise NotImplementedError for a tensor with a tangent, or one by which autograd would record ``function``."""
    named = tuple(named)
    if forward_ad._current_level >= 0 and any(x is not None for x in unpacked(x for _, x in named)[1]):
        raise NotImplementedError(
            f"a tensor has a tangent, which {function} does not follow; accepted: tensors without one"
        )
    if torch.is_grad_enabled():
        for name, x in named:
            if x is not None and x.requires_grad:
                raise NotImplementedError(
                    f"{name} requires a gradient, which {function} does not give; accepted: tensors without one"
                )
