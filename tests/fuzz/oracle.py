"""The definition of attention in plain torch, one score at a time. Imports only torch, nothing from the package.

Functions are evaluated by vmap for the scores that masks leave: a hidden score has no value and no derivative.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any] | None


@dataclass(frozen=True)
class Options:
    """Operations on scores, in this order: scale, softcap, ALiBi, bias, score_mod, mask_mod and masks, sinks.

    alibi: (heads,) or (batch, heads). bias: as of (batch, heads, rows, keys), each or 1; of bool, True is seen.
    window: keys that a query sees before and after its position, None for all. shift: position of query 0.
    """

    scale: float
    softcap: float = 0.0
    alibi: Tensor | None = None
    bias: Tensor | None = None
    score_mod: Function = None
    mask_mod: Function = None
    window: tuple[int | None, int | None] = (None, None)
    sinks: Tensor | None = None


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, dtype: torch.dtype, batch: int, shift: int
) -> tuple[Tensor, Tensor]:
    """out (rows, heads, head_dim_v) and lse (heads, rows) of sequence ``batch``, of q (rows, heads, head_dim).

    dtype: of both products; everything between them is in fp32 or better. shift: position of query 0.
    """
    v = v.to(dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return weighted(scores(q, k, options, dtype, batch, shift), v, options.sinks)


def batched(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """out (batch, rows, heads, head_dim_v) and lse of sequences of one length, in q's dtype; options: of `Options`."""
    given = Options(q.shape[-1] ** -0.5 if scale is None else scale, **options)
    shift = k.shape[1] - q.shape[1]
    found = [attend(*x, given, q.dtype, b, shift) for b, x in enumerate(zip(q, k, v, strict=True))]
    out, lse = map(torch.stack, zip(*found, strict=True))
    return out, lse


def scores(q: Tensor, k: Tensor, options: Options, dtype: torch.dtype, batch: int, shift: int) -> Tensor:
    """Scores (heads, rows, keys) before the softmax; arguments as of :func:`attend`."""
    k = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    products = torch.einsum("qhd,khd->hqk", q.to(dtype), k).to(torch.promote_types(dtype, torch.float32))
    return modified(products * options.scale, options, batch, shift)


def modified(scores: Tensor, options: Options, batch: int, shift: int) -> Tensor:
    """Scores (heads, rows, keys) after all modifications before the softmax; hidden ones are -inf."""
    heads, rows, keys = scores.shape
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    at = (torch.arange(n, device=scores.device) for n in scores.shape)
    head, row, key = torch.meshgrid(*at, indexing="ij")
    if options.alibi is not None:
        slopes = options.alibi if options.alibi.dim() == 1 else options.alibi[batch]
        scores = scores - slopes.to(scores.dtype)[:, None, None] * (row + shift - key).abs()
    left, right = options.window
    seen = torch.ones_like(head, dtype=torch.bool)
    if left is not None:
        seen &= key >= row + shift - left
    if right is not None:
        seen &= key <= row + shift + right
    if options.bias is not None:
        bias = options.bias.expand(max(options.bias.shape[0], batch + 1), heads, -1, -1)[batch]
        bias = bias[:, :rows, :keys].expand_as(scores)
        if bias.dtype == torch.bool:
            seen = seen & bias
        else:
            scores = scores + bias.to(scores.dtype)
    places = [torch.full_like(head, batch)[seen], head[seen], row[seen], key[seen]]
    if options.mask_mod is not None and len(places[0]):
        seen = seen.masked_scatter(seen, _of_each(options.mask_mod, *places).bool())
        places = [torch.full_like(head, batch)[seen], head[seen], row[seen], key[seen]]
    kept = scores[seen]
    if options.score_mod is not None and len(kept):
        kept = _of_each(options.score_mod, kept.clone(), *places).to(scores.dtype)
    return torch.full_like(scores, -torch.inf).masked_scatter(seen, kept)


def weighted(scores: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse of modified scores and v (keys, heads, head_dim_v): 0 and -inf where a row has no key and no sink."""
    others = scores
    if sinks is not None:
        others = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)], -1)
    empty = (others == -torch.inf).all(-1)
    lse = torch.where(empty, -torch.inf, others.masked_fill(empty[..., None], 0.0).logsumexp(-1))
    p = (scores - lse.masked_fill(empty, 0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", torch.where(scores == -torch.inf, 0.0, p).to(v.dtype), v), lse


def _of_each(function: Callable[..., Any], *args: Tensor) -> Tensor:
    """A function's value for each element of its arguments."""
    found = torch.vmap(lambda *each: torch.as_tensor(function(*each)))(*args)
    if found.shape != args[0].shape:
        raise ValueError(f"a function of {tuple(args[0].shape)} scores returns {tuple(found.shape)} values")
    return found


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Numbers and quotients of integers in functions have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
