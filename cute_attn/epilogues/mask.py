"""Masks: which keys a query sees. Sequence end, causal and windowed bands, aligned bottom right or top left."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.device.band import Band
from cute_attn.device.math import rematerialize
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits

NO_QUERY = 1 << 30
"""A query's index that no sequence reaches."""


@dataclass(frozen=True)
class Mask(Epilogue):
    """Scores outside the band become -inf. Applied only to blocks that the band's edge crosses."""

    causal: bool
    windowed: bool

    @staticmethod
    def of(traits: Traits) -> "Mask":
        """The mask that traits ask for; without a band it is the sequence's end alone."""
        return Mask(traits.causal, traits.windowed)

    def fake_args(self) -> tuple:
        return (Int32(0), Int32(0)) if self.windowed else ()

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return (inputs.window_left, inputs.window_right) if self.windowed else ()

    def begin(self, args: tuple, context: ScoreContext) -> Band:
        if self.windowed:
            left, right = args
            return Band(True, True, context.shift - left, context.shift + right + 1, context.seqlen_k)
        return Band(False, self.causal, Int32(0), context.shift + 1, context.seqlen_k)

    def forward(self, state: Band, tile: ScoreTile, loaded=()) -> None:
        """Bounds are taken along the axis of which a thread has fewer: keys of a row, or queries of a column."""
        if tile.transposed:
            self._bound_queries(state, tile)
        else:
            self._bound_keys(state, tile)

    @cute.jit
    def _bound_keys(self, state: Band, tile: ScoreTile) -> None:
        row0 = rematerialize(
            tile.row0
        )  # or each row's bounds would wait in registers for the blocks that need them
        for r in cutlass.range_constexpr(len(tile.rows)):
            query = row0 + tile.rows[r]
            end = state.end_key(query) - tile.col0
            first = state.first_key(query) - tile.col0
            for c in cutlass.range_constexpr(len(tile.cols)):
                visible = tile.cols[c] < end
                if cutlass.const_expr(state.has_left):
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
        """Where the mask hides a key, P is 0 and with it the gradient."""
