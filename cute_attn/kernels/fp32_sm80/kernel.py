"""The Ampere fp32 forward with fp16 terms, and the fallback kernel for inputs that terms cannot represent.

The launches of :mod:`cute_attn.kernels.split_fp32` write the terms of K and V, and the scales of Q, K and V. Then both
kernels of this file are launched, and each reads the scales first. If no scale is 0 and no score can be huge, the
speculative kernel, :class:`ForwardTerms`, computes: products of terms then have fp32's precision. Otherwise the
fallback computes with three tf32 products from Q, K and V themselves. The CTAs of the kernel that does not compute
return at once. Results are thus right for any input, and the host reads no number back.

The main loop is :mod:`cute_attn.kernels.forward_sm80.main_loop`, on rows of twice as many 16-bit elements. Only one CTA
reads a row of Q, so it splits the row on the way to shared memory instead of reading terms from global memory. Scores
and the output have no scale, so epilogues are unchanged.

Under a causal mask the longest work tiles are first, see :meth:`cute_attn.work.query_tiles.QueryGrid.longest_first`.

With precision tf32 there is one term, with tf32's digits, and each product is a single fp16 product, as in the kernel
for 16-bit tensors. P is multiplied by 2^14 and keeps its digits down to 2^-28. The fallback computes one tf32 product.

Limits: fp32; other limits are those of the forward.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Float16, Float32, Int32, cute

from cute_attn.device.math import LOG2_E
from cute_attn.device.score_tile import ScoreMap
from cute_attn.device.seqlen import sequence
from cute_attn.device.terms import P_EXPONENT, inverse_of_power_of_two, split_tile
from cute_attn.kernels import fakes
from cute_attn.kernels.forward_sm80.kernel import ForwardSm80
from cute_attn.kernels.forward_sm80.main_loop import MainLoop
from cute_attn.kernels.forward_sm80.products import OneTermProducts, Products, StoredTermsProducts
from cute_attn.kernels.forward_sm80.storage import ForwardParams
from cute_attn.kernels.fp32_sm80.heuristics import default_tile, terms_pay
from cute_attn.outputs.fragment_rows import store_rows
from cute_attn.tiles import ForwardTermsTile, padded
from cute_attn.traits import Traits
from cute_attn.work.query_tiles import ForwardSchedule, QueryTile, WorkClaims

LARGEST_TERM = 2.0**15
"""Upper bound of all terms."""
LARGEST_SCORE = 2.0**30
"""Largest score in log2 for which terms are used. Above 2**31, a fused multiply-add of a score and its row's maximum
may have an error beyond the range of fp32's exponents."""


KeyRows = Annotated[
    cute.Tensor,
    lambda kernel: fakes.rows(Float16 if kernel.computes_terms else Float32, fakes.rank(kernel.traits)),
]
"""mK and mV: the forward's tensors, or in :class:`ForwardTerms` their terms."""


@cute.jit
def terms_serve(scales: cute.Tensor, scale_log2: Float32, head_dim: Constexpr) -> Boolean:
    """True if terms of Q, K and V have the required precision and scores stay below LARGEST_SCORE."""
    largest = scales[0] * scales[1] * (scale_log2 * Float32(head_dim * LARGEST_TERM**2))
    return (scales[0] != 0.0) & (scales[1] != 0.0) & (scales[2] != 0.0) & (largest <= Float32(LARGEST_SCORE))


