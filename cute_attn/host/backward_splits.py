"""How a backward divides what one CTA would do alone: the query heads of a kv head, and a sequence's key blocks.

Host code, run once for the metadata of a call. Times are counted in steps: one query block with one key block.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # the laboratory's estimates need no torch
    from cute_attn.host.call import Call

Row = TypeVar("Row")
Column = TypeVar("Column")

MAX_SPLITS = 16
"""The most dQ accumulators of the deterministic mode."""

TILE_STEPS = 1
"""What a work tile costs beside its steps: K and V in, dK and dV out. Steps, measured: bench/notes.md."""
BYTES_PER_STEP = 16 << 20
"""Bytes of divided dK and dV, mostly in L2, that are added up in the time of a step, 2 us."""
ADDING_STEPS = 14
"""What the sums of dK and of dV cost beside their bytes, measured as well."""
NEARLY = 1.02
"""The fewest splits of query heads whose time is at most that much of the least are as good: they take less memory."""
NEARLY_IN_LITTLE_MEMORY = 1.05
"""The same of key blocks, of which each split takes a dQ in fp32."""
MOST_TILES = 4096
"""More keep every multiprocessor busy."""
_MOST_BLOCKS = 64  # of a sequence whose steps are counted
_L2_BYTES = 32 << 20


def key_splits(blocks: int, planes: int, multiprocessors: int) -> int:
    """Splits of a (batch, head of dK)'s key blocks in the deterministic mode, each with a dQ accumulator.

    The fewest that are nearly the fastest of up to ``MAX_SPLITS``: time is waves of CTAs times a CTA's key blocks.

    Args:
        blocks: key blocks of the longest sequence.
        planes: batch times heads of dK.
        multiprocessors: of the GPU.
    """

    def time(splits: int) -> int:
        return -(-splits * planes // multiprocessors) * -(-blocks // splits)

    return fewest(range(1, min(blocks, MAX_SPLITS) + 1), time, time, NEARLY_IN_LITTLE_MEMORY)


def head_splits(call: "Call", tile: Any, multiprocessors: int) -> int:
    """Work tiles among which the query heads of a kv head are divided, as evenly as their number allows.

    Each has its own dK and dV, which are added up afterwards: more of them fill the GPU where a call has few key blocks
    and kv heads and keep the query heads in L2 that CTAs work on at a time, but cost memory and time. The fewest that
    are nearly the fastest, by simulation.

    Args:
        call: the call's.
        tile: the main kernel's.
        multiprocessors: of the GPU.
    """
    work = HeadSplitWork.of(call, tile, multiprocessors)
    return 1 if work is None else fewest(range(1, work.most + 1), work.time, work.bound, NEARLY)


@dataclass(frozen=True)
class HeadSplitWork:
    """Work tiles of a main kernel, for any number of splits of a kv head's query heads.

    Attributes:
        steps: of each row of the kernel's :class:`cute_attn.work.key_tiles.KeyTileOrder`, for one query head.
        columns: of that, without splits.
        most: splits that there may be.
    """

    call: "Call"
    steps: tuple[int, ...]
    columns: int
    most: int
    multiprocessors: int

    @staticmethod
    def of(call: "Call", tile: Any, multiprocessors: int) -> "HeadSplitWork | None":
        """None where nothing can be divided."""
        group, nheads_kv = call.group, call.k.shape[-2]
        if group == 1 or call.batch * nheads_kv > MOST_TILES:
            return None
        sequences, columns = _sequences(call), nheads_kv * (1 if call.varlen else call.batch)
        count = sum(-(-seqlen_k // tile.tile_n) for _, seqlen_k in sequences) * columns
        most = min(group, MOST_TILES // max(count, 1))
        if most < 2:
            return None
        steps = tuple(n for lengths in sequences for n in steps_of_keys(call, tile, *lengths))
        return HeadSplitWork(call, steps, columns, most, multiprocessors)

    def time(self, splits: int) -> float:
        """Simulated, with the time that adding up dK and dV takes."""
        cost = [self._step(heads) for heads in divided_heads(self.call.group, splits)] * self.columns
        tiles = in_sections(self.steps, cost, section_columns(self.call, len(cost), self.multiprocessors))
        costs = (of_row * of_column + TILE_STEPS for of_row, of_column in tiles)
        return makespan(costs, self.multiprocessors) + self._adding(splits)

    def bound(self, splits: int) -> float:
        """What ``time`` is at least: that of evenly divided work, and of the longest work tile."""
        least, longer = divmod(self.call.group, splits)
        step = longer * self._step(least + 1) + (splits - longer) * self._step(least)
        work = self.columns * (sum(self.steps) * step + len(self.steps) * splits * TILE_STEPS)
        longest = max(self.steps) * self._step(least + (longer > 0)) + TILE_STEPS
        return max(work / self.multiprocessors, longest) + self._adding(splits)

    @functools.cached_property
    def _misses(self) -> tuple[float, float]:
        return cost_of_heads(self.call)

    def _step(self, heads: int) -> float:
        """What a step of each of a work tile's query heads costs together."""
        in_l2, cost = self._misses
        return heads * (1 + cost * max(heads - in_l2, 0))

    def _adding(self, splits: int) -> float:
        """What it costs to add up dK and dV."""
        gradient_bytes = 2 * (self.call.k.numel() + self.call.v.numel())
        return (splits + 1) * gradient_bytes / BYTES_PER_STEP + ADDING_STEPS if splits > 1 else 0


