"""How a backward splits work among CTAs: the query heads of a kv head, and the key blocks of a sequence.

Host code, run once for the metadata of a call.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cute_attn.epilogues.inputs import UNBOUNDED

if TYPE_CHECKING:
    from cute_attn.host.call import Call

MAX_SPLITS = 16
"""Maximum dQ accumulators in the deterministic mode."""

MAX_IN_ORDER = 4
"""Maximum accumulators if key blocks add in order, unless the accumulators are small."""
TURN_STEPS = 1.5
"""Steps between the additions of two successive key blocks to the same query block."""
AROUND_STEPS = 5
"""Time to load a key block's K and V and to store its dK and dV, in steps."""

MAX_PARTS = 16
"""Maximum parts of a query head's queries."""
ADDING_STEPS = 7
"""Fixed cost of summing split dK and dV, apart from their bytes, in steps. A step is a query block with a key block,
about 2 us: row 55 of bench/history.md."""
BYTES_PER_STEP = 5 << 20
"""Bytes of split dK and dV that are summed in the time of a step, or of a dQ accumulator that is cleared and read."""
NEARLY = 1.03
"""Maximum ratio to the shortest time for fewer splits to be preferred, since each split takes memory; also the
slowdown by splits of unlike numbers of heads, such as 3, 3 and 2."""
PAYS = 1.08
"""Minimum ratio of the time without splits of heads to the shortest for splits to pay: two splits often do not."""
UNEVEN = 4 / 3
"""Maximum ratio of the most queries that see a key block to the mean for CTAs to stay in step."""
WAVES_OF_LISTS = 6
"""Minimum waves of work tiles with a block mask: the lengths of its lists are not known here."""
WAITS = 2.5
"""Slowdown of key blocks that add in order if long work tiles come last and heads are not all split."""
MOST_BLOCKS = 64
"""Maximum key blocks of a sequence for which :func:`queries_seen` counts queries."""

UNKNOWN = 0.6
"""Idle time at the end of a call with packed sequences of different lengths, over the mean time of a work tile. Only
the sums of the lengths are known."""
IN_L2, MISSES = 0.5, 0.14
"""Bytes in flight over L2's size that cost nothing, and the slowdown by each further L2's size with 128 keys in a
block. Fewer keys take less time per byte. Fitted to all stored timings: "Choices, by regret" in bench/notes.md."""


