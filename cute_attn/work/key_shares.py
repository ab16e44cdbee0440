"""Stream-K for attention: all key blocks in equal ranges, one per CTA, computed on the device from the lengths there.

A *unit* is a query block of one kv head of one sequence, with the key blocks that its queries see. All units' key
blocks lie on one line: kv head by kv head, sequence by sequence, query block by query block. The line is cut into
ranges with sizes that differ by at most one, one for each *slot*, a CTA's index on the line. (As stream-K divides a
GEMM: Osama et al. 2023, arXiv:2301.03598.) So CTAs at equal distances read all heads of a sequence at about the same
time. Rows of these heads are adjacent in memory; one head after the other would read DRAM rows in fragments.

So a CTA computes the end of one unit, some whole units, and the start of another. It writes whole units directly; the
other two are partial results, at 2 * slot and 2 * slot + 1 of the workspace. The combine kernel finds a unit's slots by
the same arithmetic, and nothing is written to say where they are. No plan is made on the host, so a CUDA graph replays
with other lengths.

If all units are equal and slightly fewer slots avoid cutting them, or cut them evenly, the remaining slots stay empty.

On the line a unit also has ``overhead`` positions before its key blocks, for its fixed cost. A unit that sees no key
counts as one block, so that a CTA writes its zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Int32, Int64, cute

from cute_attn.device.math import on_device
from cute_attn.device.score_tile import ScoreContext
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.work.block_range import BlockRange

WARP = 32
EVEN = 16
"""Units are cut evenly if at least ``(EVEN - 1) / EVEN`` of the slots are then used."""
OVERHEAD = 1
"""Positions on the line for a unit's fixed cost, its start and its end, in key blocks."""


@dataclass(frozen=True)
class VisibleBlocks:
    """Query blocks of a sequence, and the key blocks that each sees."""

    seqlens: Seqlens
    mask_args: tuple
    mask: Constexpr  # an ``epilogues.mask.Mask``, bottom right
    queries: Constexpr  # of a query block
    tile_n: Constexpr

    @cute.jit
    def m_blocks(self, batch: Int32) -> Int32:
        """Query blocks of one kv head."""
        return cute.ceil_div(SeqlenInfo.read(self.seqlens, batch).seqlen_q, self.queries)

    @cute.jit
    def key_blocks(self, batch: Int32, m_block: Int32) -> BlockRange:
        """Key blocks that any query of the block sees."""
        info = SeqlenInfo.read(self.seqlens, batch)
        zero = Int32(0)
        lengths = (info.seqlen_q, info.seqlen_k, zero, zero)
        shift = info.seqlen_k - info.seqlen_q
        context = ScoreContext(zero, zero, zero, *lengths, shift, None, None, None, first_key=info.first_key)
        band = self.mask.begin(self.mask_args, context)
        first = m_block * self.queries
        return BlockRange.of_queries(
            band, first, cutlass.min(first + self.queries, info.seqlen_q), self.tile_n
        )


@dataclass(frozen=True)
class Share:
    """One slot's range of one unit: [begin, end) of the unit's visible key blocks, counted from the first.

    Without key blocks and not :attr:`whole` it is only overhead: there is nothing to do.

    Attributes:
        batch, head, m_block: the unit; ``head`` of the kv heads.
        starts: whether the unit's first key block is in this slot.
        ends: whether its last is.
        next: where on the line the following unit starts.
    """

    batch: Int32
    head: Int32
    m_block: Int32
    begin: Int32
    end: Int32
    starts: Boolean
    ends: Boolean
    next: Int32

    @property
    def whole(self) -> Boolean:
        """The slot computes the whole unit and writes the result directly."""
        return self.starts & self.ends

    def partial(self, slot: Int32) -> Int32:
        """The index of the partial result, unless :attr:`whole`."""
        return 2 * slot + cutlass.select_(self.starts, Int32(1), Int32(0))


