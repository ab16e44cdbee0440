"""Buffers that one warp fills by TMA while others read them, and the order in which warpgroups take turns.

The n-th filling of a ring goes to stage n % num_stages. Who fills and who reads count alike, so that nothing but a
number has to be carried along.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute


@dataclass(frozen=True)
class Pipeline:
    """``num_stages`` buffers in shared memory, each with an mbarrier that says it is full and one that it is free."""

    barriers: cute.Pointer  # 2 * num_stages of 8 bytes: full ones, then free ones
    num_stages: Constexpr
    stage_bytes: Constexpr  # what TMA brings each time
    per_lane_arrivals: Constexpr = False  # filled and released by all lanes, see ``_tell``

    def __post_init__(self) -> None:
        assert not self.per_lane_arrivals or not self.stage_bytes, "TMA is started by one lane"

    @staticmethod
    def barrier_bytes(num_stages: int) -> int:
        """Shared memory for the barriers."""
        return 16 * num_stages

    @cute.jit
    def init(self, readers: Constexpr, fillers: Constexpr = 1) -> None:
        """By one thread, before anybody waits: ``readers`` warps of each block will release each filling.

        fillers: warps that say it is full; one where TMA fills.
        """
        lanes = 32 if self.per_lane_arrivals else 1
        for stage in cutlass.range_constexpr(self.num_stages):
            cute.arch.mbarrier_init(self.barriers + stage, fillers * lanes)
            cute.arch.mbarrier_init(self.barriers + self.num_stages + stage, readers * lanes)

    def stage(self, n: Int32) -> Int32:
        """Where filling n lies."""
        if self.num_stages == 1:
            return Int32(0)
        if self.num_stages & (self.num_stages - 1) == 0:
            return n & (self.num_stages - 1)
        return n % self.num_stages

    def parity(self, n: Int32) -> Int32:
        """How often, modulo 2, filling n's stage had been filled before."""
        if self.num_stages & (self.num_stages - 1) == 0:
            return (n >> (self.num_stages.bit_length() - 1)) & 1
        return (n // self.num_stages) & 1

    def full_barrier(self, n: Int32) -> cute.Pointer:
        """The barrier that filling n arrives at."""
        return self.barriers + self.stage(n)

    def empty_barrier(self, n: Int32) -> cute.Pointer:
        """The barrier that filling n's readers arrive at."""
        return self.barriers + self.num_stages + self.stage(n)

    @cute.jit
    def producer_acquire(self, n: Int32) -> None:
        """By the filling warp: wait until the stage is free, and announce the bytes that are about to come."""
        self.producer_wait(n)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full_barrier(n), self.stage_bytes)

    @cute.jit
    def producer_wait(self, n: Int32) -> None:
        """By a filling warp: until the stage is free."""
        cute.arch.mbarrier_wait(self.empty_barrier(n), self.parity(n) ^ 1)

    @cute.jit
    def producer_commit(self, n: Int32) -> None:
        """By every filling warp, where lanes fill instead of TMA: what they have written may be read."""
        self._arrive(self.full_barrier(n))

    @cute.jit
    def consumer_wait(self, n: Int32) -> None:
        """By a reader: wait until filling n is there."""
        cute.arch.mbarrier_wait(self.full_barrier(n), self.parity(n))

    @cute.jit
    def consumer_release(self, n: Int32) -> None:
        """By every warp that reads: done with filling n. Not of a ring ``per_lane_arrivals``."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty_barrier(n))

    @cute.jit
    def consumer_release_reads(self, n: Int32) -> None:
        """As ``release``, by a warp whose lanes have read filling n themselves: what each has read comes before."""
        self._arrive(self.empty_barrier(n))

    @cute.jit
    def _arrive(self, barrier: cute.Pointer) -> None:
        """By a warp: what its lanes have done comes before what they do who wait for the barrier.

        One lane arrives once all are there. With ``per_lane_arrivals`` each arrives for itself: where lanes write what others
        read, racecheck follows only that, as it overlooks that a warp's lanes wait for each other before one arrives.
        """
        if cutlass.const_expr(self.per_lane_arrivals):
            cute.arch.mbarrier_arrive(barrier)
        else:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier)


@dataclass(frozen=True)
class SharedDoubleBuffer:
    """Two buffers in shared memory that all warps fill together and all read, with an mbarrier each: it is full.

    The n-th filling goes to stage n % 2. Nobody has to say that a stage is free, if every warp waits for every filling,
    and arrives at one only when it has read the one before: whoever has waited for filling n - 1 knows that all have
    read n - 2, and may overwrite it. As far as that allows, warps may drift apart.
    """

    barriers: cute.Pointer  # 2 of 8 bytes

    @cute.jit
    def init(self, warps: Constexpr) -> None:
        """By one thread, before anybody waits."""
        for stage in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(self.barriers + stage, warps)

    @cute.jit
    def arrive(self, n: Int32) -> None:
        """By every warp: what it has to write of filling n is written, and may be read by wgmma."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers + (n & 1))

    @cute.jit
    def wait(self, n: Int32) -> None:
        """By every warp: until all have arrived at filling n."""
        cute.arch.mbarrier_wait(self.barriers + (n & 1), (n >> 1) & 1)


