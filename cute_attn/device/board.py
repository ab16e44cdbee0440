"""What the loading warp tells all others of a block of threads: which key block comes next."""

from dataclasses import dataclass

from cutlass import Boolean, Int32, cute

from cute_attn.device.pipeline import Pipeline
from cute_attn.device.seqlen import SeqlenInfo, Seqlens

NOTE_INTS = 4
_NONE = -1


@dataclass(frozen=True)
class KeyBlock:
    """One key block of one kv head of one batch; ``split``: which accumulator of dQ it adds to."""

    block: Int32
    split: Int32
    head_kv: Int32
    batch: Int32
    info: SeqlenInfo


@dataclass(frozen=True)
class Board:
    """Two notes in shared memory. WorkItem n, in place n % 2, says which key block filling n of K's ring is.

    The ring guards it: who has waited for its filling n may read note n until it has released filling n + 1, and every
    warp that reads notes releases every filling. The last note, which says that nothing comes any more, is of a filling
    without bytes that nobody releases.
    """

    notes: cute.Pointer  # 2 * NOTE_INTS of 4 bytes, 16-byte aligned
    ring: Pipeline

    def _note(self, n: Int32) -> cute.Tensor:
        return cute.make_tensor(self.notes + (n & 1) * NOTE_INTS, cute.make_layout(NOTE_INTS))

    @cute.jit
    def write(self, n: Int32, block: Int32, split: Int32, head_kv: Int32, batch: Int32) -> None:
        """By the warp that fills K, before it says so."""
        with cute.arch.elect_one():
            note = self._note(n)
            note[0], note[1], note[2], note[3] = block, split, head_kv, batch
        cute.arch.sync_warp()

    @cute.jit
    def write_end(self, n: Int32) -> None:
        """Nothing comes any more."""
        self.write(n, Int32(_NONE), Int32(_NONE), Int32(_NONE), Int32(_NONE))
        self.ring.producer_wait(n)
        self.ring.producer_commit(n)

    @cute.jit
    def holds(self, n: Int32) -> Boolean:
        """Wait for filling n. Whether note n says that there is a key block."""
        self.ring.consumer_wait(n)
        return self._note(n)[0] != _NONE

    @cute.jit
    def read(self, n: Int32, seqlens: Seqlens) -> KeyBlock:
        """What it says."""
        note = self._note(n)
        block, split, head_kv, batch = (cute.arch.make_warp_uniform(note[i]) for i in range(NOTE_INTS))
        return KeyBlock(block, split, head_kv, batch, SeqlenInfo.read(seqlens, batch))

    @cute.jit
    def take(self, n: Int32, seqlens: Seqlens) -> KeyBlock:
        """What it says, by a warp that has no use for K itself: filling n is released."""
        place = self.read(n, seqlens)
        self.ring.consumer_release_reads(n)
        return place
