"""Adds the partial sums of two CTAs of a cluster, exchanged through each other's shared memory."""

from dataclasses import dataclass

from cutlass import Constexpr, Int32, cute

from cute_attn.outputs.accumulate import load_fragment, send_fragment

VECTOR = 4
"""Number of fp32 values that one asynchronous store writes."""


@cute.jit
def cluster_barrier() -> None:
    """Wait for all threads of the cluster that have not exited, and for their writes."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@dataclass(frozen=True)
class PeerSum:
    """Adds the register fragments of a CTA and its peer, thread by thread; both CTAs get the same bits.

    Each thread stores its fragment to the peer's memory asynchronously. The stores count their bytes at the peer's
    mbarrier; its n-th phase is the n-th sum.

    There is one stage per sum, without an empty barrier, because a CTA computes two sums, s and t, in turn. It sends
    to t once it has received s, and the peer sent s after it had read the previous t. In the same way, it sends to the
    next s once it has received t.
    """

    received: cute.Pointer  # the peer's fragments in shared memory, in the order of ``outputs.accumulate``
    barrier: cute.Pointer  # 8 bytes
    num_bytes: Constexpr

    def init(self) -> None:
        """By one thread, before the first :func:`cluster_barrier`: initialize the mbarrier."""
        cute.arch.mbarrier_init(self.barrier, 1)

    @cute.jit
    def send(self, acc: cute.Tensor, thread: Int32) -> None:
        """By all threads that hold fragments: start storing them to the peer's memory."""
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.barrier, self.num_bytes)
        peer = cute.arch.block_idx_in_cluster() ^ 1
        received, barrier = (cute.arch.map_dsmem_ptr(x, peer) for x in (self.received, self.barrier))
        send_fragment(acc, received.toint(), barrier.toint(), thread, VECTOR)

    @cute.jit
    def add(self, acc: cute.Tensor, thread: Int32, n: Int32) -> None:
        """Wait for the peer's n-th fragments, and add this thread's fragment to ``acc``."""
        cute.arch.mbarrier_wait(self.barrier, n & 1)
        load_fragment(acc, self.received, thread, VECTOR, more=True)
