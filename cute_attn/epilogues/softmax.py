"""Online softmax (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), as in FlashAttention-2.

FlashAttention-2: https://arxiv.org/abs/2307.08691.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32

from cute_attn.device.math import (
    LARGE,
    LN_2,
    LOG2_E,
    add,
    exp2,
    fabs,
    fma,
    fmax,
    log,
    log2,
    product,
    product_minus,
    quad_reduce,
    reciprocal,
    rounded_to,
)


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running statistics of a thread's rows: row_max (raw scores) and row_sum over the thread's elements.

    At each key block scores S become P = 2^(scale_log2 (S - max)), and the output and the sum so far are scaled by
    2^(scale_log2 (old max - max)). The sum is reduced over the four lanes of a row once, at the end.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32  # score_scale * log2(e)
    may_be_empty: Constexpr  # rows of unmasked blocks may be all -inf
    threshold: Constexpr = 0  # powers of two by which scores may exceed row_max
    may_be_large: Constexpr = False  # scores may be beyond LARGE, down to fp32's smallest number
    p_exponent: Constexpr = 0  # P, row_sum and the output are times 2^p_exponent: digits of small P in fp16
    p_dtype: Constexpr = None  # type that P is rounded to; None if it keeps at least 22 bits
    seen: Any = None  # the thread's greatest score of each row, (rows), if ``row_max`` may be another number

    @staticmethod
    def make(
        rows: int,
        scale_log2: Float32,
        may_be_empty: bool,
        stats: cute.Tensor | None = None,
        threshold: int = 0,
        may_be_large: bool = False,
        p_exponent: int = 0,
        p_dtype: Any = None,
        keeps_greatest: bool = False,
    ) -> "OnlineSoftmax":
        """Initial statistics: row_max -inf, row_sum 0.

        Args:
            stats: the thread's shared memory for the statistics, (rows, 2); None to keep them in registers.
            threshold: t > 0 keeps row_max until a score exceeds it by more than t powers of two, so that the output is
                rarely rescaled. P is then at most 2^t, without loss of precision.
            p_exponent: see the attribute; :meth:`finish` undoes it.
            p_dtype: see the attribute and :meth:`rounding`.
            keeps_greatest: keep each row's greatest score in ``seen``, for an output.
        """
        if stats is None:
            stats = cute.make_rmem_tensor(cute.make_layout((rows, 2)), Float32)
        row_max, row_sum = stats[None, 0], stats[None, 1]
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        seen = None
        if keeps_greatest:
            seen = cute.make_rmem_tensor(cute.make_layout(rows), Float32)
            seen.fill(-Float32.inf)
        options = (may_be_empty, threshold, may_be_large, p_exponent, p_dtype, seen)
        return OnlineSoftmax(row_max, row_sum, scale_log2, *options)

    def load_stats(self) -> "OnlineSoftmax":
        """This softmax with its statistics in registers: a copy if they are in shared memory."""
        if self.row_max.memspace == cute.AddressSpace.rmem:
            return self
        row_max, row_sum = cute.make_rmem_tensor_like(self.row_max), cute.make_rmem_tensor_like(self.row_sum)
        cute.autovec_copy(self.row_max, row_max)
        cute.autovec_copy(self.row_sum, row_sum)
        return replace(self, row_max=row_max, row_sum=row_sum)

    def store_stats(self, loaded: "OnlineSoftmax") -> None:
        """Store the statistics of ``loaded``, from :meth:`load_stats`, back to shared memory if they are kept there."""
        if loaded is not self:
            cute.autovec_copy(loaded.row_max, self.row_max)
            cute.autovec_copy(loaded.row_sum, self.row_sum)

    @cute.jit
    def block_max(self, acc: cute.Tensor, r: Constexpr) -> Float32:
        """max(row_max[r], the thread's elements of row r)."""
        cols = cute.size(acc, mode=[1])
        # Four independent chains hide the latency.
        largest = [self.row_max[r], acc[r, 0], acc[r, 1], acc[r, 2]]
        for c in cutlass.range_constexpr(3, cols):
            largest[c % 4] = fmax(largest[c % 4], acc[r, c])
        found = fmax(fmax(largest[0], largest[1]), fmax(largest[2], largest[3]))
        if cutlass.const_expr(self.seen is not None):
            self.seen[r] = fmax(self.seen[r], found)
        return found

    def exceeds(self, r: Constexpr, largest: Float32) -> Boolean:
        """True if ``largest`` exceeds row_max[r] by more than ``threshold`` allows."""
        return (largest - self.row_max[r]) * self.scale_log2 > Float32(self.threshold)

    @cute.jit
    def max_to_use(self, r: Constexpr, largest: Float32) -> Float32:
        """The new row_max of row r: ``largest``, or the old row_max if ``threshold`` allows it."""
        new_max = largest
        if cutlass.const_expr(self.threshold > 0):
            new_max = largest if self.exceeds(r, largest) else self.row_max[r]
        return new_max

    @cute.jit
    def finite_max(self, r: Constexpr, masked: Constexpr) -> tuple[Float32, Float32]:
        """(row_max[r], the same times scale_log2), or zeros for a row that has seen no key."""
        largest = self.row_max[r]
        scaled = largest * self.scale_log2
        if cutlass.const_expr(masked or self.may_be_empty):
            # Scaling makes a maximum of -3e38 -inf as well; its row is not masked, but large.
            found = largest if cutlass.const_expr(self.may_be_large) else scaled
            fully_masked = found == -Float32.inf
            largest = Float32(0.0) if fully_masked else largest
            scaled = Float32(0.0) if fully_masked else scaled
        return largest, scaled

    @cute.jit
    def replace_max(self, r: Constexpr, new_max: Float32, masked: Constexpr) -> Float32:
        """Set row_max[r]; rescale row_sum[r] by the factor that is returned, which the output so far needs as well."""
        old = self.row_max[r]
        self.row_max[r] = new_max
        largest, _ = self.finite_max(r, masked)
        # The difference first: with a fused multiply-add the factor of an unchanged maximum would not be exactly 1.
        factor = exp2((old - largest) * self.scale_log2)
        self.row_sum[r] = self.row_sum[r] * factor
        return factor

    @cute.jit
    def exponentiate(self, acc: cute.Tensor, r: Constexpr, masked: Constexpr) -> None:
        """Convert scores of row r to P under row_max[r], and add them to row_sum[r]."""
        largest, max_scaled = self.finite_max(r, masked)
        if cutlass.const_expr(self.may_be_large):
            if fabs(max_scaled) > Float32(LARGE):  # as :meth:`is_large`
                for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                    acc[r, c] = acc[r, c] - largest
                max_scaled = Float32(0.0)
        if cutlass.const_expr(self.p_exponent):
            max_scaled = max_scaled - Float32(self.p_exponent)
        total = self.row_sum[r]
        for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            p = exp2(product_minus(acc[r, c], self.scale_log2, max_scaled))
            acc[r, c] = p
            total = total + p
        self.row_sum[r] = total

    @cute.jit
    def advance_frozen(self, acc: cute.Tensor) -> None:
        """Process one key block under stale row maxima (speculation); :meth:`within` checks the result later."""
        for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
            max_scaled = self.row_max[r] * self.scale_log2
            total = self.row_sum[r]
            chains = [] if cutlass.const_expr(self.seen is None) else [self.seen[r]] * 4
            for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                if cutlass.const_expr(self.seen is not None):
                    # One score at a time: nothing waits for the greatest one, and exponentials hide it.
                    chains[c % 4] = fmax(chains[c % 4], acc[r, c])
                p = exp2(product_minus(acc[r, c], self.scale_log2, max_scaled))
                acc[r, c] = p
                total = total + p
            self.row_sum[r] = total
            if cutlass.const_expr(self.seen is not None):
                self.seen[r] = fmax(fmax(chains[0], chains[1]), fmax(chains[2], chains[3]))

    def within(self, r: Constexpr, limit: Constexpr) -> Boolean:
        """True if row r's stale maximum was large enough; False if it was -inf (the sum is inf or NaN).

        If the sum is within ``limit``, so is each term: nothing has overflowed, and relative precision does not depend
        on the maximum.
        """
        return self.row_sum[r] <= Float32(limit)

    def has_seen(self, r: Constexpr, least: Constexpr) -> Boolean:
        """True if row r has seen a key: row_max * scale_log2 > ``least``; row_max is -inf if all keys were masked.

        A large maximum does not count, since :meth:`advance_frozen` cannot use it.
        """
        max_scaled = self.row_max[r] * self.scale_log2
        seen = max_scaled > Float32(least)
        return seen & (max_scaled < Float32(LARGE)) if self.may_be_large else seen

    @cute.jit
    def advance(self, acc: cute.Tensor, factors: cute.Tensor, masked: Constexpr) -> None:
        """Process one key block: convert acc (rows, cols) from scores to P; set the output's rescale factors (rows)."""
        rows: Constexpr = cute.size(acc, mode=[0])
        if cutlass.const_expr(self.threshold > 0):
            # A vote takes the place of the rows' reductions until a lane's score exceeds its row's maximum.
            largest, exceeded = cute.make_rmem_tensor(cute.make_layout(rows), Float32), Boolean(False)
            for r in cutlass.range_constexpr(rows):
                largest[r], factors[r] = self.block_max(acc, r), Float32(1.0)
                exceeded = exceeded | self.exceeds(r, largest[r])
            if cute.arch.vote_any_sync(exceeded):
                for r in cutlass.range_constexpr(rows):
                    new_max = self.max_to_use(r, quad_reduce(largest[r], fmax))
                    factors[r] = self.replace_max(r, new_max, masked)
        else:
            for r in cutlass.range_constexpr(rows):
                factors[r] = self.replace_max(r, quad_reduce(self.block_max(acc, r), fmax), masked)
        for r in cutlass.range_constexpr(rows):
            self.exponentiate(acc, r, masked)

    @cute.jit
    def rescale(self, acc_o: cute.Tensor, factors: cute.Tensor) -> None:
        """Rescale the output so far, acc_o (rows, head_dim_v), to the new maximum."""
        rescale_rows(acc_o, factors, self.threshold > 0)

    @cute.jit
    def step(self, acc: cute.Tensor, acc_o: cute.Tensor, masked: Constexpr) -> None:
        """Process one key block: :meth:`advance`, then :meth:`rescale`."""
        factors = cute.make_rmem_tensor(cute.make_layout(cute.size(acc, mode=[0])), Float32)
        self.advance(acc, factors, masked)
        self.rescale(acc_o, factors)

    @cute.jit
    def merge(self, row_max: cute.Tensor, row_sum: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """Merge the statistics of other keys, whose sums are not yet reduced over the lanes of a row either.

        Returns factors (rows) for the output so far and for the other keys' output; the scaled sum is the new output.
        """
        rows: Constexpr = cute.size(row_max)
        own, other = (cute.make_rmem_tensor(cute.make_layout(rows), Float32) for _ in range(2))
        for r in cutlass.range_constexpr(rows):
            new_max = fmax(self.row_max[r], row_max[r])
            finite_max = Float32(0.0) if new_max == -Float32.inf else new_max
            own[r] = exp2((self.row_max[r] - finite_max) * self.scale_log2)
            other[r] = exp2((row_max[r] - finite_max) * self.scale_log2)
            self.row_sum[r] = self.row_sum[r] * own[r] + row_sum[r] * other[r]
            self.row_max[r] = new_max
        return own, other

    @cute.jit
    def finish(self, r: Constexpr, row_sum: Float32, rescale: Float32):
        """(factor of output row r, LSE in natural log): 0 and -inf for a fully masked row."""
        inverse = Float32(0.0)
        lse = -Float32.inf
        if row_sum != 0.0:
            inverse = rescale * reciprocal(row_sum + self.rounding(r))
            lse = self.natural_lse(r, row_sum)
        return inverse, lse

    @cute.jit
    def natural_lse(self, r: Constexpr, row_sum: Float32) -> Float32:
        """The natural LSE of row r, which must have seen a key.

        It uses the number that was subtracted from the row's scores: max * scale_log2, rounded.
        """
        # Where P keeps fp32's digits, the error of an approximate logarithm would be a backward's largest one.
        lse = (self.subtracted(r) + log2(row_sum, approximate=self.p_dtype is not None)) * LN_2
        if cutlass.const_expr(self.may_be_large):
            if self.is_large(r):  # exponentials are of differences
                lse = self.row_max[r] * (self.scale_log2 * LN_2) + self._log(row_sum)
        return lse

    @cute.jit
    def rounding(self, r: Constexpr) -> Float32:
        """Rounding error of the largest score's P in the product with V, for a row that has seen a key.

        That P is 2^x, where x is the error of the rounded max * scale_log2; it is 1 only while scores are small. The
        row's sum contains P unrounded. Without this correction the output of a row that sees one key would deviate from
        that key's value, and the gradient of its score, from dP - D, would not be 0, since dP and D err differently.
        """
        gained = Float32(0.0)
        if cutlass.const_expr(self.p_dtype is not None):
            p = exp2(fma(self.row_max[r], self.scale_log2, -self.subtracted(r)))
            gained = rounded_to(p, self.p_dtype) - p
            if cutlass.const_expr(self.may_be_large):
                gained = Float32(0.0) if self.is_large(r) else gained
        return gained

    def subtracted(self, r: Constexpr) -> Float32:
        """The number that :meth:`exponentiate` subtracts from the scaled scores of row r, unless :meth:`is_large`."""
        max_scaled = product(self.row_max[r], self.scale_log2)
        return max_scaled - Float32(self.p_exponent) if self.p_exponent else max_scaled

    def is_large(self, r: Constexpr) -> Boolean:
        """True if row r's scores are large; the maximum is then subtracted before they are scaled."""
        return fabs(self.row_max[r] * self.scale_log2) > Float32(LARGE)

    def _log(self, total: Float32) -> Float32:
        """The natural logarithm of a sum of P, without the sum's factor 2^p_exponent."""
        return log(total * Float32(2.0**-self.p_exponent) if self.p_exponent else total)

    @cute.jit
    def finish_with_sink(self, r: Constexpr, row_sum: Float32, rescale: Float32, sink: Float32):
        """Like :meth:`finish`, with exp(sink) in the sum: 0 and ``sink`` for a fully masked row."""
        inverse = Float32(0.0)
        lse = -Float32.inf
        max_log2, sink_log2 = product(self.row_max[r], self.scale_log2), sink * LOG2_E
        largest = fmax(max_log2, sink_log2)
        if largest != -Float32.inf:
            factor = exp2(max_log2 - largest)
            sink_log2 = sink_log2 - largest
            if cutlass.const_expr(self.p_exponent):
                sink_log2 = sink_log2 + Float32(self.p_exponent)
            total = row_sum * factor + exp2(sink_log2)
            gained = Float32(0.0)
            if row_sum != 0.0:
                gained = self.rounding(r)
            inverse = rescale * factor * reciprocal(total + gained * factor)
            lse = largest * LN_2 + self._log(total)
        return inverse, lse

    def finish_row(self, r: int, rescale: Float32, sinks: tuple[Float32, ...] | None):
        """:meth:`finish` or :meth:`finish_with_sink`, with the sum reduced over the lanes of row r."""
        row_sum = quad_reduce(self.row_sum[r], add)
        if sinks is None:
            return self.finish(r, row_sum, rescale)
        return self.finish_with_sink(r, row_sum, rescale, sinks[r])

    @cute.jit
    def normalize(
        self, acc_o: cute.Tensor, lse: cute.Tensor, rescale: Float32, sinks: Constexpr = None
    ) -> None:
        """Convert acc_o (rows, head_dim_v) to the output after the last key block; set lse (rows) to the natural LSE.

        sinks: one attention sink per row, or None.
        """
        for r in cutlass.range_constexpr(cute.size(acc_o, mode=[0])):
            factor, lse[r] = self.finish_row(r, rescale, sinks)
            for c in cutlass.range_constexpr(cute.size(acc_o, mode=[1])):
                acc_o[r, c] = acc_o[r, c] * factor


@cute.jit
def rescale_rows(acc_o: cute.Tensor, factors: cute.Tensor, rarely: Constexpr) -> None:
    """acc_o (rows, head_dim_v) *= factors (rows). rarely: most factors are 1; a warp skips the product if all are."""
    if cutlass.const_expr(rarely):
        changed = factors[0] != 1.0
        for r in cutlass.range_constexpr(1, cute.size(acc_o, mode=[0])):
            changed = changed | (factors[r] != 1.0)
        if cute.arch.vote_any_sync(changed):
            multiply_rows(acc_o, factors)
    else:
        multiply_rows(acc_o, factors)


@cute.jit
def multiply_rows(acc_o: cute.Tensor, factors: cute.Tensor) -> None:
    """acc_o (rows, head_dim_v) *= factors (rows)."""
    for r in cutlass.range_constexpr(cute.size(acc_o, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(acc_o, mode=[1])):
            acc_o[r, c] = acc_o[r, c] * factors[r]
