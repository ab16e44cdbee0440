"""How a backward divides what one CTA would do alone: the query heads of a kv head, and a sequence's key blocks.

Host code, run once for the metadata of a call. Times are counted in steps: one query block with one key block.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the laboratory's estimates need no torch
    from cute_attn.host.call import Call

MAX_SPLITS = 16
"""The most dQ accumulators of the deterministic mode."""

TILE_STEPS = 3
"""What a work tile costs beside its steps: K and V in, dK and dV out. Steps, measured: bench/notes.md."""
BYTES_PER_STEP = 8 << 20
"""Bytes that the GPU moves in the time of a step, 2 us."""
MOST_TILES = 4096
"""More keep every multiprocessor busy."""
_MOST_BLOCKS = 64  # of a sequence whose steps are counted
_L2_BYTES = 32 << 20


def key_splits(blocks: int, planes: int, multiprocessors: int) -> int:
    """Splits of a (batch, head of dK)'s key blocks in the deterministic mode, each with a dQ accumulator.

    The fewest within 5 % of the least time of up to ``MAX_SPLITS``, where time is waves of CTAs times key blocks of
    each.

    Args:
        blocks: key blocks of the longest sequence.
        planes: batch times heads of dK.
        multiprocessors: of the GPU.
    """
    times = {
        splits: -(-splits * planes // multiprocessors) * -(-blocks // splits)
        for splits in range(1, min(blocks, MAX_SPLITS) + 1)
    }
    return _fewest(times)


def head_splits(call: "Call", tile: Any, multiprocessors: int) -> int:
    """Work tiles among which the query heads of a kv head are divided, a divisor of their number.

    Each has its own dK and dV, which are added up afterwards: more of them fill the GPU where a call has few key blocks
    and kv heads, but cost memory and time. The fewest within 5 % of the least simulated time.

    Args:
        call: the call's.
        tile: the main kernel's.
        multiprocessors: of the GPU.
    """
    group, nheads_kv = call.group, call.k.shape[-2]
    if group == 1 or call.batch * nheads_kv > MOST_TILES:
        return 1
    sequences = _sequences(call)
    count = sum(-(-seqlen_k // tile.tile_n) for _, seqlen_k in sequences) * nheads_kv
    most = min(group, MOST_TILES // max(count, 1))
    splits = [n for n in range(1, most + 1) if group % n == 0]
    if len(splits) < 2:
        return 1
    steps = [n for lengths in sequences for n in steps_of_keys(call, tile, *lengths)]
    gradient_bytes = 2 * (call.k.numel() + call.v.numel())
    miss = cost_of_a_head(call)

    def time(n: int) -> float:
        heads = group // n
        step = heads * (1 + miss * (heads - 1))
        tiles = [count * step + TILE_STEPS for count in steps for _ in range(nheads_kv * n)]
        adding = (n + 1) * gradient_bytes / BYTES_PER_STEP + 1 if n > 1 else 0
        return makespan(tiles, multiprocessors) + adding

    return _fewest({n: time(n) for n in splits})


def _fewest(times: Mapping[int, float]) -> int:
    """The first number of splits whose time is within 5 % of the least."""
    least = min(times.values())
    return next(splits for splits, time in times.items() if time <= 1.05 * least)


def cost_of_a_head(call: "Call") -> float:
    """By how much a step takes longer for each further query head of its work tile.

    Under a mask key blocks have different numbers of steps, so that CTAs of one kv head soon work on different query
    heads. Where those do not fit L2 together, Q, dO and dQ come from memory: at head dim 256 (1920 and 789 queries, 80
    heads on 10) 8 heads a tile took 1.48 and 4 heads 1.1 of the time of 2; at 128 (4 x 598, 99 on 11) 9 took 1.1 of 1.
    """
    head_dim = call.q.shape[-1]
    if not call.mask or call.q.numel() * 8 <= _L2_BYTES:  # Q, dO and dQ
        return 0.0
    return max(0, head_dim - 64) * 2e-4


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
    """Lengths of queries and keys; of packed sequences the mean of all others, then the longest: the worst order."""
    longest, batch = call.longest, call.batch
    if not call.varlen:
        return [longest] * batch
    rows = (call.q.shape[0], call.k.shape[0])
    q, k = (max(0, math.ceil((n - most) / max(batch - 1, 1))) for n, most in zip(rows, longest, strict=True))
    return [*[(q, k)] * (batch - 1), longest]
