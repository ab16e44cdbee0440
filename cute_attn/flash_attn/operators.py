"""The functions that FlashAttention-2's autograd functions call: a forward, and a backward from its outputs.

Libraries that split a sequence across GPUs import these private functions from ``flash_attn.flash_attn_interface``
(with the signatures of FlashAttention 2.7 and later), or from the extension ``flash_attn_2_cuda``, which has arguments
in another order. A forward returns

    out          shaped like q, with v's head_dim
    softmax_lse  fp32 (batch, nheads, seqlen_q), or packed (nheads, total_q); +inf where a query sees no key
    S_dmask      the softmax, as from the public functions, with return_softmax and dropout; otherwise of size 0
    rng_state    int64 (2,), seed and offset of the dropout mask, for the backward; zeros without dropout

Unlike in FlashAttention-2, out and softmax_lse are differentiable by autograd.

A backward writes dq, dk and dv, and skips a gradient that is None. FlashAttention-2's backward returns the row sums of
dout * out, padded to its blocks. Here these stay in the workspace, and a tensor of size 0 is returned. out and
softmax_lse may cover more keys than the call has, as in ring attention: gradients are then the contributions of the
call's keys, to be summed by the caller.

Functions raise TypeError, ValueError and Unsupported as in :mod:`cute_attn.api.attention`. A backward also raises for
dropout without a rng_state.
"""

from typing import Any

import torch
from torch import Tensor

from cute_attn.api.attention import attention_backward, attention_varlen_backward, draw_rng_state
from cute_attn.flash_attn.conventions import (
    Scores,
    attend,
    attend_pages,
    check_tensors,
    flag,
    longest,
    note,
    plus_infinity,
    probability,
    refuse,
)

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""out, softmax_lse, S_dmask, rng_state."""


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Outputs:  # fmt: skip
    """The forward of :func:`~cute_attn.flash_attn.flash_attn_func`."""
    scores = Scores(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    return _forward((q, k, v), None, scores, dropout_p, return_softmax)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False, num_splits: int = 0,
) -> Outputs:  # fmt: skip
    """The forward of :func:`~cute_attn.flash_attn.flash_attn_varlen_func`.

    num_splits: read only with a block_table.

    Raises
    ------
    TypeError, ValueError, Unsupported
        As ``flash_attn_varlen_func``.
    NotImplementedError
        leftpad_k or zero_tensors is given.
    """
    refuse(leftpad_k=leftpad_k, zero_tensors=zero_tensors)
    scores = Scores(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is None:
        return _forward((q, k, v), lengths, scores, dropout_p, return_softmax, seqused_k=seqused_k)
    used = {} if seqused_k is None else {"cache_seqlens": seqused_k}
    door, options = "flash_attn._flash_attn_varlen_forward", {"num_splits": num_splits, **used}
    out, lse = attend_pages(door, (q, k, v), lengths, block_table, scores, dropout_p, True, **options)
    assert lse is not None
    return out, plus_infinity(lse), out.new_empty(0), out.new_zeros(2, dtype=torch.int64)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The backward of :func:`~cute_attn.flash_attn.flash_attn_func`; writes to dq, dk and dv."""
    scores = Scores(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    options = {"dropout_p": dropout_p, "deterministic": deterministic, "rng_state": rng_state}
    tensors = (dout, q, k, v, out, softmax_lse)
    return backward("flash_attn._flash_attn_backward", tensors, (dq, dk, dv), None, scores, options)


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """The backward of :func:`~cute_attn.flash_attn.flash_attn_varlen_func`; writes to dq, dk and dv.

    Rows that belong to no sequence become 0, with or without zero_tensors.
    """
    scores = Scores(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = {"dropout_p": dropout_p, "deterministic": deterministic, "rng_state": rng_state}
    tensors = (dout, q, k, v, out, softmax_lse)
    return backward("flash_attn._flash_attn_varlen_backward", tensors, (dq, dk, dv), lengths, scores, options)


def _forward(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[Any, ...] | None,
    scores: Scores,
    dropout_p: float,
    return_softmax: bool,
    **options: Any,
) -> Outputs:
    """Compute a forward. tensors: q, k, v. lengths: both cu_seqlens and both max_seqlens, None for batches."""
    q, k, v = tensors
    check_tensors(q=q, k=k, v=v)
    dropout_p = probability(dropout_p)
    state = draw_rng_state(q.device) if dropout_p else q.new_zeros(2, dtype=torch.int64)
    options |= {"dropout_p": dropout_p, "return_lse": True}
    wants_softmax = flag("return_softmax", return_softmax)
    if dropout_p:
        options |= {"rng_state": state, "return_softmax": wants_softmax}
    door = f"flash_attn._flash_attn_{'varlen_' if lengths else ''}forward"
    out, lse, *softmax = attend(door, tensors, lengths, scores, options, dropout_p=dropout_p)
    return out, plus_infinity(lse), softmax[0] if softmax else out.new_empty(0), state


def backward(
    door: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
    lengths: tuple[Any, ...] | None,
    scores: Scores,
    options: dict[str, Any],
) -> Tensor:
    """Write gradients to dq, dk and dv, those that are not None, in ``into``. Returns a tensor of size 0.

    door: name of the function that is counted. tensors: dout, q, k, v, out and softmax_lse. lengths: see
    :func:`_forward`. options: arguments of attention_backward.
    """
    dout, q, k, v, out, lse = tensors
    check_tensors(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse)
    given = {name: x for name, x in zip("qkv", into, strict=True) if x is not None}
    for name, x in given.items():
        check_tensors(**{f"d{name}": x})
    nothing = dout.new_empty(0, dtype=torch.float32)
    if not given:
        return nothing
    options = options | scores.arguments()
    options["dropout_p"] = probability(options.get("dropout_p", 0.0))
    options["deterministic"] = flag("deterministic", options["deterministic"])
    options |= {"wanted": tuple(given), "into": tuple(given.values())}
    with torch.no_grad():
        if lengths is None:
            attention_backward(*tensors, **options)
        else:
            attention_varlen_backward(*tensors, *lengths[:2], *longest(lengths), **options)
    note(door, (q, k, v), scores, dropout_p=options["dropout_p"], cum_seq_q=lengths and lengths[0])
    return nothing
