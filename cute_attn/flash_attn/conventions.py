"""Translates FlashAttention's conventions to those of this package, for all of FlashAttention's functions."""

import contextlib
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_attn.api.attention import attention, attention_varlen
from cute_attn.api.kvcache import attention_with_kvcache
from cute_attn.host import doors
from cute_attn.host.checks import check_starts
from cute_attn.host.fused_qkv import unbind
from cute_attn.host.values import check_dense, check_dtype, is_one_of, number, shown, wrong_shape


class Scores(NamedTuple):
    """The arguments that change scores."""

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments for :func:`cute_attn.attention`."""
        causal, slopes = flag("causal", self.causal), self.alibi_slopes
        return {
            "softmax_scale": self.softmax_scale,
            "causal": causal,
            "window": _window(self.window_size, causal),
            "softcap": max(number("softcap", self.softcap), 0.0),
            "alibi_slopes": slopes.detach() if isinstance(slopes, Tensor) else slopes,
        }


def flag(name: str, value: Any) -> bool:
    """A flag as FlashAttention's extension accepts it: any value with ``__bool__``, such as a number; None is False.

    Raises:
        TypeError: the value has no ``__bool__``, such as a string or a list.
    """
    if value is True or value is False:
        return value
    if hasattr(type(value), "__bool__"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # it may have several numbers, or none
            return bool(value)
    raise TypeError(f"{name} is {shown(value)}; accepted: False or True")


def _window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """The ``window`` of :func:`cute_attn.attention`. Bounds may be numpy numbers, or tensors of one number."""
    try:
        left, right = (None if x < 0 else x for x in map(_index, window_size))
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size is {shown(window_size)}; accepted: (left, right), two ints, -1 for no bound"
        ) from None
    return left, 0 if causal else right


def _index(length: Any) -> Any:
    return length if isinstance(length, int | torch.SymInt) else operator.index(length)


def whole_number(name: str, length: Any) -> Any:
    """A length as an int, from an int, a numpy number or a tensor. Reading a tensor waits for the device."""
    try:
        return _index(length)
    except TypeError:
        raise TypeError(
            f"{name} is {shown(length)}; accepted: a Python int, or what is equal to one"
        ) from None


def longest(lengths: tuple[Any, ...]) -> tuple[Any, ...]:
    """max_seqlen_q and max_seqlen_k as ints. lengths: both cu_seqlens, then both max_seqlens."""
    return whole_number("max_seqlen_q", lengths[2]), whole_number("max_seqlen_k", lengths[3])


def probability(dropout_p: Any) -> float:
    """dropout_p as a float, or 0 if it is so small that nothing is dropped.

    Some programs, such as diffusers, pass a tiny dropout_p to get LSE from an older FlashAttention.
    """
    dropout_p = number("dropout_p", dropout_p)
    return 0.0 if 1.0 - dropout_p == 1.0 else dropout_p


def check_tensors(**tensors: Any) -> None:
    """Call :func:`cute_attn.host.values.check_dense` for each tensor."""
    for name, x in tensors.items():
        check_dense(name, x)


def check_table(block_table: Any) -> None:
    """Raise unless ``block_table`` is a table of pages."""
    check_dense("block_table", block_table)
    if block_table.dim() != 2:
        raise wrong_shape("block_table", block_table, "(batch, pages of a sequence)")
    check_dtype("block_table", block_table, torch.int32)


def refuse(**arguments: Any) -> None:
    """Raise for the first argument that is given: no kernel of this package supports it."""
    for name, value in arguments.items():
        if value is not None and not is_one_of(value, (0,)):
            what = "given" if isinstance(value, Tensor) else shown(value)
            raise NotImplementedError(f"{name} is {what}; accepted: its default, as no kernel here reads it")


def unpack(name: str, packed: Any, dims: int, parts: int) -> tuple[Tensor, ...]:
    """Views q, k and v of a packed qkv, or k and v of a packed kv."""
    check_tensors(**{name: packed})
    if packed.dim() != dims or packed.shape[-3] != parts:
        rows = "batch, seqlen" if dims == 5 else "total"
        raise wrong_shape(name, packed, f"({rows}, {parts}, nheads, head_dim)")
    return unbind(packed)


def plus_infinity(lse: Tensor) -> Tensor:
    """lse with +inf where a query sees no key, as in FlashAttention-2."""
    return lse.nan_to_num(math.nan, math.inf, math.inf)


def note(door: str, tensors: tuple[Tensor, ...], scores: Scores, **others: Any) -> None:
    """Count a call of function ``door``. tensors: q, k and v. others: arguments, named as in PyTorch's operators."""
    given: dict[str, Any] = dict(zip(("query", "key", "value"), tensors, strict=True))
    doors.note(door, given | {"is_causal": scores.causal, "softcap": scores.softcap} | others)


