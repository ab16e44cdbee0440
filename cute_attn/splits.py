"""How a backward divides what one CTA would do alone: the query heads of a kv head, and a sequence's key blocks.

Host code, run once for the metadata of a call. Times are counted in steps: one query block with one key block.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any

from cute_attn.params import AttentionParams

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
    least = min(times.values())
    return next(splits for splits, time in times.items() if time <= 1.05 * least)


def head_splits(params: AttentionParams, tile: Any, multiprocessors: int) -> int:
    """Work tiles among which the query heads of a kv head are divided, a divisor of their number.

    Each has its own dK and dV, which are added up afterwards: more of them fill the GPU where a call has few key blocks
    and kv heads, but cost memory and time. The fewest within 5 % of the least simulated time.

    Args:
        params: the call's.
        tile: the main kernel's.
        multiprocessors: of the GPU.
    """
    group, nheads_kv = params.group, params.k.shape[-2]
    if group == 1 or params.batch * nheads_kv > MOST_TILES:
        return 1
    sequences = _sequences(params)
    count = sum(-(-seqlen_k // tile.tile_n) for _, seqlen_k in sequences) * nheads_kv
    most = min(group, MOST_TILES // max(count, 1))
    splits = [n for n in range(1, most + 1) if group % n == 0]
    if len(splits) < 2:
        return 1
    steps = [n for lengths in sequences for n in steps_of_keys(params, tile, *lengths)]
    gradient_bytes = 2 * (params.k.numel() + params.v.numel())
    miss = cost_of_a_head(params)

    def time(n: int) -> float:
        heads = group // n
        step = heads * (1 + miss * (heads - 1))
        tiles = [count * step + TILE_STEPS for count in steps for _ in range(nheads_kv * n)]
        adding = (n + 1) * gradient_bytes / BYTES_PER_STEP + 1 if n > 1 else 0
        return makespan(tiles, multiprocessors) + adding

    times = {n: time(n) for n in splits}
    least = min(times.values())
    return next(n for n, spent in times.items() if spent <= 1.05 * least)


def cost_of_a_head(params: AttentionParams) -> float:
    """By how much a step takes longer for each further query head of its work tile.

    Under a mask key blocks have different numbers of steps, so that CTAs of one kv head soon work on different query
    heads. Where those do not fit L2 together, Q, dO and dQ come from memory: at head dim 256 (1920 and 789 queries, 80
    heads on 10) 8 heads a tile took 1.48 and 4 heads 1.1 of the time of 2; at 128 (4 x 598, 99 on 11) 9 took 1.1 of 1.
    """
    head_dim = params.q.shape[-1]
    if not params.mask or params.q.numel() * 8 <= _L2_BYTES:  # Q, dO and dQ
        return 0.0
    return max(0, head_dim - 64) * 2e-4


def makespan(costs: Sequence[float], machines: int) -> float:
    """When the last of some jobs ends, each begun in their order by the machine that is free first."""
    ends = [0.0] * machines
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def steps_of_keys(params: AttentionParams, tile: Any, seqlen_q: int, seqlen_k: int) -> Iterator[int]:
    """Query blocks that see each key block of a sequence; of many key blocks some, repeated."""
    first, last = _seen_by(params, seqlen_q, seqlen_k)
    blocks = -(-seqlen_k // tile.tile_n)
    every = -(-blocks // _MOST_BLOCKS)
    for block in range(blocks):
        key = (block // every * every + min(every, blocks - block) // 2) * tile.tile_n
        begin = max(0, key + first)
        end = min(seqlen_q, min(key + tile.tile_n, seqlen_k) - 1 + last)
        yield -(-end // tile.tile_m) - begin // tile.tile_m if begin < end else 0


def _seen_by(params: AttentionParams, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Key k is seen by queries from k + the first number up to, not including, k + the second."""
    shift = 0 if "top_left" in params.mask else seqlen_k - seqlen_q
    beyond = seqlen_q + seqlen_k
    left = right = beyond
    if params.mask.startswith("window"):
        left, right = params.window_left, params.window_right
    elif params.mask:
        right = 0
    return -min(right, beyond) - shift, min(left, beyond) - shift + 1


def _sequences(params: AttentionParams) -> list[tuple[int, int]]:
    """Lengths of queries and keys; of packed sequences the mean of all others, then the longest: the worst order."""
    longest, batch = params.longest, params.batch
    if not params.varlen:
        return [longest] * batch
    rows = (params.q.shape[0], params.k.shape[0])
    q, k = (max(0, math.ceil((n - most) / max(batch - 1, 1))) for n, most in zip(rows, longest, strict=True))
    return [*[(q, k)] * (batch - 1), longest]
