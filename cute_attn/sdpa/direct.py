"""scaled_dot_product_attention from Python to the launch, past PyTorch's dispatcher.

PyTorch's function calls the operator of a backend, and a Python override of an operator costs: boxed arguments and
results, and three tensors that only a backward with dropout reads. A call that repeats an earlier one needs no such.
:func:`scaled_dot_product_attention` makes such calls. All others, and the first of each kind, it gives to PyTorch's
function: with a mask, dropout or gradients, of fp32 or of tensors that override functions, under autocast, compilers,
modes, function transforms and profilers.

That a call repeats an earlier one is for torch's guards to say, those of compiled code: they compare types, dtypes,
devices, shapes, strides and the state of the dispatcher. What PyTorch's choice of a backend depends on beside them is
part of a key.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import has_torch_function

from cute_attn import ops
from cute_attn.sdpa import plans, state
from cute_attn.sdpa.operators import Options, forward_plan
from cute_attn.sdpa.plans import ForwardPlan

NAME = "scaled_dot_product_attention"

pytorchs: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
"""The function that is replaced; it does not change."""

_BACKENDS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}


@dataclass(frozen=True, slots=True)
class Known:
    """An earlier call.

    Attributes:
        check: whether q, k and v have its metadata, under the same state of the dispatcher.
        operator: that PyTorch chose.
        plan: the operator's; None where PyTorch's function is called.
    """

    check: Callable[..., bool]
    operator: str
    plan: ForwardPlan | None


_MAX_KEYS = 4096
_MAX_ALIKE = 8
_known: dict[tuple, list[Known]] = {}
_options: Options | None = None
_device = "cuda"


def install(options: Options, device: str = "cuda") -> None:
    """Replace ``torch.nn.functional.scaled_dot_product_attention``, unless something else has.

    device: type of the tensors whose operators are overridden.
    """
    global _options, _device
    _known.clear()
    _options, _device = options, device
    if F.scaled_dot_product_attention is pytorchs:
        F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
        torch.jit._builtins._register_builtin(scaled_dot_product_attention, f"aten::{NAME}")


def remove() -> None:
    """Put PyTorch's function back; what imported the other one meanwhile calls PyTorch's by it."""
    global _options
    _options = None
    _known.clear()
    if F.scaled_dot_product_attention is scaled_dot_product_attention:
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
    inputs = (query, key, value)
    if (
        attn_mask is not None
        or dropout_p != 0.0
        or type(is_causal) is not bool
        or type(scale) not in _SCALES
        or _options is None
        or state.observer is not None
        or not (ops.no_dispatch_mode() and _PLAIN.issuperset(map(type, inputs)))
        or forward_ad._current_level >= 0
        or query.is_nested  # without a shape
        or key.is_nested
        or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    ):
        return _by_pytorch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    asked = (is_causal, scale, enable_gqa, query.shape, key.shape, *_what_choice_depends_on())
    for known in _known.get(asked, ()):
        if known.check(*inputs):
            if known.plan is None or (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
                break
            state.served[known.operator, ""] += 1
            return known.plan.run((*inputs, None, None, None, None, None)).out
    out = pytorchs(*inputs, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    _learn(asked, inputs)
    return out


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


def _by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """PyTorch's function, under its own name where something may look for it: overrides tell functions by identity."""
    seen = _function_modes() or has_torch_function((query, key, value, mask))
    if not seen or F.scaled_dot_product_attention is not scaled_dot_product_attention:
        return pytorchs(query, key, value, mask, *args, **kwargs)
    F.scaled_dot_product_attention = pytorchs
    try:
        return pytorchs(query, key, value, mask, *args, **kwargs)
    finally:
        if _options is not None:
            F.scaled_dot_product_attention = scaled_dot_product_attention


_function_modes = torch._C._len_torch_function_stack
_PLAIN, _SCALES = frozenset((Tensor, torch.nn.Parameter)), (type(None), float)


def _learn(asked: tuple, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Remember a call that PyTorch's function has accepted."""
    alike = _known.get(asked, [])
    check = plans.guard(inputs) if len(alike) < _MAX_ALIKE else None
    if check is None:
        return
    causal, scale, gqa, *_ = asked
    choice = torch._fused_sdp_choice(*inputs, None, 0.0, causal, scale=scale, enable_gqa=gqa)
    backend = _BACKENDS.get(choice, "")
    if len(_known) >= _MAX_KEYS:
        _known.clear()
    plan = _plan(backend, inputs, causal, scale)
    known = Known(check, f"_scaled_dot_product_{backend}_attention", plan)
    _known.setdefault(asked, alike).append(known)


def _plan(
    backend: str, inputs: tuple[Tensor, Tensor, Tensor], causal: bool, scale: float | None
) -> ForwardPlan | None:
    """The plan of the operator that PyTorch's function calls with these, where it hands them on as they are."""
    query, _, value = inputs
    if (
        _options is None
        or backend not in _options.backends
        or query.device.type != _device
        or query.dtype not in (torch.float16, torch.bfloat16)  # the precision of fp32 products may change
        or torch.is_autocast_enabled(_device)  # it casts
        or query.shape[-1] % 8  # PyTorch pads
        or value.shape[-1] % 8
        or not all(map(_is_ordinary, inputs))
    ):
        return None
    found = forward_plan((backend, causal, 0.0, scale, True, False), _options, (*inputs, *[None] * 5))
    return None if isinstance(found, str) else found


def _is_ordinary(x: Tensor) -> bool:
    """Whether memory is all there is to ``x``: the dispatcher knows it by no more than what new memory has.

    It would negate a negative view, for example, before it calls an operator.
    """
    with torch.inference_mode(False):
        new = torch.empty(0, dtype=x.dtype, device=x.device)
    return not torch._C._dispatch_keys(x).raw_repr() & ~torch._C._dispatch_keys(new).raw_repr()
