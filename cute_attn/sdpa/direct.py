"""scaled_dot_product_attention from Python to the launch, past PyTorch's dispatcher.

:func:`scaled_dot_product_attention` makes calls that repeat an earlier one, see :mod:`cute_attn.sdpa.repeated`. All
others it gives to PyTorch's function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import has_torch_function

from cute_attn.sdpa import repeated

NAME = "scaled_dot_product_attention"

pytorchs: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
"""The function that is replaced; it does not change."""


_installed: Callable[..., Tensor] | None = None


def install(function: Callable[..., Tensor] | None = None) -> None:
    """Replace ``torch.nn.functional.scaled_dot_product_attention``, unless something else has.

    function: what stands there from now on, with PyTorch's arguments; by default the one of this module.
    """
    global _installed
    if F.scaled_dot_product_attention is pytorchs:
        _installed = F.scaled_dot_product_attention = function or scaled_dot_product_attention  # type: ignore[assignment]
        torch.jit._builtins._register_builtin(_installed, f"aten::{NAME}")


def remove() -> None:
    """Put PyTorch's function back; what imported the other one meanwhile calls PyTorch's by it."""
    global _installed
    own, _installed = _installed, None
    if own is not None and F.scaled_dot_product_attention is own:
        F.scaled_dot_product_attention = pytorchs


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function of this name."""
    if torch.compiler.is_compiling():
        return pytorchs(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    options = {"scale": scale, "enable_gqa": enable_gqa}
    memory, asked = repeated.current(), None
    if memory is not None and type(is_causal) is bool and type(scale) in _SCALES and type(enable_gqa) is bool:
        asked = repeated.key_of(query, key, value, attn_mask, dropout_p, is_causal, **options)  # type: ignore[arg-type]
    if memory is None or asked is None:
        return by_pytorch(query, key, value, attn_mask, dropout_p, is_causal, **options)
    known = repeated.find(memory, asked, query, key, value)
    out = None if known is None else known.run(query, key, value)
    if out is None:
        out = pytorchs(query, key, value, None, 0.0, is_causal, **options)
        if known is None:
            repeated.learn(memory, asked, (query, key, value))
    return out


_SCALES = (type(None), float)


def by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """PyTorch's function, under its own name where something may look for it: overrides tell functions by identity."""
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
