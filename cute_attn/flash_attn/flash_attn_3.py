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
from cute_attn.flash_attn.conventions import (
    Scores,
    attend,
    attend_cache,
    check_tensors,
    flag,
    note,
    refuse,
    unpack,
    whole_number,
)
from cute_attn.flash_attn.operators import backward
from cute_attn.host.checks import check_written
from cute_attn.host.values import python_number, shown, wrong_shape

__all__ = [
    "_flash_attn_backward", "_flash_attn_forward", "flash_attn_combine", "flash_attn_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata",
]  # fmt: skip

Result = Tensor | tuple[Tensor, ...]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Attention on batches: out (batch, seqlen_q, nheads, head_dim).

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention`.
    NotImplementedError
        qv, attention_chunk or one of q_descale, k_descale and v_descale is given.
    """
    refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk
    )
    scores = Scores(softmax_scale, causal, window_size, softcap)
    options = _options(deterministic, return_attn_probs)
    return _result(attend("flash_attn_3.flash_attn_func", (q, k, v), None, scores, options))


def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """:func:`flash_attn_func` with q, k and v in one tensor.

    Parameters
    ----------
    qkv : Tensor (batch, seqlen, 3, nheads, head_dim), or with num_heads_q (batch, seqlen, heads, head_dim)
        With num_heads_q: heads of q first, then of k, then as many of v.
    num_heads_q : int, optional
        Number of q's heads.
    """
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    check_tensors(qkv=qkv)
    tensors = _heads(qkv, num_heads_q) if qkv.dim() == 4 else unpack("qkv", qkv, 5, 3)
    scores = Scores(softmax_scale, causal, window_size, softcap)
    options = _options(deterministic, return_attn_probs)
    return _result(attend("flash_attn_3.flash_attn_func", tensors, None, scores, options))


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
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
    refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk
    )
    scores = Scores(softmax_scale, causal, window_size, softcap)
    options = _options(deterministic, return_attn_probs) | {"seqused_q": seqused_q, "seqused_k": seqused_k}
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _result(attend("flash_attn_3.flash_attn_varlen_func", (q, k, v), lengths, scores, options))


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Result:  # fmt: skip
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
    refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk
    )
    scores = Scores(softmax_scale, causal, window_size, softcap)
    out, lse = _cached(
        q, k_cache, v_cache, scores, k=k, v=v, cache_seqlens=cache_seqlens, page_table=page_table,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, cu_seqlens_k_new=cu_seqlens_k_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_seqlens=rotary_seqlens, rotary_interleaved=rotary_interleaved, num_splits=num_splits,
        return_lse=flag("return_softmax_lse", return_softmax_lse),
    )  # fmt: skip
    given = {"cum_seq_q": cu_seqlens_q, "block_table": page_table}
    note("flash_attn_3.flash_attn_with_kvcache", (q, k_cache, v_cache), scores, **given)
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
    check_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if lse_partial.shape != out_partial.shape[:-1]:
        accepted = tuple(out_partial.shape[:-1])
        raise wrong_shape("lse_partial", lse_partial, accepted)
    if out is not None:
        dtype, named = (
            out_dtype or out_partial.dtype,
            [("out_partial", out_partial), ("lse_partial", lse_partial)],
        )
        check_written("out", out, named, shape=out_partial.shape[1:], dtype=dtype, device=out_partial.device)
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
    check_tensors(cache_seqlens=cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=torch.int32)


# ---- functions that FlashAttention-3's autograd functions call ----


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 1,
    pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """All forwards in one function: out, softmax_lse, and two tensors of size 0 in place of partial results.

    On batches, or on packed sequences with cu_seqlens_q and cu_seqlens_k, as :func:`flash_attn_varlen_func`, with
    gradients. With arguments of a cache (k_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, or packed queries and
    unpacked keys), as :func:`flash_attn_with_kvcache`; seqused_k is then cache_seqlens. out_: memory for out.
    """
    refuse(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk
    )
    scores = Scores(softmax_scale, causal, (window_size_left, window_size_right), softcap)
    door = "flash_attn_3._flash_attn_forward"
    of_a_cache = (k_new, v_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, cu_seqlens_k_new)
    if any(x is not None for x in of_a_cache) or (cu_seqlens_q is not None and cu_seqlens_k is None):
        _alone("with a cache", cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q)
        out, lse = _cached(
            q, k, v, scores, k=k_new, v=v_new, out=out_, cache_seqlens=seqused_k, page_table=page_table,
            cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, cu_seqlens_k_new=cu_seqlens_k_new, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, rotary_seqlens=seqlens_rotary, rotary_interleaved=rotary_interleaved,
            num_splits=num_splits, return_lse=True,
        )  # fmt: skip
        assert lse is not None
        note(door, (q, k, v), scores, cum_seq_q=cu_seqlens_q, block_table=page_table)
        return out, lse, *_accumulators(out)
    options: dict[str, Any] = {"return_lse": True, "seqused_k": seqused_k}
    if cu_seqlens_q is None:
        _alone("without cu_seqlens_q", cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q)
        lengths = None
    else:
        lengths, options["seqused_q"] = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), seqused_q
    out, lse = attend(door, (q, k, v), lengths, scores, options, out_)
    return out, lse, *_accumulators(out)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """Compute dq, dk and dv, of batches or packed sequences, in the given tensors. A gradient may be None to skip it.

    Returns a tensor of size 0 in place of the row sums of dout * out.
    """
    scores = Scores(softmax_scale, is_causal, (window_size_left, window_size_right), softcap)
    options: dict[str, Any] = {"deterministic": deterministic, "seqused_k": sequed_k}
    if cu_seqlens_q is None:
        _alone("without cu_seqlens_q", cu_seqlens_k=cu_seqlens_k, sequed_q=sequed_q)
        lengths = None
    else:
        check_tensors(cu_seqlens_k=cu_seqlens_k)
        lengths, options["seqused_q"] = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), sequed_q
    tensors = (dout, q, k, v, out, softmax_lse)
    return backward("flash_attn_3._flash_attn_backward", tensors, (dq, dk, dv), lengths, scores, options)


def _cached(*tensors: Any, max_seqlen_q: Any, rotary_interleaved: Any, **others: Any) -> Any:
    """Call :func:`attend_cache`, with numbers and flags of the types that FlashAttention accepts."""
    if max_seqlen_q is not None:
        max_seqlen_q = whole_number("max_seqlen_q", max_seqlen_q)
    if others["rotary_cos"] is None:  # they count with it only
        others["rotary_seqlens"] = None
    others["rotary_interleaved"] = flag("rotary_interleaved", rotary_interleaved)
    return attend_cache(*tensors, max_seqlen_q=max_seqlen_q, **others)


def _options(deterministic: Any, return_attn_probs: Any) -> dict[str, Any]:
    """Translate flags of the public functions to arguments of :func:`cute_attn.attention`."""
    return {
        "deterministic": flag("deterministic", deterministic),
        "return_lse": flag("return_attn_probs", return_attn_probs),
    }


def _result(found: tuple[Tensor, ...]) -> Result:
    return found if len(found) > 1 else found[0]


def _heads(qkv: Tensor, num_heads_q: Any) -> tuple[Tensor, ...]:
    """Split qkv (batch, seqlen, heads, head_dim) into q, k and v."""
    heads, num_heads_q = qkv.shape[2], python_number(num_heads_q)
    if not isinstance(num_heads_q, int) or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q is {shown(num_heads_q)} with a qkv of {heads} heads; accepted: an int that leaves as many "
            "heads to k as to v"
        )
    keys = (heads - num_heads_q) // 2
    return qkv.split([num_heads_q, keys, keys], dim=2)


def _accumulators(out: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors in place of FlashAttention-3's partial results, which stay in the kernels' workspace here."""
    return out.new_empty(0, dtype=torch.float32), out.new_empty(0, dtype=torch.float32)


def _alone(where: str, **arguments: Any) -> None:
    """Raise for an argument that is given although it has no meaning in this case."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is given {where}; accepted: None")
