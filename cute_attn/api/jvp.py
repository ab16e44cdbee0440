"""The torch operator ``cute_attn::jvp``: attention and its forward-mode derivative, for CUDA, CPU and fake tensors.

Takes a tangent, or None for zeros, for each of q, k, v, bias, sinks and the epilogues' tensors. A dot denotes a
tangent, and P the probabilities of the scores S::

    out_dot = sum_j keep * P (S_dot - lse_dot) v / (1 - dropout_p) + keep * P v_dot / (1 - dropout_p)
    lse_dot = sum_j P S_dot
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_attn.api.operators import below_operators, call_of, forward_cpu
from cute_attn.host.call import ATTENTION, define, schema
from cute_attn.host.dispatch import DIFFERENTIABLE
from cute_attn.host.jvp import Tangents, with_tangents


def _jvp_cpu(tangents: Tangents, *arguments: Any) -> tuple[Tensor, ...]:
    """Differentiate the definition by torch's forward mode."""
    call = call_of(arguments)
    tensors = (*(getattr(call, name) for name in DIFFERENTIABLE), *call.epilogue_tensors)
    level = forward_ad.dual_level() if forward_ad._current_level < 0 else contextlib.nullcontext()
    with below_operators(), level, forward_ad._set_fwd_grad_enabled(True):
        duals = [_dual(x, tangent) for x, tangent in zip(tensors, tangents, strict=True)]
        named: dict[str, Any] = dict(zip(DIFFERENTIABLE, duals, strict=False))
        own: Any = tuple(duals[len(DIFFERENTIABLE) :])
        outputs = forward_cpu(call._replace(**named, epilogue_tensors=own))[:2]
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
