"""What warps of the Hopper backward that neither compute nor load have in common: they follow those that compute."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.board import KeyBlock
from cute_attn.kernels.backward_sm90.params import Problem, Shared


@dataclass(frozen=True)
class WarpRole:
    """One such warp; what it does, a subclass says."""

    kernel: Constexpr
    problem: Problem
    shared: Shared

    def begin_head(self, place: KeyBlock, head: Int32) -> Any:
        """Begin a query head; the result is what its steps need."""
        raise NotImplementedError

    def step(self, of_head: Any, place: KeyBlock, block: Int32, n: Int32) -> None:
        """A query block of that head, the running block's n-th step."""
        raise NotImplementedError

    def finish_tile(self) -> None:
        """A key block is done."""

    @cute.jit
    def run(self) -> None:
        """All steps of the running block of threads, in the order in which they are computed."""
        board, seqlens, group = self.shared.board, self.problem.seqlens, self.problem.qheads_per_kvhead
        n, i = Int32(0), Int32(0)
        while board.holds(i):
            place = board.take(i, seqlens)
            blocks = self.kernel.query_blocks(self.problem, place)
            for h in cutlass.range(group, unroll=1):
                of_head = self.begin_head(place, place.head_kv * group + h)
                for step in cutlass.range(blocks.begin, blocks.end, unroll=1):
                    self.step(of_head, place, blocks.turned(step), n)
                    n += 1
            self.finish_tile()
            i += 1
