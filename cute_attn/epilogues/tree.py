"""A mask over the last keys for trees of draft tokens, in speculative decoding.

A sequence's queries are its last keys: the tokens of a tree, each after its parent. A query sees all keys before the
tree, and the tokens whose bits are set in its row of bits: its ancestors and itself (Miao et al. 2023,
https://arxiv.org/abs/2305.09781).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.device.fakes import plain
from cute_attn.device.score_tile import ScoreContext, ScoreTile
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.inputs import ScoreInputs


@dataclass(frozen=True)
class TreeState:
    """The sequence's rows of bits; bit j - shift of a row is for key j."""

    bits: cute.Tensor  # int32 (rows, words)
    last_query: Int32
    last_bit: Int32
    shift: Int32


@dataclass(frozen=True)
class Tree(Epilogue):
    """Scores of the sequence's last seqlen_q keys become -inf where the query's bit is 0. Bits: int32 (total_q, words).

    Only key blocks that overlap these keys cost time.
    """

    name = "tree"

    def fake_args(self) -> tuple:
        return (plain(Int32, 2),)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        return (inputs.tree_mask,)

    def begin(self, args: tuple, context: ScoreContext) -> TreeState:
        (bits,) = args
        first = Int64(context.first_row) * bits.stride[0]
        own = cute.make_tensor(bits.iterator + first, bits.layout)
        last, bits_of_row = context.seqlen_q - 1, 32 * bits.shape[1]
        return TreeState(own, last, cutlass.min(last, bits_of_row - 1), context.shift)

    @cute.jit
    def forward(self, state: TreeState, tile: ScoreTile, loaded=()) -> None:
        last_column = tile.col0 + max(tile.cols)
        if last_column >= state.shift:
            for r in cutlass.range_constexpr(len(tile.rows)):
                query = cutlass.min(tile.row0 + tile.rows[r], state.last_query)
                start = Int64(query) * state.bits.stride[0]
                words = cute.make_tensor(state.bits.iterator + start, cute.make_layout(state.bits.shape[1]))
                for c in cutlass.range_constexpr(len(tile.cols)):
                    draft = tile.col0 + tile.cols[c] - state.shift
                    existing = cutlass.max(cutlass.min(draft, state.last_bit), 0)
                    bit = (words[existing // 32] >> (existing % 32)) & Int32(1)
                    visible = (draft < 0) | (bit != 0)
                    tile.acc[r, c] = tile.acc[r, c] if visible else -Float32.inf
