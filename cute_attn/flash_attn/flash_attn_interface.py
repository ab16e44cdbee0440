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

from cute_attn.head_dims import whole_head_dim
from cute_attn.interface import attention, attention_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]


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
    block_table
        None: paged keys are not supported.

    Raises
    ------
    NotImplementedError
        There is a block_table.
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention_varlen`.
    """
    if block_table is not None:
        raise NotImplementedError("block_table needs kernels for paged keys; accepted: None")
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _attend((q, k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), options)


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
    """Raise: there are no kernels for a cache of keys yet.

    Raises
    ------
    NotImplementedError
        Always.
    """
    raise NotImplementedError(
        "flash_attn_with_kvcache needs kernels for a cache of keys; accepted: flash_attn_func on its used part"
    )


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
    """The parts of qkv or kv. Their gradients become one tensor by one copy."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is a {type(packed).__name__}; accepted: a torch.Tensor")
    if packed.dim() != dims or packed.shape[-3] != parts:
        rows = "batch, seqlen" if dims == 5 else "total"
        raise ValueError(
            f"{name} has shape {tuple(packed.shape)}; accepted: ({rows}, {parts}, nheads, head_dim)"
        )
    return packed.unbind(-3)


def _attend(tensors: tuple[Tensor, ...], lengths: tuple[Any, ...] | None, options: _Options) -> Result:
    """tensors: q, k and v. lengths: both cu_seqlens and both longest lengths, of packed sequences."""
    for name, x in zip("qkv", tensors, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; accepted: a torch.Tensor")
    q, _, v = tensors
    scale, slopes, probs = options.softmax_scale, options.alibi_slopes, options.return_attn_probs
    if scale is None and q.dim() and q.shape[-1]:
        scale = q.shape[-1] ** -0.5
    dropout = options.dropout_p > 0
    arguments: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": bool(options.causal),
        "window": _window(options.window_size, options.causal),
        "alibi_slopes": slopes.detach() if isinstance(slopes, Tensor) else slopes,
        "softcap": max(options.softcap, 0.0),
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
    out, *others = result if probs else (result,)
    if out.shape[-1] != v.shape[-1]:
        out = out[..., : v.shape[-1]]
    if not probs:
        return out
    lse = others[0].masked_fill(others[0] == -math.inf, math.inf)
    return out, lse, others[1] if dropout else out.new_empty(0)


def _window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """As :func:`cute_attn.attention` takes it."""
    bounds = window_size if isinstance(window_size, tuple | list) else ()
    if len(bounds) != 2 or not all(isinstance(x, int | torch.SymInt) for x in bounds):
        raise ValueError(
            f"window_size is {window_size!r}; accepted: (left, right), two ints, -1 for no bound"
        )
    left, right = (None if x < 0 else x for x in bounds)
    return left, 0 if causal else right


def _whole_number(length: Any) -> Any:
    """A length that may be a number of numpy's, or a tensor, which waits for the device."""
    return length if isinstance(length, int | torch.SymInt) else operator.index(length)
