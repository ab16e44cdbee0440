"""Each row's greatest score, for training that clips weights by it (QK-clip, Kimi K2, arXiv:2507.20534).

Scores are compared after all epilogues and masks, and without sinks. The softmax keeps the greatest score that a thread
has seen of each of its rows in a work tile, and the number in memory is raised to it once, by an atomic maximum. So it
does not matter which CTAs divide a row's keys, whether row maxima of the softmax are stale, or whether a work tile is
replayed.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, cute

from cute_attn.device.fakes import plain
from cute_attn.device.lanes import max_to
from cute_attn.device.math import fmax, quad_reduce
from cute_attn.device.score_tile import ScoreContext, ScoreMap
from cute_attn.epilogues.inputs import ScoreInputs


@dataclass(frozen=True)
class MaximaState:
    """Where a work tile's maxima are.

    Attributes:
        first: the address of query 0 of the tile's first head.
        head_step: elements from one head to the next.
        seqlen_q, heads_left: queries from seqlen_q on, and rows of heads from heads_left on, do not exist.
        score_scale: factor from accumulators to scores.
    """

    first: cute.Pointer
    head_step: Int64
    seqlen_q: Int32
    heads_left: Int32 | None
    score_scale: Float32


@dataclass(frozen=True)
class Maxima:
    """Raises fp32 numbers (batch, nheads, seqlen_q), or packed (nheads, total_q), to the rows' greatest scores."""

    varlen: bool

    def fake_args(self) -> tuple:
        """A fake tensor of the maxima."""
        return (plain(Float32, 2 if self.varlen else 3),)

    def host_args(self, inputs: ScoreInputs) -> tuple:
        """The maxima of one launch."""
        return (inputs.max_scores,)

    def begin(self, args: tuple, context: ScoreContext) -> MaximaState:
        """The addresses of a work tile."""
        (maxima,) = args
        head_step = Int64(maxima.stride[-2])
        start = Int64(context.head) * head_step
        if self.varlen:
            start += Int64(context.first_row)
        else:
            start += Int64(context.batch) * maxima.stride[0]
        own = (context.seqlen_q, context.heads_left, context.score_scale)
        return MaximaState(maxima.iterator + start, head_step, *own)

    @cute.jit
    def store(self, state: MaximaState, seen: cute.Tensor, score_map: ScoreMap, row0: Int32) -> None:
        """Raise the numbers in memory to those that the lanes of each row have ``seen``, (rows)."""
        for r in cutlass.range_constexpr(cute.size(seen)):
            largest = quad_reduce(seen[r], fmax)
            if cute.arch.lane_idx() % 4 == 0:
                self.store_row(state, largest, score_map, row0, r)

    @cute.jit
    def store_row(
        self, state: MaximaState, largest: Float32, score_map: ScoreMap, row0: Int32, r: Constexpr
    ) -> None:
        """Raise the number of row r of the map to ``largest``, if the row exists. row0: the tile's first query."""
        query = row0 + score_map.query(r)
        exists, place = query < state.seqlen_q, Int64(query)
        if cutlass.const_expr(score_map.heads > 1):
            exists = exists & (score_map.head(r) < state.heads_left)
            place += Int64(score_map.head(r)) * state.head_step
        if exists:
            max_to(state.first + place, largest * state.score_scale)
