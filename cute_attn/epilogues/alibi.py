"""ALiBi: a penalty linear in the distance between query and key (Press et al., https://arxiv.org/abs/2108.12409)."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from cute_attn.device.math import fabs
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.inputs import ScoreInputs


@dataclass(frozen=True)
class AlibiState:
    """One work tile's slopes, from its batch and first head on, and the first of them in the tile's unit."""

    slopes: cute.Tensor
    slope: Float32
    inv_score_scale: Float32
    shift: Int32


@dataclass(frozen=True)
class Alibi(Epilogue):
    """score - slope * |query + shift - key|, a slope for each batch and head."""

    name = "alibi"

    def fake_args(self) -> tuple:
        shape = (cute.sym_int(), cute.sym_int())
        return (make_fake_tensor(Float32, shape, stride=(cute.sym_int64(), 1)),)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return (inputs.alibi_slopes,)

    def begin(self, args: tuple, context: ScoreContext) -> "AlibiState":
        (slopes,) = args
        own = cute.domain_offset((context.batch, context.head), slopes)
        return AlibiState(own, own[0, 0] * context.inv_score_scale, context.inv_score_scale, context.shift)

    def load(self, state: "AlibiState", tile: ScoreTile) -> tuple[Float32, ...]:
        """The rows' own slopes, where they have several heads."""
        return tuple(state.slopes[0, head] * state.inv_score_scale for head in tile.heads or ())

    def forward(self, state: "AlibiState", tile: ScoreTile, loaded: tuple[Float32, ...] = ()) -> None:
        if tile.transposed:
            self._by_columns(state, tile)
        else:
            self._by_rows(state, tile, loaded or (state.slope,) * len(tile.rows))

    @cute.jit
    def _by_rows(self, state: "AlibiState", tile: ScoreTile, slopes: tuple) -> None:
        shift = state.shift
        for r in cutlass.range_constexpr(len(tile.rows)):
            slope = slopes[r]
            # Indices are exact in fp32: distances of 2^24 and more have no slope that leaves them any weight.
            distance = Float32(tile.row0 + tile.rows[r] + shift - tile.col0)
            for c in cutlass.range_constexpr(len(tile.cols)):
                tile.acc[r, c] = tile.acc[r, c] - slope * fabs(distance - Float32(tile.cols[c]))

    @cute.jit
    def _by_columns(self, state: "AlibiState", tile: ScoreTile) -> None:
        """A conversion to fp32 takes as long as four additions, so one for each of the columns, which are few."""
        slope, shift = state.slope, state.shift
        for c in cutlass.range_constexpr(len(tile.cols)):
            distance = Float32(tile.row0 + shift - tile.col0 - tile.cols[c])
            for r in cutlass.range_constexpr(len(tile.rows)):
                tile.acc[r, c] = tile.acc[r, c] - slope * fabs(distance + Float32(tile.rows[r]))

    def backward(self, state: "AlibiState", tile: ScoreTile, saved: Any) -> None:
        """What is added has no part in the score's own gradient."""
