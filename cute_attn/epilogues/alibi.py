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

    @cute.jit
    def forward(self, state: tuple, tile: ScoreTile, loaded=()) -> None:
        slope, shift = state
        for r in cutlass.range_constexpr(len(tile.rows)):
            # Indices are exact in fp32: distances of 2^24 and more have no slope that leaves them any weight.
            distance = Float32(tile.row0 + tile.rows[r] + shift - tile.col0)
            for c in cutlass.range_constexpr(len(tile.cols)):
                tile.acc[r, c] = tile.acc[r, c] - slope * fabs(distance - Float32(tile.cols[c]))

    def backward(self, state: tuple, tile: ScoreTile, saved: Any) -> None:
        """What is added has no part in the score's own gradient."""
