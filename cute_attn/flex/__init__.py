"""PyTorch's FlexAttention on the kernels of this package.

    from cute_attn.flex import flex_attention    instead of PyTorch's
    cute_attn.flex.activate()                    every flex_attention of this process, eager and compiled
    cute_attn.flex.served                        number of calls, and why PyTorch computed some of them
    cute_attn.flex.restore()
    cute_attn.flex.interval_mask(begin, end, n)  a BlockMask of one interval of keys for each query

Functions and BlockMasks are as for ``attention(..., score_mod=, block_mask=)``; docs/functions.md describes both.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from cute_attn.flex import overrides
from cute_attn.flex.intervals import interval_mask
from cute_attn.flex.overrides import Result, attend
from cute_attn.host import doors, plans
from cute_attn.host.activation import Options, for_a_block
from cute_attn.host.doors import served
from cute_attn.host.values import check_flags

__all__ = ["activate", "active", "flex_attention", "interval_mask", "restore", "served"]


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: dict[str, Any] | None = None, *,
    return_aux: AuxRequest | None = None,
) -> Result:  # fmt: skip
    """``torch.nn.attention.flex_attention.flex_attention``, as one call of :func:`cute_attn.attention`.

    Parameters
    ----------
    query : Tensor (batch, nheads, seqlen_q, head_dim)
        fp16, bf16 or fp32 on CUDA. On the CPU any float dtype, computed in plain torch instead of by a kernel.
    key : Tensor (batch or 1, nheads_kv, seqlen_k, head_dim)
    value : Tensor (batch or 1, nheads_kv, seqlen_k, head_dim_v)
    score_mod : function (score, b, h, q_idx, kv_idx) -> score, optional
        See :func:`cute_attn.attention`; h counts query heads.
    block_mask : BlockMask, optional
        Made for these lengths, or for longer ones (only the first rows and columns are used), with query's batch and
        heads, or 1. Full blocks are visible, unlisted blocks are hidden, and mask_mod decides in partial blocks.
    scale : float, optional
        Factor of the products. Default 1 / sqrt(head_dim).
    enable_gqa : bool
        Allow nheads to be a multiple of nheads_kv: consecutive query heads use the same key head.
    return_lse : bool
        Also return lse.
    kernel_options : dict, optional
        Options of PyTorch's kernels; not read.
    return_aux : AuxRequest, optional
        Also return an AuxOutput, with lse and max_scores if requested.

    Returns
    -------
    out : Tensor (batch, nheads, seqlen_q, head_dim_v), query's dtype
        Dimensions have the same order in memory as query's. 0 in rows that see no key.
    lse : Tensor (batch, nheads, seqlen_q), float32 (float64 for float64 query)
        Natural logarithm of each row's sum of exponentials, -inf in rows that see no key.

    out and lse are differentiable in query, key and value, and in tensors that functions capture.

    Raises
    ------
    TypeError, ValueError, Unsupported
        An argument is not as described here, or :func:`cute_attn.attention` raises.
    NotImplementedError
        A gradient of a captured CUDA tensor must repeat bit for bit.

    Source: torch.nn.attention.flex_attention of torch 2.13, and Dong et al. 2024, arXiv:2412.05496.
    """
    arguments = (
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return attend(*arguments, return_aux=return_aux)

    def call() -> Result:
        found = attend(*arguments, return_aux=return_aux)
        given = {"query": query, "key": key, "value": value, "score_mod": score_mod, "block_mask": block_mask}
        doors.note("flex.flex_attention", given)
        return found

    if return_aux is not None or kernel_options is not None or doors.observer is not None:
        return call()
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or not query.dim() == key.dim() == 4:
        return call()
    if query.dtype == torch.float32:  # attention looks at autocast and at PyTorch's precision
        return call()
    options = ("flex_attention", scale, enable_gqa, return_lse)
    if score_mod is None and block_mask is None:
        return plans.repeat(options, (query, key, value), call)
    batch, nheads, seqlen_q, _ = query.shape
    sizes = (batch, seqlen_q, nheads, key.shape[2], key.shape[1])
    own, _, read = plans.read_by((score_mod, None, block_mask), sizes)  # type: ignore[misc]
    return plans.repeat((*options, own), (query, key, value), call, read)


def activate(*, unsupported: str = "fall_back", strict: bool = False) -> None:
    """Serve ``torch.nn.attention.flex_attention.flex_attention`` from now on, even if programs have imported it.

    A second call replaces the options of the first. If nothing can be served, as on a machine without a GPU, calls
    have no effect, and the first one warns. Under ``torch.compile``, a call of flex_attention becomes a graph node,
    ours or PyTorch's, and is counted when it is traced.

    Parameters
    ----------
    unsupported : {"fall_back", "error"}
        What happens to a call that no kernel supports. PyTorch computes it, compiled if the call was compiled, and
        the first such call warns; or ``Unsupported`` is raised.
    strict : bool
        Raise if nothing can be served.

    Raises
    ------
    ValueError
        An argument is not as described here; or with ``strict`` there is no GPU that kernels are built for, or
        PyTorch's function has other arguments. Served calls do not change in that case.
    """
    check_flags(strict=strict)
    options = Options(unsupported=unsupported)
    why = doors.why_nothing_is_served() or overrides.why_not_replaced()
    if why is None:
        overrides.Activation(options)
    elif strict:
        raise ValueError(why)
    else:
        doors.warn_once("cute_attn.flex", f"cute_attn.flex.activate() does nothing here: {why}")


def restore() -> None:
    """Let PyTorch compute everything again; has no effect unless :func:`activate` was called."""
    activation = overrides.serving()
    if activation is not None:
        activation.remove()


def active(**options: Any) -> AbstractContextManager[None]:
    """:func:`activate` with these options for a ``with`` block, after which calls are served as before it."""
    start = functools.partial(activate, **options)
    return for_a_block(start, restore, overrides.serving, overrides.Activation.start)
