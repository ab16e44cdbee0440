"""Offsets of the rows of a tensor with any strides."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute


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
