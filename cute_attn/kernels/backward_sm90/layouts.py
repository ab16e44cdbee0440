"""The Hopper backward's layouts in shared memory, copies and MMAs: override one of these to experiment."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from cutlass import cute

import layouts
from cute_attn.device.wgmma import operand_layout
from cute_attn.kernels.copies import Copies, transposed
from cute_attn.kernels.fakes import CUTE_DTYPES
from cute_attn.kernels.step import StepContent, wgmma_count
from cute_attn.outputs.dq_order import mma_dq
from cute_attn.tiles import BackwardSm90Tile
from cute_attn.traits import Traits


@dataclass(frozen=True)
class BackwardSm90Layouts:
    """Layouts, copies and MMAs of the kernel of (traits, tile)."""

    traits: Traits
    tile: BackwardSm90Tile

    def step_content(self) -> StepContent:
        """A step of the unmasked loop, with dQ of the step before."""
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
        moved += 4 * tile.tile_m * (2 + (d if tile.dq_bulk else 0))  # LSE and D; dQ
        moved += 8 * tile.tile_m * tile.tile_n if tile.cluster > 1 else 0  # a peer's S and dP
        exp2 = elements * (1 + self.traits.softcap)
        return StepContent(mma, exp2, elements, 4 * groups, async_bytes=moved, ctas=tile.cluster)

    @property
    def dtype(self) -> Any:
        """Element type of Q, K, V, dO, dK and dV."""
        return CUTE_DTYPES[self.traits.dtype]

    @property
    def dims(self) -> tuple[int, int]:
        """A CTA's columns of head_dim and head_dim_v, as shared memory and registers hold them."""
        return self.tile.columns_of(self.traits.head_dim), self.tile.columns_of(self.traits.head_dim_v)

    def layout_k(self) -> cute.ComposedLayout:
        """K, (tile_n, head_dim): an operand of S, and transposed of dQ. dK reuses its memory."""
        tile = self.tile
        parts = max(tile.dq_warps_n, tile.dkv_warps_n)
        return operand_layout(tile.tile_n, self.dims[0], self.dtype, stages=1, parts=parts)

    def layout_v(self) -> cute.ComposedLayout:
        """V, (tile_n, head_dim_v). dV reuses its memory."""
        tile = self.tile
        return operand_layout(tile.tile_n, self.dims[1], self.dtype, stages=1, parts=tile.dkv_warps_n)

    def layout_q(self) -> cute.ComposedLayout:
        """Q, (tile_m, head_dim, stage): an operand of S, and transposed of dK."""
        tile = self.tile
        return operand_layout(
            tile.tile_m, self.dims[0], self.dtype, stages=tile.num_stages_q, parts=tile.dkv_warps_n
        )

    def layout_do(self) -> cute.ComposedLayout:
        """dO, (tile_m, head_dim_v, stage): an operand of dP, and transposed of dV."""
        tile = self.tile
        return operand_layout(
            tile.tile_m, self.dims[1], self.dtype, stages=tile.num_stages_do, parts=tile.dkv_warps_n
        )

    def layout_ds(self) -> cute.ComposedLayout:
        """dS and P, (tile_m, tile_n, stage)."""
        tile = self.tile
        stages, parts = tile.num_stages_ds, tile.ds_warps_n
        return operand_layout(tile.tile_m, tile.tile_n, self.dtype, stages=stages, parts=parts)

    def layout_bias(self) -> cute.ComposedLayout:
        """The bias, (tile_m, tile_n, stage)."""
        tile, dtype = self.tile, CUTE_DTYPES[self.traits.bias]
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
        """dK += dS Q and dV += P dO, (keys, head_dim): dS and P from registers, with p_in_smem from shared memory.

        With dkv_transposed Q^T dS and dO^T P, (head_dim, keys).
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
        """dQ = dS K, (queries, head_dim), or transposed K^T dS^T; K and dS as they lie in shared memory."""
        a, b = ("mn", "k") if self.tile.dq_transposed else ("k", "mn")
        return mma_dq(self.traits, self.tile, a_major=a, b_major=b)

    def scores_store(self) -> cute.TiledCopy:
        """P or dS from registers to shared memory, (queries, keys) with p_in_smem, otherwise transposed."""
        tile = self.tile
        transpose = not tile.p_in_smem
        return layouts.store_copy_c(self.mma_scores(), self.dtype, "sm90", transpose, tile.store_columns)

    def gradient_store(self, head_dim: int) -> cute.TiledCopy:
        """dK or dV from registers to shared memory, (keys, head_dim), or with dkv_transposed transposed."""
        tile = self.tile
        mma = self.mma_dkv(head_dim)
        return layouts.store_copy_c(mma, self.dtype, "sm90", tile.dkv_transposed, tile.store_columns)

    def gmem_store(self, head_dim: int) -> cute.TiledCopy:
        """BackwardStorage to global memory, where TMA would write rows of the next sequence."""
        return layouts.gmem_tiled_copy(self.dtype, self.tile.mma_threads, head_dim, asynchronous=False)

    def copies(self) -> Copies:
        """Operands, dS and gradients in shared memory; threads move only dS and the gradients."""
        tile, (d, dv), found = self.tile, self.dims, Copies(self, self.tile.mma_threads)
        scores = (tile.tile_m, tile.tile_n, tile.num_stages_ds)
        for name, shape in (
            *(("k", (tile.tile_n, d, 1)), ("v", (tile.tile_n, dv, 1)), ("ds", scores)),
            *(("q", (tile.tile_m, d, tile.num_stages_q)), ("do", (tile.tile_m, dv, tile.num_stages_do))),
        ):
            found.area(name, shape, f"layout_{name}")
        found.area("p", scores, "layout_ds")
        found.area("dk", (tile.tile_n, d, 1), "layout_k")
        if tile.bias_stages:
            shape = (tile.tile_m, tile.tile_n, tile.bias_stages)
            found.area("bias", shape, "layout_bias", of=CUTE_DTYPES[self.traits.bias])
        found.part("mma-scores", "mma_scores").part("mma-dq", "mma_dq")
        found.part("mma-dk", "mma_dkv", d).part("mma-dv", "mma_dkv", dv)
        found.part("copy-scores-to-smem", "scores_store").part("copy-gradient-to-smem", "gradient_store", d)
        found.part("copy-smem-to-gmem", "gmem_store", d)
        ds = self.layout_ds if tile.p_in_smem else transposed(self.layout_ds)
        found.move("dS to shared memory", "STSM", self.scores_store, ds)
        for name, dim, layout in (("dK", d, self.layout_k), ("dV", dv, self.layout_v)):
            seen = transposed(layout) if tile.dkv_transposed else layout
            found.move(f"{name} to shared memory", "STSM", partial(self.gradient_store, dim), seen)
        return found