WARPGROUP = 128
FIRST_PING_PONG_BARRIER = 1  # named barrier 0 is the whole block's
FIRST_WARPGROUP_BARRIER = 5


@dataclass(frozen=True)
class PingPong:
    """Warpgroups issue their products one after the other, so that one's softmax runs beside another's products."""

    warpgroup: Int32
    warpgroups: Constexpr
    enabled: Constexpr

    @cute.jit
    def start(self) -> None:
        """Once, by all: the first warpgroup's turn."""
        if cutlass.const_expr(self.enabled):
            if self.warpgroup == self.warpgroups - 1:
                cute.arch.barrier_arrive(barrier_id=FIRST_PING_PONG_BARRIER, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def sync(self) -> None:
        """Wait for this warpgroup's turn."""
        if cutlass.const_expr(self.enabled):
            cute.arch.barrier(
                barrier_id=FIRST_PING_PONG_BARRIER + self.warpgroup, number_of_threads=2 * WARPGROUP
            )

    @cute.jit
    def pass_on(self) -> None:
        """Pass the turn on."""
        if cutlass.const_expr(self.enabled):
            following = Int32(0) if self.warpgroup == self.warpgroups - 1 else self.warpgroup + 1
            cute.arch.barrier_arrive(
                barrier_id=FIRST_PING_PONG_BARRIER + following, number_of_threads=2 * WARPGROUP
            )

    @cute.jit
    def finish(self) -> None:
        """Once, by all, at the very end: take back the turn that is still open."""
        if cutlass.const_expr(self.enabled):
            if self.warpgroup == 0:
                cute.arch.barrier(barrier_id=FIRST_PING_PONG_BARRIER, number_of_threads=2 * WARPGROUP)


@cute.jit
def warpgroup_barrier(warpgroup: Int32) -> None:
    """All threads of one warpgroup."""
    cute.arch.barrier(barrier_id=FIRST_WARPGROUP_BARRIER + warpgroup, number_of_threads=WARPGROUP)


@cute.jit
def warpgroup_any(warpgroup: Int32, flag: Boolean) -> Boolean:
    """A barrier for all threads of one warpgroup, after which each knows whether one of them had ``flag`` set."""
    how_many = cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.popc.u32 {$w0}, {$r1}, {$r2}, p; }",
        write_only_types=[Int32],
        read_only_args=[Int32(flag), FIRST_WARPGROUP_BARRIER + warpgroup, Int32(WARPGROUP)],
    )
    return Boolean(Int32(how_many) != 0)


CONSUMER_BARRIER = FIRST_WARPGROUP_BARRIER + 3


@cute.jit
def consumer_barrier(warpgroups: Constexpr) -> None:
    """All threads of all warpgroups that compute."""
    cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=WARPGROUP * warpgroups)
