"""MMA tilings that stand for every kernel's, to run the epilogues over on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from cutlass import Float16
from torch import Tensor

import layouts
from cute_attn import emulate, reference
from cute_attn.epilogues.base import user_epilogue
from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits


@dataclass(frozen=True)
class TileSize:
    """As much of a tile as the emulation looks at."""

    tile_m: int
    tile_n: int
    rescale_threshold: int = 0


@dataclass(frozen=True)
class Tiling:
    """As much of a kernel as the emulation looks at: an MMA and its tile, with the epilogues of some traits."""

    tile: TileSize
    make: Callable[[TileSize], Any]
    traits: Traits | None = None

    def of(self, features: str = "") -> "Tiling":
        """With the features of a kernel's name, such as "causal-dropout"."""
        return replace(
            self, traits=Traits.parse("forward-sm80-fp16-d64" + (f"-{features}" if features else ""))
        )

    def tiled_mma(self) -> Any:
        return self.make(self.tile)

    @property
    def epilogues(self) -> EpilogueChain:
        assert self.traits is not None
        return EpilogueChain.of(self.traits)


def _warps(tile_m: int, tile_n: int, num_warps: int, warps_n: int = 1) -> Tiling:
    return Tiling(
        TileSize(tile_m, tile_n), lambda tile: layouts.tiled_mma_sm80(Float16, num_warps, warps_n=warps_n)
    )


def _warpgroups(tile_m: int, tile_n: int, warpgroups: int, warpgroups_n: int = 1) -> Tiling:
    def make(tile: TileSize) -> Any:
        return layouts.tiled_mma_sm90(
            Float16, tile.tile_m, tile.tile_n, warpgroups=warpgroups, warpgroups_n=warpgroups_n
        )

    return Tiling(TileSize(tile_m, tile_n), make)


TILINGS = {
    "warps4x1-64x64": _warps(64, 64, 4),
    "warps4x1-128x32": _warps(128, 32, 4),
    "warps8x1-128x96": _warps(128, 96, 8),
    "warps2x2-64x64": _warps(64, 64, 4, 2),
    "warps2x4-32x128": _warps(32, 128, 8, 4),
    "wgmma1-64x80": _warpgroups(64, 80, 1),
    "wgmma2-128x176": _warpgroups(128, 176, 2),
    "wgmma2-64x128-along-n": _warpgroups(64, 128, 2, 2),
}
SMALL = "warps4x1-64x64"


@dataclass(frozen=True)
class Scores:
    """A problem as the emulation takes it: q k^T and V for each query head, and what the epilogues are given."""

    q: Tensor  # (batch, seqlen_q, nheads, head_dim)
    k: Tensor
    v: Tensor
    inputs: ScoreInputs = reference.NO_INPUTS
    lengths: reference.Lengths = reference.FULL_LENGTHS
    scale: float = 0.6

    @staticmethod
    def random(
        batch: int, nheads: int, seqlen_q: int, seqlen_k: int, seed: int = 0, head_dim: int = 8, **inputs: Any
    ) -> "Scores":
        """Normally distributed q, k and v."""
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(batch, n, nheads, head_dim, generator=generator)
            for n in (seqlen_q, seqlen_k, seqlen_k)
        )
        return Scores(q, k, v, ScoreInputs(**inputs))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, nheads, seqlen_q, seqlen_k)."""
        return (self.q.shape[0], self.q.shape[2], self.q.shape[1], self.k.shape[1])

    @property
    def products(self) -> Tensor:
        """q k^T as (batch, nheads, seqlen_q, seqlen_k)."""
        return torch.einsum("bqhd,bkhd->bhqk", self.q, self.k)

    def emulate(self, tiling: Tiling) -> emulate.Emulated:
        """What all threads of the tiling make of it."""
        values = self.v.transpose(1, 2)
        return emulate.attend_on_host(tiling, self.products, values, self.scale, self.inputs, self.lengths)

    def features(self, traits: Traits) -> reference.Features:
        """The reference's word for the traits."""
        users = tuple(user_epilogue(name).reference for name in traits.epilogues)
        return reference.Features(traits.mask, traits.dropout, users)

    def coords(self, traits: Traits) -> reference.ScoreCoords:
        """Every index of the problem, all sequences having full length."""
        return emulate.all_coords(traits, self.shape)

    def expected_scores(self, traits: Traits) -> Tensor:
        """Scores by definition, float64 rounded to float32."""
        return emulate.scores_by_definition(traits, self.products.double(), self.scale, self.inputs).float()

    def expected(self, traits: Traits) -> tuple[Tensor, Tensor]:
        """out (batch, nheads, seqlen_q, head_dim) and lse by definition, from full or seqused lengths."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        out, lse, _ = reference.attention(
            q, k, v, self.scale, self.features(traits), self.inputs, self.lengths
        )
        return out.transpose(1, 2).float(), lse.float()
