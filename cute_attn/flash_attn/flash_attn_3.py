"""FlashAttention-3's functions, as in its module ``flash_attn_interface``, and their common arguments.

q, k and v are (batch, seqlen, nheads, head_dim), or packed (total, nheads, head_dim); k and v may have fewer heads, v
another head_dim. Arguments beyond those of :mod:`~cute_attn.flash_attn.flash_attn_interface`:

    num_splits, pack_gqa, sm_margin, scheduler_metadata    affect FlashAttention-3's speed only. Not read here, except
                       num_splits with a cache, the number of splits of its keys
    qv, q_descale, k_descale, v_descale, attention_chunk    raise if given: no kernel here supports a second product for
                       scores, fp8 or chunks
    return_attn_probs  return (out, softmax_lse) instead of out
    softmax_lse        is -inf where a query sees no key

These functions have no dropout and no ALiBi. Source of names, arguments and conventions: Dao-AILab/flash-attention,
hopper/flash_attn_interface.py of 2026-08. Added here: gradients through softmax_lse, GPUs from 8.0 on, fp32.
"""

from typing import Any

import torch
from torch import Tensor

from cute_attn.api.merge import merge_attention
from cute_attn.flash_attn import conventions
from cute_attn.flash_attn.conventions import LENGTHS, Given, Result, takes
from cute_attn.flash_attn.operators import backward
from cute_attn.host.checks import check_written
from cute_attn.host.values import wrong_shape

__all__ = [
    "_flash_attn_backward", "_flash_attn_forward", "flash_attn_combine", "flash_attn_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata",
]  # fmt: skip

_REFUSED = ("qv", "q_descale", "k_descale", "v_descale", "attention_chunk")
_DESCALE = "q_descale=None k_descale=None v_descale=None"
_SCORES = f"{_DESCALE} window_size=(-1,-1) attention_chunk=0 softcap=0.0"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_SPEED = "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"


@takes(f"q k v softmax_scale=None causal=False qv=None {_SCORES} {_SPEED}", repeats=True)
def flash_attn_func(given: Given) -> Result:
    """Attention on batches: out (batch, seqlen_q, nheads, head_dim).

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention`.
    NotImplementedError
        qv, attention_chunk or one of q_descale, k_descale and v_descale is given.
    """
    return _attend("flash_attn_3.flash_attn_func", given)


@takes(
    f"qkv softmax_scale=None causal=False {_SCORES} deterministic=False num_heads_q=None sm_margin=0 "
    "return_attn_probs=False",
    repeats=True,
)
def flash_attn_qkvpacked_func(given: Given) -> Result:
    """:func:`flash_attn_func` with q, k and v in one tensor.

    Parameters
    ----------
    qkv : Tensor (batch, seqlen, 3, nheads, head_dim), or with num_heads_q (batch, seqlen, heads, head_dim)
        With num_heads_q: heads of q first, then of k, then as many of v.
    num_heads_q : int, optional
        Number of q's heads.
    """
    return _attend("flash_attn_3.flash_attn_func", given)


@takes(
    f"q k v {_LENGTHS} seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None {_SCORES} {_SPEED}",
    repeats=True,
)
def flash_attn_varlen_func(given: Given) -> Result:
    """Attention on packed sequences: out (total_q, nheads, head_dim).

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : Tensor (batch + 1,), int32
        Where sequences start.
    max_seqlen_q, max_seqlen_k : int
        Length of the longest sequence, or more.
    seqused_q, seqused_k : Tensor (batch,), int32, optional
        How many rows of each sequence exist.

    Raises
    ------
    TypeError, ValueError, Unsupported, NotImplementedError
        As :func:`cute_attn.attention_varlen` and :func:`flash_attn_func`.
    """
    used = {"seqused_q": given["seqused_q"], "seqused_k": given["seqused_k"]}
    return _attend("flash_attn_3.flash_attn_varlen_func", given, **used)


