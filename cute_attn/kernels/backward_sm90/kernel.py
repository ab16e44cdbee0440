"""The Hopper backward: dK, dV and dQ with TMA, wgmma and specialised warpgroups.

    S = epilogues(softmax_scale * Q K^T)       (seqlen_q, seqlen_k), one tile at a time, in registers
    P = exp(S - LSE)                           as in the forward
    dP = keep * (dO V^T)                       keep: which elements dropout kept
    dS = P * (dP - D),  D = rowsum(dO * O)     then the epilogues' derivatives, last first
    dV = rp * (keep * P)^T dO                  rp = 1 / (1 - dropout_p)
    dK = rp * softmax_scale * dS^T Q
    dQ = rp * softmax_scale * dS K

The kernel is persistent: each CTA claims key blocks until none is left. For a key block it visits all query blocks
that see it, of every query head of the group, and accumulates dK and dV in registers. dQ is accumulated in fp32 in
global memory by atomic additions of all CTAs; another kernel converts it.

The producer warp claims the next key block (an atomic counter) and broadcasts it. It loads K and V once per key block,
and through pipelines Q with LSE and a 16-bit bias, and dO with D. The first Q and dO of a key block are loaded during
the last step of the previous key block. K is loaded once no product reads the previous K; so is V, unless dV is stored
from V's memory. The two consumer warpgroups compute S and dP transposed, each for 64 keys, so that the accumulators of
P and dS are the register operands of dV and dK (all as (keys, queries) here):

    issue S = K Q^T, dP = V dO^T
    wait for S; epilogues, P
    wait for dP; dS = P (dP - D); P and dS to 16 bits
    wait until all warpgroups' dS of the last step is in shared memory; store this step's next to it
    issue dQ = dS K of the last step, each warpgroup some of its columns or rows
    issue dV += P dO
    wait for dQ, arrive at the barrier of this step's dS, add dQ to global memory
    issue dK += dS Q
    wait for dV and dK

dQ is computed a step late, so warpgroups need not be in the same step: products of one overlap exponentials of the
other. P stays in fp32 until dS has been computed from it.

Shared-memory accesses wait in one in-order queue with wgmma. So a step reads LSE before it issues S, if registers are
left for that, and stores dS before it issues dQ and dV. Subtracting D costs nothing, since dP's accumulator is
initialized with -D (not with dropout, which drops dP but not D).

With ``mask_warps``, warps of the producer's warpgroup generate flash's dropout mask ahead of the steps: one bit per
element in shared memory, in the order of the consumers' registers.

With ``dq_bulk`` the consumers store dQ to shared memory, and a warp of the producer's warpgroup adds it to global
memory by one bulk reduction per step. Otherwise the consumers add dQ from registers. With ``dq_in_order``, key blocks
add to a query block's dQ from the last key block to the first, so that gradients repeat bit for bit; a warp waits for
each turn. With ``dq_direct`` a CTA computes all of a query block's dQ and stores it in 16 bits, without accumulators
in global memory and the other kernel: sequences have one key block, whose query blocks may be divided among CTAs, or a
CTA computes all key blocks of a short sequence and sums dQ in shared memory (``dq_rows``); each thread reads there what
it wrote. With ``bias_stages``, another warp stores the bias gradient if it equals dS.

Above head dim 128 dK and dV of 64 keys exceed a warpgroup's registers. P goes through shared memory too
(``p_in_smem``): the warpgroups divide the keys of S, and the columns of dV, dK and dQ, which is not a step late.

Above 256 two CTAs divide the head dims: :class:`cute_attn.kernels.backward_sm90.steps.ScoresAhead`.

Limits: fp16 and bf16; head dims up to 576, multiples of 8, padded to multiples of 32 in shared memory; if one is
above 256, both have to be multiples of 64; rows 16-byte aligned with a contiguous last dimension.
"""

import functools
from dataclasses import dataclass, replace
from typing import Annotated, Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

