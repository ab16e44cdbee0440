"""Calls of scaled_dot_product_attention that repeat an earlier one: PyTorch's choice of a backend, and a plan.

PyTorch's function chooses a backend and calls its operator, and a Python override of an operator costs: boxed arguments
and results, and three tensors that only a backward with dropout reads. A call that repeats an earlier one needs no
such. All others, and the first of each kind, are PyTorch's function's: with a mask, dropout or gradients, of fp32 or of
tensors that override functions, under compilers, modes, function transforms and profilers.

:mod:`cute_attn.host.plans` says whether a call repeats an earlier one. What PyTorch's choice depends on beside the
tensors' metadata is part of the key.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

from cute_attn.host import doors, plans
from cute_attn.host.activation import Options
from cute_attn.host.dispatch import no_dispatch_mode
from cute_attn.host.memory import is_aligned
from cute_attn.sdpa.operators import forward_plan
from cute_attn.sdpa.plans import ForwardPlan

_BACKENDS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}


@dataclass(frozen=True, slots=True)
class Known:
    """What became of an earlier call.

    Attributes:
        operator: the one that PyTorch chose.
        plan: the operator's; None where PyTorch's function is called.
    """

    operator: str
    plan: ForwardPlan | None

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """The result of a call with its metadata; None where PyTorch's function is to be called."""
        plan = self.plan
        if plan is None or (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
            return None
        doors.served.add(self.operator)
        inputs = (query, key, value, None, None, None, None, None)
        return plan.run(inputs).out if plan.launcher is None else plan.launch(inputs, None)[0]


_MAX_KEYS = 4096


class Memory:
    """The calls of one activation.

    Attributes:
        options: the activation's.
        device: type of the tensors whose operators are overridden.
        seen: keys of calls that came once.
    """

    __slots__ = ("device", "options", "seen")

    def __init__(self, options: Options, device: str) -> None:
        """Arguments: as above."""
        self.options, self.device = options, device
        self.seen: set[tuple] = set()


_current: Memory | None = None  # of other threads a call keeps the one that it began with


def start(options: Options, device: str = "cuda") -> None:
    """Learn calls from now on, in place of what was known. Arguments: of :class:`Memory`."""
    global _current
    stop()
    _current = Memory(options, device)


def stop() -> None:
    """Forget all calls, and learn none."""
    global _current
    before, _current = _current, None
    if before is not None:
        plans.forget(before)


def current() -> Memory | None:
    """Where calls are learnt, or None."""
    return _current


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
    """What finds a call of PyTorch's function with these arguments; None for one that is PyTorch's in any case."""
    if (  # what overrides functions is looked for first, since it sees attributes being read
        attn_mask is not None
        or dropout_p != 0.0
        or not _PLAIN.issuperset(map(type, (query, key, value)))
        or _function_modes()
        or (query.requires_grad and torch.is_grad_enabled())  # guards know the others
        or doors.observer is not None
        or not no_dispatch_mode()
        or forward_ad._current_level >= 0
        or query.is_nested  # without a shape
        or key.is_nested
    ):
        return None
    return (is_causal, scale, enable_gqa, query.shape, key.shape, *_what_choice_depends_on())


_function_modes = torch._C._len_torch_function_stack
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def find(memory: Memory, asked: tuple, *inputs: Tensor) -> Known | None:
    """The earlier call that this one repeats. asked: as of :func:`key_of`; inputs: q, k and v."""
    known = plans.find((memory, asked), inputs)
    if known is None or not (known.constant or not torch.is_grad_enabled()):
        return None
    return known.plan


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


def learn(memory: Memory, asked: tuple, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Remember a call that PyTorch's function has accepted and that :func:`find` does not know.

    Only once it came twice: where keys grow from call to call, each call would be learnt in vain.
    """
    if asked not in memory.seen:
        if len(memory.seen) >= _MAX_KEYS:
            memory.seen.clear()
        memory.seen.add(asked)
        return
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if gradients or not all(map(is_aligned, inputs)):
        return
    causal, scale, gqa, *_ = asked
    choice = torch._fused_sdp_choice(*inputs, None, 0.0, causal, scale=scale, enable_gqa=gqa)
    backend = _BACKENDS.get(choice, "")
    plan = _plan(memory, backend, inputs, causal, scale)
    plans.keep((memory, asked), inputs, Known(f"_scaled_dot_product_{backend}_attention", plan))


def _plan(
    memory: Memory,
    backend: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    causal: bool,
    scale: float | None,
) -> ForwardPlan | None:
    """The plan of the operator that PyTorch's function calls with these, where it hands them on as they are."""
    query, _, value = inputs
    if (
        backend not in memory.options.backends
        or query.device.type != memory.device
        or query.dtype not in (torch.float16, torch.bfloat16)  # the precision of fp32 products may change
        or torch.is_autocast_enabled(memory.device)  # it casts, before the dispatcher has an override called
        or query.shape[-1] % 8  # PyTorch pads
        or value.shape[-1] % 8
        or not all(map(_is_ordinary, inputs))
    ):
        return None
    found = forward_plan(_QUESTIONS[backend](causal, scale), memory.options, (*inputs, *[None] * 5))
    return None if isinstance(found, str) else found


_QUESTIONS: dict[str, Callable[[bool, float | None], tuple]] = {
    "flash": lambda causal, scale: ("flash", causal, 0.0, scale, True, True, False),
    "efficient": lambda causal, scale: ("efficient", causal, 0.0, scale, True, False),
    "cudnn": lambda causal, scale: ("cudnn", causal, 0.0, scale),
}
"""What the operators ask without gradients, whose plans these are."""


def _is_ordinary(x: Tensor) -> bool:
    """Whether memory is all there is to ``x``: the dispatcher knows it by no more than what new memory has.

    It would negate a negative view, for example, before it calls an operator.
    """
    with torch.inference_mode(False):
        new = torch.empty(0, dtype=x.dtype, device=x.device)
    return not torch._C._dispatch_keys(x).raw_repr() & ~torch._C._dispatch_keys(new).raw_repr()


def override(stock: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """``aten::scaled_dot_product_attention`` above autograd for the dispatcher; ``stock``: PyTorch's, boxed.

    Repeated calls without gradients end here, past the operators of the backends, while calls of that type of device
    are learnt. Under inference mode, which has no autograd, the dispatcher does not come here.
    """

    def run(keyset: "torch._C.DispatchKeySet", *args: Any, **kwargs: Any) -> Tensor:
        memory = _current
        if memory is None or memory.device != device:
            return stock(keyset, *args, **kwargs)
        asked = key_of(*args, **kwargs)
        if asked is None:
            return stock(keyset, *args, **kwargs)
        query, key, value = args[:3]
        known = find(memory, asked, query, key, value)
        found = None if known is None else known.run(query, key, value)
        if found is not None:
            return found
        out = stock(keyset, *args, **kwargs)
        if known is None:
            learn(memory, asked, (query, key, value))
        return out

    return run
