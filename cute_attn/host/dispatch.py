"""The operators' derivatives, and whether something transforms them."""

import torch

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
