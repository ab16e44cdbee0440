"""Adds a row's results over several splits of its keys, one after the other, from the last split to the first.

The order of the sums, and so every bit of the result, depends only on the row's splits that have keys, not on other
rows' splits or on empty splits. The Hopper kernel with split "folded" adds splits in this way as it computes them. The
combine kernel with ``in_order`` adds the results of a kernel with split "fixed". With the same splits, both give the
same bits.

    m'  = max(m, lse)               m: the greatest LSE so far, -inf before the first one
    O'  = O exp(m - m') + o exp(lse - m')
    sum'= sum exp(m - m') + exp(lse - m')

After the last split, out is O / sum and its LSE is m + log(sum).
"""

import math
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, cute

from cute_attn.device.math import LOG2_E, exp2, fma, fmax, log, product, reciprocal, rematerialize

AT_ONCE = 4
"""Maximum 16-byte vectors that a thread loads at once; fewer unless this divides its vectors of a row."""


@dataclass(frozen=True)
class RowSums:
    """Each row's greatest LSE so far, and the sum of exp(LSE - greatest)."""

    largest: cute.Tensor
    total: cute.Tensor

    @staticmethod
    def make(rows: int) -> "RowSums":
        """The sums of rows to which nothing has been added."""
        largest, total = (cute.make_rmem_tensor(cute.make_layout(rows), Float32) for _ in range(2))
        largest.fill(-Float32.inf)
        total.fill(0.0)
        return RowSums(largest, total)

    @cute.jit
    def add(self, r: Constexpr, lse: Float32) -> tuple[Float32, Float32]:
        """Add a result of row r; returns the factors of the row's O so far and of the result, 0 if it saw no key."""
        largest = fmax(self.largest[r], lse)
        shift = Float32(0.0) if largest == -Float32.inf else largest
        kept = exp2((self.largest[r] - shift) * LOG2_E)
        weight = exp2((lse - shift) * LOG2_E)
        self.total[r] = fma(self.total[r], kept, weight)
        self.largest[r] = largest
        return kept, weight


@cute.jit
def added(o: Float32, kept: Float32, value: Float32, weight: Float32) -> Float32:
    """An element of O after a result's ``value`` is added; with a weight of 0, ``value`` may be anything."""
    before = product(o, kept)
    return before if weight == 0.0 else fma(value, weight, before)


@cute.jit
def with_sink(largest: Float32, total: Float32, sink: Float32) -> tuple[Float32, Float32, Float32]:
    """A row's greatest LSE and its sum after an attention sink is added, and the factor of the row's O."""
    greatest = fmax(largest, sink)
    shift = Float32(0.0) if greatest == -Float32.inf else greatest
    factor = exp2((largest - shift) * LOG2_E)
    return greatest, fma(total, factor, exp2((sink - shift) * LOG2_E)), factor


@cute.jit
def normalized(largest: Float32, total: Float32) -> tuple[Float32, Float32]:
    """The last factor of a row's O, and the row's LSE: 0 and -inf if the row saw no key."""
    factor = Float32(0.0) if total == 0.0 else reciprocal(total)
    lse = -Float32.inf if total == 0.0 else largest + log(total)
    return factor, lse


@dataclass(frozen=True)
class Fold:
    """Adds one work tile's splits, for one thread: sums are in registers, O so far in global memory, in L2.

    Attributes:
        scratch: fp32 (CTAs, rows of a work tile, columns); a CTA's elements are in an arbitrary order.
        thread: the thread's index among ``threads``.
    """

    sums: RowSums
    scratch: cute.Tensor
    thread: Int32
    threads: Constexpr

    @cute.jit
    def memory(self, vectors: Constexpr) -> cute.Tensor:
        """The thread's elements of the scratch: (4, vectors), 16 bytes each. The address is recomputed at each use."""
        thread = rematerialize(self.thread)
        first = cutlass.Int64(cute.arch.block_idx()[0]) * self.scratch.stride[0] + thread * 4
        start = self.scratch.iterator + cute.assume(first, divby=4)
        return cute.make_tensor(start, cute.make_layout((4, vectors), stride=(1, 4 * self.threads)))

    @cute.jit
    def add(self, acc: cute.Tensor, lse: cute.Tensor, first: Boolean, store: Constexpr) -> None:
        """Add the result of a split: acc (rows, columns) normalised, lse (rows) natural.

        Args:
            first: True if nothing was added before.
            store: True to store O to memory, False to leave it in acc, for the last split.
        """
        columns: Constexpr = cute.size(acc, mode=[1]) // 4
        at_once: Constexpr = math.gcd(columns, AT_ONCE)
        before = cute.make_rmem_tensor(cute.make_layout((4, at_once)), Float32)
        memory = self.memory(cute.size(acc) // 4)
        for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
            kept, weight = self.sums.add(r, lse[r])
            for start in cutlass.range_constexpr(0, columns, at_once):
                before.fill(0.0)
                if not first:
                    for j in cutlass.range_constexpr(at_once):
                        cute.autovec_copy(memory[None, r * columns + start + j], before[None, j])
                for j in cutlass.range_constexpr(at_once):
                    for e in cutlass.range_constexpr(4):
                        c = 4 * (start + j) + e
                        sum_of_both = added(before[e, j], kept, acc[r, c], weight)
                        if cutlass.const_expr(store):
                            before[e, j] = sum_of_both
                        else:
                            acc[r, c] = sum_of_both
                    if cutlass.const_expr(store):
                        cute.autovec_copy(before[None, j], memory[None, r * columns + start + j])

    @cute.jit
    def finish(self, acc: cute.Tensor, lse: cute.Tensor, sinks: Constexpr = None) -> None:
        """After the last split: replace acc by the output and lse by its LSE; sinks: each row's sink, or None."""
        for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
            largest, total = self.sums.largest[r], self.sums.total[r]
            if cutlass.const_expr(sinks is not None):
                largest, total, factor = with_sink(largest, total, Float32(sinks[r]))
                for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                    acc[r, c] = product(acc[r, c], factor)
            inverse, lse[r] = normalized(largest, total)
            for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                acc[r, c] = product(acc[r, c], inverse)
