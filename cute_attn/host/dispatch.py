"""Whether something observes or transforms operators, and what derivatives the operators have."""

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


def no_dispatch_mode() -> bool:
    """Whether, for plain tensors, an implementation called directly equals the operator.

    The dispatcher costs more time than the launch. It is needed where something observes or transforms operators:
    compilers, tracers, modes, function transforms, profilers. The node of :mod:`cute_attn.api.operators` records
    the direct call for autograd.
    """
    return not (
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _function_transforms() is not None
        or _tracing_state() is not None
        or _profiler_enabled()
    )


_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_function_transforms, _tracing_state = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_profiler_enabled = torch.autograd._profiler_enabled


def transforms_are_active() -> bool:
    """Whether one of torch.func's transforms is, other than for a compiler."""
    if torch.compiler.is_compiling():
        return False
    top = _function_transforms()
    return top is not None and top.key() != torch._C._functorch.TransformType.Functionalize


def refuse_tangents(tensors: tuple[Any, ...]) -> None:
    """Raise where a tensor is a dual one: kernels would return its primal result alone.

    Raises
    ------
    NotImplementedError
        One is.
    """
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "a forward-mode derivative of attention is asked for; accepted on CUDA: none"
        )
