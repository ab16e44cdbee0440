""":func:`merge_attention`: one result from partial ones over disjoint sets of keys, and its torch operator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_attn.host import plans, record
from cute_attn.host.call import define
from cute_attn.host.checks import check_like
from cute_attn.host.dispatch import refuse_derivatives
from cute_attn.host.memory import Tensors, materialized, on_device
from cute_attn.host.merge import check, check_for_kernels, launch
from cute_attn.host.values import tensors_of
from cute_attn.reference import kvcache as kvcache_reference


def merge_attention(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    sinks: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse over all keys, from partial results over disjoint sets of keys.

    For example, merges results over a prefix common to several sequences with results over each sequence's other keys.
    The definition is :func:`cute_attn.reference.kvcache.merge`, which also computes CPU tensors. Sums have a fixed
    order, so results repeat bit for bit.

    Parameters
    ----------
    outs : Tensor (partials, batch, seqlen_q, nheads, head_dim_v), or packed (partials, total_q, nheads, head_dim_v)
        fp32. A sequence of partial results is copied to one tensor. On CUDA, other float dtypes and head dims that are
        not multiples of 4 are copied to fp32 rows, and the limits are 512 partials and head_dim_v 512.
    lses : Tensor (partials, batch, nheads, seqlen_q), or packed (partials, nheads, total_q), float32
        Natural logarithms. Where lse is -inf or +inf, the partial result saw no key and its out is not used.
    sinks : Tensor (nheads,), float32, fp16 or bf16, optional
        Attention sinks, see :func:`cute_attn.attention`; no partial LSE includes them.
    dtype : torch.dtype, optional
        dtype of out: fp16, bf16 or fp32. Default: dtype of outs.

    Returns
    -------
    out : Tensor, shaped like one of outs
        0 where no partial result saw a key.
    lse : Tensor, shaped like one of lses
        -inf, or the sink, where no partial result saw a key.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here; the message names the argument, its value and the accepted values.
    NotImplementedError
        A tensor requires a gradient.
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    tensors, key = (outs, lses, sinks), ("merge_attention", dtype)
    return plans.repeat(key, tensors, lambda: _merge(tensors, dtype))


def _merge(tensors: Tensors, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Check and run a merge that repeats no recorded one; tensors: outs, lses and sinks."""
    outs, lses, sinks = tensors
    check(outs, lses, sinks, dtype)
    refuse_derivatives((("outs", outs), ("lses", lses), ("sinks", sinks)), "merge_attention")
    return torch.ops.cute_attn.merge.default(*materialized(tensors), outs.dtype if dtype is None else dtype)


def _stacked(name: str, partials: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(partials, Tensor):
        return partials
    found = tensors_of(name, partials, what=", or one tensor of all")
    if not found:
        raise ValueError(f"{name} has 0 partial results; accepted: 1 or more")
    for i, x in enumerate(found):
        check_like(f"{name}[{i}]", x, shape=found[0].shape, dtype=found[0].dtype, device=found[0].device)
    return torch.stack(found)


# ---- the operator ----


def merge_cpu(outs: Tensor, lses: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    check(outs, lses, sinks, dtype)
    out, lse = kvcache_reference.merge(outs, lses, sinks)
    return out.to(dtype), lse.to(lses.dtype)


def merge_cuda(outs: Tensor, lses: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Run the combine kernel on the current stream of outs' device."""
    check(outs, lses, sinks, dtype)
    check_for_kernels(outs, lses, dtype)
    with on_device(outs.get_device()):
        out = record.contiguous(outs, tuple(outs.shape[1:]), dtype)
        lse = record.contiguous(outs, tuple(lses.shape[1:]), torch.float32)
        if out.numel():
            launch(outs, lses, out, lse, sinks)
    return out, lse


def _merge_fake(
    outs: Tensor, lses: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    check(outs, lses, sinks, dtype)
    return outs.new_empty(outs.shape[1:], dtype=dtype), lses.new_empty(lses.shape[1:])


define(
    "merge(Tensor outs, Tensor lses, Tensor? sinks, ScalarType dtype) -> (Tensor out, Tensor lse)",
    merge_cpu,
    merge_cuda,
    _merge_fake,
)
