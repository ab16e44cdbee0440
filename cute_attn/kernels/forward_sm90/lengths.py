"""Chooses the Hopper forward's tile by sequence lengths: a row of ``tiles.csv``, keys per step, and packed heads.

The choice is the fastest by a model of a multiprocessor: rounds of work tiles, times the steps of one, times the time
of a step, which either its rows or the loads of K and V bound. Times are in rows times keys. The constants are fitted
to the stored timings of ``bench.regret``, whose ``--judge`` judges a change.
"""

import dataclasses
import functools
import itertools
import math

from cute_attn.epilogues.names import held, lists_blocks, reads_keys
from cute_attn.kernels.forward_sm90.heuristics import TABLE, epilogues_beside, keys
from cute_attn.tiles import MULTIPROCESSORS, PACKS, ForwardSm90Tile, Sizes, may_pack_heads
from cute_attn.traits import Traits

LENGTHS = ("long", "short", "two_warpgroups", "one_warpgroup", "four_warpgroups")
FEW_KEYS = (64, 80, 96)
"""Keys per step in place of a row's, if fewer keys are wasted. A text's 77 keys take one step."""

ROW = (1.3, 1.1, 0.95, 0.85)
"""A row's time per key at head dims up to 64, with one to four consumer warpgroups on a multiprocessor."""
LOAD = {64: 68, 128: 130}
"""The time of loading a key, which is the same for any number of rows."""
SECTORS = 1.5
"""The same relative to head dims 80, 96, 112 and 128, whose rows begin with sectors of L2."""
STEP = 17
"""Fixed time of a step, in keys of its rows; other CTAs of the multiprocessor hide it."""
FILL = 0.6
"""Fixed time of a work tile, in steps without their fixed time: its first loads and products overlap nothing."""
NARROW = 1.1
"""A row's time per key in blocks of fewer keys than its row of the table has, relative to those."""
CAP = 1.7
"""The same with a function such as a cap, which no load bounds."""
PACKED = 1.1
"""The same with packed heads that leave out neither rows nor keys: without a mask, and under a causal one at head dims
65 to 128."""


def tile_for_lengths(default: ForwardSm90Tile, traits: Traits, sizes: Sizes) -> ForwardSm90Tile:
    """The tile for sequences of at most these sizes. default: the tile for many long sequences."""
    # 256 rows are measured with equal lengths, and slower in windows.
    most_rows = 192 if sizes.pairs is None or traits.varlen or traits.windowed else 256
    tiles = _candidates(default, traits, sizes.group, most_rows)
    return min(tiles, key=lambda one: _time(one[0], one[1], traits, sizes))[0]


def _is_of_scores(traits: Traits) -> bool:
    """True if the only epilogues are functions of a score and its query, such as a cap: they do not grow along keys.

    Functions that hold numbers are excluded: they leave no registers for two loops.
    """
    names = traits.epilogues
    alone = bool(names) and epilogues_beside(traits) == 1
    return alone and not reads_keys(names) and not held(names, traits.op)


@functools.lru_cache(maxsize=1024)
def _candidates(
    default: ForwardSm90Tile, traits: Traits, group: int, most_rows: int
) -> tuple[tuple[ForwardSm90Tile, bool], ...]:
    """Tiles of the table, each with all numbers of keys per step and packed heads, and whether its keys are fewer.

    They load a bias as the default does.
    """
    rows = (TABLE.tiles(*keys(traits, "sm90", lengths)) for lengths in LENGTHS)
    fit = ([tile for tile in tiles if tile.reject(traits, "sm90") is None][:1] for tiles in rows)
    # A function may grow along the keys: each step would be computed twice.
    exact = {} if default.speculative or _is_of_scores(traits) else {"speculative": False}
    packs = [n for n in reversed(PACKS) if n < 2 * group] if may_pack_heads(traits) else [1]
    listed = lists_blocks(traits.epilogues)
    few = [] if listed or traits.bias else [n for n in FEW_KEYS if n % 32 == 0 or traits.dropout != "flash"]
    # Bounds in addition to a list need registers; the list's blocks are multiples of 64 keys.
    bounded = listed and not traits.bias and (traits.windowed or traits.causal)
    return tuple(
        (dataclasses.replace(tile, tile_n=n, pack_heads=pack, **exact), n < tile.tile_n)
        for tile in dict.fromkeys([default, *itertools.chain.from_iterable(fit)])
        if bool(tile.bias_stages) == bool(default.bias_stages) and tile.tile_m <= most_rows
        for n in ([64] if bounded else [tile.tile_n, *(n for n in few if n < tile.tile_n)])
        for pack in packs
    )


def _steps(tile: ForwardSm90Tile, traits: Traits, sizes: Sizes) -> float:
    """Mean number of key blocks that a work tile visits."""
    seqlen_q, seqlen_k, window = sizes.seqlen_q, sizes.seqlen_k, sizes.window
    n, queries = tile.tile_n, min(tile.queries, seqlen_q)
    most = -(-seqlen_k // n)
    if traits.windowed and 0 < window < seqlen_k:
        return min(most, (window + queries - 2) / n + 1)  # it begins anywhere
    if traits.causal and seqlen_q > queries:
        last = min(seqlen_k, seqlen_q) if traits.top_left else seqlen_k
        return min(most, (max(last - seqlen_q, 0) + (min(seqlen_q, last) + queries) / 2) / n)
    return most


def _time(tile: ForwardSm90Tile, narrow: bool, traits: Traits, sizes: Sizes) -> float:
    """The time of a multiprocessor; of a mean sequence if its number is unknown."""
    d = max(traits.head_dim, traits.head_dim_v)
    n, most = tile.tile_n, tile.blocks_per_sm
    steps = _steps(tile, traits, sizes)
    load = LOAD[64 if d <= 64 else 128] * (SECTORS if 64 < d <= 128 and d % 16 else 1)
    rows = tile.tile_m * (NARROW if narrow else 1) * (CAP if _is_of_scores(traits) else 1)
    fewer = traits.varlen or traits.windowed or (traits.causal and not 64 < d <= 128)
    if tile.pack_heads > 1 and sizes.seqlen_q > tile.tile_m and not fewer:
        rows *= PACKED

    def work_tile(blocks: int) -> float:
        """The time of one of as many CTAs on a multiprocessor, divided by their number."""
        row = rows * (ROW[min(blocks * tile.warpgroups, 4) - 1] if d <= 64 else 1)
        return steps * (max(row, load) * n + STEP * row / blocks) + FILL * n * row / blocks

    lengths = (sizes.seqlen_q, -(-sizes.seqlen_q // 2)) if traits.varlen else (sizes.seqlen_q,)
    work = sum(-(-length // tile.queries) for length in lengths) / len(lengths)
    work *= -(-sizes.group // tile.pack_heads)
    if sizes.pairs is None or traits.varlen:
        return work * work_tile(most)
    work *= sizes.pairs / sizes.group / MULTIPROCESSORS
    if traits.causal:  # the longest first, of up to twice the mean
        longest = sizes.seqlen_k / max(sizes.seqlen_k - min(sizes.seqlen_q, sizes.seqlen_k) / 2, 1)
        return max(longest * work_tile(1), work * work_tile(most))
    rounds, rest = divmod(math.ceil(work), most)
    last = rest * work_tile(rest) if rest else 0
    # CTAs of which three fit have few loads in flight, 2% slower where there are fewer.
    return rounds * most * work_tile(most) + last if rounds or most < 3 else 1.02 * last
