"""dQ staged in shared memory: MMA warps write it, one warp adds it to global memory by bulk reductions."""

from dataclasses import dataclass

from cutlass import Constexpr, Int32, cute

from cute_attn.device.pipeline import Pipeline


@dataclass(frozen=True)
class DqStaging(Pipeline):
    """A pipeline with a single stage: all MMA warps produce a dQ block, one warp consumes it.

    A producer commits once its elements are written and each lane has issued the fence for the async proxy, or once the
    warp has added its elements itself.
    """

    num_stages: Constexpr = 1
    stage_bytes: Constexpr = 0

    @cute.jit
    def turn_wait(self, n: Int32) -> None:
        """By a warp that adds dQ from registers, in order, and not through the stage: wait for its n-th turn.

        The consumer warp grants the turn by its n-th release.
        """
        cute.arch.mbarrier_wait(self.empty_barrier(n), self.parity(n))

    @cute.jit
    def release_by_one(self) -> None:
        """By one thread of the consumer warp: signal that the stage has been read."""
        cute.arch.mbarrier_arrive(self.empty_barrier(Int32(0)))
