"""The torch operator ``cute_attn::second``: second derivatives of attention, for CUDA, CPU and fake tensors.

Takes a tangent, or None for zeros, for each of q, k, v, bias, sinks and the epilogues' tensors, cotangents of out and
lse, and flags of the needed results. These are the tangents of out and lse, and the gradients, by the tensors that may
have tangents, of the product of the tangents with the cotangents. No kernel computes them, but the definition, on any
device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attn.api.operators import below_operators, call_of
from cute_attn.host.call import ATTENTION, define, schema
from cute_attn.host.checks import check
from cute_attn.host.dispatch import DIFFERENTIABLE
from cute_attn.host.jvp import Tangents
from cute_attn.reference.second import second


def _second(
    tangents: Tangents, grad_out: Tensor | None, grad_lse: Tensor | None, needed: list[bool], *arguments: Any
) -> list[Tensor]:
    call = call_of(arguments)
    check(call)

    def described(others: Sequence[Any]) -> Any:
        sinks, *own = others
        return call._replace(bias=None, sinks=sinks, epilogue_tensors=tuple(own)).by_definition()

    tensors = (*(getattr(call, name) for name in DIFFERENTIABLE), *call.epilogue_tensors)
    with below_operators(), torch.enable_grad(), torch.autocast(call.q.device.type, enabled=False):
        found = second(tensors, tangents, (grad_out, grad_lse), needed, call.softmax_scale, described)
    likes = (call.q, grad_lse, *tensors)
    return [
        call.q.new_empty(0) if x is None else x.to(like.dtype) for x, like in zip(found, likes, strict=True)
    ]


def _second_fake(
    _: Tangents, grad_out: Tensor | None, grad_lse: Tensor | None, needed: list[bool], *arguments: Any
) -> list[Tensor]:
    call = call_of(arguments)
    likes = (grad_out, grad_lse, *(getattr(call, name) for name in DIFFERENTIABLE), *call.epilogue_tensors)
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
