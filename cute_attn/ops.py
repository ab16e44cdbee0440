"""The torch operator ``cute_attn::forward``: for CUDA, for the CPU, for fake tensors, and its gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.call import NUM_TENSORS, Call, check
from cute_attn.launch import Outputs, Tensors, plan_call

_library = torch.library.Library("cute_attn", "DEF")
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? alibi_slopes, Tensor? bias, Tensor? rng_state, Tensor[] epilogue_tensors, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, "
    "str mask, SymInt window_left, SymInt window_right, float softcap, str dropout, float dropout_p, "
    "str[] epilogues, float[] epilogue_numbers, bool return_softmax, str kernel, str tile"
)
_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define(f"forward({_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor softmax)", tags=_TAGS)
_library.define(
    f"backward(Tensor grad_out, Tensor grad_lse, bool[] needed, {_ARGUMENTS}) "
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias)",
    tags=_TAGS,
)
DIFFERENTIABLE = ("q", "k", "v", "bias")
_PLAIN = (Tensor, type(None), torch.nn.Parameter)


def forward(call: Call) -> Outputs:
    """out, lse, and softmax where the call asks for it, through the dispatcher where anything may watch."""
    if nobody_watches() and all_plain(call[:NUM_TENSORS]):
        return forward_cuda(call) if call.q.is_cuda else forward_cpu(call)
    out, lse, softmax = torch.ops.cute_attn.forward.default(*call)
    return out, lse, softmax if call.return_softmax else None


def nobody_watches() -> bool:
    """Whether, with plain tensors, calling an implementation at once cannot be told from calling the operator.

    The dispatcher costs more time than the launch. It is needed wherever something observes or transforms operators:
    compilers and tracers, modes, function transforms, profilers. (Where autograd would have to record the call, the
    direct way either raises, on CUDA, or is recorded by itself, on the CPU.)
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


def all_plain(tensors: Tensors) -> bool:
    """Whether none is of a subclass, which may do as it likes."""
    return all(type(x) in _PLAIN for x in tensors)


def forward_cuda(call: Call) -> Outputs:
    """Launch the kernel that serves the call, on the current stream of q's device."""
    return plan_call(call).launch(call[:NUM_TENSORS], tuple(call.epilogue_tensors))


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
    # The reference itself is differentiable in everything; this is reached under a compiler.
    if any(x is not None and x.requires_grad for x in (call.alibi_slopes, *call.epilogue_tensors)):
        raise NotImplementedError(
            "alibi_slopes or an epilogue's tensor requires a gradient, which the operator does not give; "
            "accepted: tensors without one, or CPU tensors outside torch.compile"
        )
    ctx.save_for_backward(*call[:NUM_TENSORS], *call.epilogue_tensors)
    ctx.rest = call[NUM_TENSORS + 1 :]
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor, _: Tensor) -> tuple:
    tensors = ctx.saved_tensors
    call = Call._make((*tensors[:NUM_TENSORS], tensors[NUM_TENSORS:], *ctx.rest))
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
