"""The operators' derivatives, and whether something transforms them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
"""The arguments with a gradient."""

NO_GRADIENT = (
    "alibi_slopes or an epilogue's tensor requires a gradient, which the operator does not give; accepted: tensors "
    "without one, tensors of functions outside torch.func, or CPU tensors outside torch.compile"
)


def transforms_are_active() -> bool:
    """True within a torch.func transform, except one that a compiler applies."""
    if torch.compiler.is_compiling():
        return False
    top = torch._C._functorch.peek_interpreter_stack()
    return top is not None and top.key() != torch._C._functorch.TransformType.Functionalize


def refuse_tangents(tensors: tuple[Any, ...]) -> None:
    """Raise where a tensor is a dual one: kernels would return only its primal result.

    Raises
    ------
    NotImplementedError
        One is.
    """
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "a forward-mode derivative of attention is asked for; accepted on CUDA: none"
        )
