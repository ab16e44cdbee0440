"""Translates FlashAttention's conventions to those of this package, for all of FlashAttention's functions."""

import ast
import contextlib
import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attn.api.attention import attention, attention_varlen
from cute_attn.api.kvcache import attention_with_kvcache
from cute_attn.host import doors, plans, values
from cute_attn.host.checks import check_starts
from cute_attn.host.fused_qkv import unbind

Given = dict[str, Any]
"""A function's arguments by name, with the names of FlashAttention-2's public functions where others differ."""
Result = Tensor | tuple[Tensor, ...]
_RENAMED = {"p_dropout": "dropout_p", "is_causal": "causal"}
_NUMBERS = ("softmax_scale", "max_seqlen_q", "max_seqlen_k", "max_seqlen", "num_heads_q", "pack_gqa")
"""The arguments without a number as their default that are no tensors."""
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def takes(arguments: str, *, repeats: bool = False) -> Callable[[Callable[[Given], Any]], Any]:
    """Decorator: a function of ``arguments``, by position or name, in place of one of a dictionary of them.

    Args:
        arguments: names in order, each with its default, if it has one.
        repeats: whether a call with equal arguments is repeated from a record.
    """
    kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for own, _, default in (one.partition("=") for one in arguments.split()):
        value = ast.literal_eval(default) if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(own, kind, default=value))
    signature, names = inspect.Signature(parameters), [one.name for one in parameters]
    nothing = (None, inspect.Parameter.empty)
    tensors = {one.name for one in parameters if one.default in nothing and one.name not in _NUMBERS}

    def decorate(run: Callable[[Given], Any]) -> Any:
        def bound(args: tuple, kwargs: dict[str, Any]) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return run({_RENAMED.get(own, own): x for own, x in given.arguments.items()})

        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not repeats or len(args) > len(names) or torch.compiler.is_compiling():
                return bound(args, kwargs)
            own, others = [], []
            for name, x in itertools.chain(zip(names, args, strict=False), kwargs.items()):
                if name not in tensors:
                    others.append(x)
                elif x is None or isinstance(x, Tensor):
                    own.append(x)
                else:  # of an int for cache_seqlens each call makes a tensor
                    return bound(args, kwargs)
            options = tuple(others)
            if not plans.may_repeat(options, own[0] if own else None):
                return bound(args, kwargs)
            return plans.repeat((run, *kwargs, *options), tuple(own), lambda: bound(args, kwargs))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def lengths_of(given: Given) -> tuple[Any, ...] | None:
    """Both cu_seqlens and both max_seqlens of a function of packed sequences, or None."""
    if "cu_seqlens" in given:
        return given["cu_seqlens"], given["cu_seqlens"], given["max_seqlen"], given["max_seqlen"]
    return tuple(given[name] for name in LENGTHS) if LENGTHS[0] in given else None


def scores_of(given: Given) -> dict[str, Any]:
    """The arguments of :func:`cute_attn.attention` that change scores."""
    causal, slopes = flag("causal", given["causal"]), given.get("alibi_slopes")
    sides = (given.get("window_size_left"), given.get("window_size_right"))
    return {
        "softmax_scale": given["softmax_scale"],
        "causal": causal,
        "window": _window(given.get("window_size", sides), causal),
        "softcap": max(values.number("softcap", given["softcap"]), 0.0),
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
    raise TypeError(f"{name} is {values.shown(value)}; accepted: False or True")


def _window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """The ``window`` of :func:`cute_attn.attention`. Bounds may be numpy numbers, or tensors of one number."""
    try:
        left, right = (None if x < 0 else x for x in map(_index, window_size))
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size is {values.shown(window_size)}; accepted: (left, right), two ints, -1 for no bound"
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
            f"{name} is {values.shown(length)}; accepted: a Python int, or what is equal to one"
        ) from None


def longest(lengths: Sequence[Any]) -> tuple[Any, ...]:
    """max_seqlen_q and max_seqlen_k as ints. lengths: both cu_seqlens, then both max_seqlens."""
    return whole_number("max_seqlen_q", lengths[2]), whole_number("max_seqlen_k", lengths[3])


def probability(dropout_p: Any) -> float:
    """dropout_p as a float, or 0 if it is so small that nothing is dropped.

    Some programs, such as diffusers, pass a tiny dropout_p to get LSE from an older FlashAttention.
    """
    dropout_p = values.number("dropout_p", dropout_p)
    return 0.0 if 1.0 - dropout_p == 1.0 else dropout_p


def check_tensors(**tensors: Any) -> None:
    """Call :func:`cute_attn.host.values.check_dense` for each tensor."""
    for name, x in tensors.items():
        values.check_dense(name, x)


def check_table(block_table: Any) -> None:
    """Raise unless ``block_table`` is a table of pages."""
    values.check_dense("block_table", block_table)
    if block_table.dim() != 2:
        raise values.wrong_shape("block_table", block_table, "(batch, pages of a sequence)")
    values.check_dtype("block_table", block_table, torch.int32)


def refuse(given: Given, *names: str) -> None:
    """Raise for the first of these arguments that is given: no kernel of this package supports it."""
    for name in names:
        value = given.get(name)
        if value is not None and not values.is_one_of(value, (0,)):
            what = "given" if isinstance(value, Tensor) else values.shown(value)
            raise NotImplementedError(f"{name} is {what}; accepted: its default, as no kernel here reads it")


