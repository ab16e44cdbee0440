"""FlashAttention-2's functions, and their common arguments; each function describes its differences.

q, k and v are (batch, seqlen, nheads, head_dim), or packed (total, nheads, head_dim); k and v may have fewer heads.
Packed tensors hold sequence b in rows cu_seqlens[b] to cu_seqlens[b + 1].

    dropout_p          probability of dropping an element of the softmax; the mask comes from torch's generator
    softmax_scale      factor of q k^T; by default 1 / sqrt(head_dim), with the unpadded head_dim
    causal             query i sees keys up to i + seqlen_k - seqlen_q; a right window counts as 0
    window_size        (left, right): keys i + seqlen_k - seqlen_q - left to ... + right; below 0 for no bound
    softcap            scores become softcap * tanh(score / softcap); 0 or less leaves them
    alibi_slopes       fp32 (nheads,) or (batch, nheads); slope * abs(i + seqlen_k - seqlen_q - j) is subtracted;
                       no gradient flows to them
    deterministic      gradients repeat bit for bit
    return_attn_probs  return (out, softmax_lse, S_dmask) instead of out

softmax_lse is fp32 (batch, nheads, seqlen_q), or packed (nheads, total_q): the natural logarithm of the sum of each
row's exponentials, +inf where a query sees no key. S_dmask is the softmax (batch, nheads, seqlen_q, seqlen_k) before
dropout, negative where dropout drops an element; without dropout it is a tensor of size 0.

Added here: softcap and dropout together, gradients through softmax_lse, v with another head_dim. With causal and ALiBi,
FlashAttention-2's kernels omit a constant per row from softmax_lse. Here softmax_lse includes that constant, as follows
from the scores in FlashAttention-2's documentation.

Libraries for long sequences import private names: see :mod:`~cute_attn.flash_attn.operators`.
"""

from typing import Any

from torch import Tensor

from cute_attn.flash_attn import extension as flash_attn_gpu
from cute_attn.flash_attn.conventions import (
    Scores,
    attend,
    attend_cache,
    attend_pages,
    check_table,
    flag,
    note,
    plus_infinity,
    probability,
    unpack,
)
from cute_attn.flash_attn.operators import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from cute_attn.host import plans

