"""Online softmax (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; FlashAttention-2, https://arxiv.org/abs/2307.08691)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32

from cute_attn.device.math import LN_2, add, exp2, fmax, log, quad_reduce, reciprocal


@dataclass(frozen=True)
class OnlineSoftmax:
    """A thread's rows: their running maximum (raw scores) and their running sum, which is the thread's own part of it.

    Every block, scores S become P = 2^(scale_log2 (S - max)) and what was accumulated so far is scaled by 2^(scale_log2
    (old max - max)). The sum is reduced over the four lanes of a row once, at the end.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32  # unit * log2(e)
    may_be_empty: Constexpr  # a visited row can have nothing but -inf in it
    threshold: Constexpr = 0  # powers of two by which scores may exceed the maximum in use

    @staticmethod
    def make(
        rows: int,
        scale_log2: Float32,
        may_be_empty: bool,
        stats: cute.Tensor | None = None,
        threshold: int = 0,
    ) -> "OnlineSoftmax":
        """Nothing seen yet. ``stats``: a thread's own (rows, 2) of shared memory to keep the statistics in.

        ``threshold``: with t > 0 the maximum in use stays as long as no score exceeds it by more than t powers of
        two, so that the output is hardly ever rescaled. Probabilities are then up to 2^t, which costs no precision.
        """
        if stats is None:
            stats = cute.make_rmem_tensor(cute.make_layout((rows, 2)), Float32)
        row_max, row_sum = stats[None, 0], stats[None, 1]
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        return OnlineSoftmax(row_max, row_sum, scale_log2, may_be_empty, threshold)

    def load_stats(self) -> "OnlineSoftmax":
        """With the statistics in registers, from wherever they are kept."""
        if self.row_max.memspace == cute.AddressSpace.rmem:
            return self
        row_max, row_sum = cute.make_rmem_tensor_like(self.row_max), cute.make_rmem_tensor_like(self.row_sum)
        cute.autovec_copy(self.row_max, row_max)
        cute.autovec_copy(self.row_sum, row_sum)
        return OnlineSoftmax(row_max, row_sum, self.scale_log2, self.may_be_empty, self.threshold)

    def store_stats(self, loaded: "OnlineSoftmax") -> None:
        """Put the statistics back after a step."""
        if loaded is not self:
            cute.autovec_copy(loaded.row_max, self.row_max)
            cute.autovec_copy(loaded.row_sum, self.row_sum)

    @cute.jit
    def block_max(self, acc: cute.Tensor, r: Constexpr) -> Float32:
        """The maximum of row r so far and of the thread's own elements of this block."""
        cols = cute.size(acc, mode=[1])
        # Four chains, since each step waits for the last.
        largest = [self.row_max[r], acc[r, 0], acc[r, 1], acc[r, 2]]
        for c in cutlass.range_constexpr(3, cols):
            largest[c % 4] = fmax(largest[c % 4], acc[r, c])
        return fmax(fmax(largest[0], largest[1]), fmax(largest[2], largest[3]))

    @cute.jit
    def max_to_use(self, r: Constexpr, largest: Float32) -> Float32:
        """What row r is to be taken relative to, now that ``largest`` is its maximum."""
        new_max = largest
        if cutlass.const_expr(self.threshold > 0):
            excess = (largest - self.row_max[r]) * self.scale_log2
            new_max = self.row_max[r] if excess <= Float32(self.threshold) else largest
        return new_max

    @cute.jit
    def exponentiate(self, acc: cute.Tensor, r: Constexpr, new_max: Float32, masked: Constexpr) -> Float32:
        """Scores of row r become probabilities under new_max; returns the factor for what was accumulated before."""
        finite_max = new_max
        max_scaled = new_max * self.scale_log2
        if cutlass.const_expr(masked or self.may_be_empty):
            # Nothing to see. The scaled maximum says so too of a bias of -3e38, of which scaling makes -inf.
            nothing = max_scaled == -Float32.inf
            finite_max = Float32(0.0) if nothing else finite_max
            max_scaled = Float32(0.0) if nothing else max_scaled
        # The difference first: with one rounding less, an unchanged maximum would give a factor beside 1, each block.
        factor = exp2((self.row_max[r] - finite_max) * self.scale_log2)
        total = self.row_sum[r] * factor
        for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            p = exp2(acc[r, c] * self.scale_log2 - max_scaled)
            acc[r, c] = p
            total = total + p
        self.row_max[r] = new_max
        self.row_sum[r] = total
        return factor

    @cute.jit
    def advance_frozen(self, acc: cute.Tensor) -> None:
        """One block under the maxima in use, whatever its scores are; :meth:`within` says later if that was right."""
        for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
            max_scaled = self.row_max[r] * self.scale_log2
            total = self.row_sum[r]
            for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                p = exp2(acc[r, c] * self.scale_log2 - max_scaled)
                acc[r, c] = p
                total = total + p
            self.row_sum[r] = total

    def within(self, r: Constexpr, limit: Constexpr) -> Boolean:
        """Whether row r's maximum in use was large enough; false as well if there was none (the sum is inf or NaN).

        As long as a sum is within ``limit``, so is each of its terms: nothing has overflowed, and floating point is as
        exact under too small a maximum as under the right one.
        """
        return self.row_sum[r] <= Float32(limit)

    def has_seen(self, r: Constexpr, least: Constexpr) -> Boolean:
        """Whether row r's maximum in use is above 2^least before exponentiation: it is -inf if nothing was seen."""
        return self.row_max[r] * self.scale_log2 > Float32(least)

    @cute.jit
    def advance(self, acc: cute.Tensor, factors: cute.Tensor, masked: Constexpr) -> None:
        """One block: acc (rows, cols) from scores to probabilities; factors (rows) for the output."""
        for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
            largest = quad_reduce(self.block_max(acc, r), fmax)
            factors[r] = self.exponentiate(acc, r, self.max_to_use(r, largest), masked)

    @cute.jit
    def rescale(self, acc_o: cute.Tensor, factors: cute.Tensor) -> None:
        """Bring what was accumulated, acc_o (rows, head_dim_v), under the new maximum."""
        if cutlass.const_expr(self.threshold > 0):
            changed = factors[0] != 1.0
            for r in cutlass.range_constexpr(1, cute.size(acc_o, mode=[0])):
                changed = changed | (factors[r] != 1.0)
            if cute.arch.vote_any_sync(changed):
                self.multiply(acc_o, factors)
        else:
            self.multiply(acc_o, factors)

    @cute.jit
    def multiply(self, acc_o: cute.Tensor, factors: cute.Tensor) -> None:
        """acc_o (rows, head_dim_v) times factors (rows)."""
        for r in cutlass.range_constexpr(cute.size(acc_o, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(acc_o, mode=[1])):
                acc_o[r, c] = acc_o[r, c] * factors[r]

    @cute.jit
    def step(self, acc: cute.Tensor, acc_o: cute.Tensor, masked: Constexpr) -> None:
        """One block, output included."""
        factors = cute.make_rmem_tensor(cute.make_layout(cute.size(acc, mode=[0])), Float32)
        self.advance(acc, factors, masked)
        self.rescale(acc_o, factors)

    @cute.jit
    def finish(self, r: Constexpr, row_sum: Float32, rescale: Float32):
        """(factor for the output row, its log-sum-exp): 0 and -inf for a row that saw nothing."""
        inverse = Float32(0.0)
        lse = -Float32.inf
        if row_sum != 0.0:
            inverse = rescale * reciprocal(row_sum)
            lse = self.row_max[r] * (self.scale_log2 * LN_2) + log(row_sum)
        return inverse, lse

    @cute.jit
    def normalize(self, acc_o: cute.Tensor, lse: cute.Tensor, rescale: Float32) -> None:
        """After the last block: acc_o (rows, head_dim_v) becomes the output, lse (rows) the natural log-sum-exp."""
        for r in cutlass.range_constexpr(cute.size(acc_o, mode=[0])):
            row_sum = quad_reduce(self.row_sum[r], add)
            factor, lse[r] = self.finish(r, row_sum, rescale)
            for c in cutlass.range_constexpr(cute.size(acc_o, mode=[1])):
                acc_o[r, c] = acc_o[r, c] * factor
