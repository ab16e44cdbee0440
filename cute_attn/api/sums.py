""":func:`attention_sums`: how much attention each key gets, without a matrix of scores."""

import math
from typing import Any

import torch
from torch import Tensor

from cute_attn.api.attention import Causal, Window, _attend, _Options
from cute_attn.api.functions import Functions, MaskMod, ScoreMod
from cute_attn.host.memory import Tensors
from cute_attn.host.values import check_choice, check_dense


@torch.no_grad()
def attention_sums(
    q: Tensor, k: Tensor, *, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None,
    causal: Causal = False, window: Window = (None, None), alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, softcap: float = 0.0, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
) -> Tensor:  # fmt: skip
    """The softmax of :func:`attention`, summed over queries: which keys of a cache are worth keeping.

    Caches are compressed by such sums, over all queries (H2O, arXiv:2306.14048) or the last ones (SnapKV,
    arXiv:2404.14469, for which q has only those). Memory is linear in the lengths: one call computes LSE, and another,
    with the roles of q and k exchanged, sums exp(score - lse) over queries, once per query head of a key head. No
    gradient is computed.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, nheads, head_dim), or packed (total_q, nheads, head_dim) with cu_seqlens_q
        As for :func:`attention` or :func:`attention_varlen`.
    k : Tensor (batch, seqlen_k, nheads_kv, head_dim), or packed (total_k, nheads_kv, head_dim)
        As q.
    causal : bool or "bottom_right"
        As for :func:`attention`, without "top_left".
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q
        For packed sequences, as for :func:`attention_varlen`; the first four all or none.
    softmax_scale, window, alibi_slopes, sinks, softcap, seqused_k, score_mod, mask_mod
        As for :func:`attention`. Sinks are in the softmax's denominator, and have no sum of their own.

    Returns
    -------
    Tensor (batch, nheads, seqlen_k), or packed (nheads, total_k), float32 (float64 for float64 q)
        0 for a key that no query sees, and beyond seqused_k; arbitrary in packed rows that belong to no sequence.

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`attention`.
    """
    check_choice("causal", causal, (False, True, "bottom_right"))
    for name, x in (("q", q), ("k", k)):
        check_dense(name, x)
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    used, options = (seqused_q, seqused_k), (softmax_scale, softcap)
    functions = (score_mod, mask_mod, None)
    lse = _lse(q, k, starts, longest, used, alibi_slopes, sinks, options, causal, window, functions)
    if not lse.numel():  # functions capture no tensor without elements
        return lse.new_zeros((*q.shape[:-3], q.shape[-2], k.shape[-3]))
    lse.masked_fill_(lse == -math.inf, math.inf)  # exp(score - lse) is then 0, and never NaN
    left, right = window
    seen = (0 if causal else right, left)
    group, sums = max(q.shape[-2] // max(k.shape[-2], 1), 1), []
    for i in range(group):
        heads = torch.arange(i, q.shape[-2], group, device=q.device, dtype=torch.int32)
        slopes = None if alibi_slopes is None else alibi_slopes[..., i::group].contiguous()
        exchanged = _exchanged(score_mod, mask_mod, lse[..., i::group, :], starts[0], heads)
        sums.append(
            _lse(
                *(k, q[..., i::group, :], starts[::-1], longest[::-1], used[::-1], slopes, None, options),
                *(False, seen, exchanged),
            )
        )
    return torch.stack(sums, -2).flatten(-3, -2).exp_()


def _lse(
    q: Tensor, k: Tensor, starts: tuple, longest: tuple, used: tuple, slopes: Tensor | None,
    sinks: Tensor | None, options: tuple, causal: Causal, window: Window, functions: Functions,
) -> Tensor:  # fmt: skip
    """The LSE of an attention whose values are as few of k's columns as its kernel takes without spills."""
    softmax_scale, softcap = options
    v = k if k.dtype == torch.float32 else k[..., :8]
    tensors: Tensors = (q, k, v, *starts, *used, slopes, None, sinks, None)
    varlen = any(x is not None for x in (*starts, *longest))
    given = _Options(varlen, longest[0], longest[1], softmax_scale, causal, window, softcap, return_lse=True)
    return _attend(tensors, given, None, functions)[1]


def _exchanged(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, lse: Tensor, starts: Tensor | None, heads: Tensor
) -> Functions:
    """The functions of scores whose queries are keys, and whose keys are queries with this ``lse``.

    starts: packed queries' starts, or None. heads: the query head of each head of the scores.
    """

    def minus_lse(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if score_mod is not None:
            score = score_mod(score, b, heads[h], kv_idx, q_idx)
        return score - (lse[b, h, kv_idx] if starts is None else lse[h, starts[b] + kv_idx])

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        assert mask_mod is not None
        return mask_mod(b, heads[h], kv_idx, q_idx)

    return minus_lse, None if mask_mod is None else mask, None
