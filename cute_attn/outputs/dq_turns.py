"""Turns to add to a query block's dQ: where key blocks add in one order, gradients repeat bit for bit.

The key blocks of an accumulator add to a query block from the first one to the last, or from the last to the first. A
counter for each query block says which key block added last. Work tiles are claimed in the same order, so a CTA waits
only for CTAs that run.
"""

from dataclasses import dataclass

from cutlass import Boolean, Constexpr, Int32, cute


@dataclass(frozen=True)
class DqTurns:
    """A key block's turns at the query blocks of one head, for one warp."""

    counters: (
        cute.Pointer
    )  # 4 bytes, of the head's first query block: 1 + the key block that added last, at first 0
    stride: Constexpr  # from a query block's counter to the next one's
    key_block: Int32
    before: Int32  # the key block that adds just before this one, if it sees the query block
    begin: Int32  # the query blocks [begin, end) see it
    end: Int32

    @cute.jit
    def has_come(self, block: Int32) -> Boolean:
        """True if the turn at a query block has come, at one look."""
        come = Boolean(True)
        if (self.begin <= block) & (block < self.end):
            come = self._last(block) == self.before + 1
        return come

    @cute.jit
    def wait(self, block: Int32) -> None:
        """Wait for the turn at a query block."""
        if (self.begin <= block) & (block < self.end):
            last = self._last(block)
            while last != self.before + 1:
                last = self._last(block)

    @cute.jit
    def finish(self, block: Int32) -> None:
        """By one thread, which has seen all additions of the turn: the next key block may add."""
        counter = self.counters + block * self.stride
        cute.arch.store(counter, self.key_block + 1, sem="release", scope="gpu")

    def _last(self, block: Int32) -> Int32:
        counter = self.counters + block * self.stride
        last = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        return cute.arch.make_warp_uniform(last)
