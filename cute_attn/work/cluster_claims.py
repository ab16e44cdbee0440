"""Work tiles for clusters of two CTAs: the first CTA claims for both."""

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Int32, cute

from cute_attn.work.query_tiles import WorkClaims


@dataclass(frozen=True)
class ClusterClaims:
    """Claims work tiles for a cluster: the first CTA's producer warp tells the second CTA's via shared memory."""

    told: cute.Pointer  # 4 bytes in shared memory, of the second CTA
    barriers: (
        cute.Pointer
    )  # 2 of 8 bytes: the second CTA's says that ``told`` is full, the first one's that it is empty

    BYTES: ClassVar[int] = 4

    def init(self) -> None:
        """By one thread of each CTA, before the cluster's first barrier: initialize the mbarriers."""
        cute.arch.mbarrier_init(self.barriers, 1)
        cute.arch.mbarrier_init(self.barriers + 1, 1)

    @cute.jit
    def claim(self, claims: WorkClaims, i: Int32) -> Int32:
        """Claim a work tile, the cluster's i-th claim, and return its index; the first tile needs no claim."""
        position = Int32(0)
        full, empty = self.barriers, self.barriers + 1
        if cute.arch.block_idx_in_cluster() == 0:
            claimed = cute.arch.shuffle_sync(claims.claim(), 0)
            position = cute.arch.grid_dim()[0] // cute.arch.cluster_size() + claimed
            cute.arch.mbarrier_wait(empty, (i & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.store_async_dsmem(self.told, position, full, 1)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.BYTES)
            cute.arch.mbarrier_wait(full, i & 1)
            position = cute.make_tensor(self.told, cute.make_layout(1))[0]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty, 0)
        return cute.arch.make_warp_uniform(position)
