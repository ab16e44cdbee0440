"""The torch operator ``cute_attn::forward``: for CUDA, for the CPU, for fake tensors, and its gradient.

An eager call is short on purpose. Everything that follows from metadata (checks, kernel, output shapes, arguments
that never change) is worked out once and kept as a ``Plan`` under that metadata: a call is one dictionary lookup, the
outputs' allocation and the launch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.call import Call, check, check_alignment, check_for_kernels, regular_strides
from cute_attn.epilogues.inputs import ScoreInputs

Outputs = tuple[Tensor, Tensor, Tensor | None]

_library = torch.library.Library("cute_attn", "DEF")
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? alibi_slopes, Tensor? bias, Tensor? rng_state, Tensor[] epilogue_tensors, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, "
    "str mask, SymInt window_left, SymInt window_right, float softcap, str dropout, float dropout_p, "
    "str[] epilogues, float[] epilogue_numbers, bool return_softmax, str kernel, str tile"
)
_library.define(f"forward({_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor softmax)")
_library.define(
    f"backward(Tensor grad_out, Tensor grad_lse, bool[] needed, {_ARGUMENTS}) "
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias)"
)
_TENSORS = Call._fields.index("epilogue_tensors")
DIFFERENTIABLE = ("q", "k", "v", "bias")

# Allocates out and lse. A test replaces it to find elements that no kernel writes.
_empty = torch.empty


def forward(call: Call) -> Outputs:
    """out, lse, and softmax where the call asks for it."""
    if not _nobody_watches(call):
        out, lse, softmax = torch.ops.cute_attn.forward.default(*call)
        return out, lse, softmax if call.return_softmax else None
    return forward_cuda(call) if call.q.is_cuda else forward_cpu(call)


def _nobody_watches(call: Call) -> bool:
    """Whether calling the implementation at once cannot be told from calling the operator.

    The dispatcher costs more time than the launch. It is needed wherever something observes or transforms operators:
    compilers and tracers, modes, function transforms, profilers, tensor subclasses. (Where autograd would have to
    record the call, this path either raises, on CUDA, or is recorded by itself, on the CPU.)
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
        or any(type(x) not in _PLAIN for x in call[:_TENSORS])
    )


_PLAIN = (Tensor, type(None), torch.nn.Parameter)


# ---- CUDA ----


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from a call's metadata.

    Attributes:
        function: launches the kernel, or None where there is nothing to launch.
        kernel: the kernel object, which picks the epilogues' arguments.
        seqlens: how the kernel takes lengths.
        shapes: of out, lse and softmax.
        strides: to replace those of q, k and v, or None where they serve.
        score_args: the epilogues' arguments where no tensor is among them, else None.
        prefill: whether there may be rows that no thread writes, so that outputs need a value beforehand.
    """

    function: Callable[..., None] | None
    kernel: Any
    seqlens: Any
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    strides: tuple[tuple[int, ...] | None, ...] | None
    score_args: tuple | None
    prefill: bool


_MAX_PLANS = 4096
_plans: dict[tuple, Plan] = {}


def forward_cuda(call: Call) -> Outputs:
    """Launch the kernel that serves the call, on the current stream of q's device."""
    index = call.q.device.index
    if index == torch.cuda.current_device():
        return _run(call)
    with torch.cuda.device(index):
        return _run(call)


def _run(call: Call) -> Outputs:
    tensors: tuple[Any, ...] = call[:_TENSORS]
    key = (
        *[None if x is None else (x.dtype, x.device, x.shape, x.stride()) for x in tensors],
        *call[_TENSORS + 1 :],
    )
    if call.epilogues or call.kernel:
        key += _user_key(call)
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(call)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return _launch(call, plan)


