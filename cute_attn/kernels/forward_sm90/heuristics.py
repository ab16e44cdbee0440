"""Default tiles of the Hopper forward."""

import dataclasses

from cute_attn.epilogues.base import held, in_every_step, lists_blocks
from cute_attn.tiles import (
    ForwardSm90Tile,
    best_packing,
    first_that_fits,
    may_pack_heads,
    padded,
)
from cute_attn.traits import Traits
from cute_attn.work.block_lists import divides

SHORT_SEQLEN = 1024
"""Longest sequences that take a smaller tile: prologue and epilogue dominate them."""

SHORT_BIASED = 512
"""The same with a bias that TMA loads: beyond it 192 rows are faster than 64."""

FEW_KEYS = (64, 80, 96)
"""Keys of a step for sequences of no more, such as a text's 77."""

MULTIPROCESSORS = 132
"""How many an H100 SXM and an H200 have."""

LEAST_GAIN = 1.1
"""How much faster a tile of another number of rows has to be, by the estimate, to be taken."""

MANY_ROWS = {72: (96, 1.25), 88: (80, 1.2), 104: (64, 1.08)}
"""Head dims that take 192 rows: keys of a step, and the time of a row in a tile of 128 over that in this one.

Their rows begin within sectors of L2, whose traffic then bounds the kernel: more rows share what is loaded.
"""


def tile_for_lengths(
    default: ForwardSm90Tile,
    traits: Traits,
    seqlen_q: int,
    seqlen_k: int,
    group: int,
    pairs: int | None = None,
) -> ForwardSm90Tile:
    """The tile for sequences of at most these lengths.

    Args:
        default: the tile for many long sequences.
        group: query heads per key head.
        pairs: the number of (sequence, query head) pairs; None: unknown, taken as enough to fill the GPU.
    """
    short = short_tile(traits, seqlen_q, seqlen_k)
    plain = short or default
    tile = None
    if may_pack_heads(traits):
        tile = best_packing(_packing_tiles(traits, short), plain, seqlen_q, group, traits.varlen)
    if tile is None and pairs is not None and not (_has_epilogue(traits) or traits.varlen):
        tile = _tile_for_work(plain, traits, seqlen_q, seqlen_k, pairs)
    tile = tile or plain
    if seqlen_k > max(FEW_KEYS) or traits.bias:
        return tile
    enough = [
        n for n in FEW_KEYS if seqlen_k <= n < tile.tile_n and (n % 32 == 0 or traits.dropout != "flash")
    ]
    return dataclasses.replace(tile, tile_n=enough[0]) if enough else tile


def _has_epilogue(traits: Traits) -> bool:
    return bool(traits.bias or traits.epilogues or traits.dropout or traits.softcap or traits.alibi)


# ---- packed heads ----


def _packing_tiles(traits: Traits, short: ForwardSm90Tile | None) -> list[ForwardSm90Tile]:
    """Of one warpgroup and of two."""
    two = [tile for tile in ([short] if short else []) + preferred_tiles(traits) if tile.tile_m == 128]
    one = _one_warpgroup(max(padded(traits.head_dim), padded(traits.head_dim_v)))
    return [one, first_that_fits(two, traits, "sm90")]


def _one_warpgroup(d: int) -> ForwardSm90Tile:
    """For 64 rows in all: bound by memory, so many loads are kept in flight."""
    if d <= 64:
        return ForwardSm90Tile(64, 128, num_stages=3, speculative=True, blocks_per_sm=2)
    tile = ForwardSm90Tile(64, 64, num_stages=3, share_qo_smem=True, speculative=True, rescale_threshold=8)
    return dataclasses.replace(tile, blocks_per_sm=2) if d <= 128 else tile


# ---- little work ----


