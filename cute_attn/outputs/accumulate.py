"""Atomically adds register fragments to fp32 memory to which several CTAs add, and reads the sums.

Memory holds fragments in thread order, not in matrix order, one warp after the other. Value i of lane l, with ``size``
values per thread, is float

    (i // vector * 32 + l) * vector + i % vector        of the warp's 32 * size,

so that a warp accesses whole cache lines with any MMA's fragment. A reader must use the same fragment layout.

:func:`add_fragment` adds registers directly, by one reduction per vector, in the same memory queue as the warp's reads
of shared memory. :func:`stage_fragment` copies them to shared memory instead, and :func:`add_staged` adds from there by
one asynchronous bulk reduction. :func:`send_fragment` stores them to shared memory of another CTA of the cluster.
"""

from dataclasses import dataclass

from cutlass import Boolean, Constexpr, Float32, Int32, cute

from cute_attn.device.math import on_device
from cute_attn.device.pipeline import Pipeline
from cute_attn.work.block_range import BlockRange

WARP = 32
VECTORS = (1, 2, 4)
"""Numbers of floats that one reduction can add: 1 on all targets, 2 and 4 (red.global.add.v2/.v4.f32) from sm90 on."""
SENT = 4
"""Number of floats that one asynchronous store sends to a peer."""


def add_fragment(acc: cute.Tensor, base: cute.Pointer, thread: Int32, vector: int) -> None:
    """Add ``acc`` (fp32 in registers, in register order) to the fragment of ``thread`` at ``base``.

    base: global memory of all threads' fragments, aligned to 4 * vector bytes. CTAs that add to the same fragment do so
    in any order.
    """
    values = _flat(acc, vector)
    first = base + _first_float(thread, cute.size(values), vector)
    for i in range(0, cute.size(values), vector):
        _reduce(first, i * WARP, [values[i + j] for j in range(vector)])


def load_fragment(
    acc: cute.Tensor, base: cute.Pointer, thread: Int32, vector: int, more: bool = False
) -> None:
    """Load the sums of :func:`add_fragment` at ``base`` into ``acc``; ``more``: add the sums to acc."""
    values = _flat(acc, vector)
    first = base + cute.assume(_first_float(thread, cute.size(values), vector), divby=vector)
    piece = cute.make_rmem_tensor(cute.make_layout(vector), Float32)
    for i in range(0, cute.size(values), vector):
        cute.autovec_copy(cute.make_tensor(first + i * WARP, cute.make_layout(vector)), piece)
        for j in range(vector):
            values[i + j] = values[i + j] + piece[j] if more else piece[j]


def stage_fragment(acc: cute.Tensor, base: cute.Pointer, thread: Int32, vector: int) -> None:
    """Store ``acc`` to the fragment of ``thread`` in shared memory at ``base``, aligned to 16 bytes."""
    values = _flat(acc, vector)
    first = base + cute.assume(_first_float(thread, cute.size(values), vector), divby=vector)
    for i in range(0, cute.size(values), vector):
        piece = cute.make_tensor(values.iterator + i, cute.make_layout(vector))
        cute.autovec_copy(piece, cute.make_tensor(first + i * WARP, cute.make_layout(vector)))


def add_staged(staged: cute.Pointer, base: cute.Pointer, floats: int) -> None:
    """By one thread: start adding ``floats`` floats at ``staged``, in shared memory, to ``base``, as a bulk group."""
    cute.arch.inline_ptx(
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{{$r0}}], [{{$r1}}], {4 * floats};",
        read_only_args=[base.toint(), staged.toint()],
    )
    cute.arch.cp_async_bulk_commit_group()


