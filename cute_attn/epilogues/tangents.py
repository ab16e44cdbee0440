"""Tangents of a score tile and of its rows' statistics, beside the online softmax: the forward-mode derivative.

With a dot for a tangent, P the probabilities of the scores S, and sums over a row's keys::

    lse_dot = sum P S_dot
    out_dot = sum P (S_dot - lse_dot) v + P v_dot
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Float32, cute

from cute_attn.device.math import LOG2_E, add, exp2, fma, log2, quad_reduce, reciprocal
from cute_attn.epilogues.softmax import OnlineSoftmax


@cute.jit
def weigh(p: cute.Tensor, dot: cute.Tensor, softmax_scale: Float32) -> None:
    """Tangents of Q K^T in ``dot`` (rows, cols) become P S_dot, before the epilogues' factors; 0 where P is."""
    for r in cutlass.range_constexpr(cute.size(p, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(p, mode=[1])):
            dot[r, c] = dot[r, c] * softmax_scale * p[r, c]


@dataclass(frozen=True)
class RowTangents:
    """Running statistics of a thread's rows.

    S_dot enters the products as P (S_dot - center), in 16 bits. A row's center is the mean of S_dot over its keys in
    the first block with any. A large part that all keys have in common then costs no digits, and of a row with one key
    nothing remains but P v_dot.

    center: (rows), equal in the four lanes of a row; total: (rows), sum of P (S_dot - center) over the thread's
    elements, under the online softmax's maximum.
    """

    center: cute.Tensor
    total: cute.Tensor

    @staticmethod
    def make(rows: int) -> "RowTangents":
        """Before a row has seen a key."""
        center, total = (cute.make_rmem_tensor(cute.make_layout(rows), Float32) for _ in range(2))
        center.fill(0.0)
        total.fill(0.0)
        return RowTangents(center, total)

    def sums(self, r: Constexpr, p: cute.Tensor, dot: cute.Tensor) -> tuple[Float32, Float32]:
        """The sums of P and of P S_dot over the thread's elements of row r."""
        weight, tangent = Float32(0.0), Float32(0.0)
        for c in range(cute.size(p, mode=[1])):
            weight, tangent = weight + p[r, c], tangent + dot[r, c]
        return weight, tangent

    @cute.jit
    def subtract_center(
        self,
        r: Constexpr,
        p: cute.Tensor,
        dot: cute.Tensor,
        own: tuple[Float32, Float32],
        row: tuple[Float32, Float32],
        factor: Float32,
        unseen: Boolean,
    ) -> None:
        """P S_dot in ``dot`` becomes P (S_dot - center).

        Args:
            own, row: the thread's and the whole row's :meth:`sums`.
            factor: of earlier sums, of the online softmax.
            unseen: the row had seen no key before this block.
        """
        if unseen & (row[0] != 0.0):
            self.center[r] = row[1] / row[0]
        center = self.center[r]
        self.total[r] = self.total[r] * factor + fma(-center, own[0], own[1])
        for c in cutlass.range_constexpr(cute.size(p, mode=[1])):
            dot[r, c] = fma(-center, p[r, c], dot[r, c])

    @cute.jit
    def advance(self, p: cute.Tensor, dot: cute.Tensor, factors: cute.Tensor, unseen: Constexpr) -> None:
        """One key block; unseen: a flag for each row."""
        for r in cutlass.range_constexpr(cute.size(p, mode=[0])):
            own = self.sums(r, p, dot)
            row = tuple(quad_reduce(x, add) for x in own)
            self.subtract_center(r, p, dot, own, row, factors[r], unseen[r])

    def finish(
        self, r: int, softmax: OnlineSoftmax, row_sum: Float32, total: Float32, lse: Float32, has_sinks: bool
    ) -> tuple[Float32, Float32]:
        """(lse_dot of row r, what its tangents still lack): lse_dot and lse_dot - center; 0 if it has seen no key.

        Args:
            row_sum, total: reduced over the lanes of the row.
            lse: of the row, with its sink.
            has_sinks: then the keys have only a part of the row's sum.
        """
        return self._finish(r, softmax, row_sum, total, lse, has_sinks)

    @cute.jit
    def _finish(
        self,
        r: Constexpr,
        softmax: OnlineSoftmax,
        row_sum: Float32,
        total: Float32,
        lse: Float32,
        has_sinks: Constexpr,
    ):
        lse_dot = Float32(0.0)
        if row_sum != 0.0:
            lse_dot = fma(total, reciprocal(row_sum), self.center[r])
            if cutlass.const_expr(has_sinks):
                lse_dot = lse_dot * exp2(softmax.subtracted(r) + log2(row_sum) - lse * LOG2_E)
        return lse_dot, lse_dot - self.center[r]