def tensors_of(given: Given) -> tuple[Tensor, ...]:
    """q, k and v: arguments, or views of a packed qkv or kv."""
    rows, dims = ("batch, seqlen", 5) if lengths_of(given) is None else ("total", 4)
    own = [given[name] for name in ("q", "k", "v") if name in given]
    for name, count in (("qkv", 3), ("kv", 2)):
        if name in given:
            packed = given[name]
            check_tensors(**{name: packed})
            if "num_heads_q" in given and packed.dim() == 4:
                return split_heads(packed, given["num_heads_q"])
            if packed.dim() != dims or packed.shape[-3] != count:
                raise values.wrong_shape(name, packed, f"({rows}, {count}, nheads, head_dim)")
            own += unbind(packed)
    return tuple(own)


def split_heads(qkv: Tensor, num_heads_q: Any) -> tuple[Tensor, ...]:
    """Views q, k and v of qkv (batch, seqlen, heads, head_dim): heads of q first, then of k, then as many of v."""
    heads, num_heads_q = qkv.shape[2], values.python_number(num_heads_q)
    if not isinstance(num_heads_q, int) or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q is {values.shown(num_heads_q)} with a qkv of {heads} heads; accepted: an int that leaves as "
            "many heads to k as to v"
        )
    keys = (heads - num_heads_q) // 2
    return qkv.split([num_heads_q, keys, keys], dim=2)


def plus_infinity(lse: Tensor) -> Tensor:
    """lse with +inf where a query sees no key, as in FlashAttention-2."""
    return lse.nan_to_num(math.nan, math.inf, math.inf)


def note(door: str, tensors: Sequence[Tensor], given: Given) -> None:
    """Count a call of function ``door``. tensors: q, k and v."""
    noted: dict[str, Any] = dict(zip(("query", "key", "value"), tensors, strict=True))
    noted |= {"is_causal": given["causal"], "softcap": given["softcap"], "dropout_p": given.get("dropout_p")}
    noted["cum_seq_q"] = given.get("cu_seqlens", given.get("cu_seqlens_q"))
    doors.note(door, noted | {"block_table": given.get("block_table", given.get("page_table"))})


def attend(door: str, given: Given, **options: Any) -> tuple[Tensor, ...]:
    """Call :func:`cute_attn.attention`, or ``attention_varlen``. Returns a tuple of their results.

    Args:
        door: name of the function that is counted.
        options: other arguments of that function.
    """
    tensors, lengths = tensors_of(given), lengths_of(given)
    options |= scores_of(given)
    q, k, v = tensors
    if lengths is None:
        found: Any = attention(q, k, v, **options)
    else:
        found = attention_varlen(q, k, v, *lengths[:2], *longest(lengths), **options)
    note(door, tensors, given)
    return found if isinstance(found, tuple) else (found,)


_OF_A_CACHE = (
    "k", "v", "cache_seqlens", "page_table", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new",
    "rotary_cos", "rotary_sin", "rotary_seqlens", "num_splits",
)  # fmt: skip


def attend_cache(door: str, given: Given, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Call :func:`cute_attn.api.kvcache.attention_with_kvcache`. Returns out, and lse with return_lse, else None.

    given: with the names of its tensors; options: its arguments in place of those.
    """
    own: dict[str, Any] = {name: given[name] for name in _OF_A_CACHE if name in given} | options
    if "rotary_interleaved" in given:
        own["rotary_interleaved"] = flag("rotary_interleaved", given["rotary_interleaved"])
    if given.get("max_seqlen_q") is not None:
        own["max_seqlen_q"] = whole_number("max_seqlen_q", given["max_seqlen_q"])
    if own.get("rotary_cos") is None:  # they count with it only
        own.pop("rotary_seqlens", None)
    tensors = q, k_cache, v_cache = given["q"], given["k_cache"], given["v_cache"]
    found: Any = attention_with_kvcache(q, k_cache, v_cache, **own, **scores_of(given))
    note(door, tensors, given)
    return found if isinstance(found, tuple) else (found, None)


def attend_pages(door: str, given: Given, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Attend packed queries to paged keys. door: see :func:`attend`. Returns out, and lse or None."""
    tensors, lengths = [given[name] for name in ("q", "k", "v")], [given[name] for name in LENGTHS]
    table, dropout_p = given["block_table"], given["dropout_p"]
    if probability(dropout_p):
        raise ValueError(f"dropout_p is {dropout_p} with a block_table; accepted: 0")
    starts_q, starts_k, *_ = lengths
    longest_q, longest_k = longest(lengths)
    check_tensors(q=tensors[0], k=tensors[1], v=tensors[2])
    check_table(table)
    check_starts("cu_seqlens_k", starts_k)
    capacity = tensors[1].shape[1] * table.shape[-1] if tensors[1].dim() == 4 else 0
    if not 0 <= longest_k <= capacity:
        raise ValueError(
            f"max_seqlen_k is {longest_k}; accepted: 0 to {capacity}, the rows of a table's pages"
        )
    own = dict(zip(("q", "k_cache", "v_cache"), (x.detach() for x in tensors), strict=True))
    used = given.get("seqused_k")
    own |= {"cache_seqlens": starts_k.diff() if used is None else used, "page_table": table}
    own |= {"cu_seqlens_q": starts_q, "max_seqlen_q": longest_q, "num_splits": given.get("num_splits", 0)}
    scores = {name: x for name, x in given.items() if name not in ("k", "v")}
    out, lse = attend_cache(door, scores | own, return_lse=return_lse)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        out = _WithoutBackward.apply(out, *tensors)
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
