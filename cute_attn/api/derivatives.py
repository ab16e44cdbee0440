"""The torch operators ``cute_attn::jvp`` and ``::second``: forward-mode and second derivatives of attention.

Both take a tangent, or None for zeros, for each of q, k, v, bias, sinks and the epilogues' tensors. ``jvp`` returns
out, lse and their tangents. A dot denotes a tangent, and P the probabilities of the scores S::

    out_dot = sum_j keep * P (S_dot - lse_dot) v / (1 - dropout_p) + keep * P v_dot / (1 - dropout_p)
    lse_dot = sum_j P S_dot

``second`` also takes cotangents of out and lse, and flags of the needed results. These are the tangents of out and lse,
and the gradients, by the tensors that may have tangents, of the product of the tangents with the cotangents. No kernel
computes them, but the definition, on any device.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_attn.api.operators import below_operators, call_of, forward_cpu
from cute_attn.host.call import ATTENTION, define, schema
from cute_attn.host.checks import check
from cute_attn.host.jvp import Tangents, with_tangents
from cute_attn.reference.second import second


def _jvp_cpu(tangents: Tangents, *arguments: Any) -> tuple[Tensor, ...]:
    """Differentiate the definition by torch's forward mode."""
    call = call_of(arguments)
    level = forward_ad.dual_level() if forward_ad._current_level < 0 else contextlib.nullcontext()
    with below_operators(), level, forward_ad._set_fwd_grad_enabled(True):
        duals = [_dual(x, tangent) for x, tangent in zip(call.differentiable, tangents, strict=True)]
        outputs = forward_cpu(call.with_differentiable(duals))[:2]
        pairs = [forward_ad.unpack_dual(x) for x in outputs]
        primals = tuple(primal.clone() for primal, _ in pairs)
        found = tuple(torch.zeros_like(x) if dot is None else dot.clone() for x, dot in pairs)
    return *primals, *found


def _dual(x: Tensor | None, tangent: Tensor | None) -> Tensor | None:
    """``x`` with its tangent, both contiguous: torch requires each element to be in memory only once."""
    if x is None or tangent is None:
        return x
    return forward_ad.make_dual(x.detach().contiguous(), tangent.detach().contiguous())


def _jvp_cuda(tangents: Tangents, *arguments: Any) -> tuple[Tensor, ...]:
    return with_tangents(call_of(arguments), tangents)


def _jvp_fake(_: Tangents, *arguments: Any) -> tuple[Tensor, ...]:
    call = call_of(arguments)
    return *call.fake_outputs(), *call.fake_outputs()


define(
    f"jvp(Tensor?[] tangents, {schema(ATTENTION)}) -> (Tensor out, Tensor lse, Tensor out_dot, Tensor lse_dot)",
    _jvp_cpu,
    _jvp_cuda,
    _jvp_fake,
)


def _second(
    tangents: Tangents, grad_out: Tensor | None, grad_lse: Tensor | None, needed: list[bool], *arguments: Any
) -> list[Tensor]:
    call = call_of(arguments)
    check(call)

    def described(others: Sequence[Any]) -> Any:
        sinks, *own = others
        return call._replace(bias=None, sinks=sinks, epilogue_tensors=tuple(own)).by_definition()

    with below_operators(), torch.enable_grad(), torch.autocast(call.q.device.type, enabled=False):
        found = second(
            call.differentiable, tangents, (grad_out, grad_lse), needed, call.softmax_scale, described
        )
    likes = (call.q, grad_lse, *call.differentiable)
    return [
        call.q.new_empty(0) if x is None else x.to(like.dtype) for x, like in zip(found, likes, strict=True)
    ]


def _second_fake(
    _: Tangents, grad_out: Tensor | None, grad_lse: Tensor | None, needed: list[bool], *arguments: Any
) -> list[Tensor]:
    call = call_of(arguments)
    likes = (grad_out, grad_lse, *call.differentiable)
    return [
        x.new_empty(x.shape) if wanted and x is not None else call.q.new_empty(0)
        for x, wanted in zip(likes, needed, strict=True)
    ]


define(
    f"second(Tensor?[] tangents, Tensor? grad_out, Tensor? grad_lse, bool[] needed, {schema(ATTENTION)}) -> Tensor[]",
    _second,
    _second,
    _second_fake,
)