@dataclass(frozen=True)
class FollowsSplit(ForwardSm80):
    """Base of both kernels: their arguments, and the choice, by the scales, of the kernel that computes."""

    computes_terms: ClassVar[bool] = False
    launch: ClassVar[Any]
    """``launch(params, tiles, schedule, stream)`` launches the kernel for ``tiles`` work tiles."""

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        if traits.dtype != "fp32":
            return f"it computes fp32, not {traits.dtype}"
        return super().supports(traits)

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: KeyRows,
        mV: KeyRows,
        mO: fakes.HeadRows,
        mLSE: fakes.RowNumbers,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.ForwardCounters,
        score_args: fakes.ScoreArgs,
        mScales: fakes.Scales,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel. mScales: (3,), the scales of Q, K and V, which the split wrote."""
        params = self.params((mQ, mK, mV, mO, mLSE), seqlens, softmax_scale, schedule, score_args, mScales)
        self.launch(params, params.grid.tiles(seqlens.batch(mQ)), schedule, stream)

    def computes(self, params: ForwardParams) -> Boolean:
        """True if this kernel computes the result, False if the other kernel does."""
        scale_log2 = params.softmax_scale * LOG2_E
        return terms_serve(params.scales, scale_log2, self.traits.head_dim) == self.computes_terms


@dataclass(frozen=True)
class ForwardFallback(FollowsSplit):
    """The forward for calls in which terms of Q, K or V lack the required precision.

    CTAs claim their work tiles, so that only few CTAs have to start if there is nothing to compute: with a tile of
    200 KB a multiprocessor runs one CTA at a time.
    """

    WARPS: ClassVar[int] = 16
    """Approximate number of warps per multiprocessor; no default tile leaves room for more."""

    def launch(
        self, params: ForwardParams, tiles: Int32, schedule: ForwardSchedule, stream: cuda.CUstream
    ) -> None:
        threads = self.tile.num_threads
        ctas = cutlass.min(schedule.multiprocessors * max(32 * self.WARPS // threads, 1), tiles)
        self.kernel(params, tiles, schedule.counters).launch(
            grid=[ctas, 1, 1], block=[threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, params: ForwardParams, tiles: Int32, counters: cute.Tensor) -> None:
        if self.computes(params):
            claims = WorkClaims(counters)
            tile = cute.arch.block_idx()[0]
            while tile < tiles:
                self.run_claimed(params, tile)
                tile = self.next_tile(claims)
            if cute.arch.warp_idx() == 0:
                claims.leave()

    def run_claimed(self, params: ForwardParams, tile: Int32) -> None:
        self.run(dataclasses.replace(params, grid=dataclasses.replace(params.grid, claimed=tile)))

    @cute.jit
    def next_tile(self, claims: WorkClaims) -> Int32:
        """Claim a work tile and broadcast it to the CTA through shared memory that is free between work tiles."""
        cute.arch.barrier()
        slot = cute.make_tensor(cute.arch.get_dyn_smem(Int32), cute.make_layout(1))
        if cute.arch.warp_idx() == 0:
            claimed = claims.index(claims.claim())
            if cute.arch.lane_idx() == 0:
                slot[0] = claimed
        cute.arch.barrier()
        tile = slot[0]
        cute.arch.barrier()
        return tile


@dataclass(frozen=True)
class ForwardTerms(FollowsSplit):
    """The forward on terms of Q, K and V, for calls in which terms have the required precision.

    mK and mV: rows of fp16 terms: padded head dim hi terms, then as many lo terms, if any. mQ: fp32, as in the forward;
    each CTA splits its rows.
    """

    computes_terms: ClassVar[bool] = True

    # ---- launch ----

    def launch(
        self, params: ForwardParams, tiles: Int32, schedule: ForwardSchedule, stream: cuda.CUstream
    ) -> None:
        self.kernel(params).launch(grid=[tiles, 1, 1], block=[self.tile.num_threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, params: ForwardParams) -> None:
        if self.computes(params):
            self.run(params)

    # ---- tiles ----

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> ForwardTermsTile:
        return default_tile(traits, target)

    # ---- differences from 16-bit tensors ----

    terms_pay = staticmethod(terms_pay)

    @functools.cached_property
    def products(self) -> Products:
        """The instructions of both products, for one or two terms."""
        if self.two_terms:
            return StoredTermsProducts(self.traits, self.tile)
        return OneTermProducts(self.traits, self.tile, self.folds_factor)

    @property
    def single(self) -> bool:
        """False: products multiply fp16 terms."""
        return False

    @property
    def two_terms(self) -> bool:
        """True if operands have two terms; each product is then the sum of three products of hi and lo terms."""
        return self.traits.fp32_terms == 2

    @property
    def p_exponent(self) -> int:
        """The exponent for one term. With two terms it is 0, since the split of P multiplies P."""
        return 0 if self.two_terms else P_EXPONENT

    @property
    def folds_factor(self) -> bool:
        """True if the softmax applies the factor that undoes the scales of Q and K: nothing else reads scores."""
        return not (self.two_terms or self.epilogues.modifiers or self.traits.max_scores)

    @property
    def scores_may_be_large(self) -> bool:
        """True if an epilogue may make scores huge. If Q K^T may be huge, the fallback kernel computes."""
        return self.epilogues.may_be_large

    @property
    def row_widths(self) -> tuple[int, int]:
        """Elements per row of Q and K, and of V, with all terms."""
        traits = self.traits
        return traits.fp32_terms * padded(traits.head_dim), traits.fp32_terms * padded(traits.head_dim_v)

    @cute.jit
    def load_queries(self, params: ForwardParams, q: cute.Tensor, tile: QueryTile, loop: MainLoop) -> None:
        """Split Q into terms in shared memory while the first key blocks load; the first step's barrier follows."""
        loop.start_loads()
        traits, factor = self.traits, inverse_of_power_of_two(loop.operands.scales[0])
        target, threads = loop.shared.q[None, None, 0], self.tile.num_threads
        rows = (loop.row0, tile.info.seqlen_q, target, traits.head_dim)
        split_tile(q, *rows, factor, loop.thread, threads, traits.fp32_terms)

    def output_scale(self, loop: MainLoop) -> Any:
        """The factor by which O is multiplied; also undoes V's scale and, with two terms, P's."""
        scale = loop.operands.scales[2]
        if self.two_terms:
            scale = scale * Float32(2.0**-P_EXPONENT)
        return self.epilogues.rescale(loop.state) * scale

    @cute.jit
    def store_output(self, mO: cute.Tensor, loop: MainLoop, tile: QueryTile, thread: Int32) -> None:
        """Store O in fp32 from registers."""
        o = sequence(mO, tile.batch, tile.head, tile.info.offset_q, self.traits.varlen)
        columns: Constexpr = padded(self.traits.head_dim_v)
        own = ScoreMap.make(loop.operands.tiled_mma, self.tile.tile_m, columns, thread)
        store_rows(loop.acc_o_rows, own, o, tile.row0, tile.info.seqlen_q, self.traits.head_dim_v)