def _tile_for_work(
    plain: ForwardSm90Tile, traits: Traits, seqlen_q: int, seqlen_k: int, pairs: int
) -> ForwardSm90Tile | None:
    """A tile of fewer rows where those of ``plain`` leave multiprocessors idle, or rows of theirs empty."""
    if plain.tile_m == 64:
        return None
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    # A row's time in another tile, over that in the default one: where CTAs fill a multiprocessor, and of one alone.
    # Ratios of large calls and of single tiles: bench/notes.md.
    others: list[tuple[ForwardSm90Tile, float, float]] = []
    if plain.tile_m > 128:
        slower = 1.13 if d <= 64 else MANY_ROWS[traits.head_dim][1]
        others.append((first_that_fits(_two_warpgroups(traits, d), traits, "sm90"), slower, slower))
    if _count(plain, seqlen_q, pairs) <= MULTIPROCESSORS:  # many short sequences would load K and V too often
        others.append((_one_warpgroup(d), 1.16 if d <= 64 else 1.08 if d <= 128 else 1.45, 1.45))
    if not others:
        return None
    triangular = traits.causal and (traits.top_left or seqlen_k < 2 * seqlen_q)

    def estimate(tile: ForwardSm90Tile, shared: float, alone: float) -> float:
        """Rows that a multiprocessor computes one after the other, in time of the default tile's."""
        blocks = _count(tile, seqlen_q, pairs)
        if triangular:  # half of the keys on average, the longest first
            return tile.tile_m * max(alone, blocks * shared / (2 * MULTIPROCESSORS))
        rounds, rest = divmod(-(-blocks // MULTIPROCESSORS), tile.blocks_per_sm)
        return tile.tile_m * (rounds * tile.blocks_per_sm * shared + rest * alone)

    best = min(others, key=lambda other: estimate(*other))
    return best[0] if LEAST_GAIN * estimate(*best) < estimate(plain, 1.0, 1.0) else None


def _count(tile: ForwardSm90Tile, seqlen_q: int, pairs: int) -> int:
    """Work tiles."""
    return -(-seqlen_q // tile.tile_m) * pairs


# ---- tiles ----


def short_tile(traits: Traits, seqlen_q: int, seqlen_k: int) -> ForwardSm90Tile | None:
    """For short sequences, else None: narrow key blocks waste less at the edges, small CTAs overlap."""
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    if _tma_bias_tiles(traits, d):
        tile = ForwardSm90Tile(64, 64, bias_stages=2, speculative=True, blocks_per_sm=3)
        if d <= 64:
            return tile if max(seqlen_q, seqlen_k) <= SHORT_BIASED else None
        wide = dataclasses.replace(tile, rescale_threshold=8, blocks_per_sm=2)
        return wide if seqlen_q <= wide.tile_m else None
    if max(seqlen_q, seqlen_k) > SHORT_SEQLEN or _has_epilogue(traits) or 64 < d <= 128:
        return None
    if d <= 64:
        return ForwardSm90Tile(64, 64, speculative=True, blocks_per_sm=3)
    return ForwardSm90Tile(128, 64, rescale_threshold=8, share_qo_smem=True)


def preferred_tiles(traits: Traits) -> list[ForwardSm90Tile]:
    """Best first; the first one that fits is the default. bench/notes.md has what others did.

    An epilogue with registers beside the scores (a bias, the words of the mem_efficient mask) takes a smaller
    ``tile_n`` or leaves Q in shared memory.
    """
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    needs_registers = bool(
        traits.bias or in_every_step(traits.epilogues) or traits.dropout == "mem_efficient"
    )
    tiles = [*_tma_bias_tiles(traits, d), *_other_tiles(traits, d, needs_registers)]
    numbers = held(traits.epilogues, traits.op)
    if numbers >= 4:
        tiles = [tile for tile in tiles if tile.tile_n <= 80]
    if numbers > 6 and 64 < d <= 128:
        tiles = [ForwardSm90Tile(64, 64, rescale_threshold=8)]
    if not lists_blocks(traits.epilogues):
        return tiles
    return [dataclasses.replace(tile, q_in_regs=False) for tile in tiles if divides(tile)]


def _tma_bias_tiles(traits: Traits, d: int) -> list[ForwardSm90Tile]:
    """For a bias that TMA loads, if it is the only epilogue."""
    other_epilogue = traits.epilogues or traits.dropout or traits.softcap or traits.alibi
    if other_epilogue or traits.bias not in ("fp16", "bf16") or d > 128:
        return []
    if d <= 64:
        return [ForwardSm90Tile(192, 96, num_stages=3, bias_stages=2, speculative=True)]
    return [
        ForwardSm90Tile(128, 96, bias_stages=2, q_in_regs=True, rescale_threshold=8, speculative=True),
    ]


def _other_tiles(traits: Traits, d: int, needs_registers: bool) -> list[ForwardSm90Tile]:
    """Without a TMA bias."""
    if d <= 64:
        several = sum(map(bool, (traits.softcap, traits.alibi, traits.bias, traits.dropout))) > 1
        tile_n = 96 if traits.epilogues or several else 128
        if held(traits.epilogues, traits.op) in (1, 4):  # T5's buckets spill 24 bytes with 96 keys
            tile_n = 80
        if traits.dropout == "mem_efficient":
            tile_n = 64
        return [
            ForwardSm90Tile(192, tile_n, num_stages=3, speculative=not needs_registers),
            *_two_warpgroups(traits, d, needs_registers),
        ]
    if d <= 128:
        return [*_three_warpgroups(traits), *_two_warpgroups(traits, d, needs_registers)]
    plain = ForwardSm90Tile(128, 80, rescale_threshold=8, share_qo_smem=True)
    more_keys = padded(traits.head_dim_v) <= 192 and not needs_registers
    return [
        *(dataclasses.replace(plain, tile_n=n, speculative=True) for n in (128, 112, 96) if more_keys),
        *(dataclasses.replace(plain, tile_n=n) for n in (80, 64, 32)),
    ]


def _three_warpgroups(traits: Traits) -> list[ForwardSm90Tile]:
    """For head dims in ``MANY_ROWS``, without an epilogue."""
    tile_n, _ = MANY_ROWS.get(traits.head_dim, (0, 0.0))
    if not tile_n or traits.head_dim_v > traits.head_dim or _has_epilogue(traits):
        return []
    return [ForwardSm90Tile(192, tile_n, num_stages=3, rescale_threshold=8, speculative=True)]


def _two_warpgroups(traits: Traits, d: int, needs_registers: bool = False) -> list[ForwardSm90Tile]:
    """For head dims up to 128."""
    if d <= 64:
        return [ForwardSm90Tile(128, 128, speculative=not needs_registers), ForwardSm90Tile(128, 64)]
    tile_n, plain = 96 if traits.bias == "fp32" else 128, not needs_registers
    return [
        ForwardSm90Tile(128, tile_n, q_in_regs=plain, rescale_threshold=8, speculative=plain),
        ForwardSm90Tile(128, 64, rescale_threshold=8),
    ]
