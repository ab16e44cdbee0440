"""The Hopper forward for head dims above 256: two consumer warpgroups divide the columns of O.

The kernel of :mod:`cute_attn.kernels.forward_sm90.kernel` with another main loop. A warpgroup holds 64 rows of at most
256 columns of O, so a work tile has 64 rows, and each of two warpgroups half of their columns. One of them computes the
scores as well; P goes through shared memory:

    scores warpgroup                                     values warpgroup
    S[0] = Q K[0]; softmax; P[0] to shared memory
    for j = 1, 2, ...                                    for j = 0, 1, ...
        issue S[j] = Q K[j]                                  wait for P[j] and the factors of O's rows
        wait for O; rescale it                               rescale O
        issue O += P[j - 1] V[j - 1], first half             O += P[j] V[j], second half
        wait for S[j]; epilogues, online softmax
        P[j] and the factors of O's rows to shared memory
    O += P V of the last block                           wait for the factors that normalize O

The softmax overlaps P V of both warpgroups. FlashAttention-3 also divides O's columns for a large head dim of V (Shah
et al. 2024, https://arxiv.org/abs/2407.08608).

Limits: those of the Hopper forward, with head dims up to 576 for q and k and 512 for v; TMA does not load a bias.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

import layouts
from cute_attn.device.gemm import operand_layout
from cute_attn.device.pipeline import WARPGROUP
from cute_attn.kernels.base import StepContent, beyond, wgmma_count
from cute_attn.kernels.copies import Copies
from cute_attn.kernels.forward_sm90 import ForwardSm90
from cute_attn.kernels.forward_sm90.consumer import Consumer
from cute_attn.kernels.forward_sm90.storage import ForwardParams
from cute_attn.kernels.head_dim_512_sm90.heuristics import TABLE, keys, tile_for_lengths
from cute_attn.kernels.head_dim_512_sm90.roles import (
    SCORES,
    VALUES,
    LargeStorage,
    ScoreLoop,
    ScoreResults,
    ValueConsumer,
    consumer_thread,
    make_storage,
)
from cute_attn.outputs.staged_output import ForwardOutputs
from cute_attn.rows.tma import TmaTiles
from cute_attn.tiles import ForwardLargeTile, Sizes, padded
from cute_attn.traits import MAX_HEAD_DIM, MAX_HEAD_DIM_V, Traits


@dataclass(frozen=True)
class ForwardLargeSm90(ForwardSm90):
    """Forward kernel for (traits, tile) with a head dim above 256; ``__call__`` launches it."""

    tile: ForwardLargeTile  # type: ignore[assignment]

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        if traits.head_dim_v > MAX_HEAD_DIM_V:
            return f"head_dim_v is {traits.head_dim_v}; accepted: up to {MAX_HEAD_DIM_V}"
        return beyond(traits, most=MAX_HEAD_DIM)

    table, keys = TABLE, staticmethod(keys)

    def tile_for(self, target: str, sizes: Sizes) -> ForwardLargeTile:  # type: ignore[override]
        return tile_for_lengths(self.traits, self.tile, sizes.seqlen_q, sizes.group)

    @property
    def can_visit_lists(self) -> bool:
        """Always False: the kernel visits all blocks."""
        return False

    def without_tma_bias(self) -> "ForwardLargeSm90":
        """This kernel itself: its threads always read a bias from global memory."""
        return self

    def step_content(self) -> StepContent:
        """Content of an unmasked step of the warpgroup with the scores, and the P V of the other warpgroups."""
        tile, d, each = self.tile, padded(self.traits.head_dim), self.columns_at_once
        qk = wgmma_count(tile.tile_m, tile.tile_n, d, 1)
        pv = self.output_columns // each * wgmma_count(tile.tile_m, each, tile.tile_n, 1)
        own = 0 if tile.score_warps else pv
        elements = tile.tile_n // 2
        columns = d if self.traits.latent else d + tile.columns_of_v(self.traits)
        return StepContent(
            qk + own, elements * (1 + self.traits.softcap), elements, 4,
            async_bytes=2 * tile.tile_n * columns, other_wgmma=(tile.warpgroups * pv - own, each),
        )  # fmt: skip

    # ---- layouts and the MMAs ----

    def values_layout(self, stages: int | None = None) -> cute.ComposedLayout:
        """Layout of V, (tile_n, columns of v[, stages]): each warpgroup's columns are whole swizzle atoms."""
        tile = self.tile
        return operand_layout(
            tile.tile_n, tile.columns_of_v(self.traits), self.dtype, stages=stages, parts=tile.warpgroups
        )

    def probabilities_layout(self, stages: int | None = None) -> cute.ComposedLayout:
        """Layout of P, (64, tile_n[, stages])."""
        return layouts.wgmma_smem_layout(self.tile.tile_m, self.tile.tile_n, self.dtype, stages=stages)

    def mma_qk(self) -> cute.TiledMma:
        """S = Q K^T by one warpgroup, both from shared memory."""
        return layouts.tiled_mma_sm90(self.dtype, self.tile.tile_m, self.tile.tile_n, warpgroups=1)

    def mma_pv(self) -> cute.TiledMma:
        """O += P V, both from shared memory; warpgroups divide the columns."""
        tile = self.tile
        return layouts.tiled_mma_sm90(
            self.dtype,
            tile.tile_m,
            tile.columns_of_v(self.traits),
            warpgroups=tile.warpgroups,
            warpgroups_n=tile.warpgroups,
            b_major="mn",
        )

    def copies(self) -> Copies:
        """Areas and copies of Q, K, V and P in shared memory; threads move only P and O."""
        traits, tile, stages = self.traits, self.tile, self.tile.num_stages
        found = Copies(self, WARPGROUP * tile.warpgroups)
        for name, rows, count in (("k", tile.tile_n, stages), ("q", tile.tile_m, 1)):
            shape = (rows, padded(traits.head_dim), count)
            found.area(name, shape, "smem_layout", rows, traits.head_dim, count)
        found.area("v", (tile.tile_n, tile.columns_of_v(traits), stages), "values_layout", stages)
        found.area("p", (tile.tile_m, tile.tile_n, tile.p_stages), "probabilities_layout", tile.p_stages)
        found.part("copy-smem-to-gmem", "gmem_store", threads=WARPGROUP)
        found.part("mma-qk", "mma_qk", threads=WARPGROUP).part("mma-pv", "mma_pv")
        return self.move_output(found.store("P", self.mma_qk, lambda: self.probabilities_layout(1)))

    @property
    def divides_columns(self) -> bool:
        """Always True: warpgroups divide the columns of O, not its rows."""
        return True

    @property
    def columns_at_once(self) -> int:
        """Columns of an instruction of P V: all of a warpgroup's."""
        return self.output_columns

    @property
    def output_columns(self) -> int:
        return self.tile.columns_of_v(self.traits) // self.tile.warpgroups

    def values(self, op: Any, mV: cute.Tensor) -> TmaTiles:
        tile = self.tile
        shape = (tile.tile_n, tile.columns_of_v(self.traits))
        return TmaTiles.make(op, mV, self.values_layout(), shape, cute.rank(mV) == 3)

    # ---- device ----

    def storage(self) -> LargeStorage:
        """The CTA's shared storage, with P."""
        return make_storage(self)

    @cute.jit
    def consume(
        self,
        params: ForwardParams,
        storage: LargeStorage,
        outputs: ForwardOutputs,
        warp: Int32,
        thread: Int32,
    ) -> None:
        """Run the role of the warp's consumer warpgroup: scores and the first half of O, or the second half of O."""
        lane = thread % WARPGROUP
        if warp < 8:
            own = consumer_thread(self, storage, SCORES, lane)
            results = ScoreResults(params, outputs)
            Consumer(self, params, storage, own, ScoreLoop, results).run()
        else:
            own = consumer_thread(self, storage, VALUES, lane)
            ValueConsumer(self, params, storage, outputs, own).run()