import layouts
from cute_attn.device.gemm import operand_layout
from cute_attn.device.pipeline import WARPGROUP
from cute_attn.device.seqlen import padded_row0, sequence, workspace_rows
from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.kernels import fakes
from cute_attn.kernels.backward_sm90.consumer import Consumer
from cute_attn.kernels.backward_sm90.heuristics import EMPTY, FEW_ROWS, TABLE, keys, lengths_of, visited_rows
from cute_attn.kernels.backward_sm90.params import (
    BackwardInputs,
    BackwardOutputs,
    BackwardParams,
    shared_memory,
)
from cute_attn.kernels.backward_sm90.roles import (
    BiasGradientStorer,
    DqAdder,
    PhiloxProducer,
    Producer,
    TurnGiver,
)
from cute_attn.kernels.backward_sm90.steps import DqInStep, DqLate, ScoresAhead
from cute_attn.kernels.base import AttentionKernel, StepContent, beyond, wgmma_count
from cute_attn.kernels.copies import Copies, transposed
from cute_attn.kernels.dq_order import block_floats, mma_dq
from cute_attn.outputs.accumulate import DqTurns, cluster_barrier
from cute_attn.rows.tma import TmaTiles, TmaVectors
from cute_attn.rows.tma_bias import bias_tma
from cute_attn.tiles import BackwardSm90Tile, Sizes, first_that_fits, padded
from cute_attn.tiles.backward import COUNTERS
from cute_attn.traits import LARGE_HEAD_DIM, MAX_HEAD_DIM, Traits
from cute_attn.work.block_range import BlockRange
from cute_attn.work.broadcast import KeyTile
from cute_attn.work.key_tiles import HeadSplits, KeyTileOrder

DqRows = Annotated[
    cute.Tensor,
    lambda kernel: (
        fakes.head_rows(kernel) if kernel.tile.dq_direct else fakes.workspace(fakes.rank(kernel.traits))
    ),
]
"""mDQaccum: the accumulators, see ``fakes.Accumulators``, or with ``dq_direct`` dQ itself."""


ROWS, SPARE = (256, 512), 1.07
"""Queries whose dQ may be summed in shared memory, and the maximum ratio of heads in whole waves to heads."""


def _undivided(traits: Traits) -> str | None:
    """Why two CTAs cannot divide large head dims, or None."""
    dims = traits.head_dim, traits.head_dim_v
    if max(dims) <= LARGE_HEAD_DIM or all(padded(dim) % 64 == 0 for dim in dims):
        return None
    return (
        f"head_dim, head_dim_v are {dims}; accepted beside one above {LARGE_HEAD_DIM}: "
        "those whose next multiple of 32 is also one of 64"
    )