def key_splits(
    blocks: int,
    heads: int,
    multiprocessors: int,
    steps: float = 1.0,
    accumulator_bytes: int = 0,
    all_blocks: int = 0,
) -> int:
    """Number of splits of the key blocks of a (batch, head of dK) in the deterministic mode, one dQ accumulator each.

    The fastest up to ``MAX_SPLITS``. Time is waves of CTAs times the steps of a CTA, plus the time of the accumulators.

    Args:
        blocks: key blocks of the longest sequence.
        heads: heads of dK in all sequences.
        steps: mean query blocks that a CTA visits for a key block; a key block without queries still costs a step.
        accumulator_bytes: bytes of one accumulator.
        all_blocks: key blocks of all these heads if sequences differ; 0 for the product of ``blocks`` and ``heads``.
    """
    splits = range(1, min(blocks, MAX_SPLITS) + 1)

    def time(n: int) -> float:
        longest, waves = -(-blocks // n), -(-n * heads // multiprocessors)
        busiest = longest + all_blocks / multiprocessors if all_blocks else waves * longest
        return busiest * max(steps, 1) + n * accumulator_bytes / BYTES_PER_STEP

    return min(splits, key=time)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of :class:`cute_attn.work.key_tiles.KeyTileOrder`, whose key blocks add to dQ in order.

    Attributes:
        blocks: key blocks of the longest sequence.
        rows: key blocks of a column.
        sequences: sequences of a column, one after the other.
        steps: query blocks that a CTA visits for a key block.
        seen: fraction of the query blocks that a key block sees, on average.
    """

    count: int
    blocks: int
    rows: int
    sequences: int
    steps: float
    seen: float


def accumulators_in_order(
    columns: Columns,
    accumulator_bytes: int,
    key_bytes: int,
    multiprocessors: int,
    l2_bytes: int,
) -> int:
    """The number of dQ accumulators that is fastest, if key blocks add in order, each to one of them by turns.

    The key blocks that see a query block add to it ``TURN_STEPS`` steps apart. If the launch takes longer than these
    additions, they delay only the key blocks of a column that begin together. The accumulators in use at a time fit in
    half of L2: beyond that, an addition takes up to twice as long. More than ``MAX_IN_ORDER`` accumulators take no more
    memory than k and v.

    Args:
        accumulator_bytes: bytes of one accumulator.
        key_bytes: bytes of K and V.
    """
    running = multiprocessors / columns.count  # key blocks of a column that run at a time
    # sequences of a column that run at a time
    sequences = max(1.0, min(columns.sequences, running / columns.blocks))
    busy = columns.rows * (columns.steps + AROUND_STEPS) / running
    chain = columns.rows * columns.seen / sequences
    used = min(1.0, running) * sequences / columns.sequences  # fraction of the accumulators, at a time

    def time(n: int) -> float:
        turns = max(busy, TURN_STEPS * chain / n) + TURN_STEPS * running / n
        return turns + n * accumulator_bytes / BYTES_PER_STEP

    def fits(n: int) -> bool:
        return n == 1 or used * n * accumulator_bytes <= l2_bytes / 2

    most = min(MAX_SPLITS, max(MAX_IN_ORDER, key_bytes // accumulator_bytes), columns.blocks)
    return min(filter(fits, range(1, most + 1)), key=time)


def head_splits(
    call: "Call",
    tile: Any,
    multiprocessors: int,
    l2_bytes: int,
    deterministic: bool = False,
    in_order: bool = False,
) -> int:
    """Number of work tiles among which the query heads of a kv head are split, as evenly as possible.

    A work tile is a key block; its CTA visits the queries of its heads, one head after the other. Each split writes a
    separate dK and dV, which are added up afterwards. Two things call for splits.

    **Few work tiles** leave multiprocessors idle. Equal work tiles run in waves. Unequal ones run longest first, so
    that short ones even out the end: the time is the mean of all CTAs, or that of the longest work tile if it is
    longer. Both are in steps of a query block with a key block, as is the cost of the sums.

    **Bytes in flight.** CTAs reuse each other's Q, dO and dQ while these are in L2. Without a mask all work tiles take
    as many steps: the CTAs of a kv head are at the same query head at the same time, and only its queries are in
    flight. Under a causal mask CTAs drift apart until each may be at any of its heads. The fraction of Q, dO and dQ in
    flight then equals the fraction of work tiles that are running, and n splits divide it by n. On 132 multiprocessors
    128 keys of head dim 128 make 16.5 MB in flight for each head of a work tile, whatever the lengths. What exceeds L2
    slows every step.

    With ``dq_direct`` the queries of a head may be divided too: then there are more splits than heads in a group.

    With ``same_bits`` the number of splits depends only on the mask.

    Args:
        deterministic: whether a CTA computes several key blocks, one after the other.
        in_order: whether a sequence's last key blocks are computed first. Under a causal mask the longest work tiles
            then come last: heads are all split, so that these are short, unless the sums cost more (``WAITS``).
    """
    group = call.group
    if call.same_bits:
        return group if call.mask else 1
    most, mean = queries_seen(call, *call.longest, tile.tile_n)
    direct = getattr(tile, "dq_direct", False)
    if not most or (direct and tile.dq_rows) or (group == 1 and not direct):
        return 1
    drifts = most > UNEVEN * mean
    tiles, steps, longest, queries = 0, 0.0, 0.0, 0  # totals of one head
    for count, seqlen_q, seqlen_k in _sequences(call):
        most, mean = queries_seen(call, seqlen_q, seqlen_k, tile.tile_n)
        blocks = -(-seqlen_k // tile.tile_n)
        own = min(blocks, MAX_SPLITS) if deterministic else blocks
        tiles, queries = tiles + count * own, queries + count * most
        steps += count * blocks * mean / tile.tile_m
        longest = max(longest, (most + mean * (-(-blocks // max(own, 1)) - 1)) / tile.tile_m)
    nheads_kv, element, dims = call.k.shape[-2], call.q.element_size(), call.q.shape[-1] + call.v.shape[-1]
    gradient_bytes = element * (call.k.numel() + call.v.numel())
    query_bytes = queries * call.nheads * (element * dims + 4 * call.q.shape[-1])
    tiles, steps = tiles * nheads_kv, steps * call.nheads

    def time(splits: int) -> float:
        heads = -(-group // splits)
        own = longest if splits <= group else math.ceil(longest / (splits // group))
        adding = ADDING_STEPS + (splits + 1) * gradient_bytes / BYTES_PER_STEP if splits > 1 else 0
        if drifts or call.varlen:
            last = UNKNOWN * steps / (splits * tiles) if call.varlen else 0
            busiest = max(steps / multiprocessors + last, heads * own)
        else:  # shorter tiles count as fractions of whole ones
            waves = splits * steps / (group * longest * multiprocessors)
            busiest = math.ceil(round(waves, 6)) * heads * own
        if drifts and in_order:
            busiest *= WAITS if splits < group else 1
        elif drifts:
            in_flight = query_bytes * multiprocessors / (splits * tiles)
            busiest *= 1 + MISSES * (128 / tile.tile_n) * max(in_flight / l2_bytes - IN_L2, 0)
        unlike = heads > 1 and group % splits
        return (NEARLY if unlike else 1) * busiest + adding

    options = [*even_splits(group)]
    if direct:
        options += [group * n for n in range(2, min(MAX_PARTS, math.ceil(longest)) + 1)]
    if call.lists_blocks:
        return next((n for n in options if n * tiles >= WAVES_OF_LISTS * multiprocessors), group)
    times = [time(splits) for splits in options]
    if times[0] <= PAYS * min(times):
        return 1
    return next(n for n, own in zip(options, times, strict=True) if own <= NEARLY * min(times))


def even_splits(group: int) -> Iterator[int]:
    """Yield the fewest splits for each size of the largest split: 1, 2, 3, 4 and 8 for 8 heads."""
    heads = group
    while heads:
        splits = -(-group // heads)
        yield splits
        heads = (group - 1) // splits


def queries_seen(call: "Call", seqlen_q: int, seqlen_k: int, tile_n: int) -> tuple[int, float]:
    """Maximum and mean number of queries that see a key block of a sequence, over up to ``MOST_BLOCKS`` key blocks."""
    left, right = UNBOUNDED, 0 if call.mask else UNBOUNDED
    if call.mask.startswith("window"):
        left, right = call.window_left, call.window_right
    shift = 0 if "top_left" in call.mask else seqlen_k - seqlen_q
    blocks = -(-seqlen_k // tile_n)
    every = max(1, -(-blocks // MOST_BLOCKS))
    counts = []
    for first in range(every // 2 * tile_n, seqlen_k, every * tile_n):
        last = min(first + tile_n, seqlen_k) - 1
        begin, end = max(first - shift - right, 0), min(last - shift + left + 1, seqlen_q)
        counts.append(max(end - begin, 0))
    return max(counts, default=0), statistics.fmean(counts or [0])


def _sequences(call: "Call") -> list[tuple[int, int, int]]:
    """(count, queries, keys) of the sequences. Packed sequences except the longest are assumed equal, since only the
    sum of their lengths is known."""
    longest, batch = call.longest, call.batch
    if not call.varlen or batch == 1:
        return [(batch, *longest)]
    rows = (call.q.shape[0], call.k.shape[0])
    q, k = (max(0, math.ceil((n - most) / (batch - 1))) for n, most in zip(rows, longest, strict=True))
    return [(1, *longest), (batch - 1, q, k)]