def send_fragment(acc: cute.Tensor, base: Int32, barrier: Int32, thread: Int32, vector: int) -> None:
    """Start storing ``acc`` to the fragment of ``thread`` at ``base``, in shared memory of a CTA of the cluster.

    The stores count their bytes at the mbarrier ``barrier`` of that CTA.
    """
    values = _flat(acc, vector)
    first = base + 4 * _first_float(thread, cute.size(values), vector)
    operands = ", ".join(f"{{$r{j + 2}}}" for j in range(vector))
    for i in range(0, cute.size(values), vector):
        cute.arch.inline_ptx(
            f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v{vector}.f32 "
            f"[{{$r0}} + {4 * i * WARP}], {{{operands}}}, [{{$r1}}];",
            read_only_args=[first, barrier, *(values[i + j] for j in range(vector))],
        )


def _first_float(thread: Int32, size: int, vector: int) -> Int32:
    """The offset of a thread's fragment among the fragments of all threads, ``size`` floats each."""
    return thread // WARP * (WARP * size) + thread % WARP * vector


def _flat(acc: cute.Tensor, vector: int) -> cute.Tensor:
    """acc in one mode, in register order."""
    size = cute.cosize(acc.layout)
    if size != cute.size(acc) or size % vector or vector not in VECTORS:
        raise ValueError(
            f"acc has layout {acc.layout} and vector is {vector}: whole vectors of {VECTORS} are accepted"
        )
    return cute.make_tensor(acc.iterator, cute.make_layout(size))


def _reduce(first: cute.Pointer, offset: int, values: list[Float32]) -> None:
    """first[offset:] += values, by one instruction; on the host by ordinary additions."""
    if not on_device():
        target = cute.make_tensor(first + offset, cute.make_layout(len(values)))
        for i, value in enumerate(values):
            target[i] = target[i] + value
        return
    kind = "f32" if len(values) == 1 else f"v{len(values)}.f32"
    operands = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    operands = operands if len(values) == 1 else f"{{{operands}}}"
    cute.arch.inline_ptx(
        f"red.relaxed.gpu.global.add.{kind} [{{$r0}} + {4 * offset}], {operands};",
        read_only_args=[first.toint(), *values],
    )


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


@dataclass(frozen=True)
class DqTurns:
    """A key block's turns to add to dQ of one head's query blocks, for one warp; gradients then repeat bit for bit.

    The key blocks of an accumulator add to a query block from the last key block to the first: under a causal mask or
    in a window, each then starts at queries to which no other key block must add first. Work tiles are claimed in the
    same order, so a CTA waits only for CTAs that run. A counter holds 1 + the key block that added last, or 0 before
    any has.
    """

    counters: cute.Pointer  # int32 counters, from the head's first query block on
    stride: Constexpr  # from a query block's counter to the next one's
    key_block: Int32
    before: Int32  # the key block that adds just before this one, if it sees the query block
    seen_before: BlockRange  # the query blocks that it visits

    @cute.jit
    def has_come(self, block: Int32) -> Boolean:
        """True if the turn at a query block has come; reads the counter once and does not wait."""
        come = Boolean(True)
        if (self.seen_before.begin <= block) & (block < self.seen_before.end):
            come = self._last(block) == self.before + 1
        return come

    @cute.jit
    def wait(self, block: Int32) -> None:
        if (self.seen_before.begin <= block) & (block < self.seen_before.end):
            last = self._last(block)
            while last != self.before + 1:
                last = self._last(block)

    @cute.jit
    def finish(self, block: Int32) -> None:
        """By one thread that has seen all additions of the turn: let the next key block add."""
        counter = self.counters + block * self.stride
        cute.arch.store(counter, self.key_block + 1, sem="release", scope="gpu")

    def _last(self, block: Int32) -> Int32:
        counter = self.counters + block * self.stride
        last = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        return cute.arch.make_warp_uniform(last)


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
        send_fragment(acc, received.toint(), barrier.toint(), thread, SENT)

    @cute.jit
    def add(self, acc: cute.Tensor, thread: Int32, n: Int32) -> None:
        """Wait for the peer's n-th fragments, and add this thread's fragment to ``acc``."""
        cute.arch.mbarrier_wait(self.barrier, n & 1)
        load_fragment(acc, self.received, thread, SENT, more=True)
