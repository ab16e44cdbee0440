"""mbarrier pipelines in shared memory, ping-pong scheduling of warpgroups, named barriers.

Use n of a pipeline is in stage n % num_stages. Producer and consumers count uses the same way, so n is the whole
pipeline state.

TMA and wgmma access shared memory through the async proxy, loads and stores of threads through the generic proxy. An
mbarrier orders accesses of one proxy only. A stage that TMA fills and threads access is therefore released behind a
proxy fence; otherwise TMA's next fill may overtake reads before the release (PTX ISA, "Proxies"; CUTLASS fences its
epilogue's TMA loads likewise). :meth:`Pipeline.consumer_release` has to be told who accessed the stage;
:mod:`cute_attn.lab.proxies` checks the machine code.
"""

import enum
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute


class Accessed(enum.Enum):
    """Who accessed a stage that a consumer warp releases."""

    BY_WGMMA = enum.auto()
    """Only wgmma products, and all of them are complete."""
    BY_THREADS = enum.auto()
    """Also the warp's lanes, by ldmatrix, ordinary loads or stores."""
    BY_THREADS_FENCED = enum.auto()
    """Like BY_THREADS, and each lane has issued a proxy fence since its last access."""


@dataclass(frozen=True)
class Pipeline:
    """Stages in shared memory, filled by TMA or by warps, with a full and an empty mbarrier each."""

    barriers: cute.Pointer  # 2 * num_stages mbarriers of 8 bytes: full ones, then empty ones
    num_stages: Constexpr
    stage_bytes: Constexpr  # bytes that TMA loads at each use; 0 if warps fill the stages
    per_lane_arrivals: Constexpr = False  # see ``_arrive``

    def __post_init__(self) -> None:
        assert not self.per_lane_arrivals or not self.stage_bytes, "TMA is started by one lane"

    @staticmethod
    def barrier_bytes(num_stages: int) -> int:
        return 16 * num_stages

    @cute.jit
    def init(self, consumers: Constexpr, producers: Constexpr = 1) -> None:
        """By one thread, before any wait: initialize the mbarriers.

        Args:
            consumers: warps that release each use.
            producers: warps that commit each use; 1 with TMA.
        """
        lanes = 32 if self.per_lane_arrivals else 1
        for stage in cutlass.range_constexpr(self.num_stages):
            cute.arch.mbarrier_init(self.barriers + stage, producers * lanes)
            cute.arch.mbarrier_init(self.barriers + self.num_stages + stage, consumers * lanes)

    def stage(self, n: Int32) -> Int32:
        if self.num_stages == 1:
            return Int32(0)
        if self.num_stages & (self.num_stages - 1) == 0:
            return n & (self.num_stages - 1)
        return n % self.num_stages

    def parity(self, n: Int32) -> Int32:
        """The phase parity of use n: how often its stage was used before, modulo 2."""
        if self.num_stages & (self.num_stages - 1) == 0:
            return (n >> (self.num_stages.bit_length() - 1)) & 1
        return (n // self.num_stages) & 1

    def full_barrier(self, n: Int32) -> cute.Pointer:
        """The full barrier of use n."""
        return self.barriers + self.stage(n)

    def empty_barrier(self, n: Int32) -> cute.Pointer:
        """The empty barrier of use n."""
        return self.barriers + self.num_stages + self.stage(n)

    @cute.jit
    def producer_acquire(self, n: Int32) -> None:
        """By the producer warp: wait until the stage is empty, then arrive with the transaction bytes of TMA."""
        self.producer_wait(n)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full_barrier(n), self.stage_bytes)

    @cute.jit
    def producer_wait(self, n: Int32) -> None:
        """By a producer warp: wait until the stage is empty."""
        cute.arch.mbarrier_wait(self.empty_barrier(n), self.parity(n) ^ 1)

    @cute.jit
    def producer_commit(self, n: Int32) -> None:
        """By each producer warp of a warp-filled stage: signal that its writes of use n may be read."""
        self._arrive(self.full_barrier(n))

    @cute.jit
    def consumer_wait(self, n: Int32) -> None:
        """By a consumer: wait until use n is full."""
        cute.arch.mbarrier_wait(self.full_barrier(n), self.parity(n))

    @cute.jit
    def consumer_release(self, n: Int32, accessed: Constexpr) -> None:
        """By each consumer warp: release use n; ``accessed``, an :class:`Accessed`, says who accessed it."""
        if cutlass.const_expr(accessed is Accessed.BY_WGMMA):
            assert not self.per_lane_arrivals, "one lane arrives for a warp's products"
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.empty_barrier(n))
        else:
            if cutlass.const_expr(accessed is Accessed.BY_THREADS and self.stage_bytes > 0):
                cute.arch.fence_proxy("async.shared", space="cta")  # TMA's next fill follows the accesses
            self._arrive(self.empty_barrier(n))

    @cute.jit
    def _arrive(self, barrier: cute.Pointer) -> None:
        """By a warp: arrive, with all its lanes' accesses ordered before accesses after a wait for the barrier.

        One lane arrives after a warp sync. With ``per_lane_arrivals`` each lane arrives: compute-sanitizer's racecheck
        does not treat the warp sync as ordering, and reports races between lanes that write and read shared memory.
        """
        if cutlass.const_expr(self.per_lane_arrivals):
            cute.arch.mbarrier_arrive(barrier)
        else:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier)


