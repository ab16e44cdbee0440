"""FlashAttention-2's functions. What they share is said here, and in each what differs.

q, k and v are (batch, seqlen, nheads, head_dim), packed (total, nheads, head_dim); k and v may have fewer heads.
Packed tensors hold sequence b in rows cu_seqlens[b] to cu_seqlens[b + 1].

    dropout_p          probability of dropping an element of the softmax; the mask comes from torch's generator
    softmax_scale      of q k^T; by default 1 / sqrt(head_dim), of the head_dim that was given
    causal             query i sees keys up to i + seqlen_k - seqlen_q; a right window counts as 0
    window_size        (left, right): keys i + seqlen_k - seqlen_q - left to ... + right; below 0 for no bound
    softcap            scores become softcap * tanh(score / softcap); 0 or less leaves them
    alibi_slopes       fp32 (nheads,) or (batch, nheads); slope * abs(i + seqlen_k - seqlen_q - j) is subtracted;
                       no gradient flows to them
    deterministic      whether gradients repeat bit for bit
    return_attn_probs  return (out, softmax_lse, S_dmask) instead of out

softmax_lse is fp32 (batch, nheads, seqlen_q), packed (nheads, total_q), the natural logarithm of the sum of each row's
exponentials, +inf where a query sees no key. S_dmask is the softmax (batch, nheads, seqlen_q, seqlen_k) before dropout,
negative where dropout drops an element, and without dropout a tensor of size 0.

Beyond FlashAttention-2: softcap and dropout together, gradients through softmax_lse, v with another head_dim. Its
kernels leave a constant of each row out of softmax_lse under ALiBi with causal; here it is in, as its documentation
defines scores.
"""

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn import doors
from cute_attn.head_dims import whole_head_dim
from cute_attn.interface import attention, attention_varlen, number
from cute_attn.kvcache import attention_with_kvcache
from cute_attn.packed import unbind
from cute_attn.params import check_dense, check_starts

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, ...]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention on batches: out (batch, seqlen_q, nheads, head_dim).

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention`.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _attend((q, k, v), None, options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with k and v in one tensor kv (batch, seqlen_k, 2, nheads_k, head_dim).

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention`.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _attend((q, *_unpack("kv", kv, 5, 2)), None, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with q, k and v in one tensor qkv (batch, seqlen, 3, nheads, head_dim).

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention`.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _attend(_unpack("qkv", qkv, 5, 3), None, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention on packed sequences: out (total_q, nheads, head_dim).

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : Tensor (batch + 1,), int32
        Where sequences start.
    max_seqlen_q, max_seqlen_k : int
        The longest sequence, or more.
    block_table : Tensor (batch, pages of a sequence), int32, optional
        The pages of each sequence; k and v are then (pages, page_size, nheads_k, head_dim), without gradients and
        dropout.

    Raises
    ------
    TypeError, ValueError, Unsupported, NotImplementedError
        As :func:`cute_attn.attention_varlen`, or with a block_table as
        :func:`cute_attn.kvcache.attention_with_kvcache`.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is not None:
        return _attend_pages((q, k, v), lengths, block_table, options)
    return _attend((q, k, v), lengths, options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with k and v in one tensor kv (total_k, 2, nheads_k, head_dim).

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention_varlen`.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _attend((q, *_unpack("kv", kv, 4, 2)), lengths, options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with q, k and v in one tensor qkv (total, 3, nheads, head_dim).

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention_varlen`.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _attend(_unpack("qkv", qkv, 4, 3), (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention with a cache of keys and values, to which k and v are appended first, in place; no gradients.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, nheads, head_dim)
    k_cache, v_cache : Tensor (entries, capacity, nheads_k, head_dim)
        Or (pages, page_size, nheads_k, head_dim) with a block_table; pages may have any size.
    k, v : Tensor (batch, seqlen_new, nheads_k, head_dim), optional
        New rows, from row cache_seqlens on.
    rotary_cos, rotary_sin : Tensor (positions, rotary_dim / 2), optional
        Rotate k and q: new key i at cache_seqlens + i, and so query i if causal or under a window, else all queries at
        cache_seqlens.
    cache_seqlens : Tensor (batch,), int32, or int, optional
        Rows in use before. Default, without k: the capacity.
    cache_batch_idx : Tensor (batch,), int32, optional
        Each sequence's entry of the cache; by default sequence b has entry b.
    cache_leftpad : Tensor (batch,), int32, optional
        The first valid row of each sequence.
    block_table : Tensor (batch, pages of a sequence), int32, optional
        The pages of each sequence; entries behind its end may have any values. Lengths beyond the table's pages count
        as all of their rows, and new rows beyond them are written nowhere. FlashAttention-2 raises a RuntimeError for
        such lengths, for which it waits until the device has written them.
    rotary_interleaved : bool
        Whether elements 2i and 2i + 1 are rotated together rather than i and i + rotary_dim / 2.
    num_splits : int
        Parts in which keys are divided, 0 for a number that suits the call.
    return_softmax_lse : bool
        Return (out, softmax_lse) instead of out.

    Raises
    ------
    TypeError, ValueError, Unsupported, NotImplementedError
        As :func:`cute_attn.kvcache.attention_with_kvcache`.
    """
    found = attention_with_kvcache(
        _contiguous(q),
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        k=_contiguous(k),
        v=_contiguous(v),
        page_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        softmax_scale=softmax_scale,
        causal=bool(causal),
        window=_window(window_size, causal),
        softcap=max(number("softcap", softcap), 0.0),
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
    )
    given = {"query": q, "key": k_cache, "value": v_cache, "is_causal": causal, "block_table": block_table}
    doors.note("flash_attn.flash_attn_with_kvcache", given)
    return found if isinstance(found, Tensor) else (found[0], _infinite(found[1]))


def _contiguous(x: Any) -> Any:
    """``x``, copied where its last dimension is not contiguous."""
    return x.contiguous() if isinstance(x, Tensor) and x.dim() and x.stride(-1) != 1 else x


def _infinite(lse: Tensor) -> Tensor:
    """lse with +inf where a query sees no key."""
    return lse.nan_to_num(math.nan, math.inf, math.inf)


class _Options(NamedTuple):
    """The arguments that all functions share."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool


def _unpack(name: str, packed: Tensor, dims: int, parts: int) -> tuple[Tensor, ...]:
    """The parts of qkv or kv."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is a {type(packed).__name__}; accepted: a torch.Tensor")
    if packed.dim() != dims or packed.shape[-3] != parts:
        rows = "batch, seqlen" if dims == 5 else "total"
        raise ValueError(
            f"{name} has shape {tuple(packed.shape)}; accepted: ({rows}, {parts}, nheads, head_dim)"
        )
    return unbind(packed)


def _attend(tensors: tuple[Tensor, ...], lengths: tuple[Any, ...] | None, options: _Options) -> Result:
    """tensors: q, k and v. lengths: both cu_seqlens and both longest lengths, of packed sequences."""
    for name, x in zip("qkv", tensors, strict=True):
        if not isinstance(x, Tensor) or x.is_nested:
            check_dense(name, x)
    q, _, v = tensors
    scale, slopes, probs = options.softmax_scale, options.alibi_slopes, options.return_attn_probs
    if scale is None and q.dim() and q.shape[-1]:
        scale = q.shape[-1] ** -0.5
    dropout = number("dropout_p", options.dropout_p) > 0
    arguments: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": bool(options.causal),
        "window": _window(options.window_size, options.causal),
        "alibi_slopes": slopes.detach() if isinstance(slopes, Tensor) else slopes,
        "softcap": max(number("softcap", options.softcap), 0.0),
        "dropout_p": options.dropout_p,
        "deterministic": bool(options.deterministic),
        "return_lse": probs,
        "return_softmax": probs and dropout,
    }
    prepared: Any = tuple(map(whole_head_dim, tensors))
    if lengths is None:
        result: Any = attention(*prepared, **arguments)
    else:
        result = attention_varlen(*prepared, *lengths[:2], *map(_whole_number, lengths[2:]), **arguments)
    _note(tensors, lengths, options)
    out, *others = result if probs else (result,)
    if out.shape[-1] != v.shape[-1]:
        out = out[..., : v.shape[-1]]
    if not probs:
        return out
    return out, _infinite(others[0]), others[1] if dropout else out.new_empty(0)


def _attend_pages(
    tensors: tuple[Tensor, ...], lengths: tuple[Any, ...], block_table: Tensor, options: _Options
) -> Result:
    """Packed queries, and keys in pages."""
    if options.dropout_p:
        raise ValueError(f"dropout_p is {options.dropout_p} with a block_table; accepted: 0")
    starts_q, starts_k, longest_q, longest_k = lengths
    for name, x in zip(("q", "k", "v", "block_table"), (*tensors, block_table), strict=True):
        check_dense(name, x)
    if block_table.dim() != 2:
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}; accepted: (batch, pages of a sequence)"
        )
    check_starts("cu_seqlens_k", starts_k)
    capacity = tensors[1].shape[1] * block_table.shape[-1] if tensors[1].dim() == 4 else 0
    if _whole_number(longest_k) > capacity:
        raise ValueError(
            f"max_seqlen_k is {longest_k}; accepted: up to {capacity}, the rows of a table's pages"
        )
    scale, dim = options.softmax_scale, tensors[2].shape[-1]
    if scale is None and tensors[0].dim() and tensors[0].shape[-1]:
        scale = tensors[0].shape[-1] ** -0.5
    q, k, v = (whole_head_dim(x.detach()) for x in tensors)
    found = attention_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=starts_k.diff(),
        page_table=block_table,
        cu_seqlens_q=starts_q,
        max_seqlen_q=_whole_number(longest_q),
        softmax_scale=scale,
        causal=bool(options.causal),
        window=_window(options.window_size, options.causal),
        softcap=max(number("softcap", options.softcap), 0.0),
        alibi_slopes=options.alibi_slopes,
        return_lse=options.return_attn_probs,
    )
    _note(tensors, lengths, options, block_table)
    out = found if isinstance(found, Tensor) else found[0]
    if out.shape[-1] != dim:
        out = out[..., :dim]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        out = _WithoutBackward.apply(out, *tensors)
    return out if isinstance(found, Tensor) else (out, _infinite(found[1]), out.new_empty(0))


def _note(
    tensors: tuple[Tensor, ...],
    lengths: tuple[Any, ...] | None,
    options: _Options,
    block_table: Tensor | None = None,
) -> None:
    """Count a call. Arguments: as of :func:`_attend`."""
    given: dict[str, Any] = dict(zip(("query", "key", "value"), tensors, strict=True))
    given |= {"is_causal": options.causal, "dropout_p": options.dropout_p, "softcap": options.softcap}
    given |= {"cum_seq_q": lengths and lengths[0], "block_table": block_table}
    doors.note(f"flash_attn.flash_attn_{'varlen_' if lengths else ''}func", given)


class _WithoutBackward(torch.autograd.Function):
    """Raises where a gradient is asked for that no kernel computes."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        """The same."""
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Raise."""
        raise NotImplementedError("a gradient of attention with a block_table is asked for; accepted: none")


def _window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """As :func:`cute_attn.attention` takes it; bounds may be numbers of numpy's or a tensor's."""
    try:
        left, right = (None if x < 0 else x for x in map(_whole_number, window_size))
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size is {window_size!r}; accepted: (left, right), two ints, -1 for no bound"
        ) from None
    return left, 0 if causal else right


def _whole_number(length: Any) -> Any:
    """A length that may be a number of numpy's, or a tensor, which waits for the device."""
    return length if isinstance(length, int | torch.SymInt) else operator.index(length)