__all__ = [
    "_flash_attn_backward", "_flash_attn_forward", "_flash_attn_varlen_backward", "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward", "_wrapped_flash_attn_forward", "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward", "flash_attn_func", "flash_attn_gpu", "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip

Result = Tensor | tuple[Tensor, ...]

# The operators by which FlashAttention-2's autograd functions call its extension, under their wrappers' names.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Attention on batches: out (batch, seqlen_q, nheads, head_dim).

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention`.
    """
    scores = Scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _repeat((q, k, v), (), scores, (dropout_p, deterministic, return_attn_probs))


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """:func:`flash_attn_func` with k and v in one tensor kv (batch, seqlen_k, 2, nheads_k, head_dim)."""
    scores = Scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _repeat((q, kv), (), scores, (dropout_p, deterministic, return_attn_probs))


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """:func:`flash_attn_func` with q, k and v in one tensor qkv (batch, seqlen, 3, nheads, head_dim)."""
    scores = Scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _repeat((qkv,), (), scores, (dropout_p, deterministic, return_attn_probs))


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention on packed sequences: out (total_q, nheads, head_dim).

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : Tensor (batch + 1,), int32
        Where sequences start.
    max_seqlen_q, max_seqlen_k : int
        Length of the longest sequence, or more.
    block_table : Tensor (batch, pages of a sequence), int32, optional
        Page numbers of each sequence. k and v are then (pages, page_size, nheads_k, head_dim), and gradients and
        dropout are not supported.

    Raises
    ------
    TypeError, ValueError, Unsupported, NotImplementedError
        As :func:`cute_attn.attention_varlen`, or with a block_table as
        :func:`cute_attn.api.kvcache.attention_with_kvcache`.
    """
    scores = Scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _repeat((q, k, v), lengths, scores, (dropout_p, deterministic, return_attn_probs), block_table)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """:func:`flash_attn_varlen_func` with k and v in one tensor kv (total_k, 2, nheads_k, head_dim)."""
    scores = Scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _repeat((q, kv), lengths, scores, (dropout_p, deterministic, return_attn_probs))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """:func:`flash_attn_varlen_func` with q, k and v in one tensor qkv (total, 3, nheads, head_dim)."""
    scores = Scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _repeat((qkv,), lengths, scores, (dropout_p, deterministic, return_attn_probs))


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:  # fmt: skip
    """Append k and v to a cache in place, then attend to the cache; no gradients.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, nheads, head_dim)
    k_cache, v_cache : Tensor (entries, capacity, nheads_k, head_dim)
        Or (pages, page_size, nheads_k, head_dim) with a block_table; pages may have any size.
    k, v : Tensor (batch, seqlen_new, nheads_k, head_dim), optional
        New rows, stored from row cache_seqlens.
    rotary_cos, rotary_sin : Tensor (positions, rotary_dim / 2), optional
        Rotate k and q. New key i is at position cache_seqlens + i. So is query i if causal or with a window; otherwise
        all queries are at position cache_seqlens.
    cache_seqlens : Tensor (batch,), int32, or int, optional
        Rows in use before the call. Required with k; otherwise the default is the capacity.
    cache_batch_idx : Tensor (batch,), int32, optional
        The entry of the cache for each sequence; by default, b for sequence b.
    cache_leftpad : Tensor (batch,), int32, optional
        The first valid row of each sequence.
    block_table : Tensor (batch, pages of a sequence), int32, optional
        Page numbers of each sequence; page numbers beyond its end may have any value. On CUDA, lengths are clamped to
        the rows of the table's pages, and new rows beyond these pages are not written. FlashAttention-2 waits for the
        device to read the lengths, and raises a RuntimeError if one is too large.
    rotary_interleaved : bool
        True: rotate elements 2i and 2i + 1 together. False: i and i + rotary_dim / 2.
    num_splits : int
        Number of splits of the keys; 0 to choose it from the shapes.
    return_softmax_lse : bool
        Return (out, softmax_lse) instead of out.

    Raises
    ------
    TypeError, ValueError, Unsupported, NotImplementedError
        As :func:`cute_attn.api.kvcache.attention_with_kvcache`.
    """
    scores = Scores(softmax_scale, causal, window_size, softcap, alibi_slopes)

    def call() -> Result:
        if block_table is not None:
            check_table(block_table)
        out, lse = attend_cache(
            q, k_cache, v_cache, scores, k=k, v=v, cache_seqlens=cache_seqlens, page_table=block_table,
            cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, rotary_interleaved=flag("rotary_interleaved", rotary_interleaved),
            num_splits=num_splits, return_lse=flag("return_softmax_lse", return_softmax_lse),
        )  # fmt: skip
        note("flash_attn.flash_attn_with_kvcache", (q, k_cache, v_cache), scores, block_table=block_table)
        return out if lse is None else (out, plus_infinity(lse))

    *numbers, slopes = scores
    given = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, slopes,
    )  # fmt: skip
    options = ("flash_attn cache", *numbers, rotary_interleaved, num_splits, return_softmax_lse)
    if isinstance(cache_seqlens, int) or not plans.may_repeat(options, q):  # a call makes a tensor of an int
        return call()
    return plans.repeat(options, (*given, cache_seqlens), call)


def _repeat(
    tensors: tuple[Tensor, ...],
    lengths: tuple[Any, ...],
    scores: Scores,
    options: tuple[float, bool, bool],
    block_table: Tensor | None = None,
) -> Result:
    """The result of a call, from a record if the call repeats an earlier one.

    Args:
        tensors: q, k and v, or packed qkv, or q and kv.
        lengths: both cu_seqlens and both max_seqlens of packed sequences, or () for batches.
        options: dropout_p, deterministic and return_attn_probs.
    """
    *numbers, slopes = scores
    given = (*tensors, slopes, block_table, *lengths[:2])

    def call() -> Result:
        return _attend(_parts(tensors, packed=bool(lengths)), lengths or None, scores, options, block_table)

    repeated = ("flash_attn", *numbers, *options, *lengths[2:])
    return plans.repeat(repeated, given, call) if plans.may_repeat(repeated, tensors[0]) else call()


def _parts(tensors: tuple[Tensor, ...], *, packed: bool) -> tuple[Tensor, ...]:
    """q, k and v, unpacked from qkv or kv if necessary. packed: sequences are packed."""
    dims = 4 if packed else 5
    if len(tensors) == 1:
        return unpack("qkv", tensors[0], dims, 3)
    return (tensors[0], *unpack("kv", tensors[1], dims, 2)) if len(tensors) == 2 else tensors


def _attend(
    tensors: tuple[Tensor, ...],
    lengths: Any,
    scores: Scores,
    options: tuple[float, bool, bool],
    block_table: Tensor | None,
) -> Result:
    """The result of a call that repeats no recorded one. tensors: q, k and v; lengths: None for batches."""
    dropout_p, *flags = options
    deterministic, probs = map(flag, ("deterministic", "return_attn_probs"), flags)
    door = "flash_attn.flash_attn_func" if lengths is None else "flash_attn.flash_attn_varlen_func"
    if block_table is not None:
        out, lse = attend_pages(door, tensors, lengths, block_table, scores, dropout_p, probs)
        return out if lse is None else (out, plus_infinity(lse), out.new_empty(0))
    drops = probability(dropout_p)
    arguments = {"dropout_p": drops, "deterministic": deterministic, "return_lse": probs}
    arguments["return_softmax"] = bool(probs and drops)
    out, *others = attend(door, tensors, lengths, scores, arguments, dropout_p=dropout_p)
    if not probs:
        return out
    return out, plus_infinity(others[0]), others[1] if drops else out.new_empty(0)
