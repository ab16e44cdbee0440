"""Chooses the Hopper forward's tile by sequence lengths: a row of ``tiles.csv``, and the number of packed heads.

Rules estimate the time of a call with each of a few tiles from the number of work tiles.
"""

import dataclasses

from cute_attn.epilogues.names import held, lists_blocks, reads_keys
from cute_attn.kernels.forward_sm90.heuristics import TABLE, epilogues_beside, keys
from cute_attn.tiles import (
    MULTIPROCESSORS,
    PACKS,
    ForwardSm90Tile,
    Sizes,
    best_packing,
    first_that_fits,
    may_pack_heads,
    padded,
)
from cute_attn.traits import Traits

SHORT_SEQLEN = 1024
"""Maximum mean number of keys per query for small tiles; prologue and epilogue then dominate a work tile's time."""

SHORT_WINDOW = 2048
"""Maximum window for small tiles: blocks at both ends of a window are partially masked, and small ones waste less."""

LEAST_WINDOW = 256
"""Minimum window for small tiles at head dims 129 to 192; blocks of 128 keys cover a smaller one in fewer steps."""

SHORT_BIASED = 512
"""Maximum queries and keys for small tiles with a bias that TMA loads; above it, 192 rows are faster than 64."""

PACKED = 2 / 3
"""Assumed ratio of the mean length of packed sequences to the longest length."""

NARROW_WINDOW = 512
"""Maximum window for 64 keys per step with packed heads of dims 65 to 128; above it, 96 or 128 keys."""

FEW_KEYS = (64, 80, 96)
"""Narrow key blocks, in keys per step. A sequence that fits in one, such as a text's 77 keys, takes one step."""

FEW_STEPS, NARROW = 4, 1.17
"""Maximum steps of a sequence for which keys per step matter, and the time per key in blocks of ``FEW_KEYS`` relative
to the default tile: 257 keys are faster in 3 steps of 96 than in 3 of 128."""

LEAST_GAIN = 1.1
"""Minimum estimated speedup for choosing a tile with another number of rows."""

FOUR_WARPGROUPS, FOUR_OVER_ONE, LITTLE = 0.985, 0.95, 0.99
"""A row's time in a tile of 256 rows relative to 192 rows and to the short tile of 64, since K and V are loaded less
often, and the maximum ratio of estimated times for choosing it in place of 192."""

PACKED_WORK = 7
"""Minimum work tiles of 256 rows per multiprocessor for packed heads in them, under a causal mask: 1.02 to 1.07 times
the speed of 192 rows. Fewer were not measured."""

MANY_ROWS = {72: 1.25, 88: 1.2, 104: 1.08}
"""Head dims with tiles of 192 rows -> a row's time in a tile of 128 rows relative to this tile.

At these head dims rows begin within L2 sectors, so L2 traffic bounds the kernel, and more rows reuse each load.
"""


def tile_for_lengths(default: ForwardSm90Tile, traits: Traits, sizes: Sizes) -> ForwardSm90Tile:
    """The tile for sequences of at most these sizes. default: the tile for many long sequences."""
    seqlen_q, group, pairs = sizes.seqlen_q, sizes.group, sizes.pairs
    short = _short_tile(traits, sizes)
    plain = short or default
    tile = None
    if not traits.bias:
        packed = group if may_pack_heads(traits) else 1
        tiles = _packing_tiles(traits, short, default, seqlen_q * group)
        tile = best_packing(tiles, plain, seqlen_q, packed, traits.varlen)
        if tile is None and packed > 1:
            tile = _with_group(plain, traits, sizes)
    if tile is None and pairs is not None and not traits.varlen:
        if traits.bias:
            tile = short or _biased_tile_for_work(default, traits, seqlen_q, pairs)
        else:
            tile = _tile_for_work(plain, traits, sizes, pairs)
    tile = tile or plain
    if not default.speculative and not _is_of_scores(traits):
        # A function may grow along the keys: each step would be computed twice.
        tile = dataclasses.replace(tile, speculative=False)
    if traits.bias:
        return tile
    if lists_blocks(traits.epilogues) and (traits.windowed or traits.causal):
        # Bounds in addition to a list need registers; the list's blocks are multiples of 64 keys.
        return dataclasses.replace(tile, tile_n=64)
    return dataclasses.replace(tile, tile_n=_keys_per_step(tile, traits, sizes))


def _is_of_scores(traits: Traits) -> bool:
    """True if the only epilogues are functions of a score and its query, such as a cap: they do not grow along keys.

    Functions that hold numbers are excluded: they leave no registers for two loops.
    """
    names = traits.epilogues
    alone = bool(names) and epilogues_beside(traits) == 1
    return alone and not reads_keys(names) and not held(names, traits.op)


