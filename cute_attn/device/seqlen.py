"""Lengths and starts of sequences; the only place where kernels read them."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


class Seqlens(NamedTuple):
    """Lengths as kernel arguments. cu_seqlens (batch + 1,), if varlen, and seqused (batch,): int32 or None.

    leftpad (batch,): the first row of a sequence in its cache entry, if not row 0. added_k: rows just appended to a
    cache, to be added to seqused_k.
    """

    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    max_seqlen_q: Int32
    max_seqlen_k: Int32
    leftpad: cute.Tensor | None = None
    added_k: Int32 | None = None

    def batch(self, tensor: cute.Tensor) -> Int32:
        """Number of sequences; ``tensor``: (batch, ...), not read if varlen."""
        return tensor.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


@dataclass(frozen=True)
class SeqlenInfo:
    """Lengths of one sequence and, if varlen, its first row in q and k (0 otherwise).

    With leftpad, keys are the rows [first_key, seqlen_k) of a cache entry; key indices count from the entry's row 0.
    """

    seqlen_q: Int32
    seqlen_k: Int32
    offset_q: Int32
    offset_k: Int32
    first_key: Int32 | None = None

    @staticmethod
    @cute.jit
    def read(seqlens: Seqlens, batch: Int32) -> "SeqlenInfo":
        """Read the lengths of sequence ``batch``."""
        seqlen_q, offset_q = _read(seqlens.cu_seqlens_q, seqlens.seqused_q, seqlens.max_seqlen_q, batch)
        keys = (seqlens.cu_seqlens_k, seqlens.seqused_k, seqlens.max_seqlen_k)
        seqlen_k, offset_k = _read(*keys, batch, seqlens.added_k)
        first_key = None
        if cutlass.const_expr(seqlens.leftpad is not None):
            first_key = cutlass.max(seqlens.leftpad[batch], 0)  # type: ignore[index]
        return SeqlenInfo(seqlen_q, seqlen_k, offset_q, offset_k, first_key)


@cute.jit
def _read(cu_seqlens, seqused, max_seqlen: Int32, batch: Int32, added: Int32 | None = None):
    seqlen = max_seqlen
    offset = Int32(0)
    if cutlass.const_expr(cu_seqlens is not None):
        offset = cu_seqlens[batch]
        seqlen = cu_seqlens[batch + 1] - offset
    if cutlass.const_expr(seqused is not None):
        used = seqused[batch]
        if cutlass.const_expr(added is not None):
            used += added
        seqlen = cutlass.min(used, seqlen)
    return seqlen, offset


@cute.jit
def existing_rows(cu_seqlens: cute.Tensor | None, tensor: cute.Tensor, batch: Int32) -> Int32:
    """Number of rows of sequence ``batch`` in ``tensor``, (batch, rows, ...) or varlen, regardless of seqused."""
    rows = Int32(0)
    if cutlass.const_expr(cu_seqlens is not None):
        rows = cu_seqlens[batch + 1] - cu_seqlens[batch]  # type: ignore[index]
    else:
        rows = Int32(tensor.shape[1])
    return rows


@cute.jit
def sequence(
    tensor: cute.Tensor, batch: Int32, head: Int32, offset: Int32, varlen: cutlass.Constexpr
) -> cute.Tensor:
    """One head as (seqlen, head_dim); tensor: (batch, seqlen, heads, head_dim), or varlen (total, heads, head_dim).

    Offsets are 64-bit. The number of rows is the tensor's and may exceed the sequence's: callers check lengths.
    """
    if cutlass.const_expr(varlen):
        stride_row, stride_head, stride_dim = tensor.stride
        shape = (tensor.shape[0], tensor.shape[2])
        start = Int64(offset) * stride_row + Int64(head) * stride_head
    else:
        stride_batch, stride_row, stride_head, stride_dim = tensor.stride
        shape = (tensor.shape[1], tensor.shape[3])
        start = Int64(batch) * stride_batch + Int64(head) * stride_head
    return cute.make_tensor(tensor.iterator + start, cute.make_layout(shape, stride=(stride_row, stride_dim)))


@cute.jit
def padded_row0(seqlens: Seqlens, info: SeqlenInfo, batch: Int32, tile_m: cutlass.Constexpr) -> Int32:
    """The first row of ``batch`` in a workspace that pads sequences to whole blocks of ``tile_m`` rows.

    0 unless varlen, because each (batch, head) then has separate rows. For varlen see :func:`first_block`.
    """
    row0 = Int32(0)
    if cutlass.const_expr(seqlens.cu_seqlens_q is not None):
        row0 = (info.offset_q // tile_m + batch) * tile_m
    return row0


@cute.jit
def first_block(cu_seqlens: cute.Tensor, batch: Int32, tile: cutlass.Constexpr) -> Int32:
    """The first block of a varlen sequence if each is padded to blocks of ``tile`` rows: cu_seqlens[b] // tile + b.

    Each block belongs to one sequence, and all are within total // tile + batch blocks.
    """
    return cu_seqlens[batch] // tile + batch


@cute.jit
def sequence_of_block(cu_seqlens: cute.Tensor, block: Int32, tile: cutlass.Constexpr) -> Int32:
    """The last sequence with a :func:`first_block` of at most ``block``, or the first sequence."""
    return _last_from(cu_seqlens, block, lambda batch: first_block(cu_seqlens, batch, tile))


@cute.jit
def sequence_of_row(cu_seqlens: cute.Tensor, row: Int32) -> Int32:
    """The last sequence that starts at or before packed row ``row``, or the first sequence."""
    return _last_from(cu_seqlens, row, lambda batch: cu_seqlens[batch])


@cute.jit
def _last_from(cu_seqlens: cute.Tensor, place: Int32, start_of: cutlass.Constexpr) -> Int32:
    """The last sequence with ``start_of(sequence)`` at most ``place``, or the first sequence."""
    batch, end = Int32(0), Int32(cu_seqlens.shape[0]) - 1
    while batch + 1 < end:
        middle = (batch + end) // 2
        if start_of(middle) <= place:
            batch = middle
        else:
            end = middle
    return batch


@cute.jit
def workspace_rows(
    tensor: cute.Tensor,
    batch: Int32,
    head: Int32,
    row0: Int32,
    width: cutlass.Constexpr,
    varlen: cutlass.Constexpr,
) -> cute.Tensor:
    """A workspace tensor from row ``row0`` of one head on, flat.

    tensor: fp32 (batch, nheads, rows * width), or varlen (nheads, rows * width). row0: a multiple of 4, so that the
    result is 16-byte aligned. Offsets are 64-bit; the result's length is the tensor's, not the sequence's.
    """
    if cutlass.const_expr(varlen):
        start = Int64(head) * tensor.stride[0]
    else:
        start = Int64(batch) * tensor.stride[0] + Int64(head) * tensor.stride[1]
    start += Int64(row0) * width
    start = cute.assume(start, divby=4)
    return cute.make_tensor(tensor.iterator + start, cute.make_layout(tensor.shape[-1]))


@dataclass(frozen=True)
class RowPlaces:
    """Offsets of the rows of (batch, seqlen, heads, dim), or (total, heads, dim); heads run fastest."""

    heads: cute.FastDivmodDivisorV2
    seqlen: cute.FastDivmodDivisorV2
    count: Int32

    @staticmethod
    def make(tensor: cute.Tensor) -> "RowPlaces":
        """Make the divisors on the host; for a tensor without elements, they are 1 instead of 0."""
        *outer, seqlen, heads, _ = tensor.shape
        of_heads, of_seqlen = (cute.FastDivmodDivisorV2(cutlass.max(n, 1)) for n in (heads, seqlen))
        count = Int32(seqlen) * heads
        for size in outer:
            count = count * size
        return RowPlaces(of_heads, of_seqlen, count)

    def start(self, tensor: cute.Tensor, row: Int32) -> Int64:
        """The offset of ``row`` in elements."""
        row, head = divmod(row, self.heads)
        if cute.rank(tensor) == 3:
            return Int64(row) * tensor.stride[0] + Int64(head) * tensor.stride[1]
        batch, row = divmod(row, self.seqlen)
        return (
            Int64(batch) * tensor.stride[0] + Int64(row) * tensor.stride[1] + Int64(head) * tensor.stride[2]
        )
