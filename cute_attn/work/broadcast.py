"""How the producer warp of a persistent forward kernel tells all other warps of its CTA which work tile is next."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cute_attn.device.pipeline import Pipeline

STAGES = 2
INTS = 4


@dataclass(frozen=True)
class WorkItem:
    """A work tile by its index in the order, its first query, its first head and its batch.

    The index is ``END`` where nothing is left, and ``SECTION_END`` where a section is over and more comes.
    """

    index: Int32
    row0: Int32
    head: Int32
    batch: Int32

    END = -1
    SECTION_END = -2


@dataclass(frozen=True)
class WorkBroadcast:
    """A pipeline of ``STAGES`` notes in shared memory: one warp writes, all others read every note."""

    notes: cute.Tensor  # (INTS, STAGES) in shared memory
    pipeline: Pipeline

    @staticmethod
    def make(barriers: cute.Pointer, pointer: cute.Pointer) -> "WorkBroadcast":
        """``pointer``: 4 * INTS * STAGES bytes of shared memory."""
        notes = cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout((INTS, STAGES)))
        return WorkBroadcast(notes, Pipeline(barriers, STAGES, 0))

    @cute.jit
    def publish(self, n: Int32, note: WorkItem) -> None:
        """By the producer warp: note n."""
        self.pipeline.producer_wait(n)
        stage = self.pipeline.stage(n)
        with cute.arch.elect_one():
            self.notes[0, stage], self.notes[1, stage] = note.index, note.row0
            self.notes[2, stage], self.notes[3, stage] = note.head, note.batch
        self.pipeline.producer_commit(n)

    @cute.jit
    def publish_end(self, n: Int32, more: cutlass.Boolean) -> None:
        """That the section is over, or with nothing ``more`` to come, all of it."""
        index = Int32(WorkItem.SECTION_END) if more else Int32(WorkItem.END)
        self.publish(n, WorkItem(index, Int32(0), Int32(0), Int32(0)))

    @cute.jit
    def take(self, n: Int32) -> WorkItem:
        """By every other warp: wait for note n and read it."""
        self.pipeline.consumer_wait(n)
        stage = self.pipeline.stage(n)
        values = [cute.arch.make_warp_uniform(self.notes[i, stage]) for i in range(INTS)]
        self.pipeline.consumer_release_reads(n)
        return WorkItem(*values)
