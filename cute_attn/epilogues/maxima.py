"""Each row's greatest score, for training that clips weights by it (QK-clip, Kimi K2, arXiv:2507.20534).

Scores are compared after all epilogues and masks, and without sinks. A thread keeps the greatest score that it has seen
of each of its rows in a work tile, and raises the number in memory to it once, by an atomic maximum. So it does not
matter which CTAs divide a row's keys, whether row maxima of the softmax are stale, or whether a work tile is replayed.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cute_attn.device.fakes import plain
from cute_attn.device.lanes import max_to
from cute_attn.device.math import fmax, on_device, quad_reduce
from cute_attn.device.score_tile import ScoreContext, ScoreMap, ScoreTile
from cute_attn.epilogues.inputs import ScoreInputs

_MOST_ROWS = 32
"""At least as many rows as a thread of any kernel has in a score tile; registers of the others do not exist."""


@dataclass(frozen=True)
class MaximaState:
    """A work tile's maxima.

    Attributes:
        first: the address of query 0 of the tile's first head.
        head_step: elements from one head to the next.
        seqlen_q, heads_left: queries from seqlen_q on, and rows of heads from heads_left on, do not exist.
        score_scale: factor from accumulators to scores.
        largest: the greatest of the thread's accumulators of each row in the current score tile.
        seen: the greatest one so far. Both are None on the host, where all threads have one state.
    """

    first: cute.Pointer
    head_step: Int64
    seqlen_q: Int32
    heads_left: Int32 | None
    score_scale: Float32
    largest: Any  # cute.Tensor | None
    seen: Any


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
        """The state of a work tile whose thread has seen no score."""
        (maxima,) = args
        head_step = Int64(maxima.stride[-2])
        start = Int64(context.head) * head_step
        if self.varlen:
            start += Int64(context.first_row)
        else:
            start += Int64(context.batch) * maxima.stride[0]
        largest = seen = None
        if on_device():
            largest, seen = (cute.make_rmem_tensor(cute.make_layout(_MOST_ROWS), Float32) for _ in range(2))
            seen.fill(-Float32.inf)
        own = (context.seqlen_q, context.heads_left, context.score_scale, largest, seen)
        return MaximaState(maxima.iterator + start, head_step, *own)

    @cute.jit
    def forward(self, state: MaximaState, tile: ScoreTile) -> None:
        """Note the greatest score of each row of a tile; its scores do not change."""
        for r in cutlass.range_constexpr(len(tile.rows)):
            largest = [tile.acc[r, c] for c in range(min(4, len(tile.cols)))]
            for c in cutlass.range_constexpr(len(largest), len(tile.cols)):
                largest[c % 4] = fmax(largest[c % 4], tile.acc[r, c])
            for other in cutlass.range_constexpr(1, len(largest)):
                largest[0] = fmax(largest[0], largest[other])
            if cutlass.const_expr(state.seen is None):
                head = None if cutlass.const_expr(tile.heads is None) else tile.heads[r]
                self._raise(state, tile.row0 + tile.rows[r], head, largest[0])
            else:
                state.largest[r] = largest[0]
                state.seen[r] = fmax(state.seen[r], largest[0])

    @cute.jit
    def store(self, state: MaximaState, score_map: ScoreMap, row0: Int32) -> None:
        """Raise the numbers in memory to the greatest scores that the lanes of each row have seen."""
        for r in cutlass.range_constexpr(len(score_map.modes.rows)):
            largest = quad_reduce(state.seen[r], fmax)
            if cute.arch.lane_idx() % 4 == 0:
                head = score_map.head(r) if cutlass.const_expr(score_map.heads > 1) else None
                self._raise(state, row0 + score_map.query(r), head, largest)

    @cute.jit
    def _raise(self, state: MaximaState, query: Int32, head: Any, largest: Float32) -> None:
        """head: relative to the tile's first one; None in tiles of one head."""
        exists, place = query < state.seqlen_q, Int64(query)
        if cutlass.const_expr(head is not None):
            exists = exists & (head < state.heads_left)
            place += Int64(head) * state.head_step
        if exists:
            max_to(state.first + place, largest * state.score_scale)
