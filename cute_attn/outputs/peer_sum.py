"""Sums of the partial sums of two CTAs of a cluster, exchanged through each other's shared memory."""

from dataclasses import dataclass

from cutlass import Constexpr, Int32, cute

from cute_attn.outputs.accumulate import load_fragment, send_fragment

VECTOR = 4
"""fp32 numbers of one asynchronous store."""


@cute.jit
def cluster_barrier() -> None:
    """Wait for all threads of the cluster that have not exited, and for their writes."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@dataclass(frozen=True)
class PeerSum:
    """Register fragments of a CTA plus those of its peer, thread by thread; both CTAs get the same bits.

    Each thread stores its fragment to the peer's memory asynchronously. The stores count their bytes at the peer's
    mbarrier; its n-th phase is the n-th sum.

    There is one stage, and no barrier that says it is empty: a CTA computes two sums in turn, s and t. It sends to t
    once it has received s, which its peer sent after it had read the last t; likewise to the next s once it has
    received t.
    """

    received: cute.Pointer  # the peer's fragments in shared memory, in the order of ``outputs.accumulate``
    barrier: cute.Pointer  # 8 bytes
    num_bytes: Constexpr

    def init(self) -> None:
        """By one thread, before the first :func:`cluster_barrier`."""
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
        """Wait for the peer's n-th fragments, and add this thread's to ``acc``."""
        cute.arch.mbarrier_wait(self.barrier, n & 1)
        load_fragment(acc, self.received, thread, VECTOR, more=True)