def _launch(call: Call, plan: Plan) -> Outputs:
    q, k, v = call[:3]
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        check_alignment(call)
    out_shape, lse_shape, softmax_shape = plan.shapes
    out = _empty(out_shape, dtype=q.dtype, device=q.device)
    lse = _empty(lse_shape, dtype=torch.float32, device=q.device)
    # Blocks outside the mask's band are never visited, so their zeros have to be there already.
    softmax = torch.zeros(softmax_shape, dtype=q.dtype, device=q.device) if call.return_softmax else None
    if plan.prefill:
        out.zero_()
        lse.fill_(-math.inf)
    if plan.function is None:
        return out, lse, softmax
    if plan.strides is not None:
        q, k, v = (
            x if strides is None else x.as_strided(x.shape, strides)
            for x, strides in zip((q, k, v), plan.strides, strict=True)
        )
    score_args = plan.score_args
    if score_args is None:
        score_args = plan.kernel.score_args(_kernel_inputs(call))
    plan.function(
        q, k, v, out, lse, softmax, plan.seqlens(*call[3:7], *call[11:13]), call.softmax_scale, score_args
    )
    return out, lse, softmax


def _kernel_inputs(call: Call) -> ScoreInputs:
    """The epilogues' inputs as kernels take them: slopes and bias of full shape, broadcast by stride 0."""
    inputs = call.score_inputs()
    if call.alibi_slopes is not None:
        inputs = replace(inputs, alibi_slopes=_broadcast(call.alibi_slopes, (call.batch, call.nheads)))
    if call.bias is not None:
        full = (call.batch, call.nheads, call.max_seqlen_q, call.max_seqlen_k)
        inputs = replace(inputs, bias=_broadcast(call.bias, full))
    return inputs


