"""Calls of scaled_dot_product_attention that repeat an earlier one.

PyTorch's function chooses a backend and calls its operator. A Python override of that operator has a cost: boxed
arguments and results, and three tensors that only a backward with dropout reads. A repeated call skips these, since its
record has the operator's launches. PyTorch's function handles the first two calls of each kind, and all calls with a
mask, dropout, gradients or tensors that override functions, or under compilers, modes, transforms and profilers.

:mod:`cute_attn.host.plans` decides whether a call repeats an earlier one. In addition to the tensors' metadata, the key
includes the settings on which PyTorch's choice depends.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_attn.host import doors, plans


def key_of(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> tuple | None:  # fmt: skip
    """The key of a call of PyTorch's function with these arguments; None if the call is never replayed."""
    if (  # overrides of functions are looked for first, since they see attributes being read
        attn_mask is not None
        or dropout_p != 0.0
        or not _PLAIN.issuperset(map(type, (query, key, value)))
        or _function_modes()
        or (query.requires_grad and torch.is_grad_enabled())  # guards know the others
        or doors.observer is not None
        or query.is_nested  # without a shape
        or key.is_nested
    ):
        return None
    # What PyTorch's choice depends on: the enabled backends, their order, and whether results must repeat.
    return (
        is_causal, scale, enable_gqa, _flash_enabled(), _efficient_enabled(), _cudnn_enabled(), _are_deterministic(),
        *_priority_order(),
    )  # fmt: skip


_function_modes = torch._C._len_torch_function_stack
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


_flash_enabled, _efficient_enabled, _cudnn_enabled, _priority_order, _are_deterministic = (
    getattr(torch._C, name)
    for name in (
        "_get_flash_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_cudnn_sdp_enabled",
        "_get_sdp_priority_order",
        "_get_deterministic_algorithms",
    )
)


def override(stock: Callable[..., Tensor], serving: Callable[[], Any]) -> Callable[..., Tensor]:
    """Make an override of ``aten::scaled_dot_product_attention`` above autograd.

    Repeated calls without gradients end here and skip the operators of the backends. In inference mode the dispatcher
    skips autograd's keys, so it does not call the override.

    Args:
        stock: PyTorch's kernel, boxed.
        serving: returns the activation whose calls are recorded, or None; read once at the start of each call.
    """

    def run(keyset: "torch._C.DispatchKeySet", *args: Any, **kwargs: Any) -> Tensor:
        activation = serving()
        asked = None if activation is None else key_of(*args, **kwargs)
        if asked is None:
            return stock(keyset, *args, **kwargs)
        return plans.repeat((activation, asked), args[:3], lambda: stock(keyset, *args, **kwargs))

    return run
