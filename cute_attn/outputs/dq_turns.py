"""Turns to add to a query block's dQ: key blocks add in a fixed order, so that gradients repeat bit for bit.

The key blocks of an accumulator add to a query block from the last key block to the first: under a causal mask or in
a window, each then starts at queries to which no other key block must add first. A counter for each query block says
which key block added last. Work tiles are claimed in the same order, so a CTA waits only for CTAs that run.
"""

from dataclasses import dataclass

from cutlass import Boolean, Constexpr, Int32, cute

from cute_attn.work.block_range import BlockRange


@dataclass(frozen=True)
class DqTurns:
    """A key block's turns at the query blocks of one head, for one warp.

    A counter holds 1 + the key block that added last, or 0 before any has.
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
