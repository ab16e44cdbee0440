"""dQ staged in shared memory: MMA warps write it, one warp adds it to global memory by bulk reductions."""

from dataclasses import dataclass

from cutlass import Constexpr, Int32, cute


@dataclass(frozen=True)
class DqStaging:
    """A single stage with a full and an empty mbarrier: all MMA warps produce a dQ block, one warp consumes it."""

    barriers: cute.Pointer  # 2 of 8 bytes

    @cute.jit
    def init(self, warps: Constexpr) -> None:
        """By one thread, before any wait: initialize the mbarriers; warps: number of producer warps."""
        cute.arch.mbarrier_init(self.barriers, warps)
        cute.arch.mbarrier_init(self.barriers + 1, 1)

    @cute.jit
    def producer_wait(self, n: Int32) -> None:
        """By a producer warp: wait until use n - 1 has been released."""
        cute.arch.mbarrier_wait(self.barriers + 1, (n & 1) ^ 1)

    @cute.jit
    def turn_wait(self, n: Int32) -> None:
        """By a warp that adds dQ from registers, in order, and not through the stage: wait for its n-th turn.

        The consumer warp grants the turn by its n-th release.
        """
        cute.arch.mbarrier_wait(self.barriers + 1, n & 1)

    @cute.jit
    def producer_commit(self) -> None:
        """By a producer warp: signal that its elements are written and each lane has issued the fence for the async
        proxy, or that the warp has added its elements itself."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers)

    @cute.jit
    def consumer_wait(self, n: Int32) -> None:
        """By the consumer warp: wait until use n is full."""
        cute.arch.mbarrier_wait(self.barriers, n & 1)

    @cute.jit
    def consumer_release(self) -> None:
        """By one thread of the consumer warp: signal that the stage has been read."""
        cute.arch.mbarrier_arrive(self.barriers + 1)
