"""fp32 tensors as fp16 terms on CUDA: workspace, the launch that splits tensors, and the forward that follows it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.host import record
from cute_attn.host.call import Call
from cute_attn.host.checks import check_query_blocks
from cute_attn.host.padding import MAX_ROWS
from cute_attn.host.plans import Plan
from cute_attn.tiles import padded
from cute_attn.traits import MEASURED_TENSORS


def split(kernel: Any, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Split (q, k, v) or (q, k, v, dO), with strides that kernels read, on the current stream of their device.

    Args:
        kernel: the compiled :class:`cute_attn.kernels.split_fp32.SplitFp32`.

    Returns:
        terms: fp16 terms of each tensor (..., dim) except the forward's q: contiguous (..., one or two, padded dim),
            hi, then lo, or only hi; ``unbind(-2)`` separates them. Columns beyond dim are 0. Terms are not written if
            the tensor's scale is 0.
        scales: fp32 (tensors,), for all tensors including q: 2^-e, the inverse of the power of two that the tensor was
            multiplied by; 0 if terms lose the tensor's precision, so that another kernel has to read the tensor itself.
    """
    like, traits = tensors[0], kernel.traits
    shapes = [
        (*x.shape[:-1], traits.fp32_terms, padded(x.shape[-1]))
        for x in tensors[MEASURED_TENSORS[traits.op] :]
    ]
    terms = record.together(like, shapes, torch.float16)
    partials = record.contiguous(like, (len(tensors), 2, kernel.tile.blocks), torch.int32)
    scales = record.contiguous(like, (len(tensors),), torch.float32)
    arguments = {"mX": tuple(tensors), "mTerms": tuple(terms), "mPartials": partials, "mScales": scales}
    record.launch(*kernel.bind(**arguments))
    return terms, scales


def can_split(tensors: Sequence[Tensor]) -> bool:
    """True if no tensor exceeds ``MAX_ROWS``."""
    return all(math.prod(x.shape[:-1]) <= MAX_ROWS for x in tensors)


# ---- the forward ----


def plan_forward(call: Call, kernel: Any, target: str) -> Plan | None:
    """A plan with both kernels of :mod:`cute_attn.kernels.fp32_sm80.kernel` in place of ``kernel``, or None."""
    kernels = both_kernels(call, kernel, target)
    if kernels is None:
        return None
    check_query_blocks(call, kernels[0])
    main, fallback = (compiler.build(one, target) for one in kernels)
    plain = registry.lookup(replace(kernel.traits, variant=""), None, target)
    first = compiler.compile(kernel.traits.split_fp32("forward_split"), None, target)
    return Plan(plain, {"split": first, "main": main, "fallback": fallback})


def launch_forward(plan: Plan, arguments: dict[str, Any]) -> None:
    """Split k and v, and launch the kernel that reads their terms and the fallback for tensors that lose precision.

    arguments: the forward's arguments.
    """
    (k, v), scales = split(plan.functions["split"], [arguments[name] for name in ("mQ", "mK", "mV")])
    arguments = {**arguments, "mScales": scales}
    record.launch(*plan.functions["main"].bind(**{**arguments, "mK": k.flatten(-2), "mV": v.flatten(-2)}))
    record.launch(*plan.functions["fallback"].bind(**arguments))


def both_kernels(call: Call, kernel: Any, target: str) -> tuple[Any, ...] | None:
    """The speculative kernel and its fallback, to serve a call in place of ``kernel``, the one chosen; or None.

    A call that names either of them uses both. A call that names neither, and no tile, uses both if it is large enough
    to pay for the launches before them (:func:`cute_attn.kernels.fp32_sm80.heuristics.terms_pay`).

    Raises:
        Unsupported: the call names either, and the other does not support the call.
        ValueError: the call names either, and has too many rows.
    """
    traits, few_rows = kernel.traits, can_split((call.q, call.k, call.v))
    named = traits.variant in registry.SPECULATIVE_PAIR
    if named and not few_rows:
        raise ValueError(f"q, k or v has more than {MAX_ROWS} rows of heads; accepted: fewer, for {traits}")
    if not named:
        if traits.dtype != "fp32" or traits.arch != "sm80" or traits.variant or call.tile or not few_rows:
            return None
        speculative = registry.KERNELS["forward", "sm80", registry.SPECULATIVE_PAIR[0]]
        if not speculative.terms_pay(traits, math.prod(call.q.shape[:-1]), *call.longest, call.group):
            return None
    try:
        return tuple(
            kernel if traits.variant == name else registry.lookup(replace(traits, variant=name), None, target)
            for name in registry.SPECULATIVE_PAIR
        )
    except registry.Unsupported:  # head dims that one of the two does not support
        if named:
            raise
        return None
