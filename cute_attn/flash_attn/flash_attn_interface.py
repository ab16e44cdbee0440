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

from cute_attn.flash_attn import conventions
from cute_attn.flash_attn import extension as flash_attn_gpu
from cute_attn.flash_attn.conventions import Given, Result, takes
from cute_attn.flash_attn.operators import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

__all__ = [
    "_flash_attn_backward", "_flash_attn_forward", "_flash_attn_varlen_backward", "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward", "_wrapped_flash_attn_forward", "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward", "flash_attn_func", "flash_attn_gpu", "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip

# The operators by which FlashAttention-2's autograd functions call its extension, under their wrappers' names.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


_SCORES = "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0"
_SHARED = f"dropout_p=0.0 {_SCORES} alibi_slopes=None deterministic=False return_attn_probs=False"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"


@takes(f"q k v {_SHARED}", repeats=True)
def flash_attn_func(given: Given) -> Result:
    """Attention on batches: out (batch, seqlen_q, nheads, head_dim).

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention`.
    """
    return _attend(given)


@takes(f"q kv {_SHARED}", repeats=True)
def flash_attn_kvpacked_func(given: Given) -> Result:
    """:func:`flash_attn_func` with k and v in one tensor kv (batch, seqlen_k, 2, nheads_k, head_dim)."""
    return _attend(given)


@takes(f"qkv {_SHARED}", repeats=True)
def flash_attn_qkvpacked_func(given: Given) -> Result:
    """:func:`flash_attn_func` with q, k and v in one tensor qkv (batch, seqlen, 3, nheads, head_dim)."""
    return _attend(given)


@takes(f"q k v {_LENGTHS} {_SHARED} block_table=None", repeats=True)
def flash_attn_varlen_func(given: Given) -> Result:
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
    return _attend(given)


@takes(f"q kv {_LENGTHS} {_SHARED}", repeats=True)
def flash_attn_varlen_kvpacked_func(given: Given) -> Result:
    """:func:`flash_attn_varlen_func` with k and v in one tensor kv (total_k, 2, nheads_k, head_dim)."""
    return _attend(given)


@takes(f"qkv cu_seqlens max_seqlen {_SHARED}", repeats=True)
def flash_attn_varlen_qkvpacked_func(given: Given) -> Result:
    """:func:`flash_attn_varlen_func` with q, k and v in one tensor qkv (total, 3, nheads, head_dim)."""
    return _attend(given)


@takes(
    "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
    f"cache_leftpad=None block_table=None {_SCORES} rotary_interleaved=True alibi_slopes=None num_splits=0 "
    "return_softmax_lse=False",
    repeats=True,
)
def flash_attn_with_kvcache(given: Given) -> Result:
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
    table, probs = given["block_table"], conventions.flag("return_softmax_lse", given["return_softmax_lse"])
    if table is not None:
        conventions.check_table(table)
    out, lse = conventions.attend_cache(
        "flash_attn.flash_attn_with_kvcache", given, page_table=table, return_lse=probs
    )
    return out if lse is None else (out, conventions.plus_infinity(lse))


def _attend(given: Given) -> Result:
    """The result of a call of batches or packed sequences, with q, k and v in one to three tensors."""
    deterministic, probs = (
        conventions.flag(name, given[name]) for name in ("deterministic", "return_attn_probs")
    )
    door = f"flash_attn.flash_attn_{'varlen_' if conventions.lengths_of(given) else ''}func"
    if given.get("block_table") is not None:
        out, lse = conventions.attend_pages(door, given, probs)
        return out if lse is None else (out, conventions.plus_infinity(lse), out.new_empty(0))
    drops = conventions.probability(given["dropout_p"])
    arguments = {"dropout_p": drops, "deterministic": deterministic, "return_lse": probs}
    out, *others = conventions.attend(door, given, return_softmax=bool(probs and drops), **arguments)
    if not probs:
        return out
    return out, conventions.plus_infinity(others[0]), others[1] if drops else out.new_empty(0)