@dataclass(frozen=True)
class KeyShares:
    """The line and its slots. ``blocks`` has ``m_blocks`` and ``key_blocks`` as :class:`VisibleBlocks`.

    Called by whole warps, each thread with its ``lane``; all get the same results. Positions are 32-bit: the host
    checks that all key blocks, with overhead, are fewer than 2**31.
    """

    blocks: Any
    batch: Int32
    heads: Int32
    lane: Int32
    of_head: Int32  # positions of a kv head's units
    slots: Int32  # used slots: at most one per position
    overhead: Constexpr

    @staticmethod
    @cute.jit
    def make(
        blocks: Any, batch: Int32, heads: Int32, slots: Int32, lane: Int32, overhead: Constexpr
    ) -> "KeyShares":
        """Measure the line. slots: number of CTAs, at least 1."""
        shares, _ = KeyShares.measure(blocks, batch, heads, slots, lane, overhead, Int32(0))
        return shares

    @staticmethod
    @cute.jit
    def measure(
        blocks: Any,
        batch: Int32,
        heads: Int32,
        slots: Int32,
        lane: Int32,
        overhead: Constexpr,
        sequence: Int32,
    ) -> tuple["KeyShares", Int32]:
        """As :meth:`make`, and where ``sequence`` starts among a head's positions."""
        line = KeyShares(blocks, batch, heads, lane, Int32(0), Int32(0), overhead)
        of_head, start, largest = warp_sums(line.sequence_size, batch, sequence, lane)
        used = line.used_slots(slots, of_head, largest)
        return KeyShares(blocks, batch, heads, lane, of_head, used, overhead), start

    @property
    def total(self) -> Int32:
        """Positions on the line."""
        return self.of_head * self.heads

    @cute.jit
    def used_slots(self, slots: Int32, of_head: Int32, largest: Int32) -> Int32:
        """Number of slots with work, from the positions of a head and of the longest sequence.

        If all sequences are equally long and the first has one query block, slightly fewer slots may get whole units,
        or equal fractions of units: nearly as many CTAs saturate the memory as well, with less to merge.
        """
        total = of_head * self.heads
        used = cutlass.min(slots, total)
        if (total > 0) & (of_head == self.batch * largest):
            if self.blocks.m_blocks(Int32(0)) == 1:
                units = self.batch * self.heads
                waves = cute.ceil_div(units, slots)
                even = units // waves
                fits = even * waves == units
                if units < slots:
                    even = slots // units * units
                    fits = even <= total
                if fits & (EVEN * even >= (EVEN - 1) * slots):
                    used = even
        return used

    # ---- slots ----

    @cute.jit
    def slot_of_cta(self, cta: Int32) -> Int32:
        """The slot of a CTA. If kv heads have equally many slots, CTAs that start together read one sequence."""
        slot, each = cta, self.slots // self.heads
        if (each * self.heads == self.slots) & (cta < self.slots):
            slot = cta % self.heads * each + cta // self.heads
        return slot

    @cute.jit
    def begin(self, slot: Int32) -> Int32:
        """Start of slot ``slot`` on the line, the end of the one before it; the end of the line for slots beyond.

        It is slot * total / slots, rounded down: the sizes alternate, so that equal units are cut equally.
        """
        position = self.total
        if slot < self.slots:
            size = self.total // self.slots
            position = slot * size + slot * (self.total - size * self.slots) // self.slots
        return position

    def slot_of(self, position: Int32) -> Int32:
        """The slot that contains a position."""
        return Int32(((Int64(position) + 1) * self.slots - 1) // self.total)

    # ---- sizes on the line ----

    @cute.jit
    def unit_size(self, batch: Int32, m_block: Int32) -> Int32:
        """Positions of a unit."""
        blocks = self.blocks.key_blocks(batch, m_block)
        return cutlass.max(blocks.end - blocks.begin, 1) + self.overhead

    @cute.jit
    def sequence_size(self, batch: Int32) -> Int32:
        """Positions of all query blocks of one kv head of a sequence."""
        size = Int32(0)
        for m_block in cutlass.range(self.blocks.m_blocks(batch), unroll=1):
            size += self.unit_size(batch, m_block)
        return size

    # ---- from positions to units and back ----

    @cute.jit
    def share(self, position: Int32, end: Int32) -> Share:
        """The range from ``position`` on of its unit, for the slot that ends at ``end``."""
        batch, head, m_block, start, _ = self.find_unit(position)
        return self.share_of_unit(batch, head, m_block, start, position, end)

    @cute.jit
    def find_unit(self, position: Int32) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """The unit that contains a position: its batch, head, m_block, start, and number of positions."""
        head = position // self.of_head
        batch, start = self.find_sequence(position - head * self.of_head)
        start += head * self.of_head
        m_block = Int32(0)
        size = self.unit_size(batch, m_block)
        while start + size <= position:
            start += size
            m_block += 1
            size = self.unit_size(batch, m_block)
        return batch, head, m_block, start, size

    @cute.jit
    def following(self, share: Share, end: Int32) -> Share:
        """The slot's range of the unit after ``share``'s; :attr:`Share.next` < ``end``, so there is one."""
        batch, head, m_block = share.batch, share.head, share.m_block + 1
        if m_block >= self.blocks.m_blocks(batch):
            m_block = Int32(0)
            batch = self.nonempty(batch + 1)
            if batch >= self.batch:
                head += 1
                batch = self.nonempty(Int32(0))
        return self.share_of_unit(batch, head, m_block, share.next, share.next, end)

    @cute.jit
    def nonempty(self, batch: Int32) -> Int32:
        """The first sequence with queries from ``batch`` on; the number of sequences where none follows."""
        last = self.batch - 1
        while (batch <= last) & (self.blocks.m_blocks(cutlass.min(batch, last)) == 0):
            batch += 1
        return batch

    @cute.jit
    def share_of_unit(
        self, batch: Int32, head: Int32, m_block: Int32, start: Int32, position: Int32, end: Int32
    ) -> Share:
        """A slot's range from ``position`` to ``end`` of a unit that starts at ``start``."""
        seen = self.blocks.key_blocks(batch, m_block)
        blocks = seen.end - seen.begin
        first = start + self.overhead  # the first key block's position
        stop = first + cutlass.max(blocks, 1)
        until = cutlass.min(end, stop)
        return Share(
            batch=batch,
            head=head,
            m_block=m_block,
            begin=cutlass.min(cutlass.max(position - first, 0), blocks),
            end=cutlass.min(cutlass.max(until - first, 0), blocks),
            starts=(position <= first) & (first < until),
            ends=stop <= end,
            next=stop,
        )

    @cute.jit
    def find_sequence(self, position: Int32) -> tuple[Int32, Int32]:
        """The sequence that has one of a head's positions, and where it starts."""
        batch, start, first = Int32(0), Int32(0), Int32(0)
        searching = Boolean(True)
        while searching:
            before, size = warp_search(self.sequence_size, first, self.batch, position - start, self.lane)
            batch, start = first + before, start + size
            first += WARP
            searching = (before == WARP) & (first < self.batch)
        return batch, start

    @cute.jit
    def slots_of(self, start: Int32, batch: Int32, head: Int32, m_block: Int32) -> tuple[Int32, Int32]:
        """The first and the last slot of a unit; if they are the same, that slot wrote the result directly.

        Otherwise these two and each slot between them wrote a partial result: :meth:`Share.partial`. ``start``: the
        sequence's first position in a head, see :meth:`measure`.
        """
        position = start + head * self.of_head
        for before in cutlass.range(m_block, unroll=1):
            position += self.unit_size(batch, before)
        last = position + self.unit_size(batch, m_block) - 1
        return self.slot_of(position + self.overhead), self.slot_of(last)

    @cute.jit
    def divided_unit(self, slot: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """The unit, at most one, that starts in ``slot`` and ends in a later slot.

        Returns its batch, head and m_block, and its last slot; ``slot`` if no unit does.
        """
        batch, head, m_block, last = Int32(0), Int32(0), Int32(0), slot
        end = self.begin(slot + 1)
        if self.begin(slot) < end:
            batch, head, m_block, start, size = self.find_unit(end - 1)
            if self.slot_of(start + self.overhead) == slot:
                last = self.slot_of(start + size - 1)
        return batch, head, m_block, last


Terms = Callable[[Int32], Int32]


def warp_sums(compute: Terms, end: Int32, some: Int32, lane: Int32) -> tuple[Int32, Int32, Int32]:
    """compute(0) + ... + compute(end - 1), the sum of the first ``some`` of these terms, and the largest.

    All lanes get them. A lane has every 32nd term; on the host a thread has all of them.
    """
    if not on_device():
        return _sums(compute, Int32(0), end, some, 1)
    total, before, largest = _sums(compute, lane, end, some, WARP)
    largest = Int32(cute.arch.warp_redux_sync(largest, kind="max"))
    return _sum_of_lanes(total), _sum_of_lanes(before), largest


@cute.jit
def _sums(
    compute: Constexpr, first: Int32, end: Int32, some: Int32, step: Constexpr
) -> tuple[Int32, Int32, Int32]:
    total, before, largest = Int32(0), Int32(0), Int32(0)
    for i in cutlass.range(first, end, step, unroll=4):  # loads of several terms overlap
        term = compute(i)
        total += term
        before += cutlass.select_(i < some, term, Int32(0))
        largest = cutlass.max(largest, term)
    return total, before, largest


def warp_search(
    compute: Terms, first: Int32, end: Int32, position: Int32, lane: Int32
) -> tuple[Int32, Int32]:
    """Number of the terms compute(first), ..., compute(first + 31) that end at or before ``position``, and their sum.

    Terms from ``end`` on are 0. As :func:`warp_sums`, a term in each lane.
    """
    if not on_device():
        return _search(compute, first, end, position)
    own = _term(compute, first + lane, end)
    until = own
    for step in range(5):
        below = cute.arch.shuffle_sync_up(until, offset=1 << step)
        until = until + cutlass.select_(lane >= (1 << step), below, Int32(0))
    passed = until <= position
    return (
        _sum_of_lanes(cutlass.select_(passed, Int32(1), Int32(0))),
        _sum_of_lanes(cutlass.select_(passed, own, Int32(0))),
    )


def _sum_of_lanes(term: Int32) -> Int32:
    return Int32(cute.arch.warp_redux_sync(term, kind="add"))


@cute.jit
def _term(compute: Constexpr, i: Int32, end: Int32) -> Int32:
    term = Int32(0)
    if i < end:
        term = compute(i)
    return term


@cute.jit
def _search(compute: Constexpr, first: Int32, end: Int32, position: Int32) -> tuple[Int32, Int32]:
    before, size, until = Int32(0), Int32(0), Int32(0)
    for i in cutlass.range(WARP, unroll=1):
        term = _term(compute, first + i, end)
        until += term
        if until <= position:
            before += 1
            size += term
    return before, size
