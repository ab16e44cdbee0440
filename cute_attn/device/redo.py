"""Work that a block has to do again, because what it took for granted turned out wrong."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

from cute_attn.device.cluster import meet_cluster, store_in_cluster

SECTION = 127
"""How many deals are remembered at a time: a word of shared memory each, and one for all of them."""
BARRIER = 15


@dataclass(frozen=True)
class Redo:
    """Which of the last deals failed, known to all threads that meet.

    Deals go by sections. After each, everybody meets, and whatever failed is done again in a way that cannot fail.

    The blocks of a cluster, which load for each other, do again together what failed in one of them: marks are made
    in all of them, and all threads of the cluster that have not ended meet.
    """

    flags: cute.Tensor  # (SECTION + 1) words in shared memory, the last one for any
    threads: Constexpr  # how many meet, of a block
    cluster: Constexpr = 1

    @staticmethod
    def make(pointer: cute.Pointer, threads: int, cluster: int = 1) -> "Redo":
        """``pointer``: 512 bytes of shared memory."""
        words = cute.recast_ptr(pointer, dtype=Int32)
        return Redo(cute.make_tensor(words, cute.make_layout(SECTION + 1)), threads, cluster)

    @cute.jit
    def clear(self, lane: Int32) -> None:
        """By one warp, before anybody marks."""
        for i in cutlass.range_constexpr(0, SECTION + 1, 32):
            self.flags[i + lane] = Int32(0)

    @cute.jit
    def mark(self, deal: Int32) -> None:
        """By any thread: this deal failed."""
        if cutlass.const_expr(self.cluster == 1):
            self.flags[deal % SECTION] = Int32(1)
            self.flags[SECTION] = Int32(1)
        else:
            for rank in cutlass.range_constexpr(self.cluster):
                store_in_cluster(self.flags.iterator + deal % SECTION, Int32(1), Int32(rank))
                store_in_cluster(self.flags.iterator + SECTION, Int32(1), Int32(rank))

    @cute.jit
    def meet(self) -> None:
        """Wait for all, at the end of a section."""
        if cutlass.const_expr(self.cluster > 1):
            meet_cluster()
        else:
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
