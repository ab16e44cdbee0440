"""The definition of attention with a cache of keys and values, in plain torch on any device; no gradients.

For each sequence ``b``, in this order::

    start = cache_seqlens[b], by default the capacity            rows in use, including those of leftpad
    row start + i of the cache = new key i rotated, new value i  rows beyond the capacity are not written
    end   = start + the number of new rows, at most the capacity
    out   = attention of the rotated queries with the keys in rows leftpad[b] to end

Masks, windows and ALiBi are aligned bottom right on these keys: the last query sees the last key. For a query without
keys, out is 0 and lse is -inf, or its head's sink; :func:`merge` treats a partial result with lse -inf as absent.

A row of the cache is ``k[entry, row]``, where ``entry`` is ``cache_batch_idx[b]``, by default b. In a paged cache the
entry is a row of ``page_table``, and a row is ``k[page_table[entry, row // page_size], row % page_size]``. Rows beyond
a sequence's end are never used, nor are their entries in the table.

Rotary embedding (Su et al. 2021, arXiv:2104.09864) rotates pairs of a row's first elements by the angles of its
position, see :class:`Rotary`. New key i is at position ``rotary_seqlens[b] + i``, by default ``start + i``: its row in
the cache, without subtracting leftpad. With a causal mask or a window, query i has the same position as new key i;
otherwise all queries are at position ``rotary_seqlens[b]``.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.epilogues.inputs import ScoreInputs


@dataclass(frozen=True)
class Cache:
    """Keys and values, and the tables that locate a sequence's rows.

    Attributes:
        k: (entries, capacity, nheads_kv, head_dim), or paged (pages, page_size, nheads_kv, head_dim).
        v: like k, with head_dim_v.
        page_table: int32 (entries, pages of an entry), or None for a contiguous cache.
        batch_idx: int32 (batch,), each sequence's entry, or None if sequence b has entry b.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor | None = None
    batch_idx: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Number of rows of an entry."""
        return self.k.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    def rows(self, batch: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The first two indices, into k and v, of rows [begin, end) of sequence ``batch``."""
        entry = batch if self.batch_idx is None else int(self.batch_idx[batch])
        row = torch.arange(begin, end, device=self.k.device)
        if self.page_table is None:
            return torch.full_like(row, entry), row
        size = self.k.shape[1]
        return self.page_table[entry].long()[row // size], row % size


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of a row's first ``2 * cos.shape[1]`` elements.

    Attributes:
        cos, sin: (positions, pairs). Positions beyond the tables use the last row, negative positions the first.
        interleaved: pairs are elements (2i, 2i + 1) (GPT-J); otherwise (i, i + pairs) (GPT-NeoX).
        seqlens: int32 (batch,), the position of each sequence's first new row, or None for its ``cache_seqlens``.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = True
    seqlens: Tensor | None = None


def rotate(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the pairs of rows (n, heads, head_dim) by the angles of their positions (n,).

    Computed in float32 (float64 for float64) and rounded once to x's dtype.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    positions = positions.clamp(0, rotary.cos.shape[0] - 1)
    cos, sin = (table[positions].unsqueeze(1).to(dtype) for table in (rotary.cos, rotary.sin))
    pairs = cos.shape[-1]
    turned = x[..., : 2 * pairs].to(dtype)
    if rotary.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    halves = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(halves, -1).flatten(-2) if rotary.interleaved else torch.cat(halves, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * pairs :]), -1)


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Views of each sequence's rows in x: (batch, rows, heads, dim), or packed (total, heads, dim)."""
    if cu_seqlens is None:
        return list(x)
    return [x[start:end] for start, end in itertools.pairwise(cu_seqlens.tolist())]