def _broadcast(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    strides = regular_strides(x)
    return (x if strides is None else x.as_strided(x.shape, strides)).expand(shape)


def _user_key(call: Call) -> tuple:
    """What a plan depends on beyond the arguments' values: classes that a user may register anew."""
    from cute_attn import registry
    from cute_attn.epilogues.base import user_epilogue

    tensors = [(x.dtype, x.device, x.shape, x.stride()) for x in call.epilogue_tensors]
    arch, _, variant = call.kernel.partition(":")
    kernel = registry.KERNELS.get(("forward", arch, variant))
    return (*tensors, kernel, *(user_epilogue(name) for name in call.epilogue_names))


def _make_plan(call: Call) -> Plan:
    check(call)
    check_for_kernels(call)
    shapes = call.output_shapes()
    if math.prod(shapes[0]) == 0 or 0 in (call.max_seqlen_q, call.max_seqlen_k, math.prod(call.k.shape)):
        return Plan(None, None, None, shapes, None, (), prefill=True)
    from cute_attn import compiler
    from cute_attn.device.seqlen import Seqlens

    kernel, target = choose_kernel(call)
    compiled = compiler.compile(kernel.traits, kernel.tile, target)
    strides = tuple(regular_strides(x) for x in call[:3])
    has_tensors = any(x is not None for x in (call.alibi_slopes, call.bias, call.rng_state)) or call.epilogues
    return Plan(
        function=compiled.function,
        kernel=kernel,
        seqlens=Seqlens,
        shapes=shapes,
        strides=strides if any(strides) else None,
        score_args=None if has_tensors else kernel.score_args(_kernel_inputs(call)),
        prefill=call.seqused_q is not None,
    )


def choose_kernel(call: Call) -> tuple[Any, str]:
    """The kernel with its tile, and the target it is to be built for: that of the current GPU.

    The newest generation that serves the call is taken, unless the call names one.

    Raises:
        Unsupported: no kernel serves it, with each one's reason.
    """
    from cute_attn import compiler, registry

    target = compiler.default_target("sm80")
    names = [call.kernel] if call.kernel else [a for a in ("sm90", "sm80") if target in registry.RUNS_ON[a]]
    reasons = []
    for name in names:
        arch, _, variant = name.partition(":")
        try:
            return registry.lookup(call.traits(arch, variant), call.tile or None, target), target
        except ValueError as reason:
            if len(names) == 1:
                raise
            reasons.append(str(reason))
    raise registry.Unsupported("; ".join(reasons))


# ---- CPU ----


def forward_cpu(call: Call) -> Outputs:
    """The reference, differentiable by autograd."""
    if call.q.device.type != "cpu":
        raise ValueError(f"q is on {call.q.device}; accepted: cuda and cpu tensors")
    check(call)
    epilogues: tuple[reference.Epilogue, ...] = ()
    if call.epilogues:
        from cute_attn.epilogues.base import user_epilogue

        epilogues = tuple(user_epilogue(name).reference for name in call.epilogue_names)
    return reference.attention(
        *call[:3],
        call.softmax_scale,
        reference.Features(call.mask, call.dropout, epilogues),
        call.score_inputs(),
        reference.Lengths(*call[3:7], call.max_seqlen_q, call.max_seqlen_k),
        return_softmax=call.return_softmax,
    )


# ---- the operator's implementations ----


def _call(arguments: tuple) -> Call:
    return Call._make(tuple(x) if isinstance(x, list) else x for x in arguments)


def _operator(implementation: Callable[[Call], Outputs]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, softmax = implementation(_call(arguments))
        return out, lse, out.new_empty(0) if softmax is None else softmax

    return run


_library.impl("forward", _operator(forward_cuda), "CUDA")
_library.impl("forward", _operator(forward_cpu), "CPU")


@torch.library.register_fake("cute_attn::forward", lib=_library)
def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(arguments)
    out, lse, softmax = call.output_shapes()
    lse_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    return call.q.new_empty(out), call.q.new_empty(lse, dtype=lse_dtype), call.q.new_empty(softmax)


# ---- the gradient ----


def _backward_cpu(
    grad_out: Tensor, grad_lse: Tensor, needed: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    call = _call(arguments)
    inputs = {name: getattr(call, name).detach().requires_grad_() for name in _chosen(needed)}
    with torch.enable_grad():
        out, lse, _ = forward_cpu(call._replace(**inputs, return_softmax=False))
    grads = torch.autograd.grad((out, lse), tuple(inputs.values()), (grad_out, grad_lse))
    return _all_gradients(call, dict(zip(inputs, grads, strict=True)))


def _chosen(needed: list[bool]) -> list[str]:
    return [name for name, wanted in zip(DIFFERENTIABLE, needed, strict=True) if wanted]


def _all_gradients(call: Call, grads: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """One tensor for each differentiable argument, as an operator must return; those not needed are empty."""
    return tuple(grads[name] if name in grads else call.q.new_empty(0) for name in DIFFERENTIABLE)


_library.impl("backward", _backward_cpu, "CPU")


@torch.library.register_fake("cute_attn::backward", lib=_library)
def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor, needed: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    call = _call(arguments)
    return _all_gradients(call, {name: torch.empty_like(getattr(call, name)) for name in _chosen(needed)})


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    call = _call(inputs)
    if call.q.is_cuda:
        raise NotImplementedError(NO_GRADIENT)
    ctx.save_for_backward(*call[:_TENSORS], *call.epilogue_tensors)
    ctx.rest = call[_TENSORS + 1 :]
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor, _: Tensor) -> tuple:
    tensors = ctx.saved_tensors
    call = Call._make((*tensors[:_TENSORS], tensors[_TENSORS:], *ctx.rest))
    wanted = [ctx.needs_input_grad[Call._fields.index(name)] for name in DIFFERENTIABLE]
    grads = torch.ops.cute_attn.backward.default(grad_out, grad_lse, wanted, *call)
    by_name = dict(zip(DIFFERENTIABLE, grads, strict=True))
    return tuple(
        by_name[name]
        if name in by_name and needed
        else ([None] * len(value) if isinstance(value, tuple) else None)
        for name, value, needed in zip(Call._fields, call, ctx.needs_input_grad, strict=True)
    )


NO_GRADIENT = (
    "q, k, v or bias requires a gradient, which the CUDA kernels cannot give yet; accepted: tensors without one, "
    "a call under torch.no_grad(), or CPU tensors"
)
torch.library.register_autograd("cute_attn::forward", _differentiate, setup_context=_save, lib=_library)