@takes(
    "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
    "cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
    f"{_DESCALE} softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
    "rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False",
    repeats=True,
)
def flash_attn_with_kvcache(given: Given) -> Result:
    """Append k and v to a cache in place, then attend to the cache; no gradients.

    As :func:`cute_attn.flash_attn.flash_attn_with_kvcache` (its block_table is page_table here), with additions:

    Parameters
    ----------
    cu_seqlens_q : Tensor (batch + 1,), int32, optional
        Where sequences start in a packed q (total_q, nheads, head_dim).
    max_seqlen_q : int, optional
        Length of the longest of these sequences, or more.
    cu_seqlens_k_new : Tensor (batch + 1,), int32, optional
        Where sequences start in packed k and v (total, nheads_k, head_dim).
    rotary_seqlens : Tensor (batch,), int32, optional
        The position of each sequence's first new row; counts only with rotary_cos. Default: cache_seqlens.
    return_softmax_lse : bool
        Return (out, softmax_lse, out_accum, softmax_lse_accum) instead of out, as FlashAttention-3 does; the last two
        have size 0.

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.api.kvcache.attention_with_kvcache`.
    NotImplementedError
        As ``attention_with_kvcache``, and as :func:`flash_attn_func`.
    """
    conventions.refuse(given, *_REFUSED)
    wanted = conventions.flag("return_softmax_lse", given["return_softmax_lse"])
    out, lse = conventions.attend_cache("flash_attn_3.flash_attn_with_kvcache", given, return_lse=wanted)
    return out if lse is None else (out, lse, *_accumulators(out))


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint sets of keys. Returns out, and softmax_lse (batch, seqlen, nheads).

    Parameters
    ----------
    out_partial : Tensor (num_splits, batch, seqlen, nheads, head_dim)
    lse_partial : Tensor (num_splits, batch, seqlen, nheads), float32
    out : Tensor (batch, seqlen, nheads, head_dim), optional
        Where to write the result.
    out_dtype : torch.dtype, optional
        dtype of the result. Default: dtype of out_partial.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`cute_attn.merge_attention`, for outs and lses.
    """
    conventions.check_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if lse_partial.shape != out_partial.shape[:-1]:
        accepted = tuple(out_partial.shape[:-1])
        raise wrong_shape("lse_partial", lse_partial, accepted)
    if out is not None:
        named = {"out_partial": out_partial, "lse_partial": lse_partial}
        dtype, device = out_dtype or out_partial.dtype, out_partial.device
        check_written("out", out, named.items(), shape=out_partial.shape[1:], dtype=dtype, device=device)
    merged, lse = merge_attention(out_partial, lse_partial.transpose(-1, -2), dtype=out_dtype)
    return merged if out is None else out.copy_(merged), lse.transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_size: int | None = None, max_seqlen_k_new: int = 0,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
    has_softcap: bool = False, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """An int32 tensor of size 0 on cache_seqlens' device, to pass as scheduler_metadata; nothing here reads it.

    Kernels make their schedule themselves, from lengths on the GPU.

    Raises
    ------
    TypeError
        cache_seqlens is not a tensor.
    """
    conventions.check_tensors(cache_seqlens=cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=torch.int32)


# ---- functions that FlashAttention-3's autograd functions call ----


@takes(
    "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None cu_seqlens_k_new=None "
    "seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None page_table=None kv_batch_idx=None "
    f"leftpad_k=None rotary_cos=None rotary_sin=None seqlens_rotary=None {_DESCALE} softmax_scale=None causal=False "
    "window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 rotary_interleaved=True "
    "scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0"
)
def _flash_attn_forward(given: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All forwards in one function: out, softmax_lse, and two tensors of size 0 in place of partial results.

    On batches, or on packed sequences with cu_seqlens_q and cu_seqlens_k, as :func:`flash_attn_varlen_func`, with
    gradients. With arguments of a cache (k_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, or packed queries and
    unpacked keys), as :func:`flash_attn_with_kvcache`; seqused_k is then cache_seqlens. out_: memory for out.
    """
    conventions.refuse(given, *_REFUSED)
    door, starts = "flash_attn_3._flash_attn_forward", (given["cu_seqlens_q"], given["cu_seqlens_k"])
    if any(given[name] is not None for name in _OF_A_CACHE) or (starts[0] is not None and starts[1] is None):
        _alone("with a cache", given, "cu_seqlens_k", "seqused_q")
        cache = {name: given[theirs] for name, theirs in _OURS.items()}
        out, lse = conventions.attend_cache(door, given | cache, out=given["out_"], return_lse=True)
        assert lse is not None
    else:
        given, used = _with_lengths(given, "seqused_q", "seqused_k")
        out, lse = conventions.attend(door, given, return_lse=True, out=given["out_"], **used)
    return out, lse, *_accumulators(out)


_OF_A_CACHE = (
    "k_new", "v_new", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "cu_seqlens_k_new",
)  # fmt: skip
_OURS = {
    "k_cache": "k", "v_cache": "v", "k": "k_new", "v": "v_new", "cache_seqlens": "seqused_k",
    "cache_batch_idx": "kv_batch_idx", "cache_leftpad": "leftpad_k", "rotary_seqlens": "seqlens_rotary",
}  # fmt: skip
"""The arguments of :func:`_flash_attn_forward` that have other names with a cache."""


@takes(
    "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None sequed_k=None max_seqlen_q=None "
    "max_seqlen_k=None dq=None dk=None dv=None softmax_scale=None is_causal=False window_size_left=-1 "
    "window_size_right=-1 softcap=0.0 deterministic=False sm_margin=0"
)
def _flash_attn_backward(given: Given) -> Tensor:
    """Compute dq, dk and dv, of batches or packed sequences, in the given tensors. A gradient may be None to skip it.

    Returns a tensor of size 0 in place of the row sums of dout * out.
    """
    given, used = _with_lengths(given, "sequed_q", "sequed_k")
    if "cu_seqlens_k" in given:
        conventions.check_tensors(cu_seqlens_k=given["cu_seqlens_k"])
    return backward(given, "flash_attn_3._flash_attn_backward", **used)


def _attend(door: str, given: Given, **used: Tensor | None) -> Result:
    conventions.refuse(given, *_REFUSED)
    own: dict[str, Any] = {"deterministic": conventions.flag("deterministic", given["deterministic"])}
    own["return_lse"] = conventions.flag("return_attn_probs", given["return_attn_probs"])
    found = conventions.attend(door, given, **own, **used)
    return found if len(found) > 1 else found[0]


def _with_lengths(given: Given, used_q: str, used_k: str) -> tuple[Given, dict[str, Any]]:
    """The arguments, of batches without those of packed sequences; and how many rows of each sequence exist."""
    used = {"seqused_k": given[used_k]}
    if given["cu_seqlens_q"] is not None:
        return given, used | {"seqused_q": given[used_q]}
    _alone("without cu_seqlens_q", given, "cu_seqlens_k", used_q)
    return {name: x for name, x in given.items() if name not in LENGTHS}, used


def _accumulators(out: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors in place of FlashAttention-3's partial results, which stay in the kernels' workspace here."""
    return out.new_empty(0, dtype=torch.float32), out.new_empty(0, dtype=torch.float32)


def _alone(where: str, given: Given, *names: str) -> None:
    """Raise for one of these arguments that is given although it has no meaning in this case."""
    for name in names:
        if given[name] is not None:
            raise ValueError(f"{name} is given {where}; accepted: None")
