"""Work that a block has to do again, because what it took for granted turned out wrong."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

SECTION = 127
"""How many deals are remembered at a time: a word of shared memory each, and one for all of them."""
BARRIER = 15


@dataclass(frozen=True)
class Redo:
    """Which of the last deals failed, known to all threads that meet.

    Deals go by sections. After each, everybody meets, and whatever failed is done again in a way that cannot fail.
    """

    flags: cute.Tensor  # (SECTION + 1) words in shared memory, the last one for any
    threads: Constexpr  # how many meet

    @staticmethod
    def make(pointer: cute.Pointer, threads: int) -> "Redo":
        """``pointer``: 512 bytes of shared memory."""
        words = cute.recast_ptr(pointer, dtype=Int32)
        return Redo(cute.make_tensor(words, cute.make_layout(SECTION + 1)), threads)

    @cute.jit
    def clear(self, lane: Int32) -> None:
        """By one warp, before anybody marks."""
        for i in cutlass.range_constexpr(0, SECTION + 1, 32):
            self.flags[i + lane] = Int32(0)

    @cute.jit
    def mark(self, deal: Int32) -> None:
        """By any thread: this deal failed."""
        self.flags[deal % SECTION] = Int32(1)
        self.flags[SECTION] = Int32(1)

    @cute.jit
    def meet(self) -> None:
        """Wait for all, at the end of a section."""
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=self.threads)

    def any(self) -> Boolean:
        """After a meeting: whether there is something to do again."""
        return Boolean(self.flags[SECTION] != 0)

    def failed(self, deal: Int32) -> Boolean:
        """After a meeting: whether this deal failed."""
        return Boolean(self.flags[deal % SECTION] != 0)

    @cute.jit
    def forget(self, lane: Int32, clears: Constexpr) -> None:
        """By all, once everything has been done again; one warp ``clears``."""
        self.meet()
        if cutlass.const_expr(clears):
            self.clear(lane)
        self.meet()
