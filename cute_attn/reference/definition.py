"""The definition of attention, in plain torch: any float dtype, any device, every feature, differentiable by autograd.

For one batch, one head, query ``i`` of ``seqlen_q`` and key ``j`` of ``seqlen_k``::

    s[i, j] = softmax_scale * sum_d q[i, d] * k[j, d]
    s       = softcap * tanh(s / softcap)                    where softcap is not 0
    s       = s - slope * |i + shift - j|                    ALiBi
    s       = s + bias[i, j]
    s       = users' epilogues, in order
    s       = -inf where the mask hides key j from query i
    P       = softmax over j of s;  lse[i] = log(sum_j exp(s[i, j]))
    P, lse    with exp(sink) of the head added to each row's sum where the head has an attention sink
    out[i]  = sum_j keep[i, j] * P[i, j] / (1 - dropout_p) * v[j]

``shift`` is ``seqlen_k - seqlen_q`` (bottom right: the last query is aligned with the last key) or 0 (top left). For a
row that sees no key, out is 0 and lse is -inf, or the sink. Rows outside all sequences are never read.

Tests compare the kernels' epilogues with :func:`softcap_scores`, :func:`alibi_scores`, :func:`visible` and the
``*_keep`` masks.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_attn.epilogues import numbering
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.numbering import flash_keep_threshold, mem_efficient_keep_threshold

_WORD = 0xFFFFFFFF
# Scores held at once; a tensor of them in float64 is then 64 MB.
_CHUNK_SCORES = 2**23


@dataclass(frozen=True)
class ScoreCoords:
    """Coordinates of a block of scores. Every index tensor broadcasts against (batch, nheads, seqlen_q, seqlen_k).

    Attributes:
        batch, head, query, key: int64 indices of the batch, the query head, the query and the key. Queries and keys
            count from the start of their sequence.
        nheads: number of query heads.
        seqlen_q, seqlen_k: this sequence's lengths.
        max_seqlen_q, max_seqlen_k: the call's maximum lengths, which may exceed those of all sequences.
        top_left: True if the first query is aligned with the first key, False if the last with the last.
        varlen: True if sequences are packed, with cumulative lengths.
    """

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
    nheads: int
    seqlen_q: int
    seqlen_k: int
    max_seqlen_q: int
    max_seqlen_k: int
    top_left: bool
    varlen: bool = False

    @property
    def diagonal(self) -> Tensor:
        return self.query + (0 if self.top_left else self.seqlen_k - self.seqlen_q)


# ---- functions of a score ----


def softcap_scores(scores: Tensor, softcap: float) -> Tensor:
    """Scores limited to (-softcap, softcap): softcap * tanh(scores / softcap)."""
    return torch.tanh(scores / softcap) * softcap


def alibi_scores(scores: Tensor, coords: ScoreCoords, slopes: Tensor) -> Tensor:
    """Subtract slope times the distance between query and key. slopes: (nheads,) or (batch, nheads)."""
    slope = slopes[coords.head] if slopes.dim() == 1 else slopes[coords.batch, coords.head]
    slope = slope.to(scores.dtype)
    return scores - slope * (coords.diagonal - coords.key).abs().to(scores.dtype)


def bias_scores(scores: Tensor, coords: ScoreCoords, bias: Tensor) -> Tensor:
    """Add a bias (batch|1, nheads|1, max_seqlen_q|1, max_seqlen_k)."""
    batch, head, query, key = (
        index.clamp(max=size - 1)
        for index, size in zip((coords.batch, coords.head, coords.query, coords.key), bias.shape, strict=True)
    )
    # Converted to the scores' dtype first: an element's gradient is the sum over all rows that read it, in that dtype.
    return scores + bias.to(scores.dtype)[batch, head, query, key]


def visible(coords: ScoreCoords, mask: str, window_left: int, window_right: int) -> Tensor | None:
    """A mask of the keys that each query sees, or None for all keys. The bounds apply only to a window mask."""
    if not mask:
        return None
    distance = coords.key - coords.diagonal
    if mask.startswith("causal"):
        return distance <= 0
    return (distance >= -window_left) & (distance <= window_right)


# ---- dropout ----


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor], rounds: int) -> tuple[Tensor, ...]:
    """Philox 4x32 with the given number of rounds, vectorised: four 32-bit words per counter.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Args:
        counter: four int64 tensors holding 32-bit words.
        key: two int64 tensors holding 32-bit words.
        rounds: 10 (the usual number) or 7.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # A product of two 32-bit words may wrap int64; its 64 bits are still right.
        product_0, product_1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _WORD) ^ c1 ^ k0,
            product_1 & _WORD,
            ((product_0 >> 32) & _WORD) ^ c3 ^ k1,
            product_0 & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def flash_keep(coords: ScoreCoords, dropout_p: float, rng_state: Tensor) -> Tensor:
    """FlashAttention-2's dropout mask as PyTorch draws it: True where an element is kept.

    A block of 16 queries by 32 keys uses 32 Philox calls of 7 rounds, each giving 16 bytes.
    """
    seed, offset = rng_state[0], rng_state[1]
    lane = coords.query % 8 * 4 + coords.key % 8 // 2
    subsequence = offset + (coords.batch * coords.nheads + coords.head) * 32 + lane
    words = philox4x32(
        (subsequence & _WORD, (subsequence >> 32) & _WORD, coords.query // 16, coords.key // 32),
        (seed & _WORD, (seed >> 32) & _WORD),
        rounds=7,
    )
    word = _select_word(words, coords.key // 8 % 4)
    byte = (word >> 8 * (coords.query // 8 % 2 * 2 + coords.key % 2)) & 0xFF
    return byte <= flash_keep_threshold(dropout_p)


def mem_efficient_keep(coords: ScoreCoords, dropout_p: float, rng_state: Tensor) -> Tensor:
    """The memory-efficient attention's dropout mask as PyTorch draws it: True where an element is kept.

    Each element uses one 32-bit word of cuRAND's Philox (10 rounds, subsequence 0);
    :mod:`cute_attn.epilogues.numbering` defines the word's number.
    """
    seed, offset = rng_state[0], rng_state[1]
    scores = (coords.batch * coords.nheads + coords.head) * coords.max_seqlen_q * coords.max_seqlen_k
    # int64 wraps like uint64.
    start = offset + (scores & numbering.as_signed(numbering.plane_mask(coords.varlen), 64))
    word = (start & 3) + coords.query * coords.seqlen_k + coords.key
    word = word & numbering.as_signed(numbering.score_mask(), 64)
    counter = ((start >> 2) & (2**62 - 1)) + (word >> 2)
    zero = torch.zeros_like(counter[:1, :1, :1, :1])
    words = philox4x32(
        (counter & _WORD, counter >> 32, zero, zero), (seed & _WORD, (seed >> 32) & _WORD), rounds=10
    )
    return _select_word(words, word & 3) >= mem_efficient_keep_threshold(dropout_p)


def _select_word(words: tuple[Tensor, ...], index: Tensor) -> Tensor:
    low = torch.where(index == 0, words[0], words[1])
    return torch.where(index < 2, low, torch.where(index == 2, words[2], words[3]))


DROPOUT_KEEP: dict[str, Callable[[ScoreCoords, float, Tensor], Tensor]] = {
    "flash": flash_keep,
    "mem_efficient": mem_efficient_keep,
}


# ---- attention ----


Epilogue = Callable[[Tensor, ScoreCoords, ScoreInputs], Tensor]
"""A function of scores: the ``reference`` of a user's registered epilogue."""


@dataclass(frozen=True)
class Features:
    """Steps between the two products, by default none. Their arguments are in ``ScoreInputs``.

    Attributes:
        mask: ``""``, ``"causal"``, ``"causal_top_left"``, ``"window"`` or ``"window_top_left"``.
        dropout: ``""``, ``"flash"`` or ``"mem_efficient"``.
        epilogues: users' functions of scores, applied after the bias, in order.
    """

    mask: str = ""
    dropout: str = ""
    epilogues: tuple[Epilogue, ...] = ()


def modify_scores(scores: Tensor, coords: ScoreCoords, features: Features, inputs: ScoreInputs) -> Tensor:
    """Apply softcap, ALiBi, bias, users' epilogues and the mask to scores."""
    if inputs.softcap:
        scores = softcap_scores(scores, inputs.softcap)
    if inputs.alibi_slopes is not None:
        scores = alibi_scores(scores, coords, inputs.alibi_slopes)
    if inputs.bias is not None:
        scores = bias_scores(scores, coords, inputs.bias)
    for epilogue in features.epilogues:
        scores = epilogue(scores, coords, inputs)
    seen = visible(coords, features.mask, inputs.window_left, inputs.window_right)
    return scores if seen is None else scores.masked_fill(~seen, -math.inf)


@dataclass(frozen=True)
class Lengths:
    """Positions and lengths of each batch's queries and keys. If all are None, every batch has full length.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), starts of packed sequences (varlen).
        seqused_q, seqused_k: int32 (batch,), numbers of a batch's queries and keys that are used.
        max_seqlen_q, max_seqlen_k: lengths of the longest sequences; needed for varlen.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0


PLAIN, NO_INPUTS, FULL_LENGTHS = Features(), ScoreInputs(), Lengths()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    features: Features = PLAIN,
    inputs: ScoreInputs = NO_INPUTS,
    lengths: Lengths = FULL_LENGTHS,
    *,
    return_softmax: bool = False,
    return_max_scores: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute attention by its definition.

    Args:
        q: (batch, seqlen_q, nheads, head_dim), or packed (total_q, nheads, head_dim).
        k: (batch, seqlen_k, nheads_kv, head_dim), or packed; nheads is a multiple of nheads_kv.
        v: like k, with head_dim_v.
        softmax_scale: factor of the products of q and k.
        features: masks, dropout, users' epilogues.
        inputs: arguments of ``features``, and softcap, ALiBi slopes and bias; 0 or None switches one off.
        lengths: sequence lengths if they differ from the tensors' sizes.
        return_softmax: also return P.
        return_max_scores: return the rows' greatest scores in place of P.
        compute_dtype: by default float64 for float64 inputs and float32 for all others. With the inputs' 16-bit dtype
            every step rounds to 16 bits, as in unfused torch code.

    Returns:
        out, like q with head_dim_v, in q's dtype. Rows outside all sequences are 0.
        lse, (batch, nheads, seqlen_q) or packed (nheads, total_q), natural log, in the compute dtype but at least
            float32. It is -inf on rows that see no key, without sinks, and on rows outside all sequences.
        softmax, (batch, nheads, max_seqlen_q, max_seqlen_k) in q's dtype, or None: P before dropout, with the sign bit
            set for dropped elements (0 becomes -0.0); 0 where the mask hides a key and beyond a batch's lengths.
            With return_max_scores a tensor like lse: -inf where a row sees no key.
    """
    dtype = compute_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    lse_dtype = torch.promote_types(dtype, torch.float32)
    varlen = lengths.cu_seqlens_q is not None
    # Cast before blocks are taken, so that the gradients of several blocks and query heads add up in this dtype.
    q4, k4, v4 = ((x.unsqueeze(0) if varlen else x).to(dtype) for x in (q, k, v))
    nheads = q4.shape[2]
    batch, longest = extents(q4, k4, lengths)
    out = q4.new_zeros((*q4.shape[:3], v4.shape[3]), dtype=q.dtype)
    lse = q4.new_full((q4.shape[0], nheads, q4.shape[1]), -math.inf, dtype=lse_dtype)
    softmax = q4.new_zeros((batch, nheads, *longest), dtype=q.dtype) if return_softmax else None
    max_scores = torch.full_like(lse, -math.inf) if return_max_scores else None

    for block in blocks(q4, k4, lengths, features, longest):
        own = (block.queries(q4), block.keys(k4), block.keys(v4))
        piece, piece_lse, p, largest = attend(*own, softmax_scale, features, inputs, block.coords)
        out[block.where, block.rows_q, block.heads] = piece.to(out.dtype)
        lse[block.where, block.heads, block.rows_q] = piece_lse.to(lse_dtype)
        if softmax is not None:
            block.write(softmax, p)
        if max_scores is not None:
            max_scores[block.where, block.heads, block.rows_q] = largest.to(lse_dtype)
    if max_scores is not None:
        return (out[0], lse[0], max_scores[0]) if varlen else (out, lse, max_scores)
    return (out[0], lse[0], softmax) if varlen else (out, lse, softmax)


def extents(q: Tensor, k: Tensor, lengths: Lengths) -> tuple[int, tuple[int, int]]:
    """Number of sequences, and the maximum numbers of queries and keys. q and k have four dimensions."""
    if lengths.cu_seqlens_q is None:
        return q.shape[0], (q.shape[1], k.shape[1])
    return lengths.cu_seqlens_q.numel() - 1, (lengths.max_seqlen_q, lengths.max_seqlen_k)


@torch.no_grad()
def softmax(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    softmax_scale: float,
    features: Features = PLAIN,
    inputs: ScoreInputs = NO_INPUTS,
    lengths: Lengths = FULL_LENGTHS,
    precision: str = "",
) -> Tensor:
    """Compute P of an attention from its LSE, some queries at a time.

    Args:
        lse: the LSE that :func:`attention` returns, which includes sinks.
        q, k, softmax_scale, features, inputs, lengths: see :func:`attention`.
        precision: precision of fp32 products, regardless of PyTorch's setting: "" for fp32, or "tf32".

    Returns:
        softmax, see :func:`attention`.
    """
    varlen = lengths.cu_seqlens_q is not None
    q4, k4, lse4 = (x.unsqueeze(0) if varlen else x for x in (q, k, lse))
    batch, longest = extents(q4, k4, lengths)
    result = q4.new_zeros((batch, q4.shape[2], *longest))
    for block in blocks(q4, k4, lengths, features, longest):
        products = _products(block.queries(q4), block.keys(k4), lse.dtype, precision)
        scores = modify_scores(products * softmax_scale, block.coords, features, inputs)
        own_lse = block.lse(lse4).unsqueeze(-1)
        p = torch.exp(scores - own_lse)
        total = p.sum(-1, keepdim=True)  # 1, except where LSE has no digits left, as of a bias of finfo.min
        if inputs.sinks is not None:
            total = total + torch.exp(inputs.sinks.to(lse.dtype)[block.heads][:, None, None] - own_lse)
        p = (p / total).masked_fill(own_lse == -math.inf, 0.0)
        if features.dropout:
            keep = DROPOUT_KEEP[features.dropout](block.coords, inputs.dropout_p, inputs.rng_state)
            p = _with_signs(p, keep, block.coords, features, inputs)
        block.write(result, p)
    return result


def _products(q: Tensor, k: Tensor, dtype: torch.dtype, precision: str) -> Tensor:
    """q k^T of q and k (batch, rows, heads, dim), in ``dtype``; no PyTorch flag makes the result less precise.

    Products of 16-bit numbers are exact in tf32 too, but would not be if scaled. Products of fp32 numbers, rounded to
    tf32 or not, are summed in float64.
    """
    own = torch.float64 if q.dtype == torch.float32 else dtype
    if precision == "tf32":
        q, k = _rounded_to_tf32(q), _rounded_to_tf32(k)
    q, k = (x.transpose(1, 2).to(own) for x in (q, k))
    return (q @ k.transpose(-1, -2)).to(dtype)


def _rounded_to_tf32(x: Tensor) -> Tensor:
    """Round fp32 numbers to 11 significant bits, ties away from 0; Inf and NaN are unchanged."""
    rounded = ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


@dataclass(frozen=True)
class Block:
    """Scores that are computed together: of equally long sequences, and of some heads and queries.

    Attributes:
        where: indices of the batches in q, k and v; all sequences of a varlen tensor have index 0.
        batch, heads: indices of the sequences and heads in the call.
        rows_q, rows_k: rows of q and of k.
        first: index of the first query in its sequence.
        heads_kv: the key head of each head.
        coords: coordinates of the scores.
    """

    where: slice
    batch: slice
    heads: slice
    rows_q: slice
    rows_k: slice
    first: int
    heads_kv: Tensor
    coords: ScoreCoords

    def queries(self, q: Tensor) -> Tensor:
        """The block's queries: (batch, seqlen_q, heads, dim)."""
        return q[self.where, self.rows_q, self.heads]

    def keys(self, x: Tensor) -> Tensor:
        """The block's rows of k or v for each query head: (batch, seqlen_k, heads, dim)."""
        return x[self.where, self.rows_k].index_select(2, self.heads_kv)

    def lse(self, lse: Tensor) -> Tensor:
        """The block's rows of lse: (batch, heads, seqlen_q)."""
        return lse[self.where, self.heads, self.rows_q]

    def biases(self, bias: Tensor) -> Tensor:
        """The block's elements of a bias (batch|1, nheads|1, max_seqlen_q|1, max_seqlen_k|1), not expanded."""
        rows_q = slice(self.first, self.first + self.coords.query.numel())
        places = (self.batch, self.heads, rows_q, slice(0, self.coords.seqlen_k))
        return bias[tuple(slice(1) if n == 1 else own for n, own in zip(bias.shape, places, strict=True))]

    def write(self, softmax: Tensor, p: Tensor) -> None:
        """Write P to ``softmax``, cut off where a sequence is longer than the call's maximum lengths."""
        target = softmax[self.batch, self.heads, self.first : self.first + p.shape[2], : p.shape[3]]
        target.copy_(p[:, :, : target.shape[2], : target.shape[3]])


def blocks(
    q: Tensor, k: Tensor, lengths: Lengths, features: Features, longest: tuple[int, int]
) -> Iterator[Block]:
    """Blocks that cover all scores of q and k (batch, seqlen, heads, dim): up to ``_CHUNK_SCORES``, or one query."""
    varlen, nheads = lengths.cu_seqlens_q is not None, q.shape[2]

    def index(rows: slice, axis: int) -> Tensor:
        shape = [-1 if i == axis else 1 for i in range(4)]
        return torch.arange(rows.start, rows.stop, device=q.device).view(shape)

    for batch, rows_q, rows_k in _sequences(q, k, lengths):
        seqlen_q, seqlen_k = rows_q.stop - rows_q.start, rows_k.stop - rows_k.start
        for heads in _chunks(nheads, max(1, _CHUNK_SCORES // max(1, seqlen_q * seqlen_k))):
            for rows in list(_chunks(seqlen_q, max(1, _CHUNK_SCORES // max(1, seqlen_k)))) or [slice(0, 0)]:
                places = (batch, heads, rows, slice(0, seqlen_k))
                b, h, i, j = (index(own, axis) for axis, own in enumerate(places))
                top_left = features.mask.endswith("top_left")
                coords = ScoreCoords(b, h, i, j, nheads, seqlen_q, seqlen_k, *longest, top_left, varlen)
                yield Block(
                    slice(0, 1) if varlen else batch,
                    batch,
                    heads,
                    slice(rows_q.start + rows.start, rows_q.start + rows.stop),
                    rows_k,
                    rows.start,
                    coords.head.flatten() * k.shape[2] // max(nheads, 1),
                    coords,
                )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    features: Features,
    inputs: ScoreInputs,
    coords: ScoreCoords,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of equally long sequences (batch, seqlen, heads, dim).

    Returns out, lse, P with signs for dropout, and rows' greatest scores.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = modify_scores((q * softmax_scale) @ k.transpose(-1, -2), coords, features, inputs)
    # The maximum only prevents overflow: P does not depend on it, so it needs no gradient.
    sinks = None if inputs.sinks is None else inputs.sinks.to(scores.dtype)[coords.head]
    row_max = scores.new_full((*q.shape[:3], 1), -math.inf)
    if scores.shape[-1]:
        row_max = scores.detach().amax(-1, keepdim=True)
    largest = row_max.squeeze(-1)
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks.detach())
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    p = torch.exp(scores - row_max)
    row_sum = p.sum(-1, keepdim=True)
    if sinks is not None:
        row_sum = row_sum + torch.exp(sinks - row_max)
    empty = row_sum == 0
    row_sum = row_sum.masked_fill(empty, 1.0)
    p = p / row_sum
    lse = (torch.log(row_sum) + row_max).masked_fill(empty, -math.inf).squeeze(-1)
    if not features.dropout:
        return (p @ v).transpose(1, 2), lse, p, largest
    keep = DROPOUT_KEEP[features.dropout](coords, inputs.dropout_p, inputs.rng_state)
    out = (p * keep) @ v * (1.0 / (1.0 - inputs.dropout_p))
    return out.transpose(1, 2), lse, _with_signs(p, keep, coords, features, inputs), largest


def _with_signs(
    p: Tensor, keep: Tensor, coords: ScoreCoords, features: Features, inputs: ScoreInputs
) -> Tensor:
    """P with the sign bit set on visible elements that dropout drops."""
    seen = visible(coords, features.mask, inputs.window_left, inputs.window_right)
    return torch.where(~keep if seen is None else ~keep & seen, -p, p)


def _sequences(q: Tensor, k: Tensor, lengths: Lengths) -> Iterator[tuple[slice, slice, slice]]:
    """Batches of equal lengths that are computed together, and their rows of q and of k.

    Batches of full length are grouped, as many as fit ``_CHUNK_SCORES``.
    """
    given = (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_q, lengths.seqused_k)
    if all(x is None for x in given):
        size = max(1, q.shape[1] * q.shape[2] * k.shape[1])
        for batch in _chunks(q.shape[0], max(1, _CHUNK_SCORES // size)):
            yield batch, slice(0, q.shape[1]), slice(0, k.shape[1])
        return
    varlen = lengths.cu_seqlens_q is not None
    rows_q = _rows(q, varlen, lengths.cu_seqlens_q, lengths.seqused_q)
    rows_k = _rows(k, varlen, lengths.cu_seqlens_k, lengths.seqused_k)
    for b, rows in enumerate(zip(rows_q, rows_k, strict=True)):
        yield slice(b, b + 1), *rows


def _rows(x: Tensor, varlen: bool, cu_seqlens: Tensor | None, seqused: Tensor | None) -> list[slice]:
    """The rows of each batch that are used."""
    bounds = [(0, x.shape[1])] * x.shape[0]
    if varlen:
        assert cu_seqlens is not None
        bounds = list(itertools.pairwise(cu_seqlens.tolist()))
    lengths = [end - start for start, end in bounds]
    if seqused is not None:
        lengths = [max(min(pair), 0) for pair in zip(lengths, seqused.tolist(), strict=True)]
    return [slice(start, start + n) for (start, _), n in zip(bounds, lengths, strict=True)]


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
