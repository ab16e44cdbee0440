"""Stream-K for attention: all key blocks in equal ranges, one per CTA, computed on the device from the lengths there.

A work tile is a query block of one kv head of one sequence, with the key blocks that its queries see. All work tiles'
key blocks lie on one line: kv head by kv head, sequence by sequence, query block by query block. The line is cut into
*stream-K ranges*, one per CTA, with sizes that differ by at most one. (As stream-K divides a GEMM: Osama et al. 2023,
arXiv:2301.03598.) So CTAs at equal distances read all heads of a sequence at about the same time. Rows of these heads
are adjacent in memory; reading one head after the other would fetch DRAM rows in fragments.

A CTA therefore computes the end of one work tile, some whole ones, and the start of another. It writes whole tiles
directly. Results of the other two are partial, and are at 2 * index and 2 * index + 1 of the workspace, where ``index``
numbers the ranges along the line. The combine kernel finds the ranges of a work tile by the same arithmetic, so they
are not stored. No plan is made on the host, so a CUDA graph can be replayed with other lengths.

If all work tiles are equal and slightly fewer ranges avoid cutting them, or cut them evenly, the remaining CTAs stay
idle.

On the line a work tile also has ``overhead`` positions before its key blocks, for its fixed cost. A work tile that sees
no key counts as one block, so that a CTA writes its zeros.
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
EVEN, IN_STEP = 16, 3
"""Work tiles are cut evenly if at least ``(n - 1) / n`` of the CTAs then have a range: n is EVEN for one query block,
IN_STEP for several query blocks that read the same keys."""
OVERHEAD = 1
"""Positions on the line for a work tile's fixed cost, that is its start and its end, in key blocks."""


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
        """Number of query blocks per kv head."""
        return cute.ceil_div(SeqlenInfo.read(self.seqlens, batch).seqlen_q, self.queries)

    @cute.jit
    def key_blocks(self, batch: Int32, m_block: Int32) -> BlockRange:
        """The key blocks that any query of the block sees."""
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
class TileRange:
    """The key blocks of one work tile in one stream-K range: [begin, end) of the visible ones, counted from the first.

    A range that has no key blocks and is not :attr:`whole` is only overhead: there is nothing to compute.

    Attributes:
        batch, head, m_block: the work tile; ``head`` is a kv head.
        starts: True if the work tile's first key block is in this range.
        ends: True if the work tile's last key block is in this range.
        next: the position where the following work tile starts.
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
        """True if the CTA computes the whole work tile and writes the result directly."""
        return self.starts & self.ends

    def partial(self, index: Int32) -> Int32:
        """The index of the partial result of stream-K range ``index``, unless :attr:`whole`."""
        return 2 * index + cutlass.select_(self.starts, Int32(1), Int32(0))


@dataclass(frozen=True)
class StreamK:
    """The line and its stream-K ranges. ``blocks`` has the methods of :class:`VisibleBlocks`.

    Called by whole warps, each thread with its ``lane``; all lanes get the same results. Positions are 32-bit: the host
    checks that all key blocks, with overhead, are fewer than 2**31.
    """

    blocks: Any
    batch: Int32
    heads: Int32
    lane: Int32
    of_head: Int32  # positions of a kv head's work tiles
    ranges: Int32  # that are not empty: at most one per position
    overhead: Constexpr

    @staticmethod
    @cute.jit
    def make(
        blocks: Any, batch: Int32, heads: Int32, ctas: Int32, lane: Int32, overhead: Constexpr
    ) -> "StreamK":
        """Measure the line. ctas: at least 1."""
        line, _ = StreamK.measure(blocks, batch, heads, ctas, lane, overhead, Int32(0))
        return line

    @staticmethod
    @cute.jit
    def measure(
        blocks: Any,
        batch: Int32,
        heads: Int32,
        ctas: Int32,
        lane: Int32,
        overhead: Constexpr,
        sequence: Int32,
    ) -> tuple["StreamK", Int32]:
        """Like :meth:`make`; also returns where ``sequence`` starts among a head's positions."""
        line = StreamK(blocks, batch, heads, lane, Int32(0), Int32(0), overhead)
        of_head, start, largest = warp_sums(line.sequence_size, batch, sequence, lane)
        used = line.used_ranges(ctas, of_head, largest)
        return StreamK(blocks, batch, heads, lane, of_head, used, overhead), start

    @property
    def total(self) -> Int32:
        return self.of_head * self.heads

    @cute.jit
    def used_ranges(self, ctas: Int32, of_head: Int32, largest: Int32) -> Int32:
        """The number of ranges, given the numbers of positions of a head and of the longest sequence.

        If all sequences are equally long, slightly fewer ranges may contain whole work tiles, or equal fractions of
        them: nearly as many CTAs still saturate the memory, and there is less to merge. Several query blocks then read
        the same keys in step, only once from DRAM, which pays for more idle CTAs. Under a mask, these query blocks must
        see nearly equal numbers of keys.
        """
        total = of_head * self.heads
        used = cutlass.min(ctas, total)
        if (total > 0) & (of_head == self.batch * largest):
            m_blocks = self.blocks.m_blocks(Int32(0))
            first = m_blocks * self.tile_size(Int32(0), Int32(0))
            if (first <= largest) & (first >= largest - largest // EVEN):
                tiles = self.batch * self.heads * m_blocks
                waves = cute.ceil_div(tiles, ctas)
                even = tiles // waves
                fits = (even * waves == tiles) & (first == largest)
                if tiles < ctas:
                    even = ctas // tiles * tiles
                    fits = even <= total
                least = cutlass.select_(m_blocks == 1, Int32(EVEN), Int32(IN_STEP))
                if fits & (least * even >= (least - 1) * ctas):
                    used = even
        return used

    # ---- ranges of the line ----

    @cute.jit
    def range_of_cta(self, cta: Int32) -> Int32:
        """The index of a CTA's range. If heads have equally many ranges, CTAs that start together read one sequence."""
        index, each = cta, self.ranges // self.heads
        if (each * self.heads == self.ranges) & (cta < self.ranges):
            index = cta % self.heads * each + cta // self.heads
        return index

    @cute.jit
    def begin(self, index: Int32) -> Int32:
        """Where range ``index`` starts on the line and the previous range ends; the line's end if ``index`` is unused.

        It is index * total / ranges, rounded down: the sizes alternate, so that equal work tiles are cut equally.
        """
        position = self.total
        if index < self.ranges:
            size = self.total // self.ranges
            position = index * size + index * (self.total - size * self.ranges) // self.ranges
        return position

    def range_of(self, position: Int32) -> Int32:
        """The index of the range that contains a position."""
        return Int32(((Int64(position) + 1) * self.ranges - 1) // self.total)

    # ---- sizes on the line ----

    @cute.jit
    def tile_size(self, batch: Int32, m_block: Int32) -> Int32:
        """Number of positions of a work tile."""
        blocks = self.blocks.key_blocks(batch, m_block)
        return cutlass.max(blocks.end - blocks.begin, 1) + self.overhead

    @cute.jit
    def sequence_size(self, batch: Int32) -> Int32:
        """Number of positions of all query blocks of one kv head of a sequence."""
        size = Int32(0)
        for m_block in cutlass.range(self.blocks.m_blocks(batch), unroll=1):
            size += self.tile_size(batch, m_block)
        return size

    # ---- from positions to work tiles and back ----

    @cute.jit
    def range_at(self, position: Int32, end: Int32) -> TileRange:
        """The key blocks between ``position`` and ``end`` of the work tile that contains ``position``."""
        batch, head, m_block, start, _ = self.find_tile(position)
        return self.range_in_tile(batch, head, m_block, start, position, end)

    @cute.jit
    def find_tile(self, position: Int32) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """The work tile that contains a position: its batch, head, m_block, start, and number of positions."""
        head = position // self.of_head
        batch, start = self.find_sequence(position - head * self.of_head)
        start += head * self.of_head
        m_block = Int32(0)
        size = self.tile_size(batch, m_block)
        while start + size <= position:
            start += size
            m_block += 1
            size = self.tile_size(batch, m_block)
        return batch, head, m_block, start, size

    @cute.jit
    def following(self, tile_range: TileRange, end: Int32) -> TileRange:
        """The key blocks of the next work tile in the same range; requires :attr:`TileRange.next` < ``end``."""
        batch, head, m_block = tile_range.batch, tile_range.head, tile_range.m_block + 1
        if m_block >= self.blocks.m_blocks(batch):
            m_block = Int32(0)
            batch = self.nonempty(batch + 1)
            if batch >= self.batch:
                head += 1
                batch = self.nonempty(Int32(0))
        return self.range_in_tile(batch, head, m_block, tile_range.next, tile_range.next, end)

    @cute.jit
    def nonempty(self, batch: Int32) -> Int32:
        """The first sequence from ``batch`` on that has queries, or the number of sequences if there is none."""
        last = self.batch - 1
        while (batch <= last) & (self.blocks.m_blocks(cutlass.min(batch, last)) == 0):
            batch += 1
        return batch

    @cute.jit
    def range_in_tile(
        self, batch: Int32, head: Int32, m_block: Int32, start: Int32, position: Int32, end: Int32
    ) -> TileRange:
        """The key blocks between positions ``position`` and ``end`` of a work tile that starts at ``start``."""
        seen = self.blocks.key_blocks(batch, m_block)
        blocks = seen.end - seen.begin
        first = start + self.overhead  # the first key block's position
        stop = first + cutlass.max(blocks, 1)
        until = cutlass.min(end, stop)
        return TileRange(
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
        """The sequence that contains a position of a head, and where the sequence starts."""
        batch, start, first = Int32(0), Int32(0), Int32(0)
        searching = Boolean(True)
        while searching:
            before, size = warp_search(self.sequence_size, first, self.batch, position - start, self.lane)
            batch, start = first + before, start + size
            first += WARP
            searching = (before == WARP) & (first < self.batch)
        return batch, start

    @cute.jit
    def ranges_of(self, start: Int32, batch: Int32, head: Int32, m_block: Int32) -> tuple[Int32, Int32]:
        """The first and the last range of a work tile; if they are equal, its CTA wrote the result directly.

        Otherwise the CTA of each range, from the first to the last, wrote a partial result, see
        :meth:`TileRange.partial`. ``start``: the sequence's first position in a head, see :meth:`measure`.
        """
        position = start + head * self.of_head
        for before in cutlass.range(m_block, unroll=1):
            position += self.tile_size(batch, before)
        last = position + self.tile_size(batch, m_block) - 1
        return self.range_of(position + self.overhead), self.range_of(last)

    @cute.jit
    def divided_tile(self, index: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """(batch, head, m_block, last range) of the work tile that starts in range ``index`` and ends in a later range.

        There is at most one such work tile; if there is none, the last range is ``index``.
        """
        batch, head, m_block, last = Int32(0), Int32(0), Int32(0), index
        end = self.begin(index + 1)
        if self.begin(index) < end:
            batch, head, m_block, start, size = self.find_tile(end - 1)
            if self.range_of(start + self.overhead) == index:
                last = self.range_of(start + size - 1)
        return batch, head, m_block, last


Terms = Callable[[Int32], Int32]


def warp_sums(compute: Terms, end: Int32, some: Int32, lane: Int32) -> tuple[Int32, Int32, Int32]:
    """compute(0) + ... + compute(end - 1), the sum of the first ``some`` of these terms, and the largest.

    All lanes get these. A lane computes every 32nd term; on the host a thread computes all terms.
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
    """How many running sums of compute(first), ..., compute(first + 31) are at most ``position``, and the last one.

    Terms from ``end`` on are 0. Each lane computes one; on the host a thread computes all.
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
