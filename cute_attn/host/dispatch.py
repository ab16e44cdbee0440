"""The operators' derivatives, and whether something transforms them."""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
"""The arguments with a gradient."""

NO_GRADIENT = (
    "alibi_slopes or an epilogue's tensor requires a gradient, which the operator does not give; accepted: tensors "
    "without one, tensors of functions outside torch.func, or CPU tensors outside torch.compile"
)


NO_TANGENT = "alibi_slopes has a tangent, which the operator does not follow; accepted: tensors without one"


def transforms_are_active() -> bool:
    """True within a torch.func transform, except one that a compiler applies."""
    if torch.compiler.is_compiling():
        return False
    top = torch._C._functorch.peek_interpreter_stack()
    return top is not None and top.key() != torch._C._functorch.TransformType.Functionalize


def beyond_transforms() -> AbstractContextManager:
    """Makes tensors that outlive a torch.func transform: within it, torch makes wrappers that end with it."""
    return temporarily_clear_interpreter_stack() if transforms_are_active() else contextlib.nullcontext()
