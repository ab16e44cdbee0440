"""What warps of the Hopper backward that neither compute nor load have in common: they follow those that compute."""

from typing import Any, Protocol

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.board import KeyBlock
from cute_attn.kernels.backward_sm90_parts import Problem, Shared


class Follower(Protocol):
    """What such a warp does."""

    def head(self, place: KeyBlock, head: Int32) -> Any:
        """Begin a query head; the result is what its steps need."""

    def step(self, of_head: Any, place: KeyBlock, block: Int32, n: Int32) -> None:
        """A query block of that head, the running block's n-th step."""

    def leave(self) -> None:
        """A key block is done."""


@cute.jit
def follow(kernel: Constexpr, problem: Problem, shared: Shared, follower: Follower) -> None:
    """By one warp: all steps of the running block of threads, in the order in which they are computed."""
    group = problem.qheads_per_kvhead
    n, i = Int32(0), Int32(0)
    while shared.board.holds(i):
        place = shared.board.take(i, problem.seqlens)
        blocks = kernel.query_blocks(problem, place)
        for h in cutlass.range(group, unroll=1):
            of_head = follower.head(place, place.head_kv * group + h)
            for step in cutlass.range(blocks.begin, blocks.end, unroll=1):
                follower.step(of_head, place, blocks.turned(step), n)
                n += 1
        follower.leave()
        i += 1
