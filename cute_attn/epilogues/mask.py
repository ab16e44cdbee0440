"""Causal and sliding-window masks, aligned bottom right or top left, and the end of the sequence."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.device.math import rematerialize
from cute_attn.device.score_tile import Band, ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits

NO_QUERY = 1 << 30
"""A query index beyond all sequences."""


@dataclass(frozen=True)
class Mask(Epilogue):
    """Scores outside the band become -inf. Kernels apply it only to key blocks that an edge of the band crosses."""

    causal: bool
    windowed: bool

    @staticmethod
    def of(traits: Traits) -> "Mask":
        """The mask for ``traits``; if neither causal nor windowed, it masks only keys beyond the sequence."""
        return Mask(traits.causal, traits.windowed)

    def fake_args(self) -> tuple:
        return (Int32(0), Int32(0)) if self.windowed else ()

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return (inputs.window_left, inputs.window_right) if self.windowed else ()

    def begin(self, args: tuple, context: ScoreContext) -> Band:
        if self.windowed:
            left, right = args
            bounds = (context.shift - left, context.shift + right + 1, context.seqlen_k)
            return Band(True, True, *bounds, context.first_key)
        return Band(False, self.causal, Int32(0), context.shift + 1, context.seqlen_k, context.first_key)

    def forward(self, state: Band, tile: ScoreTile, loaded=()) -> None:
        """Compute bounds once per column if transposed, else once per row: whichever a thread has fewer of."""
        if tile.transposed:
            self._bound_queries(state, tile)
        else:
            self._bound_keys(state, tile)

    @cute.jit
    def _bound_keys(self, state: Band, tile: ScoreTile) -> None:
        row0 = rematerialize(tile.row0)  # otherwise bounds occupy registers through the unmasked blocks
        for r in cutlass.range_constexpr(len(tile.rows)):
            query = row0 + tile.rows[r]
            end = state.end_key(query) - tile.col0
            first = state.first_key(query) - tile.col0
            for c in cutlass.range_constexpr(len(tile.cols)):
                visible = tile.cols[c] < end
                if cutlass.const_expr(state.has_first):
                    visible = visible & (tile.cols[c] >= first)
                tile.acc[r, c] = tile.acc[r, c] if visible else -Float32.inf

    @cute.jit
    def _bound_queries(self, state: Band, tile: ScoreTile) -> None:
        col0 = rematerialize(tile.col0)
        for c in cutlass.range_constexpr(len(tile.cols)):
            key = col0 + tile.cols[c]
            first = state.first_query(key) - tile.row0 if key < state.seqlen_k else Int32(NO_QUERY)
            end = state.end_query(key, Int32(NO_QUERY)) - tile.row0
            for r in cutlass.range_constexpr(len(tile.rows)):
                visible = tile.rows[r] >= first
                if cutlass.const_expr(state.has_left):
                    visible = visible & (tile.rows[r] < end)
                tile.acc[r, c] = tile.acc[r, c] if visible else -Float32.inf

    def backward(self, state: Band, tile: ScoreTile, saved: Any) -> None:
        """Do nothing: P is 0 at masked keys, and so is the gradient."""