def _keys_per_step(tile: ForwardSm90Tile, traits: Traits, sizes: Sizes) -> int:
    """Keys per step for short sequences: the narrowest block that holds all keys, or else the one with least waste.

    Packed heads have few queries, whose windows begin and end at nearly the same keys: narrow blocks waste fewer keys.
    """
    seqlen_k, window = sizes.seqlen_k, sizes.window
    options = [n for n in FEW_KEYS if n < tile.tile_n and (n % 32 == 0 or traits.dropout != "flash")]
    enough = [n for n in options if seqlen_k <= n]
    if enough:
        return enough[0]
    if traits.windowed and tile.pack_heads > 1 and 64 < max(traits.head_dim, traits.head_dim_v) <= 128:
        wide = 96 if tile.pack_heads >= 4 else 128
        return min(tile.tile_n, 64 if window <= NARROW_WINDOW else wide)
    first = 0  # first key that is visited
    if traits.windowed and not (traits.varlen or traits.top_left) and sizes.seqlen_q <= tile.tile_m:
        first = max(0, seqlen_k - sizes.seqlen_q - window + 1)
    elif traits.causal or traits.windowed:  # work tiles begin and end anywhere
        return tile.tile_n

    def visited(n: int) -> int:
        return (seqlen_k - 1) // n - first // n + 1

    def cost(n: int) -> float:
        return visited(n) * n * (NARROW if n < tile.tile_n else 1)

    if visited(tile.tile_n) > FEW_STEPS or lists_blocks(traits.epilogues):
        return tile.tile_n
    return min((tile.tile_n, *options), key=cost)


def _short_tile(traits: Traits, sizes: Sizes) -> ForwardSm90Tile | None:
    """The tile for queries that see few keys, or None.

    Softcap and functions make the softmax so slow that small CTAs, which overlap more, are faster at any length. With a
    bias that TMA loads and head dims above 64, a small tile is faster only if it holds all queries.
    """
    d = max(traits.head_dim, traits.head_dim_v)
    seqlen_q, seqlen_k, window = sizes.seqlen_q, sizes.seqlen_k, sizes.window
    seen = seqlen_k // 2 if _is_triangular(traits, sizes) else seqlen_k
    if traits.varlen:
        seen = int(PACKED * seen)  # only the longest is known
    if d <= 64 and lists_blocks(traits.epilogues):  # smaller ones have no registers for a list
        return _of_warpgroups(traits, "one_warpgroup") if seen <= SHORT_SEQLEN else None
    if 64 < d <= 128 and _is_of_scores(traits):
        return _of_warpgroups(traits, "one_warpgroup")
    tiles = TABLE.tiles(*keys(traits, "sm90", "short"))
    if not tiles:
        return None
    if traits.bias:
        few = seqlen_q <= tiles[0].tile_m if d > 64 else max(seqlen_q, seqlen_k) <= SHORT_BIASED
        return tiles[0] if few and tiles[0].bias_stages else None
    if d > 128 and seqlen_k <= max(FEW_KEYS):
        short = False
    elif window and window < seqlen_k:
        short = window <= SHORT_WINDOW and (window >= LEAST_WINDOW or not 128 < d <= 192)
    elif d <= 64:
        short = seen <= SHORT_SEQLEN or traits.softcap or bool(traits.epilogues)
    else:
        short = seqlen_k <= SHORT_SEQLEN
    return tiles[0] if short else None


def _is_triangular(traits: Traits, sizes: Sizes) -> bool:
    """True if queries see about half of the keys on average, False if nearly all."""
    return traits.causal and (traits.top_left or sizes.seqlen_k < 2 * sizes.seqlen_q)


def _with_group(plain: ForwardSm90Tile, traits: Traits, sizes: Sizes) -> ForwardSm90Tile | None:
    """The tile with packed query heads of a key head, and so fewer queries per tile, or None if that does not pay.

    Under a mask, fewer queries have more keys in common, and fewer blocks are partially masked. Packed sequences waste
    fewer rows at their ends. Head dims 65 to 128 gain only with packed sequences or a window. Much work of equal
    lengths is done in 256 rows.
    """
    d = max(traits.head_dim, traits.head_dim_v)
    pays = traits.varlen or traits.causal or traits.windowed
    heads = max(n for n in (1, 2, 4, 8) if sizes.group % n == 0)
    if sizes.window and heads == 1 < sizes.group:
        heads = _heads_within(plain, sizes)
    if (
        heads < (2 if d > 128 or (d > 64 and traits.windowed) else 4)
        or not pays
        or (64 < d <= 128 and not (traits.varlen or traits.windowed))
        or plain.tile_m == 64
    ):
        return None
    if sizes.pairs and not (traits.varlen or traits.windowed):
        for tile in TABLE.tiles(*keys(traits, "sm90", "four_warpgroups"))[:1]:
            work_tiles = _count(tile, sizes.seqlen_q, sizes.pairs)
            plain = tile if work_tiles >= PACKED_WORK * MULTIPROCESSORS else plain
    packed = dataclasses.replace(plain, pack_heads=heads)
    return packed if packed.reject(traits, "sm90") is None else None


