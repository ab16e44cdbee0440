"""Default tiles of the Hopper forward for attention with a cache."""

import dataclasses
import math

from cute_attn.tiles import KvcacheSm90Tile, first_that_fits, may_pack_heads, padded
from cute_attn.tiles.inference import CacheCall
from cute_attn.traits import Traits

FEW_ROWS = 32
"""Rows of a key head up to which a step has 64 keys."""
TILE_ROWS = 64
"""Rows whose time equals what a work tile costs beside its rows: it reads all keys."""


def default_cache_tile(traits: Traits) -> KvcacheSm90Tile:
    """For one query per sequence, of one head per key head."""
    return cache_tile(traits, CacheCall(page_size=64 if traits.paged else 0))


def cache_tile(traits: Traits, call: CacheCall) -> KvcacheSm90Tile:
    """The tile for a call."""
    packs = [1, 2, 4, 8, 16, 32, 64] if may_pack_heads(traits) else [1]
    candidates = [
        dataclasses.replace(tile, pack_heads=n)
        for tile in (
            _chosen(few_rows(traits, call.seqlen_q * call.group), traits, call),
            _chosen(many_rows(traits), traits, call),
        )
        for n in packs
        if n < 2 * call.group
    ]

    def cost(tile: KvcacheSm90Tile) -> tuple[int, int]:
        """Rows that a key head's work tiles compute, and what reading the keys costs beside them."""
        tiles = -(-call.group // tile.pack_heads) * -(-call.seqlen_q // tile.queries)
        return tiles * (tile.tile_m + TILE_ROWS), -tile.pack_heads

    return min(candidates, key=cost)


def _chosen(tiles: list[KvcacheSm90Tile], traits: Traits, call: CacheCall) -> KvcacheSm90Tile:
    """The first one that fits, with boxes for pages of the call's size."""
    tiles = [tile for tile in tiles if call.part_keys % tile.tile_n == 0]
    if traits.paged:
        tiles = [dataclasses.replace(t, page_rows=page_rows(call.page_size, t.tile_n)) for t in tiles]
    return first_that_fits(tiles, traits, "sm90")


def page_rows(page_size: int, tile_n: int) -> int:
    """Rows of a TMA box: the most that pages and key blocks consist of."""
    return math.gcd(page_size, tile_n)


def few_rows(traits: Traits, rows: int) -> list[KvcacheSm90Tile]:
    """For up to 64 rows, ``rows`` of a key head in all: bound by memory, with about 200 KB of loads in flight."""
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    if d > 128:
        tile = KvcacheSm90Tile(64, 64, num_stages=3, rescale_threshold=8)
        return [tile, dataclasses.replace(tile, num_stages=2)]
    tile = KvcacheSm90Tile(64, 128, num_stages=3, q_in_regs=True, rescale_threshold=8)
    if d <= 64:
        return [dataclasses.replace(tile, blocks_per_sm=2)]
    half = dataclasses.replace(tile, tile_n=64, num_stages=6, half_registers=True)
    return [half] if rows <= FEW_ROWS else [tile]


def many_rows(traits: Traits) -> list[KvcacheSm90Tile]:
    """For more rows, bound by the tensor cores; best first."""
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    speculative = traits.split == "" and d <= 128
    tile = KvcacheSm90Tile(128, 128, q_in_regs=d <= 128, rescale_threshold=8, speculative=speculative)
    if d <= 64:
        return [dataclasses.replace(tile, num_stages=3)]
    if d <= 128 and traits.softcap and traits.alibi:  # with 128 keys they spill registers
        return [dataclasses.replace(tile, tile_n=64, num_stages=4)]
    return [tile] if d <= 128 else [dataclasses.replace(tile, tile_n=n) for n in (96, 80, 64)]
