"""Replay: work tiles whose speculation failed are computed again with exact online softmax."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

BARRIER = 15


@dataclass(frozen=True)
class WorkItemId:
    """A work tile: ``n`` counts the CTA's work tiles, ``index`` is its place in the order."""

    n: Int32
    index: Int32


@dataclass(frozen=True)
class Replay:
    """The failed work tiles of a CTA's current section.

    A work tile fails if a stale row maximum was too small. A section has at most ``SECTION - 1`` work tiles. At its
    end all threads synchronize, and failed work tiles are replayed with exact online softmax, which cannot fail.
    """

    # In shared memory, SECTION + 1 words: index of a failed work tile + 1, or 0; the last one: whether any failed.
    marks: cute.Tensor
    threads: Constexpr  # threads of the CTA that synchronize

    SECTION = 127
    BYTES = 4 * (SECTION + 1)

    @staticmethod
    def make(pointer: cute.Pointer, threads: int) -> "Replay":
        """Marks are at ``pointer``, in ``BYTES`` bytes of shared memory."""
        words = cute.recast_ptr(pointer, dtype=Int32)
        return Replay(cute.make_tensor(words, cute.make_layout(Replay.SECTION + 1)), threads)

    @cute.jit
    def clear(self, lane: Int32) -> None:
        """By one warp, before any :meth:`mark`: clear all marks."""
        for i in cutlass.range_constexpr(0, Replay.SECTION + 1, 32):
            self.marks[i + lane] = Int32(0)

    @cute.jit
    def mark(self, item: WorkItemId) -> None:
        """By any thread: mark a work tile as failed."""
        self.marks[item.n % Replay.SECTION] = item.index + 1
        self.marks[Replay.SECTION] = Int32(1)

    @cute.jit
    def sync(self) -> None:
        """Synchronize all threads, at the end of a section."""
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=self.threads)

    def any(self) -> Boolean:
        """After :meth:`sync`: True if any work tile failed."""
        return Boolean(self.marks[Replay.SECTION] != 0)

    def failed(self, place: Int32) -> Boolean:
        """After :meth:`sync`: True if the work tile marked at ``place`` failed."""
        return Boolean(self.marks[place] != 0)

    def index(self, place: Int32) -> Int32:
        """The index, in the schedule's order, of the failed work tile marked at ``place``."""
        return cute.arch.make_warp_uniform(self.marks[place]) - 1

    @cute.jit
    def reset(self, clears: Constexpr) -> None:
        """Clear all marks after the replay. All threads call this; ``clears`` is True in the one warp that clears."""
        self.sync()
        if cutlass.const_expr(clears):
            self.clear(cute.arch.lane_idx())
        self.sync()