def _heads_within(plain: ForwardSm90Tile, sizes: Sizes) -> int:
    """Number of packed heads for an odd group with a window: some rows stay empty, but work tiles see fewer keys."""

    def cost(heads: int) -> float:
        queries = plain.tile_m // heads
        work_tiles = -(-sizes.group // heads) * -(-sizes.seqlen_q // queries)
        return work_tiles * (queries + sizes.window + plain.tile_n)

    best = min((n for n in PACKS if n < 2 * sizes.group), key=cost)
    return best if LEAST_GAIN * cost(best) < cost(1) else 1


def _packing_tiles(
    traits: Traits, short: ForwardSm90Tile | None, default: ForwardSm90Tile, rows: int
) -> list[ForwardSm90Tile]:
    """Tiles for packed heads with one and two warpgroups, and with three if the default has three.

    rows: query rows per key head.
    """
    one, two = (_of_warpgroups(traits, n) for n in ("one_warpgroup", "two_warpgroups"))
    if not short:
        return [one, two, default] if default.tile_m > 128 else [one, two]
    if short.tile_m == 128:
        return [one, first_that_fits([short, two], traits, "sm90")]
    return [one] if rows <= one.tile_m else [short]


def _of_warpgroups(traits: Traits, number: str) -> ForwardSm90Tile:
    return TABLE.first(traits, "sm90", *keys(traits, "sm90", number))


def _tile_for_work(
    plain: ForwardSm90Tile, traits: Traits, sizes: Sizes, pairs: int
) -> ForwardSm90Tile | None:
    """A tile with fewer rows if ``plain`` leaves multiprocessors idle or computes empty rows, or 256, or None.

    If ``plain`` has 64 rows: the one-warpgroup tile if there are one, two or four CTAs per multiprocessor.
    """
    seqlen_q, triangular = sizes.seqlen_q, _is_triangular(traits, sizes)
    four = () if traits.windowed else TABLE.tiles(*keys(traits, "sm90", "four_warpgroups"))

    def estimate(tile: ForwardSm90Tile, shared: float, alone: float) -> float:
        """Time of a multiprocessor, in rows of the default tile computed one after the other."""
        blocks = _count(tile, seqlen_q, pairs)
        if triangular:  # half of the keys on average, the longest first
            return tile.tile_m * max(alone, blocks * shared / (2 * MULTIPROCESSORS))
        rounds, rest = divmod(-(-blocks // MULTIPROCESSORS), tile.blocks_per_sm)
        return tile.tile_m * (rounds * tile.blocks_per_sm * shared + rest * alone)

    if plain.tile_m == 64:
        if plain.blocks_per_sm > 2 and -(-_count(plain, seqlen_q, pairs) // MULTIPROCESSORS) in (1, 2, 4):
            return _of_warpgroups(traits, "one_warpgroup")
        rows = plain.tile_m * _count(plain, seqlen_q, pairs) / MULTIPROCESSORS
        more = bool(four) and not triangular and estimate(four[0], FOUR_OVER_ONE, FOUR_OVER_ONE) < rows
        return four[0] if more else None
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    # A row's time in another tile over its time in the default: for CTAs that fill a multiprocessor, and for one CTA.
    # Ratios of large calls and of single tiles: bench/notes.md.
    others: list[tuple[ForwardSm90Tile, float, float]] = []
    if plain.tile_m > 128:
        slower = 1.13 if d <= 64 else MANY_ROWS[traits.head_dim]
        others.append((_of_warpgroups(traits, "two_warpgroups"), slower, slower))
    if d <= 64 or _count(plain, seqlen_q, pairs) <= MULTIPROCESSORS:  # others would load K and V too often
        slower = 1.16 if d <= 64 else 1.08 if d <= 128 else 1.45
        others.append((_of_warpgroups(traits, "one_warpgroup"), slower, 1.45))
    most, least = plain, estimate(plain, 1.0, 1.0)
    for tile in four[:1]:
        time = estimate(tile, FOUR_WARPGROUPS, FOUR_WARPGROUPS)
        if time < LITTLE * least:
            most, least = tile, time
    best = min(others, key=lambda other: estimate(*other), default=None)
    return best[0] if best is not None and LEAST_GAIN * estimate(*best) < least else most


def _biased_tile_for_work(
    default: ForwardSm90Tile, traits: Traits, seqlen_q: int, pairs: int
) -> ForwardSm90Tile | None:
    """The tile of 64 rows if it holds all queries or each work tile then has a multiprocessor to itself, else None."""
    few = _of_warpgroups(traits, "one_warpgroup")
    pays = seqlen_q <= few.tile_m or _count(few, seqlen_q, pairs) <= MULTIPROCESSORS
    return few if pays and bool(few.bias_stages) == bool(default.bias_stages) else None


def _count(tile: ForwardSm90Tile, seqlen_q: int, pairs: int) -> int:
    """Number of work tiles."""
    return -(-seqlen_q // tile.tile_m) * pairs