def attend(
    door: str,
    tensors: tuple[Tensor, ...],
    lengths: tuple[Any, ...] | None,
    scores: Scores,
    options: dict[str, Any],
    out: Tensor | None = None,
    **noted: Any,
) -> tuple[Tensor, ...]:
    """Call :func:`cute_attn.attention`, or ``attention_varlen``. Returns a tuple of their results.

    Args:
        door: name of the function that is counted; noted: for :func:`note`.
        tensors: q, k and v.
        lengths: both cu_seqlens and both max_seqlens of packed sequences, or None.
        options: other arguments of that function.
        out: memory for the result, or None.
    """
    (q, k, v), options = tensors, options | scores.arguments() | {"out": out}
    if lengths is None:
        found: Any = attention(q, k, v, **options)
    else:
        found = attention_varlen(q, k, v, *lengths[:2], *longest(lengths), **options)
    note(door, tensors, scores, cum_seq_q=None if lengths is None else lengths[0], **noted)
    return found if isinstance(found, tuple) else (found,)


def attend_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scores: Scores,
    *,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call :func:`cute_attn.api.kvcache.attention_with_kvcache`. Returns out, and lse with return_lse, else None."""
    found: Any = attention_with_kvcache(
        q, k_cache, v_cache, return_lse=return_lse, **options, **scores.arguments()
    )
    return found if isinstance(found, tuple) else (found, None)


def attend_pages(
    door: str,
    tensors: tuple[Tensor, ...],
    lengths: tuple[Any, ...],
    block_table: Tensor,
    scores: Scores,
    dropout_p: float,
    return_lse: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend packed queries to paged keys. door, lengths: see :func:`attend`. Returns out, and lse or None."""
    if probability(dropout_p):
        raise ValueError(f"dropout_p is {dropout_p} with a block_table; accepted: 0")
    starts_q, starts_k, *_ = lengths
    longest_q, longest_k = longest(lengths)
    check_tensors(q=tensors[0], k=tensors[1], v=tensors[2])
    check_table(block_table)
    check_starts("cu_seqlens_k", starts_k)
    capacity = tensors[1].shape[1] * block_table.shape[-1] if tensors[1].dim() == 4 else 0
    if not 0 <= longest_k <= capacity:
        raise ValueError(
            f"max_seqlen_k is {longest_k}; accepted: 0 to {capacity}, the rows of a table's pages"
        )
    if "cache_seqlens" not in options:
        options["cache_seqlens"] = starts_k.diff()
    q, k, v = (x.detach() for x in tensors)
    out, lse = attend_cache(
        q, k, v, scores, page_table=block_table, cu_seqlens_q=starts_q, max_seqlen_q=longest_q,
        return_lse=return_lse, **options,
    )  # fmt: skip
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        out = _WithoutBackward.apply(out, *tensors)
    note(door, tensors, scores, cum_seq_q=starts_q, block_table=block_table)
    return out, lse


class _WithoutBackward(torch.autograd.Function):
    """Identity on ``out`` that raises if the gradient of ``out`` is requested, since no kernel computes it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Raise NotImplementedError with the accepted alternatives."""
        raise NotImplementedError("a gradient of attention with a block_table is asked for; accepted: none")