def append(
    cache: Cache,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_k_new: Tensor | None = None,
    rotary: Rotary | None = None,
) -> None:
    """Write new rows into the cache after each sequence's ``cache_seqlens`` rows.

    Args:
        cache: modified in place. If several sequences have the same entry, it is undefined whose rows remain.
        k, v: (batch, rows, nheads_kv, head_dim) and head_dim_v, or packed (total, nheads_kv, head_dim).
        cache_seqlens: int32 (batch,), rows in use before the call.
        cu_seqlens_k_new: int32 (batch + 1,), starts of packed sequences.
        rotary: rotary embedding of the new keys, or None.
    """
    starts = cache_seqlens.tolist()
    first = starts if rotary is None or rotary.seqlens is None else rotary.seqlens.tolist()
    new = zip(sequences(k, cu_seqlens_k_new), sequences(v, cu_seqlens_k_new), strict=True)
    for b, (new_k, new_v) in enumerate(new):
        if rotary is not None:
            new_k = rotate(new_k, first[b] + torch.arange(len(new_k), device=k.device), rotary)
        begin, end = (min(max(row, 0), cache.capacity) for row in (starts[b], starts[b] + len(new_k)))
        where, fit = cache.rows(b, begin, end), slice(begin - starts[b], end - starts[b])
        cache.k[where], cache.v[where] = new_k[fit], new_v[fit]


@dataclass(frozen=True)
class Lengths:
    """The lengths of sequences.

    Attributes:
        cache_seqlens: int32 (batch,), rows in use, including those just appended; None for a full cache.
        leftpad: int32 (batch,), the first valid row; None for row 0.
        cu_seqlens_q: int32 (batch + 1,), starts of packed queries; None for queries that are not packed.
    """

    cache_seqlens: Tensor | None = None
    leftpad: Tensor | None = None
    cu_seqlens_q: Tensor | None = None


def attention(
    q: Tensor,
    cache: Cache,
    softmax_scale: float,
    lengths: Lengths,
    features: reference.Features = reference.PLAIN,
    inputs: reference.ScoreInputs = reference.NO_INPUTS,
    *,
    return_max_scores: bool = False,
) -> tuple[Tensor, ...]:
    """Compute attention with the keys in the cache.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), or packed (total, nheads, head_dim). Rotary embedding is not applied.
        cache: the cache; nheads is a multiple of its nheads_kv.
        softmax_scale: factor of the products of q and k.
        lengths: lengths of the sequences.
        features, inputs: see :func:`cute_attn.reference.attention`; indices of keys count from leftpad.

    Returns:
        out, like q with head_dim_v, and lse, (batch, nheads, seqlen_q) or packed (nheads, total), natural log; with
        return_max_scores also the rows' greatest scores, like lse.
    """
    packed = lengths.cu_seqlens_q is not None
    rows = q if packed else q.flatten(0, 1)
    if lengths.cu_seqlens_q is None:
        starts = [b * q.shape[1] for b in range(q.shape[0] + 1)]
    else:
        starts = lengths.cu_seqlens_q.tolist()
    batch = range(len(starts) - 1)
    ends = [cache.capacity] * len(batch)
    if lengths.cache_seqlens is not None:
        ends = [min(max(n, 0), cache.capacity) for n in lengths.cache_seqlens.tolist()]
    begins = [0] * len(batch) if lengths.leftpad is None else lengths.leftpad.tolist()
    out = rows.new_zeros((*rows.shape[:-1], cache.v.shape[-1]))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse, max_scores = (rows.new_full((rows.shape[1], len(rows)), -math.inf, dtype=dtype) for _ in range(2))
    for b in batch:
        own, begin = slice(starts[b], starts[b + 1]), max(begins[b], 0)
        where = cache.rows(b, begin, max(begin, ends[b]))
        k, v = (x[where].unsqueeze(0) for x in (cache.k, cache.v))
        tree = () if inputs.tree_mask is None else (tree_epilogue(inputs.tree_mask[own]),)
        users = dataclasses.replace(features, epilogues=(*tree, *features.epilogues))
        alone = reference.Features(epilogues=(_of_sequence(b, users, inputs),))
        given = (rows[own].unsqueeze(0), k, v, softmax_scale, alone, ScoreInputs(sinks=inputs.sinks))
        found: Any = reference.attention(*given, return_max_scores=return_max_scores)
        out[own], lse[:, own] = found[0][0], found[1][0]
        if return_max_scores:
            max_scores[:, own] = found[2][0]
    if not packed:
        out = out.unflatten(0, q.shape[:2])
        lse, max_scores = (
            x.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous() for x in (lse, max_scores)
        )
    return (out, lse, max_scores) if return_max_scores else (out, lse)


