"""Speculation's safety net: work tiles whose frozen row maxima turned out too small are computed again, exactly."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

BARRIER = 15


@dataclass(frozen=True)
class Replay:
    """Which of a CTA's last work tiles failed, known to all its threads after a barrier.

    A CTA takes its work tiles by sections of at most ``SECTION - 1``. After each, all threads meet, and whatever failed
    is computed again with exact online softmax, which cannot fail.
    """

    slots: (
        cute.Tensor
    )  # SECTION + 1 words in shared memory: index of a failed work tile + 1, or 0; the last: any
    threads: Constexpr  # of the CTA that meet

    SECTION = 127
    BYTES = 4 * (SECTION + 1)

    @staticmethod
    def make(pointer: cute.Pointer, threads: int) -> "Replay":
        """``pointer``: ``BYTES`` of shared memory."""
        words = cute.recast_ptr(pointer, dtype=Int32)
        return Replay(cute.make_tensor(words, cute.make_layout(Replay.SECTION + 1)), threads)

    @cute.jit
    def clear(self, lane: Int32) -> None:
        """By one warp, before any thread marks."""
        for i in cutlass.range_constexpr(0, Replay.SECTION + 1, 32):
            self.slots[i + lane] = Int32(0)

    @cute.jit
    def mark(self, n: Int32, index: Int32) -> None:
        """By any thread: the CTA's n-th work tile, of that index in the order, failed."""
        self.slots[n % Replay.SECTION] = index + 1
        self.slots[Replay.SECTION] = Int32(1)

    @cute.jit
    def meet(self) -> None:
        """Wait for all, at the end of a section."""
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=self.threads)

    def any(self) -> Boolean:
        """After a meeting: whether a work tile failed."""
        return Boolean(self.slots[Replay.SECTION] != 0)

    def failed(self, slot: Int32) -> Boolean:
        """After a meeting: whether the one in that slot did."""
        return Boolean(self.slots[slot] != 0)

    def index(self, slot: Int32) -> Int32:
        """Its index in the order."""
        return cute.arch.make_warp_uniform(self.slots[slot]) - 1

    @cute.jit
    def reset(self, lane: Int32, clears: Constexpr) -> None:
        """By all, once everything has been computed again; one warp ``clears``."""
        self.meet()
        if cutlass.const_expr(clears):
            self.clear(lane)
        self.meet()
