"""Level 1: softmax(Q K^T) V, one warp per query.

What a forward computes, in the words of its definition. For each query of each head

    s[j] = scale * q . k[j]         m = max s         p[j] = exp(s[j] - m)
    o    = sum p[j] v[j] / sum p    LSE = m + log sum p

A warp takes one query. Each lane holds 4 of the 128 dims (2 of 64) of q and o in registers, so that a row of K is one
coalesced load, and a dot product is 4 multiply-adds and a sum over the lanes by shuffles. The maximum has to be known
before the first exponential, so the keys are visited twice.

A causal mask is the end of the loop: query i sees the keys up to i + seqlen_k - seqlen_q, the last query all of them.
A row that sees no key has o = 0 and LSE = -inf, here and in all levels.

What to look at: the kernel reads K twice and V once for every query, 768 bytes for each score at 128 dims, and no
tensor core runs. It needs few registers: between two keys it keeps only its dims of q and o, a maximum and a sum.

Any lengths: a warp has one query, and visits keys one at a time, so nothing lies beyond the end.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cute_attn.compiler.registry import register
from cute_attn.device.math import LN_2, LOG2_E, exp2, fmax, log2
from tour.common import Level, TourTile


@dataclass(frozen=True)
class Scalar(Level):
    """One warp per query."""

    TILE = TourTile(tile_m=1, tile_n=16, num_warps=1)

    def launch(self, mQ, mK, mV, mO, mLSE, scale: Float32, multiprocessors, stream):
        grid = mQ.shape[0] * mQ.shape[1] * mQ.shape[2]
        # exp(x) is 2^(x log2 e): the hardware has exp2, and the factor joins the scale.
        self.kernel(mQ, mK, mV, mO, mLSE, scale * LOG2_E).launch(
            grid=[grid, 1, 1], block=[32, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, mLSE, scale: Float32
    ):
        lane, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        seqlen_q, seqlen_k, nheads = mQ.shape[1], mK.shape[1], mQ.shape[2]
        query, head, batch = index % seqlen_q, index // seqlen_q % nheads, index // seqlen_q // nheads
        head_kv = head // (nheads // mK.shape[2])
        keys = Int32(seqlen_k)
        # const_expr: decided when the kernel is built. A plain `if` is a branch on the GPU.
        if cutlass.const_expr(self.traits.causal):
            keys = cutlass.min(keys, cutlass.max(query + seqlen_k - seqlen_q + 1, 0))

        q = self.dims(mQ[batch, query, head, None], lane).load().to(Float32)
        # The first visit: the maximum. range is a loop on the GPU; range_constexpr, in later levels, is unrolled.
        row_max = -Float32.inf
        for j in cutlass.range(keys):
            k = self.dims(mK[batch, j, head_kv, None], lane)
            row_max = fmax(row_max, self.score(q, k) * scale)

        # The second visit: the probabilities, their sum, and o before it is divided by that sum.
        row_sum, acc = Float32(0.0), cute.make_rmem_tensor(self.traits.head_dim // 32, Float32)
        acc.fill(0.0)
        for j in cutlass.range(keys):
            k, v = self.dims(mK[batch, j, head_kv, None], lane), self.dims(mV[batch, j, head_kv, None], lane)
            p = exp2(self.score(q, k) * scale - row_max)
            row_sum += p
            acc.store(acc.load() + p * v.load().to(Float32))

        inverse, lse = Float32(0.0), -Float32.inf
        if row_sum > 0.0:
            inverse, lse = 1.0 / row_sum, (row_max + log2(row_sum)) * LN_2
        self.dims(mO[batch, query, head, None], lane).store((acc.load() * inverse).to(mO.element_type))
        if lane == 0:
            mLSE[batch, head, query] = lse

    def dims(self, row: cute.Tensor, lane: Int32) -> cute.Tensor:
        """The lane's dims of a row."""
        return cute.local_tile(row, (self.traits.head_dim // 32,), (lane,))

    def score(self, q: Any, k: cute.Tensor) -> Float32:
        """q . k: the lane's partial sum, and the sum over all lanes."""
        part = (q * k.load().to(Float32)).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return cute.arch.warp_reduction_sum(part)


register(Scalar, variant="tour1", arch="sm80")