def tree_epilogue(rows: Tensor) -> reference.Epilogue:
    """An epilogue that hides the last seqlen_q keys of a sequence from queries whose bit for the key is 0.

    rows: each query's bits, (seqlen_q, words).
    """

    def hide(scores: Tensor, coords: reference.ScoreCoords, inputs: ScoreInputs) -> Tensor:
        draft = coords.key - (coords.seqlen_k - coords.seqlen_q)
        bit = draft.clamp(min=0)
        seen = (rows[coords.query, bit // 32] >> (bit % 32).int()) & 1
        return scores.masked_fill((draft >= 0) & (seen == 0), -math.inf)

    return hide


def _of_sequence(batch: int, features: reference.Features, inputs: ScoreInputs) -> reference.Epilogue:
    """All changes of the scores of one sequence, computed in a call of its own: ``batch`` is its index."""

    def modify(scores: Tensor, coords: reference.ScoreCoords, _: ScoreInputs) -> Tensor:
        own = dataclasses.replace(coords, batch=coords.batch + batch)
        return reference.modify_scores(scores, own, features, inputs)

    return modify


def query_positions(
    seqlens: Tensor, cu_seqlens_q: Tensor | None, batch_shape: tuple[int, ...], causal_or_window: bool
) -> Tensor:
    """The position of each query, flattened from q's batch shape; 0 for packed rows outside all sequences.

    Args:
        seqlens: int32 (batch,), the position of each sequence's first query.
        cu_seqlens_q: int32 (batch + 1,), starts of packed queries.
        batch_shape: q's shape without heads and head_dim.
        causal_or_window: True if positions rise within a sequence, False if its queries have the same position.
    """
    positions = torch.zeros(batch_shape, dtype=torch.int64, device=seqlens.device)
    rows = list(positions) if cu_seqlens_q is None else sequences(positions, cu_seqlens_q)
    for own, start in zip(rows, seqlens.tolist(), strict=True):
        own += start
        if causal_or_window:
            own += torch.arange(len(own), device=own.device)
    return positions.flatten()


def merge(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge n partial results over disjoint sets of keys into one.

    Args:
        outs: (n, batch, seqlen_q, nheads, head_dim_v), or packed (n, total, nheads, head_dim_v).
        lses: (n, batch, nheads, seqlen_q), or packed (n, nheads, total), natural log. A partial result whose lse is
            -inf, or +inf as in some libraries, saw no key; its out is ignored.
        sinks: (nheads,), attention sinks, not included in any partial LSE; or None.

    Returns:
        out and lse, at least float32; 0 and -inf, or the sink, where no partial result saw a key.
    """
    dtype = torch.promote_types(outs.dtype, torch.float32)
    lses = lses.to(dtype)
    lses = lses.masked_fill(lses == math.inf, -math.inf)
    row_max = lses.amax(0)
    if sinks is not None:
        sinks = sinks.to(dtype)[:, None]
        row_max = torch.maximum(row_max, sinks)
    shift = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks - shift)
    weights = weights.transpose(-1, -2).unsqueeze(-1)
    parts = torch.where(weights == 0, 0.0, outs.to(dtype) * weights)
    divisor = total.masked_fill(total == 0, 1.0).transpose(-1, -2).unsqueeze(-1)
    return parts.sum(0) / divisor, shift + torch.log(total)
