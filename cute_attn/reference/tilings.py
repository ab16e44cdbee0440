"""MMA tilings of all kinds of kernels, for running epilogues on the CPU, and the results expected by definition."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from cutlass import Float16
from torch import Tensor

import layouts
from cute_attn import reference
from cute_attn.device.math import LARGEST, LOG2_E
from cute_attn.epilogues.chain import EpilogueChain
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.reference import emulate
from cute_attn.reference.definition import attend
from cute_attn.reference.emulate import (
    Emulated,
    EmulatedGradients,
    GradientBuffers,
    every_key_block,
    features_of,
)
from cute_attn.traits import Traits


@dataclass(frozen=True)
class TileSize:
    """The fields of a tile that the emulation uses."""

    tile_m: int
    tile_n: int
    rescale_threshold: int = 0
    pack_heads: int = 1


@dataclass(frozen=True)
class Tiling:
    """A stand-in for a kernel in the emulation: its MMA, tile and epilogues.

    traits: Traits, from :meth:`of`. transposed: the MMA is that of K Q^T. p_exponent: see ``OnlineSoftmax``.
    """

    tile: TileSize
    make: Callable[[TileSize], Any]
    traits: Any = None
    transposed: bool = False
    p_exponent: int = 0

    def of(self, features: str = "", op: str = "forward") -> "Tiling":
        """This tiling with the features of a kernel's name, for example "causal-dropout"."""
        return replace(
            self, traits=Traits.parse(f"{op}-sm80-fp16-d64" + (f"-{features}" if features else ""))
        )

    def tiled_mma(self) -> Any:
        return self.make(self.tile)

    @property
    def epilogues(self) -> EpilogueChain:
        return EpilogueChain.of(self.traits, self.tile)


def _warps(tile_m: int, tile_n: int, num_warps: int, warps_n: int = 1, transposed: bool = False) -> Tiling:
    def make(tile: TileSize) -> Any:
        return layouts.tiled_mma_sm80(Float16, num_warps, warps_n=warps_n)

    return Tiling(TileSize(tile_m, tile_n), make, transposed=transposed)


def _warpgroups(
    tile_m: int, tile_n: int, warpgroups: int, warpgroups_n: int = 1, transposed: bool = False
) -> Tiling:
    def make(tile: TileSize) -> Any:
        m, n = (tile.tile_n, tile.tile_m) if transposed else (tile.tile_m, tile.tile_n)
        return layouts.tiled_mma_sm90(Float16, m, n, warpgroups=warpgroups, warpgroups_n=warpgroups_n)

    return Tiling(TileSize(tile_m, tile_n), make, transposed=transposed)


TILINGS = {
    "warps4x1-64x32": _warps(64, 32, 4),
    "warps4x1-128x32": _warps(128, 32, 4),
    "warps8x1-128x96": _warps(128, 96, 8),
    "warps2x2-64x64": _warps(64, 64, 4, 2),
    "warps2x4-32x128": _warps(32, 128, 8, 4),
    "wgmma1-64x80": _warpgroups(64, 80, 1),
    "wgmma2-128x112": _warpgroups(128, 112, 2),
    "wgmma2-64x128-along-n": _warpgroups(64, 128, 2, 2),
}
TRANSPOSED = {
    "warps4x1-64x64-transposed": _warps(64, 64, 4, 1, True),
    "warps2x2-32x96-transposed": _warps(32, 96, 4, 2, True),
    "warps1x2-64x32-transposed": _warps(64, 32, 2, 2, True),
    "wgmma1-80x64-transposed": _warpgroups(80, 64, 1, 1, True),
    "wgmma2-64x128-transposed": _warpgroups(64, 128, 2, 1, True),
    "wgmma3-64x192-transposed": _warpgroups(64, 192, 3, 1, True),
    "wgmma2-64x64-along-n-transposed": _warpgroups(64, 64, 2, 2, True),
}
# Few registers per thread, for epilogues that take long to compile.
TINY = {
    "warps2x1-32x16": _warps(32, 16, 2),
    "warps2x1-16x32-transposed": _warps(16, 32, 2, 1, True),
    "wgmma1-64x16": _warpgroups(64, 16, 1),
    "wgmma1-16x64-transposed": _warpgroups(16, 64, 1, 1, True),
}
SMALL = "warps4x1-64x32"


