"""Replaces ``torch.nn.functional.scaled_dot_product_attention`` by an observer's function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import has_torch_function

NAME = "scaled_dot_product_attention"

pytorchs: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
"""PyTorch's function, also while it is replaced."""


_installed: Callable[..., Tensor] | None = None


def install(function: Callable[..., Tensor]) -> None:
    """Replace PyTorch's function by one with the same arguments, unless it has been replaced already."""
    global _installed
    if F.scaled_dot_product_attention is pytorchs:
        _installed = F.scaled_dot_product_attention = function
        torch.jit._builtins._register_builtin(_installed, f"aten::{NAME}")


def remove() -> None:
    """Put PyTorch's function back. Modules that imported the replacement keep it, and it calls PyTorch's."""
    global _installed
    own, _installed = _installed, None
    if own is not None and F.scaled_dot_product_attention is own:
        F.scaled_dot_product_attention = pytorchs


def by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """Call PyTorch's function, put back during the call if overrides may see it: they compare functions by identity."""
    own = F.scaled_dot_product_attention
    seen = _function_modes() or has_torch_function((query, key, value, mask))
    if not seen or own is not _installed:
        return pytorchs(query, key, value, mask, *args, **kwargs)
    F.scaled_dot_product_attention = pytorchs
    try:
        return pytorchs(query, key, value, mask, *args, **kwargs)
    finally:
        if own is _installed:
            F.scaled_dot_product_attention = own


_function_modes = torch._C._len_torch_function_stack
