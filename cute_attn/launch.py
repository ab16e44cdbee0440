"""From a checked call to a launch on CUDA, fast the second time.

Everything that follows from metadata (checks, kernel, output shapes, arguments that never change) is worked out once
and kept as a :class:`Plan` under that metadata. A call is then one dictionary lookup, the outputs' allocation and the
launch.
"""

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_attn.call import NUM_TENSORS, Call, check, check_alignment, check_for_kernels, regular_strides

Tensors = tuple[Any, ...]
"""A call's first tensors, q to rng_state; those that may be absent are None."""
Outputs = tuple[Tensor, Tensor, Tensor | None]

# Allocates out and lse. A test replaces it to find elements that no kernel writes.
_new_empty_strided = Tensor.new_empty_strided


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from a call's metadata.

    Attributes:
        function: launches the kernel, or None where there is nothing to launch.
        kernel: the kernel object, which picks the epilogues' arguments.
        seqlens: how the kernel takes lengths.
        shapes, strides: of out and lse.
        softmax_shape: or None where it is not asked for.
        views: (place among the tensors, shape, strides) of those that a kernel has to see otherwise than they come.
        score_args: the epilogues' arguments where no tensor is among them, else None.
        prefill: whether there may be rows that no thread writes, so that outputs need a value beforehand.
        softmax_scale: as the call has it.
        rest: the call's arguments that are not tensors.
    """

    function: Callable[..., None] | None
    kernel: Any
    seqlens: Any
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    softmax_shape: tuple[int, ...] | None
    views: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    score_args: tuple | None
    prefill: bool
    softmax_scale: float
    rest: tuple

    def launch(self, tensors: Tensors, epilogue_tensors: tuple[Tensor, ...] = ()) -> Outputs:
        """Allocate the outputs and launch on the current stream of q's device."""
        device = tensors[0].get_device()
        if device == torch.cuda.current_device():
            return self._launch(tensors, epilogue_tensors)
        with torch.cuda.device(device):
            return self._launch(tensors, epilogue_tensors)

    def _launch(self, tensors: Tensors, epilogue_tensors: tuple[Tensor, ...]) -> Outputs:
        q, k, v = tensors[:3]
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            check_alignment(q, k, v)
        out = _new_empty_strided(q, self.shapes[0], self.strides[0])
        lse = _new_empty_strided(q, self.shapes[1], self.strides[1], dtype=torch.float32)
        # Blocks outside the mask's band are never visited, so their zeros have to be there already.
        softmax = None if self.softmax_shape is None else q.new_zeros(self.softmax_shape)
        if self.prefill:
            out.zero_()
            lse.fill_(-math.inf)
        if self.function is None:
            return out, lse, softmax
        if self.views:
            seen = list(tensors)
            for place, shape, strides in self.views:
                seen[place] = seen[place].as_strided(shape, strides)
            tensors, (q, k, v) = tuple(seen), seen[:3]
        score_args = self.score_args
        if score_args is None:
            call = Call._make((*tensors, epilogue_tensors, *self.rest))
            score_args = self.kernel.score_args(call.score_inputs())
        seqlens = self.seqlens(*tensors[3:7], self.rest[0], self.rest[1])
        self.function(q, k, v, out, lse, softmax, seqlens, self.softmax_scale, score_args)
        return out, lse, softmax


# ---- plans ----


_MAX_PLANS = 4096
_plans: dict[tuple[Any, ...], Plan] = {}


def plan_key(tensors: Tensors, options: Hashable) -> tuple[Any, ...]:
    """What a plan is kept under: all that is known of the tensors but their contents and addresses, and the options."""
    return (
        options,
        *[None if x is None else (type(x), x.dtype, x.get_device(), x.shape, x.stride()) for x in tensors],
    )


def known_plan(tensors: Tensors, options: Hashable) -> Plan | None:
    """The plan of a call that was planned before."""
    try:
        return _plans.get(plan_key(tensors, options))
    except (
        TypeError,
        AttributeError,
    ):  # an option that cannot be hashed, or no tensor: for the checks to judge
        return None


