"""Results that leave by way of shared memory, sent by a warp that does nothing else."""

from dataclasses import dataclass

from cutlass import Constexpr, Int32, cute


@dataclass(frozen=True)
class DqStaging:
    """One buffer in shared memory that computing warps fill together and one warp sends; two mbarriers: full, empty."""

    barriers: cute.Pointer  # 2 of 8 bytes

    @cute.jit
    def init(self, warps: Constexpr) -> None:
        """By one thread, before anybody waits; warps: that fill."""
        cute.arch.mbarrier_init(self.barriers, warps)
        cute.arch.mbarrier_init(self.barriers + 1, 1)

    @cute.jit
    def producer_wait(self, n: Int32) -> None:
        """By a warp that fills: until filling n - 1 has been sent."""
        cute.arch.mbarrier_wait(self.barriers + 1, (n & 1) ^ 1)

    @cute.jit
    def producer_commit(self) -> None:
        """By a warp that fills: its part is there, and all its lanes have fenced it for the asynchronous proxy."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers)

    @cute.jit
    def consumer_wait(self, n: Int32) -> None:
        """By the warp that sends: until filling n is there."""
        cute.arch.mbarrier_wait(self.barriers, n & 1)

    @cute.jit
    def consumer_release(self) -> None:
        """By one thread of the warp that sends: what it waited for has been read."""
        cute.arch.mbarrier_arrive(self.barriers + 1)
