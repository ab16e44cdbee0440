"""Rows that are appended to a cache, and their queries: batched or packed."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from cute_attn.device.seqlen import sequence_of_row


class NewKeys(NamedTuple):
    """Appended rows: (batch, rows, nheads_kv, dim), or packed (total, nheads_kv, dim) with cu_seqlens (batch + 1,).

    seqlens: int32 (batch,), the cache's rows in use before they are appended.
    """

    k: cute.Tensor
    v: cute.Tensor
    seqlens: cute.Tensor
    cu_seqlens: cute.Tensor | None


class Angles(NamedTuple):
    """Cosines and sines (positions, pairs), and each sequence's first position, int32 (batch,)."""

    cos: cute.Tensor
    sin: cute.Tensor
    seqlens: cute.Tensor


class Queries(NamedTuple):
    """Queries and their rotated copy, shaped as in ``NewKeys``; ``step``: increment of positions per row, 1 or 0."""

    q: cute.Tensor
    rotated: cute.Tensor
    cu_seqlens: cute.Tensor | None
    step: Int32


@dataclass(frozen=True)
class NewRow:
    """A row of a sequence, and where it is in a tensor (batch, rows, ...) or (total, ...)."""

    batch: Int32
    index: Int32  # in the sequence
    exists: Boolean
    packed_row: Int32

    @staticmethod
    @cute.jit
    def find(tensor: cute.Tensor, cu_seqlens: cute.Tensor | None, number: Int32) -> "NewRow":
        """Find row ``number``, counted over all sequences."""
        batch, index, exists = Int32(0), number, Boolean(True)
        if cutlass.const_expr(cu_seqlens is None):
            batch, index = number // tensor.shape[1], number % tensor.shape[1]
        else:
            batch = sequence_of_row(cu_seqlens, number)
            index = number - cu_seqlens[batch]  # type: ignore[index]
            exists = index >= 0 and number < cu_seqlens[batch + 1]  # type: ignore[index]
        return NewRow(batch, index, exists, number)

    @cute.jit
    def elements(self, tensor: cute.Tensor, head: Int32) -> cute.Tensor:
        """The row's elements (dim,) of one head."""
        start = Int64(head) * tensor.stride[-2]
        if cutlass.const_expr(len(tensor.shape) == 3):
            start += Int64(self.packed_row) * tensor.stride[0]
        else:
            start += Int64(self.batch) * tensor.stride[0] + Int64(self.index) * tensor.stride[1]
        return cute.make_tensor(tensor.iterator + start, cute.make_layout(tensor.shape[-1]))


@cute.jit
def number_of_rows(tensor: cute.Tensor) -> Int32:
    """Number of rows of all sequences; tensor: (batch, rows, heads, dim) or (total, heads, dim)."""
    rows = Int32(tensor.shape[0])
    if cutlass.const_expr(len(tensor.shape) == 4):
        rows *= tensor.shape[1]
    return rows
