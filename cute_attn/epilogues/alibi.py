"""ALiBi: a penalty linear in the distance between query and key (Press et al., https://arxiv.org/abs/2108.12409)."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_tensor

from cute_attn.device.math import fabs
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.inputs import ScoreInputs


@dataclass(frozen=True)
class Alibi(Epilogue):
    """score - slope * |query + shift - key|, a slope for each batch and head."""

    name = "alibi"

    def fake_args(self) -> tuple:
        shape = (cute.sym_int(), cute.sym_int())
        return (make_fake_tensor(Float32, shape, stride=(cute.sym_int64(), 1)),)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return (inputs.alibi_slopes,)

    def begin(self, args: tuple, context: ScoreContext) -> tuple:
        (slopes,) = args
        return (slopes[context.batch, context.head] * context.inv_unit, context.shift)

    def forward(self, state: tuple, tile: ScoreTile, loaded=()) -> None:
        if tile.transposed:
            self._by_columns(state, tile)
        else:
            self._by_rows(state, tile)

    @cute.jit
    def _by_rows(self, state: tuple, tile: ScoreTile) -> None:
        slope, shift = state
        for r in cutlass.range_constexpr(len(tile.rows)):
            # Indices are exact in fp32: distances of 2^24 and more have no slope that leaves them any weight.
            distance = Float32(tile.row0 + tile.rows[r] + shift - tile.col0)
            for c in cutlass.range_constexpr(len(tile.cols)):
                tile.acc[r, c] = tile.acc[r, c] - slope * fabs(distance - Float32(tile.cols[c]))

    @cute.jit
    def _by_columns(self, state: tuple, tile: ScoreTile) -> None:
        """A conversion to fp32 takes as long as four additions, so one for each of the columns, which are few."""
        slope, shift = state
        for c in cutlass.range_constexpr(len(tile.cols)):
            distance = Float32(tile.row0 + shift - tile.col0 - tile.cols[c])
            for r in cutlass.range_constexpr(len(tile.rows)):
                tile.acc[r, c] = tile.acc[r, c] - slope * fabs(distance + Float32(tile.rows[r]))

    def backward(self, state: tuple, tile: ScoreTile, saved: Any) -> None:
        """What is added has no part in the score's own gradient."""
