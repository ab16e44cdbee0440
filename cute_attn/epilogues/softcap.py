"""Softcap: cap * tanh(score / cap) (Gemma 2, https://arxiv.org/abs/2408.00118)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_attn.device.math import TANH_UNIT, tanh_base2
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue


@dataclass(frozen=True)
class Softcap(Epilogue):
    """Leaves tanh in the tile: from here on a score's unit is the cap, which the context knows."""

    name = "softcap"

    def begin(self, args: tuple, context: ScoreContext) -> Float32:
        return context.softmax_scale * context.inv_unit * TANH_UNIT

    @cute.jit
    def forward(self, state: Float32, tile: ScoreTile, loaded=()) -> None:
        for r in cutlass.range_constexpr(len(tile.rows)):
            for c in cutlass.range_constexpr(len(tile.cols)):
                tile.acc[r, c] = tanh_base2(tile.acc[r, c] * state)