@dataclass(frozen=True)
class Scores:
    """Inputs of the emulation: q, k and v for each query head, and the epilogues' arguments."""

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
        """A problem with normally distributed q, k and v. inputs: fields of ``ScoreInputs``."""
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

    def emulate(self, tiling: Tiling) -> Emulated:
        """Run the forward's emulation, for all threads of the tiling."""
        values = self.v.transpose(1, 2)
        return emulate.attend_on_host(tiling, self.products, values, self.scale, self.inputs, self.lengths)

    def tangents(self, tiling: Tiling, dots: "Scores") -> Emulated:
        """Run the emulation of a forward with tangents, of op ``jvp``.

        dots: has the tangents of q, k and v, and, where the kernel takes them, of the bias and the sinks.
        """
        product = torch.einsum("bqhd,bkhd->bhqk", dots.q, self.k)
        product = product + torch.einsum("bqhd,bkhd->bhqk", self.q, dots.k)
        moved = {"bias_tangent": dots.inputs.bias, "sinks_tangent": dots.inputs.sinks}
        values, inputs = self.v.transpose(1, 2), replace(self.inputs, **moved)
        more = (inputs, self.lengths, (product, dots.v.transpose(1, 2)))
        return emulate.attend_on_host(tiling, self.products, values, self.scale, *more)

    def differentiate(
        self, tiling: Tiling, grad_out: Tensor, lse: Tensor, minus_d: Tensor
    ) -> EmulatedGradients:
        """Run the backward's emulation; ``inputs.grad_bias`` is written.

        Args:
            tiling: if transposed, its MMA is that of K Q^T.
            grad_out: gradient of out, (batch, seqlen_q, nheads, head_dim).
            lse: float32 (batch, nheads, seqlen_q), natural log; -inf where a row sees no key.
            minus_d: (dLSE - rowsum(dO * O)) * (1 - dropout_p), of lse's shape.
        """
        buffers = emulate.new_buffers(GradientBuffers, tiling, self.shape)
        seen = (slice(None), slice(None), slice(self.shape[2]), slice(self.shape[3]))
        buffers.products[seen] = self.products
        buffers.grad_p[seen] = torch.einsum("bqhd,bkhd->bhqk", grad_out, self.v)
        lse_log2 = (lse * LOG2_E).clamp(-LARGEST, LARGEST)
        buffers.lse_log2[seen[:3]] = lse_log2.masked_fill(lse == -torch.inf, torch.inf)
        buffers.minus_d[seen[:3]] = minus_d.masked_fill(lse == -torch.inf, 0.0)
        lengths = (self.lengths, *self.shape[2:])
        emulate.run(every_key_block, tiling, buffers, lengths, self.inputs, self.scale)
        return EmulatedGradients(buffers.p[seen], buffers.scores[seen], buffers.visits)

    def coords(self, traits: Traits) -> reference.ScoreCoords:
        """Coordinates of all scores, for sequences of full length."""
        return emulate.all_coords(traits, self.shape)

    def expected_scores(self, traits: Traits) -> Tensor:
        """Scores from the reference, in float64 rounded to float32."""
        return emulate.scores_by_definition(traits, self.products.double(), self.scale, self.inputs).float()

    def expected(self, traits: Traits) -> tuple[Tensor, Tensor]:
        """out (batch, nheads, seqlen_q, head_dim) and lse from the reference, for full or seqused lengths."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        out, lse, _ = reference.attention(q, k, v, self.scale, features_of(traits), self.inputs, self.lengths)
        return out.transpose(1, 2).float(), lse.float()

    def expected_gradients(
        self,
        traits: Traits,
        grad_out: Tensor,
        features: reference.Features | None = None,
        computed: Tensor | None = None,
    ) -> "Gradients":
        """Gradients by autograd through the reference, in float64, for full or seqused lengths.

        features: by default the traits'. computed: scores that replace the reference's; their gradient is unchanged.
        """
        raw = (self.products.double() * self.scale).requires_grad_()
        inputs, bias = self.inputs, None
        if inputs.bias is not None:
            bias = inputs.bias.double().requires_grad_()
            inputs = replace(inputs, bias=bias)
        coords, exists = self._used_coords(traits)

        def last(scores: Tensor, *_: Any) -> Tensor:
            if computed is not None:
                scores = _Replaced.apply(scores, computed.double())
            return scores.masked_fill(~exists, -torch.inf)

        own = features or features_of(traits)
        own = replace(own, epilogues=(*own.epilogues, last))
        # With k = 1, products are the scores themselves.
        one = torch.eye(raw.shape[3], dtype=raw.dtype).view(1, raw.shape[3], 1, -1)
        q, k = raw.transpose(1, 2), one.expand(raw.shape[0], -1, raw.shape[1], -1)
        out, lse, p, _ = attend(q, k, self.v.double(), 1.0, own, inputs, coords)
        (out * grad_out).sum().backward()
        assert raw.grad is not None
        dpsum = (out * grad_out).sum(-1).transpose(1, 2) * (1 - inputs.dropout_p)
        grad_bias = None if bias is None else bias.grad
        return Gradients(
            p.detach().clamp(min=0), raw.grad, grad_bias, lse.detach().float(), dpsum.detach().float()
        )

    def _used_coords(self, traits: Traits) -> tuple[reference.ScoreCoords, Tensor]:
        """Coordinates of all scores with each batch's lengths, and a mask of the scores within these lengths."""
        coords = self.coords(traits)
        batch = self.shape[0]
        used_q, used_k = self.lengths.seqused_q, self.lengths.seqused_k
        if used_q is not None:
            coords = replace(coords, seqlen_q=used_q.view(batch, 1, 1, 1))  # type: ignore[arg-type]
        if used_k is not None:
            coords = replace(coords, seqlen_k=used_k.view(batch, 1, 1, 1))  # type: ignore[arg-type]
        exists = (coords.query < coords.seqlen_q) & (coords.key < coords.seqlen_k)
        return coords, exists.expand(self.shape)


class _Replaced(torch.autograd.Function):
    """Replaces the values of scores, but passes their gradient through unchanged."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@dataclass(frozen=True)
class Gradients:
    """Expected results of a backward, and its row statistics.

    Attributes:
        p: float64 (batch, nheads, seqlen_q, seqlen_k), 0 where dropped, not divided by 1 - dropout_p.
        scores: float64, of p's shape: gradient of softmax_scale * q k^T.
        bias: float64, gradient of the bias, in the bias's shape before broadcasting; None without a bias.
        lse, dpsum: float32 (batch, nheads, seqlen_q), inputs of the backward.
    """

    p: Tensor
    scores: Tensor
    bias: Tensor | None
    lse: Tensor
    dpsum: Tensor