def fewest(
    splits: Sequence[int], time: Callable[[int], float], bound: Callable[[int], float], nearly: float
) -> int:
    """The first number of splits whose time is at most ``nearly`` times the least; ``bound``: no time is less than its.

    The most promising time first, then from the fewest splits on those that may matter, until none that follows can.
    """
    bounds = [bound(n) for n in splits]
    later = [*itertools.accumulate(reversed(bounds[1:]), min, initial=math.inf)][::-1]
    promising = splits[bounds.index(min(bounds))]
    times = {promising: time(promising)}
    for i, n in enumerate(splits):
        if n not in times and bounds[i] <= nearly * min(times.values()):
            times[n] = time(n)
        least = min(times.values())
        first = next((m for m in splits[: i + 1] if times.get(m, math.inf) <= nearly * least), None)
        if first is not None and times[first] <= nearly * min(least, later[i]):
            return first
    raise AssertionError("the least is at most itself")


def divided_heads(group: int, splits: int) -> list[int]:
    """Query heads of each split of a kv head, as ``HeadSplits`` of :mod:`cute_attn.work.key_tiles` has them."""
    return [group // splits + (split < group % splits) for split in range(splits)]


def section_columns(call: "Call", columns: int, multiprocessors: int) -> int:
    """Columns of a section of :class:`cute_attn.work.key_tiles.KeyTileOrder`."""
    from cute_attn.tiles import padded
    from cute_attn.work.key_tiles import L2_SECTION_BYTES

    if not call.mask.startswith("causal"):
        return 1
    head_bytes = call.longest[0] * 4 * padded(call.q.shape[-1])
    most = min(max(L2_SECTION_BYTES // max(head_bytes, 1), 1), multiprocessors // 4)
    return -(-columns // -(-columns // max(most, 1)))


def in_sections(
    rows: Sequence[Row], columns: Sequence[Column], together: int
) -> Iterator[tuple[Row, Column]]:
    """The cells of a table, a section of ``together`` columns after the other, row by row."""
    sections = [columns[first : first + together] for first in range(0, len(columns), together)]
    return ((row, column) for section in sections for row in rows for column in section)


def cost_of_heads(call: "Call") -> tuple[float, float]:
    """How many query heads a work tile may have before a step takes longer for each further one, and by how much.

    Under a mask key blocks have different numbers of steps, so that CTAs of one kv head soon work on different query
    heads. Where those do not fit L2 together, Q, dO and dQ come from memory. Fitted to 100 calls, causal and full, of
    head dims 64 to 256 with 2 to 128 splits, which it predicts to 4 %: bench/notes.md.
    """
    head_dim = call.q.shape[-1]
    if not call.mask or call.q.numel() * 8 <= _L2_BYTES:  # Q, dO and dQ
        return 0.0, 0.0
    return 384 / head_dim, head_dim * 2.5e-4


def makespan(costs: Iterable[float], machines: int) -> float:
    """When the last of some jobs ends, each begun in their order by the machine that is free first."""
    ends = [0.0] * machines
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def steps_of_keys(call: "Call", tile: Any, seqlen_q: int, seqlen_k: int) -> Iterator[int]:
    """Query blocks that see each key block of a sequence; of many key blocks some, repeated."""
    left = right = None
    if call.mask.startswith("window"):
        left, right = call.window_left, call.window_right
    elif call.mask:
        right = 0
    offset = 0 if "top_left" in call.mask else seqlen_q - seqlen_k
    blocks = -(-seqlen_k // tile.tile_n)
    every = -(-blocks // _MOST_BLOCKS)
    for block in range(blocks):
        first = (block // every * every + min(every, blocks - block) // 2) * tile.tile_n
        last = min(first + tile.tile_n, seqlen_k) - 1
        yield steps_of_block(first, last, seqlen_q, tile.tile_m, offset, right, left)


def steps_of_block(
    first: int, last: int, cols: int, step: int, offset: int, before: int | None, after: int | None
) -> int:
    """Blocks of ``step`` of ``cols`` columns that rows first to last see.

    Row r sees columns from r + offset - before to r + offset + after, without a bound where that is None.
    """
    begin = 0 if before is None else max(first + offset - before, 0)
    end = cols if after is None else min(last + offset + after + 1, cols)
    return -(-end // step) - begin // step if begin < end else 0


def _sequences(call: "Call") -> list[tuple[int, int]]:
    """Lengths of queries and keys of the sequences whose key blocks are rows of a ``KeyTileOrder``: one unless varlen.

    Of packed sequences the mean of all others, then the longest: the worst order.
    """
    longest, batch = call.longest, call.batch
    if not call.varlen:
        return [longest]
    rows = (call.q.shape[0], call.k.shape[0])
    q, k = (max(0, math.ceil((n - most) / max(batch - 1, 1))) for n, most in zip(rows, longest, strict=True))
    return [*[(q, k)] * (batch - 1), longest]
