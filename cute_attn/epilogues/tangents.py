"""Forward-mode derivative: tangents of a score tile and of its rows' statistics, next to the online softmax.

With ``_dot`` for tangents, P for the probabilities of the scores S, and sums over a row's keys, and over its sink in
lse_dot::

    lse_dot = sum P S_dot
    out_dot = sum P (S_dot - lse_dot) v + P v_dot
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Float32, cute

from cute_attn.device.math import LOG2_E, add, exp2, fma, log2, quad_reduce, reciprocal
from cute_attn.epilogues.softmax import OnlineSoftmax


@dataclass(frozen=True)
class RowTangents:
    """Running statistics of a thread's rows.

    S_dot enters the products as P (S_dot - center), in 16 bits. A row's center is the P-weighted mean of S_dot over its
    keys in the first block that has any. An offset common to all keys then costs no digits, and for a row with one key
    only P v_dot remains.

    center: (rows), equal in the four lanes of a row; total: (rows), sum of P (S_dot - center) over the thread's
    elements, under the online softmax's maximum. scale: factor of S_dot, ``EpilogueChain.tangent_scale``.
    """

    center: cute.Tensor
    total: cute.Tensor
    scale: Float32

    @staticmethod
    def make(rows: int, scale: Float32) -> "RowTangents":
        """Initial statistics, before a row has seen a key."""
        center, total = (cute.make_rmem_tensor(cute.make_layout(rows), Float32) for _ in range(2))
        center.fill(0.0)
        total.fill(0.0)
        return RowTangents(center, total, scale)

    def sums(
        self, r: Constexpr, p: cute.Tensor, dot: cute.Tensor, guarded: Constexpr
    ) -> tuple[Float32, Float32]:
        """The sums of P and of P S_dot over the thread's elements of row r."""
        weight, tangent = Float32(0.0), Float32(0.0)
        for c in range(cute.size(p, mode=[1])):
            weight = weight + p[r, c]
            tangent = tangent + _weighed(p[r, c], dot[r, c] * self.scale, guarded)
        return weight, tangent

    @cute.jit
    def set_center(self, r: Constexpr, row: tuple[Float32, Float32], unseen: Boolean) -> None:
        """Set row r's center in its first block with a key. row: its :meth:`sums`; unseen: no key came before."""
        if unseen & (row[0] != 0.0):
            self.center[r] = row[1] / row[0]

    @cute.jit
    def weigh(
        self, r: Constexpr, p: cute.Tensor, dot: cute.Tensor, factor: Constexpr, guarded: Constexpr
    ) -> None:
        """Convert S_dot in ``dot`` to P (S_dot - center). factor: the online softmax's, for earlier sums; None: 1."""
        # A block's elements are added up first: one sum over many keys would lose digits.
        center, total, own = self.center[r], self.total[r], Float32(0.0)
        if cutlass.const_expr(factor is not None):
            total = total * factor
        for c in cutlass.range_constexpr(cute.size(p, mode=[1])):
            dot[r, c] = _weighed(p[r, c], fma(dot[r, c], self.scale, -center), guarded)
            own = own + dot[r, c]
        self.total[r] = total + own

    @cute.jit
    def advance(
        self, p: cute.Tensor, dot: cute.Tensor, factors: Constexpr, unseen: Constexpr, guarded: Constexpr
    ) -> None:
        """Process one key block; called by whole warps.

        Args:
            p, dot: P and S_dot / scale (rows, cols); dot becomes P (S_dot - center).
            factors: factors of earlier sums; None under stale row maxima.
            unseen: for each row, True if it has seen no key before this block; () if every row has seen one.
            guarded: True if dot may be NaN where P is 0.
        """
        rows: Constexpr = cute.size(p, mode=[0])
        if cutlass.const_expr(len(unseen) > 0):
            self.find_centers(p, dot, unseen, guarded)
        for r in cutlass.range_constexpr(rows):
            factor = None if cutlass.const_expr(factors is None) else factors[r]
            self.weigh(r, p, dot, factor, guarded)

    @cute.jit
    def find_centers(self, p: cute.Tensor, dot: cute.Tensor, unseen: Constexpr, guarded: Constexpr) -> None:
        """Set the centers of rows that see their first key; see :meth:`advance`."""
        any_unseen = unseen[0]
        for r in cutlass.range_constexpr(1, len(unseen)):
            any_unseen = any_unseen | unseen[r]
        if cute.arch.vote_any_sync(any_unseen):
            for r in cutlass.range_constexpr(len(unseen)):
                own = self.sums(r, p, dot, guarded)
                self.set_center(r, tuple(quad_reduce(x, add) for x in own), unseen[r])

    @cute.jit
    def normalize(
        self,
        softmax: OnlineSoftmax,
        out: tuple[cute.Tensor, cute.Tensor],
        lse: tuple[cute.Tensor, cute.Tensor],
        rescale: Float32,
        sinks: Constexpr,
        sink_tangents: Constexpr,
    ) -> None:
        """Compute ``out`` and ``lse`` with their tangents after the last key block, like ``OnlineSoftmax.normalize``.

        Args:
            out: O and the sums of P (S_dot - center) V + P V_dot, (rows, head_dim_v); become out and its tangent.
            lse: LSE and its tangent, (rows), written.
            rescale: dropout's factor of the output.
            sinks, sink_tangents: one attention sink per row and its tangent, or None.
        """
        (o, dot), (natural, natural_dot) = out, lse
        for r in cutlass.range_constexpr(cute.size(o, mode=[0])):
            factor, natural[r] = softmax.finish_row(r, rescale, sinks)
            row_sum, total = (quad_reduce(x[r], add) for x in (softmax.row_sum, self.total))
            natural_dot[r], shift = self.finish(r, softmax, row_sum, total, natural[r], sinks, sink_tangents)
            for c in cutlass.range_constexpr(cute.size(o, mode=[1])):
                found = o[r, c] * factor
                o[r, c] = found
                dot[r, c] = dot[r, c] * factor - shift * found

    @cute.jit
    def finish(
        self,
        r: Constexpr,
        softmax: OnlineSoftmax,
        row_sum: Float32,
        total: Float32,
        lse: Float32,
        sinks: Constexpr,
        sink_tangents: Constexpr,
    ):
        """(lse_dot, lse_dot - center) of row r; of keys, lse_dot is 0 if the row has seen none.

        Args:
            row_sum, total: sums reduced over the lanes of the row.
            lse: the row's LSE, including its sink.
            sinks, sink_tangents: see :meth:`normalize`.
        """
        lse_dot = Float32(0.0)
        if row_sum != 0.0:
            lse_dot = fma(total, reciprocal(row_sum), self.center[r])
            if cutlass.const_expr(sinks is not None):
                lse_dot = lse_dot * exp2(softmax.subtracted(r) + log2(row_sum) - lse * LOG2_E)
        if cutlass.const_expr(sink_tangents is not None):
            p = exp2((sinks[r] - lse) * LOG2_E)
            lse_dot = lse_dot + _weighed(
                Float32(0.0) if sinks[r] == -Float32.inf else p, sink_tangents[r], True
            )
        return lse_dot, lse_dot - self.center[r]


def _weighed(p: Float32, dot: Float32, guarded: bool) -> Float32:
    """p * dot; if ``guarded``, 0 where p is 0, since 0 * NaN is NaN."""
    return cutlass.select_(p == 0.0, Float32(0.0), p * dot) if guarded else p * dot
