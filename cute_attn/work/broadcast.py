"""Broadcast of work tiles by a persistent kernel's producer warp to all other warps of its CTA."""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
from cutlass import Boolean, Int32, cute

from cute_attn.device.pipeline import Accessed, Pipeline
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.work.block_range import KeySplit
from cute_attn.work.query_tiles import WorkClaims

STAGES = 2
INTS = 4
INTS_OF_SPLITS = 8
"""Ints of an item that has a range of key blocks; the last int is unused."""


@dataclass(frozen=True)
class WorkItem:
    """A work tile of a forward: its index in the order, its first query, its first head and its batch.

    The index is ``SECTION_END`` at the end of a section, and ``END`` at the end of the last section. ``split``:
    the work tile's range of key blocks, in kernels that divide them.
    """

    index: Int32
    row0: Int32
    head: Int32
    batch: Int32
    split: KeySplit | None = None

    END = -1
    SECTION_END = -2


@dataclass(frozen=True)
class WorkBroadcast:
    """A pipeline of ``STAGES`` work items in shared memory: one warp writes, all others read every item."""

    items: cute.Tensor  # (ints, STAGES) in shared memory
    pipeline: Pipeline

    @staticmethod
    def make(barriers: cute.Pointer, pointer: cute.Pointer, divides_keys: bool) -> "WorkBroadcast":
        """Items are at ``pointer``, in 4 * ints * STAGES bytes; ints: ``INTS_OF_SPLITS`` if items have a range of key
        blocks, else ``INTS``."""
        ints = INTS_OF_SPLITS if divides_keys else INTS
        items = cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout((ints, STAGES)))
        return WorkBroadcast(items, Pipeline(barriers, STAGES, 0))

    @cute.jit
    def publish(self, n: Int32, item: WorkItem) -> None:
        """By the producer warp: write item n, once its stage is free."""
        self.pipeline.producer_wait(n)
        stage = self.pipeline.stage(n)
        with cute.arch.elect_one():
            self.items[0, stage], self.items[1, stage] = item.index, item.row0
            self.items[2, stage], self.items[3, stage] = item.head, item.batch
            if cutlass.const_expr(item.split is not None):
                split: KeySplit = item.split  # type: ignore[assignment]
                self.items[4, stage], self.items[5, stage] = split.begin, split.end
                self.items[6, stage] = split.partial
        self.pipeline.producer_commit(n)

    @cute.jit
    def publish_end(self, n: Int32, more: Boolean) -> None:
        """By the producer warp: publish the end of the section, or unless ``more`` of the kernel, as item n."""
        index = Int32(WorkItem.SECTION_END) if more else Int32(WorkItem.END)
        self.publish(n, WorkItem(index, Int32(0), Int32(0), Int32(0)))

    @cute.jit
    def take(self, n: Int32) -> WorkItem:
        """By every other warp: wait for item n and read it."""
        self.pipeline.consumer_wait(n)
        stage = self.pipeline.stage(n)
        ints = cute.size(self.items, mode=[0])
        values = [cute.arch.make_warp_uniform(self.items[i, stage]) for i in range(ints)]
        self.pipeline.consumer_release(n, Accessed.BY_THREADS)
        index, row0, head, batch = values[:INTS]
        split = KeySplit(*values[INTS : INTS + 3]) if ints > INTS else None
        return WorkItem(index, row0, head, batch, split)


@dataclass(frozen=True)
class KeyTile:
    """A work tile of a backward: one key block, for one head of dK; ``split``: which accumulator of dQ it adds to."""

    block: Int32
    split: Int32
    head_dkv: Int32
    batch: Int32
    info: SeqlenInfo


@dataclass(frozen=True)
class KeyTileBroadcast:
    """Like :class:`WorkBroadcast`, but through the pipeline that loads K: item n is sent with the pipeline's use n.

    Item n may be read from the wait for use n until the release of use n + 1, so every warp that reads items releases
    every use. The last item, ``END``, is a use without bytes that is not released.
    """

    items: cute.Pointer  # STAGES * INTS of 4 bytes, 16-byte aligned
    pipeline: Pipeline

    END = -1

    def _item(self, n: Int32) -> cute.Tensor:
        return cute.make_tensor(self.items + (n & 1) * INTS, cute.make_layout(INTS))

    @cute.jit
    def write(self, n: Int32, block: Int32, split: Int32, head_dkv: Int32, batch: Int32) -> None:
        """By the producer warp, before it loads K: write item n."""
        with cute.arch.elect_one():
            item = self._item(n)
            item[0], item[1], item[2], item[3] = block, split, head_dkv, batch
        cute.arch.sync_warp()

    @cute.jit
    def write_end(self, n: Int32) -> None:
        """By the producer warp: write ``END`` as item n, and commit use n."""
        self.write(n, Int32(self.END), Int32(self.END), Int32(self.END), Int32(self.END))
        self.pipeline.producer_wait(n)
        self.pipeline.producer_commit(n)

    @cute.jit
    def holds(self, n: Int32) -> Boolean:
        """Wait for use n; True if item n is a key block, False if it is ``END``."""
        self.pipeline.consumer_wait(n)
        return self._item(n)[0] != self.END

    @cute.jit
    def read(self, n: Int32, seqlens: Seqlens) -> KeyTile:
        """Read item n, and the lengths of its sequence."""
        item = self._item(n)
        block, split, head_dkv, batch = (cute.arch.make_warp_uniform(item[i]) for i in range(INTS))
        return KeyTile(block, split, head_dkv, batch, SeqlenInfo.read(seqlens, batch))

    @cute.jit
    def take(self, n: Int32, seqlens: Seqlens) -> KeyTile:
        """By a warp that does not read K: read item n and release use n."""
        key_tile = self.read(n, seqlens)
        self.pipeline.consumer_release(n, Accessed.BY_THREADS)
        return key_tile


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
