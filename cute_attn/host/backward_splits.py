"""How a backward divides what one CTA would do alone: the query heads of a kv head, and a sequence's key blocks.

Host code, run once for the metadata of a call.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cute_attn.epilogues.inputs import UNBOUNDED

if TYPE_CHECKING:
    from cute_attn.host.call import Call

MAX_SPLITS = 16
"""The most dQ accumulators of the deterministic mode."""

ADDING_STEPS = 14
"""What the sums of dK and of dV cost beside their bytes, in steps of a query block with a key block: bench/notes.md."""
BYTES_PER_STEP = 16 << 20
"""Bytes of divided dK and dV, mostly in L2, that are added up in the time of a step, 2 us."""
NEARLY = 1.02
"""The fewest splits of query heads whose time is at most that much of the least are as good: they take less memory."""
NEARLY_IN_LITTLE_MEMORY = 1.05
"""The same of key blocks, of which each split takes a dQ in fp32."""
EVEN = 1.5
"""Work tiles are equal enough for waves where the longest takes at most that many times the mean's steps."""

WHOLE, DIVIDED = 1.4, 0.7
"""Bytes in flight over those of L2, up to which heads stay undivided, and to which a division brings them: the sums
cost more than misses between the two. Measured on an H100 and an H200: bench/notes.md."""


def key_splits(blocks: int, planes: int, multiprocessors: int) -> int:
    """Splits of a (batch, head of dK)'s key blocks in the deterministic mode, each with a dQ accumulator.

    The fewest that are nearly the fastest of up to ``MAX_SPLITS``: time is waves of CTAs times a CTA's key blocks.

    Args:
        blocks: key blocks of the longest sequence.
        planes: batch times heads of dK.
        multiprocessors: of the GPU.
    """
    splits = range(1, min(blocks, MAX_SPLITS) + 1)
    times = [-(-n * planes // multiprocessors) * -(-blocks // n) for n in splits]
    return next(
        n for n, time in zip(splits, times, strict=True) if time <= NEARLY_IN_LITTLE_MEMORY * min(times)
    )


def head_splits(
    call: "Call", tile: Any, multiprocessors: int, l2_bytes: int, deterministic: bool = False
) -> int:
    """Work tiles among which the query heads of a kv head are divided, as evenly as their number allows.

    A work tile is a key block, whose CTA visits the queries of its heads, one head after the other. Each split has a
    dK and a dV of its own, which are added up afterwards. Two things ask for splits.

    **Few work tiles** leave multiprocessors idle. Equal ones come in waves. Of others the longest come first, so that
    short ones even out the end: the time is the mean of all CTAs, or the longest work tile's where that is more. Both
    in steps of a query block with a key block, as is what it costs to add up.

    **Bytes in flight.** CTAs share what they read of Q and dO, and the dQ that they add to, while it is in L2. Without
    a mask all work tiles take as many steps: the CTAs of a kv head are at the same query head at the same time, whose
    queries alone are in flight. Under a causal mask they drift apart, until they are anywhere in their heads. What they
    touch is then as large a share of all Q, dO and dQ as what they hold is of all work tiles; with n splits there are n
    times as many of those, so the share is an nth. On 132 multiprocessors 128 keys of head dim 128 make 16.5 MB in
    flight for each head of a work tile, whatever the lengths.

    Args:
        call: the call's.
        tile: the main kernel's.
        multiprocessors: of the GPU.
        l2_bytes: of the GPU.
        deterministic: whether a CTA takes several key blocks, one after the other.
    """
    group, triangular = call.group, is_triangular(call)
    if group == 1:
        return 1
    tiles, steps, longest, queries = 0, 0.0, 0.0, 0  # of one head
    for count, seqlen_q, seqlen_k in _sequences(call):
        visited, blocks = _visited(call, seqlen_q, seqlen_k, tile.tile_n), -(-seqlen_k // tile.tile_n)
        most = -(-visited // tile.tile_m)
        mean = most / 2 if triangular else most
        own = min(blocks, MAX_SPLITS) if deterministic else blocks
        tiles, steps, queries = tiles + count * own, steps + count * blocks * mean, queries + count * visited
        longest = max(longest, most + mean * (-(-blocks // max(own, 1)) - 1))
    nheads_kv, element, dims = call.k.shape[-2], call.q.element_size(), call.q.shape[-1] + call.v.shape[-1]
    gradient_bytes = element * (call.k.numel() + call.v.numel())
    query_bytes = queries * call.nheads * (element * dims + 4 * call.q.shape[-1])
    tiles, steps = tiles * nheads_kv, steps * call.nheads

    def time(splits: int) -> float:
        heads = -(-group // splits)
        adding = ADDING_STEPS + (splits + 1) * gradient_bytes / BYTES_PER_STEP if splits > 1 else 0
        if longest * tiles * group <= EVEN * steps:
            return -(-splits * tiles // multiprocessors) * heads * longest + adding
        return max(steps / multiprocessors, heads * longest) + adding

    def in_flight(splits: int) -> float:
        return query_bytes * min(multiprocessors / max(splits * tiles, 1), 1)

    options = [*even_splits(group)]
    times = [time(splits) for splits in options]
    fewest = next(n for n, own in zip(options, times, strict=True) if own <= NEARLY * min(times))
    if not triangular or (fewest == 1 and in_flight(1) <= WHOLE * l2_bytes):
        return fewest
    return next((n for n in options if n >= fewest and in_flight(n) <= DIVIDED * l2_bytes), group)


def even_splits(group: int) -> Iterator[int]:
    """Numbers of splits that no smaller one equals in its largest part: of 8 heads 1, 2, 3, 4 and 8."""
    heads = group
    while heads:
        splits = -(-group // heads)
        yield splits
        heads = (group - 1) // splits


def is_triangular(call: "Call") -> bool:
    """Whether queries of key blocks differ much under the mask: the most are more than 4/3 of the mean."""
    seqlen_q, seqlen_k = call.longest
    if call.mask.startswith("window"):
        return _span(call) >= seqlen_q
    return bool(call.mask) and (
        seqlen_q < 2 * seqlen_k if "top_left" in call.mask else seqlen_k < 2 * seqlen_q
    )


def _span(call: "Call") -> float:
    """Queries that a window lets see a key."""
    bounds = call.window_left, call.window_right
    return math.inf if UNBOUNDED in bounds else sum(bounds) + 1


def _visited(call: "Call", seqlen_q: int, seqlen_k: int, tile_n: int) -> int:
    """Queries of a head that the longest key block of a sequence visits."""
    if call.mask.startswith("window"):
        return int(min(seqlen_q, _span(call) + tile_n))
    return min(seqlen_q, seqlen_k) if call.mask == "causal" else seqlen_q


def _sequences(call: "Call") -> list[tuple[int, int, int]]:
    """(how many, queries, keys) of the sequences; packed ones beside the longest, whose sums alone are known, as equal
    ones."""
    longest, batch = call.longest, call.batch
    if not call.varlen or batch == 1:
        return [(batch, *longest)]
    rows = (call.q.shape[0], call.k.shape[0])
    q, k = (max(0, math.ceil((n - most) / (batch - 1))) for n, most in zip(rows, longest, strict=True))
    return [(1, *longest), (batch - 1, q, k)]