@dataclass(frozen=True)
class BackwardSm90(AttentionKernel):
    """Main backward kernel of (traits, tile); ``__call__`` launches it."""

    traits: Traits
    tile: BackwardSm90Tile

    # ---- supported traits ----

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        """Why this kernel cannot serve ``traits``, or None."""
        reason = beyond(traits, "backward-sm90", most=MAX_HEAD_DIM) or _undivided(traits)
        return reason or EpilogueChain.decline(traits)

    table, keys = TABLE, staticmethod(keys)

    def tile_for(self, target: str, sizes: Sizes) -> BackwardSm90Tile:
        """A smaller tile if many rows or keys of the default tile would be empty. Another tile stays."""
        tile_m, tile_n = self.tile.tile_m, self.tile.tile_n
        if self.tile != BackwardSm90.default_tile(self.traits, target):
            return self.tile
        lengths = lengths_of(sizes.seqlen_q, sizes.seqlen_k, tile_n)
        if lengths != "long":
            of_few_keys = TABLE.first(self.traits, target, *keys(self.traits, target, lengths))
            if of_few_keys != self.tile:
                return of_few_keys
        rows, few = (visited_rows(n, tile_n, sizes.seqlen_q, sizes.window) for n in (tile_m, FEW_ROWS))
        if tile_m == FEW_ROWS or rows < EMPTY * few:
            return self.tile
        fewer = [
            tile
            for tile in TABLE.tiles(*keys(self.traits, target))
            if tile.tile_m <= FEW_ROWS and tile.tile_m != tile_m and tile.bias_stages == self.tile.bias_stages
        ]
        return first_that_fits(fewer, self.traits, target) if fewer else self.tile

    def storing_dq(
        self, seqlen_q: int, seqlen_k: int, group: int, pairs: int, multiprocessors: int
    ) -> "BackwardSm90":
        """This kernel with ``dq_direct``, if a CTA may compute all of a query block's dQ.

        So it may if a sequence is one key block that all its query blocks visit, or if dQ of a head's queries fits in
        shared memory and heads are enough for whole waves of CTAs.

        Args:
            group: query heads per key head.
            pairs: number of sequences times query heads.

        Raises:
            ValueError: the tile has ``dq_direct`` for other sequences.
        """
        traits, tile = self.traits, self.tile
        unlike = traits.varlen or traits.seqused_q or traits.seqused_k or self.epilogues.visits_lists
        before = seqlen_q - seqlen_k if traits.causal and not traits.top_left else 0  # queries without keys
        one_block = seqlen_k <= tile.tile_n and before < tile.tile_m and not (traits.windowed or unlike)
        if tile.dq_direct:  # named
            serves = one_block
            if tile.dq_rows:
                serves = seqlen_q <= tile.dq_rows and group == 1 and not unlike
            if serves:
                return self
            raise ValueError(
                f"backward_tile has dq_direct=true, dq_rows={tile.dq_rows}; accepted: true for batches of equal "
                "lengths with one block of keys, or with dq_rows from seqlen_q on and as many key as query heads"
            )
        if one_block:
            own = [tile.direct()]
        elif not unlike and group == 1 and -(-pairs // multiprocessors) * multiprocessors <= SPARE * pairs:
            own = [x.direct(rows) for x in self._tiles_of_rows() for rows in ROWS if rows >= seqlen_q]
        else:
            return self
        fit = [x for x in own if self._holds(x) and x.reject(traits, "sm90") is None]
        return replace(self, tile=fit[0]) if fit else self

    def _tiles_of_rows(self) -> list[BackwardSm90Tile]:
        """The tile; for the default one also tiles of 64 queries, whose rows of dQ take less shared memory."""
        if self.tile.tile_m == FEW_ROWS or self.tile != BackwardSm90.default_tile(self.traits, "sm90"):
            return [self.tile]
        wanted = (FEW_ROWS, self.tile.bias_stages, self.tile.mask_warps)
        tiles = TABLE.tiles(*keys(self.traits, "sm90"))
        return [self.tile, *(x for x in tiles if (x.tile_m, x.bias_stages, x.mask_warps) == wanted)]

    def _holds(self, tile: BackwardSm90Tile) -> bool:
        """True if registers are left for the addresses of dQ's rows: not for 128 queries with dropout or a window."""
        return tile.may_be_direct and not (
            tile.tile_m > FEW_ROWS and (tile.mask_warps or self.traits.windowed)
        )

    def without_tma_bias(self) -> "BackwardSm90":
        """This kernel with the default tile for a bias that TMA cannot load, or whose gradient TMA cannot store."""
        return replace(self, tile=TABLE.first(self.traits, "sm90", *keys(self.traits, "sm90", tma=False)))

    def step_content(self) -> StepContent:
        """Content of a step of the unmasked loop, with dQ of the previous step."""
        tile, (d, dv), groups = self.tile, self.dims, self.tile.warpgroups
        m, n = self.scores_shape
        scores_n = groups // min(groups, m // 64) if tile.p_in_smem else 1
        dq_m, dq_n = (d, tile.tile_m) if tile.dq_transposed else (tile.tile_m, d)
        mma = (
            wgmma_count(m, n, d, groups, scores_n)
            + wgmma_count(m, n, dv, groups, scores_n)
            + wgmma_count(*self.gradient_shape(d), tile.tile_m, groups, self.gradient_warps_n)
            + wgmma_count(*self.gradient_shape(dv), tile.tile_m, groups, self.gradient_warps_n)
            + wgmma_count(dq_m, dq_n, tile.tile_n, groups, tile.dq_warps_n)
        )
        elements = tile.tile_m * tile.tile_n // tile.mma_threads
        moved = 2 * tile.tile_m * (d + dv + (tile.tile_n if tile.bias_stages else 0))
        added = 4 * tile.tile_m * d if tile.dq_bulk else 0
        moved += 4 * tile.tile_m * 2 + added  # LSE and D; dQ
        moved += 8 * tile.tile_m * tile.tile_n if tile.cluster > 1 else 0  # a peer's S and dP
        exp2 = elements * (1 + self.traits.softcap)
        return StepContent(
            mma, exp2, elements, 4 * groups, async_bytes=moved, added_bytes=added, ctas=tile.cluster
        )

    # ---- layouts, copies and MMAs: override one of these to experiment ----

    @property
    def dims(self) -> tuple[int, int]:
        """Columns of head_dim and head_dim_v per CTA in shared memory and registers, with padding."""
        return self.tile.columns_of(self.traits.head_dim), self.tile.columns_of(self.traits.head_dim_v)

    def layout_k(self) -> cute.ComposedLayout:
        """Layout of K and dK, (tile_n, head_dim). K is an operand of S and, transposed, of dQ."""
        tile = self.tile
        parts = max(tile.dq_warps_n, tile.dkv_warps_n)
        return operand_layout(tile.tile_n, self.dims[0], self.dtype, stages=1, parts=parts)

    def layout_v(self) -> cute.ComposedLayout:
        """Layout of V and dV, (tile_n, head_dim_v)."""
        tile = self.tile
        return operand_layout(tile.tile_n, self.dims[1], self.dtype, stages=1, parts=tile.dkv_warps_n)

    def layout_q(self) -> cute.ComposedLayout:
        """Layout of Q, (tile_m, head_dim, stage): an operand of S and, transposed, of dK."""
        tile = self.tile
        return operand_layout(
            tile.tile_m, self.dims[0], self.dtype, stages=tile.num_stages_q, parts=tile.dkv_warps_n
        )

    def layout_do(self) -> cute.ComposedLayout:
        """Layout of dO, (tile_m, head_dim_v, stage): an operand of dP and, transposed, of dV."""
        tile = self.tile
        return operand_layout(
            tile.tile_m, self.dims[1], self.dtype, stages=tile.num_stages_do, parts=tile.dkv_warps_n
        )

    def layout_ds(self) -> cute.ComposedLayout:
        """Layout of dS and P, (tile_m, tile_n, stage)."""
        tile = self.tile
        stages, parts = tile.num_stages_ds, tile.ds_warps_n
        return operand_layout(tile.tile_m, tile.tile_n, self.dtype, stages=stages, parts=parts)

    def layout_bias(self) -> cute.ComposedLayout:
        """Layout of the bias, (tile_m, tile_n, stage)."""
        tile, dtype = self.tile, fakes.CUTE_DTYPES[self.traits.bias]
        return layouts.wgmma_smem_layout(tile.tile_m, tile.tile_n, dtype, stages=tile.bias_stages)

    @property
    def scores_shape(self) -> tuple[int, int]:
        """(M, N) of S and dP: (keys, queries), or with p_in_smem (queries, keys)."""
        tile = self.tile
        return (tile.tile_m, tile.tile_n) if tile.p_in_smem else (tile.tile_n, tile.tile_m)

    def mma_scores(self) -> cute.TiledMma:
        """S = K Q^T and dP = V dO^T, all from shared memory; with p_in_smem, Q K^T and dO V^T."""
        (m, n), groups = self.scores_shape, self.tile.warpgroups
        along_n = groups // min(groups, m // 64) if self.tile.p_in_smem else 1
        return layouts.tiled_mma_sm90(self.dtype, m, n, warpgroups=groups, warpgroups_n=along_n)

    def gradient_shape(self, head_dim: int) -> tuple[int, int]:
        """(M, N) of dK or dV: (keys, head_dim), or with dkv_transposed (head_dim, keys)."""
        tile_n = self.tile.tile_n
        return (head_dim, tile_n) if self.tile.dkv_transposed else (tile_n, head_dim)

    @property
    def gradient_warps_n(self) -> int:
        """Warpgroups along N of dK and dV."""
        return self.tile.ds_warps_n if self.tile.dkv_transposed else self.tile.dkv_warps_n

    def mma_dkv(self, head_dim: int) -> cute.TiledMma:
        """dK += dS Q and dV += P dO, (keys, head_dim): dS and P from registers, or with p_in_smem from shared memory.

        With dkv_transposed: Q^T dS and dO^T P, (head_dim, keys).
        """
        tile = self.tile
        return layouts.tiled_mma_sm90(
            self.dtype,
            *self.gradient_shape(head_dim),
            warpgroups=tile.warpgroups,
            warpgroups_n=self.gradient_warps_n,
            a_source="smem" if tile.p_in_smem else "rmem",
            a_major="mn" if tile.p_in_smem else "k",
            b_major="mn",
        )

    def mma_dq(self) -> cute.TiledMma:
        """dQ = dS K, (queries, head_dim), or with dq_transposed K^T dS^T; all from shared memory."""
        a, b = ("mn", "k") if self.tile.dq_transposed else ("k", "mn")
        return mma_dq(self.traits, self.tile, a_major=a, b_major=b)

    def scores_store(self) -> cute.TiledCopy:
        """Copy of P or dS from registers to shared memory, (queries, keys) with p_in_smem, otherwise transposed."""
        tile = self.tile
        transpose = not tile.p_in_smem
        return layouts.store_copy_c(self.mma_scores(), self.dtype, "sm90", transpose, tile.store_columns)

    def gradient_store(self, head_dim: int) -> cute.TiledCopy:
        """Copy of dK or dV from registers to shared memory, (keys, head_dim), or transposed with dkv_transposed."""
        tile = self.tile
        mma = self.mma_dkv(head_dim)
        return layouts.store_copy_c(mma, self.dtype, "sm90", tile.dkv_transposed, tile.store_columns)

    def gmem_store(self, head_dim: int) -> cute.TiledCopy:
        """Copy from shared to global memory, used where TMA would also write rows of the next sequence."""
        return layouts.gmem_tiled_copy(self.dtype, self.tile.mma_threads, head_dim, asynchronous=False)

    def copies(self) -> Copies:
        """Areas and copies of operands, dS and gradients in shared memory; threads move only dS and the gradients."""
        tile, (d, dv), found = self.tile, self.dims, Copies(self, self.tile.mma_threads)
        scores = (tile.tile_m, tile.tile_n, tile.num_stages_ds)
        for name, shape in (
            *(("k", (tile.tile_n, d, 1)), ("v", (tile.tile_n, dv, 1)), ("ds", scores)),
            *(("q", (tile.tile_m, d, tile.num_stages_q)), ("do", (tile.tile_m, dv, tile.num_stages_do))),
        ):
            found.area(name, shape, f"layout_{name}")
        found.area("p", scores, "layout_ds")
        found.area("dk", (tile.tile_n, d, 1), "layout_k")
        found.area("dv", (tile.tile_n, dv, 1), "layout_v")
        if tile.bias_stages:
            shape = (tile.tile_m, tile.tile_n, tile.bias_stages)
            found.area("bias", shape, "layout_bias", of=fakes.CUTE_DTYPES[self.traits.bias])
        found.part("mma-scores", "mma_scores").part("mma-dq", "mma_dq")
        found.part("mma-dk", "mma_dkv", d).part("mma-dv", "mma_dkv", dv)
        found.part("copy-scores-to-smem", "scores_store").part("copy-gradient-to-smem", "gradient_store", d)
        found.part("copy-smem-to-gmem", "gmem_store", d)
        ds = self.layout_ds if tile.p_in_smem else transposed(self.layout_ds)
        found.move("dS to shared memory", "STSM", self.scores_store, ds)
        for name, dim, layout in (("dK", d, self.layout_k), ("dV", dv, self.layout_v)):
            seen = transposed(layout) if tile.dkv_transposed else layout
            found.move(f"{name} to shared memory", "STSM", functools.partial(self.gradient_store, dim), seen)
        return found

    # ---- code paths that traits and tile decide ----
    # ``rematerializes_thread`` and ``reads_lse_first`` are measured: they say where ptxas has registers left.

    @property
    def loads_bias_by_tma(self) -> bool:
        """True if TMA loads the bias. Its strides and address must then be aligned like those of q, k and v."""
        return self.tile.bias_stages > 0

    @property
    def stores_bias_gradient(self) -> bool:
        """True if TMA stores dS from shared memory as the bias gradient: their dtypes and values are equal."""
        same = self.traits.bias == self.traits.dtype and self.epilogues.bias_has_scores_gradient
        return self.loads_bias_by_tma and self.traits.bias_grad and same

    @property
    def rematerializes_thread(self) -> bool:
        """True if the thread index is recomputed for each key block instead of kept in a register.

        Otherwise the kernel for head dim 64 with dropout spills 8 bytes per thread.
        """
        traits = self.traits
        epilogue = traits.windowed or traits.varlen or traits.alibi or traits.dropout
        return bool((traits.windowed and traits.varlen) or (self.tile.tile_m == 128 and epilogue))

    @property
    def reads_lse_first(self) -> bool:
        """True if a step reads LSE before it starts S and dP: a later read would wait behind them in the same queue.

        The values then occupy registers during both products. With head dim 64 and a TMA-loaded bias, this spills 48
        bytes per thread; a softcap's derivative or a mask generated in the step leaves no registers either.
        """
        generates_mask = self.traits.dropout and not self.tile.mask_warps
        return not (self.loads_bias_by_tma or generates_mask or self.traits.softcap)

    @property
    def waits_for_v_late(self) -> bool:
        """True if a key block's first step starts S before V has arrived. False if rows of V have to be zeroed.

        Also false if V loads only after dV has been stored, where long sequences of head dim 128 would be 1 to 2%
        slower, and with a TMA-loaded bias, where 32 bytes per thread would spill.
        """
        zeroed = self.traits.varlen or self.traits.seqused_k
        return self.tile.dv_leaves_v(self.traits) and not (zeroed or self.loads_bias_by_tma)

    @property
    def adds_dq_early(self) -> bool:
        """True if, with P in shared memory, dQ is issued first and added while dV runs, before dK is issued.

        This is 3% faster at 192 x 128. Head dim 256, whose dK and dV are not transposed, would be up to 3% slower.
        """
        return self.tile.dkv_transposed

    @property
    def dp_starts_from_d(self) -> bool:
        """True if dP's accumulator is initialized with -D, to save the subtraction.

        False with dropout: dS of a dropped element is -P D, without its dP.
        """
        return not self.traits.dropout

    @property
    def masks_last_blocks(self) -> bool:
        """True if query blocks after the unmasked ones may need a mask."""
        return self.traits.windowed or self.epilogues.visits_lists

    @property
    def query_loop(self) -> Any:
        """The class of the consumers' loop over a head's query blocks."""
        if self.tile.scores_ahead:
            return ScoresAhead
        return DqInStep if self.tile.p_in_smem else DqLate

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.HeadRows,
        mV: fakes.HeadRows,
        mDO: fakes.HeadRows,
        mLSElog2: fakes.QueryNumbers,
        mMinusD: fakes.QueryNumbers,
        mDQaccum: DqRows,
        mDK: fakes.HeadRows,
        mDV: fakes.HeadRows,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.BackwardCounters,
        score_args: fakes.ScoreArgs,
        stream: cuda.CUstream,
    ) -> None:
        traits, tile = self.traits, self.tile
        nheads = mQ.shape[-2]
        head_bytes = Int64(seqlens.max_seqlen_q) * (4 * padded(traits.head_dim))
        order = KeyTileOrder.make(
            seqlens, mDK, schedule, head_bytes, tile.tile_n, traits.causal, tile.dq_in_order
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        d, dv = self.dims
        inputs = BackwardInputs(
            self.rows(load, mK, self.layout_k(), tile.tile_n, d),
            self.rows(load, mV, self.layout_v(), tile.tile_n, dv),
            self.rows(load, mQ, self.layout_q(), tile.tile_m, d),
            self.rows(load, mDO, self.layout_do(), tile.tile_m, dv),
            bias_tma(self.epilogues.bias(score_args), self.layout_bias()) if self.loads_bias_by_tma else None,
            TmaVectors.make(mLSElog2, tile.tile_m, traits.varlen),
            TmaVectors.make(mMinusD, tile.tile_m, traits.varlen),
        )
        outputs = BackwardOutputs(
            self.rows(store, mDK, self.layout_k(), tile.tile_n, d),
            self.rows(store, mDV, self.layout_v(), tile.tile_n, dv),
            bias_tma(self.epilogues.bias_gradient(score_args), self.layout_ds(), store=True)
            if self.stores_bias_gradient
            else None,
            mDK,
            mDV,
            mDQaccum,
            schedule.split_stride,
            cute.recast_ptr(schedule.counter.iterator, dtype=Int32) + COUNTERS,
        )
        head_splits = HeadSplits.make(mQ, mK, mDK, tile.dq_direct)
        params = BackwardParams(
            seqlens, softmax_scale, score_args, order, schedule.counter, nheads, head_splits
        )
        clusters = {"cluster": [tile.cluster, 1, 1]} if tile.cluster > 1 else {}
        self.kernel(params, inputs, outputs).launch(
            grid=[cutlass.min(order.blocks, schedule.multiprocessors) * tile.cluster, 1, 1],
            block=[tile.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
            **clusters,
        )

    def rows(self, op: Any, tensor: cute.Tensor, layout: Any, rows: int, head_dim: int) -> TmaTiles:
        """TMA tiles of (rows, padded head_dim); see ``TmaTiles.make``."""
        one_stage = cute.select(layout, mode=[0, 1])
        return TmaTiles.make(op, tensor, one_stage, (rows, head_dim), self.traits.varlen)

    # ---- device ----

    @cute.kernel
    def kernel(self, params: BackwardParams, inputs: BackwardInputs, outputs: BackwardOutputs) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        shared = shared_memory(self)
        if warp == 0:
            for tma in (inputs.k, inputs.v, inputs.q, inputs.do, inputs.lse, inputs.minus_d):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for pipeline in (shared.pipeline_v, shared.pipeline_q, shared.pipeline_do):
                    pipeline.init(4 * self.tile.warpgroups)
                # other warps that read the broadcast key tile
                others = self.stores_bias_gradient + self.tile.mask_warps
                others += self.tile.dq_bulk or self.tile.dq_in_order
                shared.pipeline_k.init(4 * self.tile.warpgroups + others)
                if cutlass.const_expr(self.tile.mask_warps > 0):
                    shared.pipeline_mask.init(4 * self.tile.warpgroups, self.tile.mask_warps)
                shared.ds_buffer.init(4 * self.tile.warpgroups + (1 if self.stores_bias_gradient else 0))
                shared.dq_staging.init(1, producers=4 * self.tile.warpgroups)
                if cutlass.const_expr(self.tile.cluster > 1):
                    shared.peer_s.init()
                    shared.peer_dp.init()
                    shared.cluster_claims.init()
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.tile.cluster > 1):
            cluster_barrier()
        else:
            cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # the convert kernel; it waits for this one's end
        cute.arch.griddepcontrol_wait()  # for the preprocess kernel's outputs
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.tile.load_registers)
            if warp == 0:
                Producer(self, params, inputs, outputs, shared).run()
            if cutlass.const_expr(self.stores_bias_gradient):
                if warp == 1:
                    BiasGradientStorer(self, params, shared, outputs).run()
            if cutlass.const_expr(self.tile.dq_bulk):
                if warp == 2:
                    DqAdder(self, params, shared, outputs).run()
            elif cutlass.const_expr(self.tile.dq_in_order):
                if warp == 2:
                    TurnGiver(self, params, shared, outputs).run()
            if cutlass.const_expr(self.tile.mask_warps > 0):
                first = 4 - self.tile.mask_warps
                if warp >= first:
                    PhiloxProducer(self, params, shared, warp - first).run()
        else:
            cute.arch.setmaxregister_increase(self.tile.compute_registers // 8 * 8)
            Consumer(self, params, outputs, shared, self.query_loop).run(thread - WARPGROUP)
            if cutlass.const_expr(self.tile.cluster > 1):
                cluster_barrier()  # a CTA's memory may be written until its peer has read the last sums

    def part(self) -> Int32 | int:
        """The index of this CTA's range of the head dims in its cluster."""
        return cute.arch.block_idx_in_cluster() if self.tile.cluster > 1 else 0

    def query_blocks(self, params: BackwardParams, key_tile: KeyTile) -> BlockRange:
        """The query blocks that see a key block, equal for all its query heads, and which of them is visited first."""
        tile = self.tile
        heads = params.query_heads(key_tile)
        _, state = self.epilogues.begin_tile(params, key_tile, heads.first)
        key0 = key_tile.block * tile.tile_n
        blocks = self.epilogues.query_blocks(
            state, key0, key0 + tile.tile_n, key_tile.info.seqlen_q, tile.tile_m
        )
        if tile.dq_direct:
            return heads.blocks(blocks)
        same = not (self.traits.causal or self.traits.windowed or self.epilogues.visits_lists)
        if tile.staggered and same:
            return replace(blocks, first=key_tile.block % cutlass.max(blocks.end, 1))
        return blocks

    def dq_of_head(
        self, params: BackwardParams, outputs: BackwardOutputs, key_tile: KeyTile, head: Int32
    ) -> cute.Pointer | cute.Tensor:
        """The address of dQ's accumulator for a head's first query block, in the key tile's split.

        With ``dq_direct``: the head's dQ, (queries, head_dim).
        """
        if self.tile.dq_direct:
            return sequence(
                outputs.mDQaccum, key_tile.batch, head, key_tile.info.offset_q, self.traits.varlen
            )
        accum, packed = outputs.mDQaccum, self.traits.varlen
        split = cute.make_tensor(
            accum.iterator + Int64(key_tile.split) * outputs.split_stride,
            cute.select(accum.layout, mode=[1, 2] if packed else [1, 2, 3]),
        )
        row0 = padded_row0(params.seqlens, key_tile.info, key_tile.batch, self.tile.tile_m)
        width = padded(self.traits.head_dim)
        rows = workspace_rows(split, key_tile.batch, head, row0, width, packed)
        return rows.iterator + self.part() * (block_floats(self.traits, self.tile) // self.tile.cluster)

    def dq_turns(
        self, params: BackwardParams, outputs: BackwardOutputs, key_tile: KeyTile, head_dq: cute.Pointer
    ) -> DqTurns:
        """The turns of a key block to add to the accumulator of one head, which begins at ``head_dq``."""
        tile, accum = self.tile, outputs.mDQaccum
        block_bytes = 4 * (block_floats(self.traits, tile) // tile.cluster)
        first = (head_dq.toint() - accum.iterator.toint()) // block_bytes
        before = key_tile.block + accum.shape[0]
        seen = self.query_blocks(params, replace(key_tile, block=before))
        return DqTurns(outputs.turns + first, tile.cluster, key_tile.block, before, seen)

    def ds_stage(self, n: Int32) -> Int32:
        """The stage of a step's dS (and P)."""
        return Int32(0) if self.tile.num_stages_ds == 1 else n & 1
