"""Calls of scaled_dot_product_attention that repeat an earlier one.

PyTorch's function chooses a backend and calls its operator, and a Python override of an operator costs: boxed arguments
and results, and three tensors that only a backward with dropout reads. A repeated call skips these: its record has the
launches of the operator. PyTorch's function computes the first two calls of each kind, and every call with a mask,
dropout or gradients, of tensors that override functions, or under compilers, modes, function transforms and profilers.

:mod:`cute_attn.host.plans` says whether a call repeats an earlier one. The key includes the settings, other than the
tensors' metadata, on which PyTorch's choice depends.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_attn.host import doors, plans


class Memory:
    """Identifies the calls of one activation, in their keys. device: type of the tensors that are served."""

    __slots__ = ("device",)

    def __init__(self, device: str) -> None:
        """Arguments: as above."""
        self.device = device


_current: Memory | None = None  # of other threads a call keeps the one that it began with


def start(device: str) -> None:
    """Forget all calls, and learn new ones from now on. Arguments: of :class:`Memory`."""
    global _current
    stop()
    _current = Memory(device)


def stop() -> None:
    """Forget all calls, and learn none."""
    global _current
    before, _current = _current, None
    if before is not None:
        plans.forget(before)


def key_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple | None:
    """The key of a call of PyTorch's function with these arguments; None if PyTorch computes it in any case."""
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
    return (is_causal, scale, enable_gqa, *_what_choice_depends_on())


_function_modes = torch._C._len_torch_function_stack
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _what_choice_depends_on() -> tuple:
    """PyTorch's settings of backends: which are enabled, in which order, and whether results must repeat."""
    return (
        _flash_enabled(),
        _efficient_enabled(),
        _cudnn_enabled(),
        _are_deterministic(),
        *_priority_order(),
    )


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


def override(stock: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """``aten::scaled_dot_product_attention`` above autograd for the dispatcher; ``stock``: PyTorch's, boxed.

    Repeated calls without gradients end here and skip the operators of the backends, while calls of that type of device
    are learnt. Inference mode has no autograd, so the dispatcher does not call this under it.
    """

    def run(keyset: "torch._C.DispatchKeySet", *args: Any, **kwargs: Any) -> Tensor:
        memory = _current
        if memory is None or memory.device != device:
            return stock(keyset, *args, **kwargs)
        asked = key_of(*args, **kwargs)
        if asked is None:
            return stock(keyset, *args, **kwargs)
        return plans.repeat((memory, asked), args[:3], lambda: stock(keyset, *args, **kwargs))

    return run
