"""ALiBi: a penalty linear in the distance between query and key (Press et al., https://arxiv.org/abs/2108.12409)."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.device.fakes import plain
from cute_attn.device.math import fabs
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.inputs import ScoreInputs


@dataclass(frozen=True)
class AlibiState:
    """slopes: a view that starts at the work tile's batch and first head.

    last: the last head relative to the first; a tile may have rows for more heads. slope: the first head's slope times
    ``inv_score_scale``.
    """

    slopes: cute.Tensor
    last: Int32
    slope: Float32
    inv_score_scale: Float32
    shift: Int32


@dataclass(frozen=True)
class Alibi(Epilogue):
    """score - slope * |query + shift - key|. Slopes: fp32 (batch, nheads)."""

    name = "alibi"

    def fake_args(self) -> tuple:
        return (plain(Float32, 2),)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return (inputs.alibi_slopes,)

    def begin(self, args: tuple, context: ScoreContext) -> "AlibiState":
        (slopes,) = args
        own = cute.domain_offset((context.batch, context.head), slopes)
        last, slope = context.nheads - 1 - context.head, own[0, 0] * context.inv_score_scale
        return AlibiState(own, last, slope, context.inv_score_scale, context.shift)

    def load(self, state: "AlibiState", tile: ScoreTile) -> tuple[Float32, ...]:
        """The slope of each row in tiles of several heads; otherwise ()."""
        heads = (cutlass.min(head, state.last) for head in tile.heads or ())
        return tuple(state.slopes[0, head] * state.inv_score_scale for head in heads)

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
            # fp32 is exact up to 2^24; no useful slope leaves a probability at larger distances.
            distance = Float32(tile.row0 + tile.rows[r] + shift - tile.col0)
            for c in cutlass.range_constexpr(len(tile.cols)):
                tile.acc[r, c] = tile.acc[r, c] - slope * fabs(distance - Float32(tile.cols[c]))

    @cute.jit
    def _by_columns(self, state: "AlibiState", tile: ScoreTile) -> None:
        """Convert to fp32 once per column: that costs as much as four additions, and a thread has few columns."""
        slope, shift = state.slope, state.shift
        for c in cutlass.range_constexpr(len(tile.cols)):
            distance = Float32(tile.row0 + shift - tile.col0 - tile.cols[c])
            for r in cutlass.range_constexpr(len(tile.rows)):
                tile.acc[r, c] = tile.acc[r, c] - slope * fabs(distance + Float32(tile.rows[r]))

    def backward(self, state: "AlibiState", tile: ScoreTile, saved: Any) -> None:
        """Do nothing: the derivative with respect to the score is 1."""