@dataclass(frozen=True)
class SharedDoubleBuffer:
    """Two stages in shared memory that all warps write and read, with a full mbarrier each. Use n is in stage n % 2.

    No empty barriers are needed if every warp waits for every use, and arrives at use n after its reads of use n - 1:
    after a wait for use n - 1 all reads of use n - 2 are done, and its stage may be overwritten.
    """

    barriers: cute.Pointer  # 2 mbarriers of 8 bytes

    @cute.jit
    def init(self, warps: Constexpr) -> None:
        """By one thread, before any wait: initialize the mbarriers."""
        for stage in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(self.barriers + stage, warps)

    @cute.jit
    def arrive(self, n: Int32) -> None:
        """By every warp: signal that its writes of use n may be read, by wgmma as well."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers + (n & 1))

    @cute.jit
    def wait(self, n: Int32) -> None:
        """By every warp: wait until all have arrived at use n."""
        cute.arch.mbarrier_wait(self.barriers + (n & 1), (n >> 1) & 1)


WARPGROUP = 128
FIRST_PING_PONG_BARRIER = 1  # named barrier 0 is the whole CTA's
FIRST_WARPGROUP_BARRIER = 5


@dataclass(frozen=True)
class PingPong:
    """Ping-pong scheduling: warpgroups take turns to issue products, so that these overlap another's softmax."""

    warpgroup: Int32
    warpgroups: Constexpr
    enabled: Constexpr

    @cute.jit
    def start(self) -> None:
        """Called once by all warpgroups, at the beginning: let the first warpgroup issue."""
        if cutlass.const_expr(self.enabled):
            if self.warpgroup == self.warpgroups - 1:
                cute.arch.barrier_arrive(barrier_id=FIRST_PING_PONG_BARRIER, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def sync(self) -> None:
        """Wait until the previous warpgroup has issued its products."""
        if cutlass.const_expr(self.enabled):
            cute.arch.barrier(
                barrier_id=FIRST_PING_PONG_BARRIER + self.warpgroup, number_of_threads=2 * WARPGROUP
            )

    @cute.jit
    def arrive(self) -> None:
        """Signal that this warpgroup has issued its products: the next warpgroup may issue."""
        if cutlass.const_expr(self.enabled):
            following = Int32(0) if self.warpgroup == self.warpgroups - 1 else self.warpgroup + 1
            cute.arch.barrier_arrive(
                barrier_id=FIRST_PING_PONG_BARRIER + following, number_of_threads=2 * WARPGROUP
            )

    @cute.jit
    def finish(self) -> None:
        """Called once by all warpgroups, at the end: wait for the last arrival, so that no barrier stays pending."""
        if cutlass.const_expr(self.enabled):
            if self.warpgroup == 0:
                cute.arch.barrier(barrier_id=FIRST_PING_PONG_BARRIER, number_of_threads=2 * WARPGROUP)


@cute.jit
def warpgroup_barrier(warpgroup: Int32) -> None:
    """Synchronize all threads of one warpgroup by a named barrier."""
    cute.arch.barrier(barrier_id=FIRST_WARPGROUP_BARRIER + warpgroup, number_of_threads=WARPGROUP)


@cute.jit
def warpgroup_any(warpgroup: Int32, flag: Boolean) -> Boolean:
    """Synchronize all threads of one warpgroup by a named barrier; True if any of them has ``flag`` set."""
    how_many = cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.popc.u32 {$w0}, {$r1}, {$r2}, p; }",
        write_only_types=[Int32],
        read_only_args=[Int32(flag), FIRST_WARPGROUP_BARRIER + warpgroup, Int32(WARPGROUP)],
    )
    return Boolean(Int32(how_many) != 0)


CONSUMER_BARRIER = FIRST_WARPGROUP_BARRIER + 4


@cute.jit
def consumer_barrier(warpgroups: Constexpr) -> None:
    """Synchronize all threads of all consumer warpgroups by a named barrier."""
    cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=WARPGROUP * warpgroups)
