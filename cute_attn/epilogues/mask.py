"""Masks: which keys a query sees. Sequence end, causal and windowed bands, aligned bottom right or top left."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Uint32, Uint64

from cute_attn.device.block_range import Band
from cute_attn.device.math import anew
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.traits import Traits


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

    @cute.jit
    def forward(self, state: Band, tile: ScoreTile, loaded=()) -> None:
        row0 = anew(tile.row0)  # or each row's bounds would wait in registers for the blocks that need them
        for r in cutlass.range_constexpr(len(tile.rows)):
            query = row0 + tile.rows[r]
            end = state.end_key(query) - tile.col0
            first = state.first_key(query) - tile.col0
            if cutlass.const_expr(state.has_right and _in_pairs(tile.cols)):
                _keep_by_bits(state, tile, r, first, end)
            else:
                _keep_by_comparison(state, tile, r, first, end)


@cute.jit
def _keep_by_comparison(state: Band, tile: ScoreTile, r: Constexpr, first: Int32, end: Int32) -> None:
    """Row r keeps its columns from ``first`` to ``end``. Rows with the same ends share their comparisons."""
    for c in cutlass.range_constexpr(len(tile.cols)):
        visible = tile.cols[c] < end
        if cutlass.const_expr(state.has_left):
            visible = visible & (tile.cols[c] >= first)
        tile.acc[r, c] = tile.acc[r, c] if visible else -Float32.inf


@cute.jit
def _keep_by_bits(state: Band, tile: ScoreTile, r: Constexpr, first: Int32, end: Int32) -> None:
    """The same by a word of bits, which becomes predicates seven at a time: an instruction and a bit an element."""
    for word in cutlass.range_constexpr(0, len(tile.cols), 32):
        visible = _ones_below(end, word)
        if cutlass.const_expr(state.has_left):
            visible = visible & ~_ones_below(first, word)
        for c in cutlass.range_constexpr(word, min(word + 32, len(tile.cols))):
            bit = visible & Uint32(1 << (c - word))
            tile.acc[r, c] = tile.acc[r, c] if bit != Uint32(0) else -Float32.inf


def _in_pairs(cols: tuple[int, ...]) -> bool:
    """Whether a thread holds two of every eight columns, as where one warp has all columns of a row."""
    return all(column == c // 2 * 8 + c % 2 for c, column in enumerate(cols))


def _ones_below(bound: Int32, word: int) -> Uint32:
    """A one for each of the 32 elements from ``word`` on, in pairs, whose column is below ``bound``."""
    bound = cutlass.min(cutlass.max(bound - word * 4, 0), 128)
    count = (bound >> 3) * 2 + cutlass.min(bound & 7, 2)
    return Uint32((Uint64(1) << Uint64(count)) - Uint64(1))