def plan_call(call: Call, options: Hashable = None) -> Plan:
    """The plan of a call, which is checked; kept under its metadata and ``options``, or else what the call says itself.

    Calls with users' classes, which may be registered anew at any time, keep those in their key.

    Raises:
        TypeError, ValueError, Unsupported: something is wrong with the call.
    """
    tensors, classes = call[:NUM_TENSORS], _classes(call)
    if options is None or classes:
        options = (call[NUM_TENSORS + 1 :], *classes)
        tensors = (*tensors, *call.epilogue_tensors)
    plan = known_plan(tensors, options)
    if plan is None:
        plan = _make_plan(call)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        with contextlib.suppress(TypeError):  # an option that cannot be hashed, such as a window as a list
            _plans[plan_key(tensors, options)] = plan
    return plan


def _classes(call: Call) -> tuple[Any, ...]:
    if not (call.epilogues or ":" in call.kernel):
        return ()
    from cute_attn import registry
    from cute_attn.epilogues.base import user_epilogue

    arch, _, variant = call.kernel.partition(":")
    kernel = registry.KERNELS.get(("forward", arch, variant))
    return (kernel, *(user_epilogue(name) for name in call.epilogue_names))


def _make_plan(call: Call) -> Plan:
    check(call)
    check_for_kernels(call)
    out_shape, lse_shape, softmax_shape = call.output_shapes()
    plan = Plan(
        function=None,
        kernel=None,
        seqlens=None,
        shapes=(out_shape, lse_shape),
        strides=(_contiguous(out_shape), _contiguous(lse_shape)),
        softmax_shape=softmax_shape if call.return_softmax else None,
        views=(),
        score_args=(),
        prefill=True,
        softmax_scale=call.softmax_scale,
        rest=call[NUM_TENSORS + 1 :],
    )
    if math.prod(out_shape) == 0 or 0 in (call.max_seqlen_q, call.max_seqlen_k, math.prod(call.k.shape)):
        return plan
    from cute_attn import compiler
    from cute_attn.device.seqlen import Seqlens

    with torch.cuda.device(call.q.device):
        target = compiler.default_target("sm80")
        kernel = choose_kernel(call, target)
        function = compiler.compile(kernel.traits, kernel.tile, target).function
    has_tensors = call.epilogues or any(x is not None for x in (call.alibi_slopes, call.bias, call.rng_state))
    return replace(
        plan,
        function=function,
        kernel=kernel,
        seqlens=Seqlens,
        views=tuple(_views(call)),
        score_args=None if has_tensors else kernel.score_args(call.score_inputs()),
        prefill=call.seqused_q is not None,
    )


def _views(call: Call) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Where a kernel needs other strides: for odd ones of dimensions of size 1, and to broadcast slopes and bias."""
    shapes = {
        "alibi_slopes": (call.batch, call.nheads),
        "bias": (call.batch, call.nheads, call.max_seqlen_q, call.max_seqlen_k),
    }
    for name in ("q", "k", "v", *shapes):
        x = getattr(call, name)
        if x is not None:
            shape = shapes.get(name, tuple(x.shape))
            strides = regular_strides(x, shape)
            if (shape, strides) != (tuple(x.shape), x.stride()):
                yield Call._fields.index(name), shape, strides


def choose_kernel(call: Call, target: str) -> Any:
    """The kernel with its tile: the newest generation that serves the call on ``target``, unless the call names one.

    Raises:
        Unsupported: no kernel serves it, with each one's reason.
    """
    from cute_attn import registry

    names = [call.kernel] if call.kernel else [a for a in ("sm90", "sm80") if target in registry.RUNS_ON[a]]
    reasons = []
    for name in names:
        arch, _, variant = name.partition(":")
        try:
            return registry.lookup(call.traits(arch, variant), call.tile or None, target)
        except ValueError as reason:
            if len(names) == 1:
                raise
            reasons.append(str(reason))
    raise registry.Unsupported("; ".join(reasons))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
