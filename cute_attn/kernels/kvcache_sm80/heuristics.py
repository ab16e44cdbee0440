"""Default tiles of the Ampere forward for attention with a cache, from ``tiles.csv``.

They have fewer keys than the forward's, since pages need registers too.
"""

import dataclasses

from cute_attn.kernels.forward_sm80.heuristics import (
    ctas_per_multiprocessor,
    tile_for_lengths,
    tiles_for_few_rows,
)
from cute_attn.tiles import TILES_OF, ForwardSm80Tile
from cute_attn.tiles.inference import CacheCall
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import LARGE_HEAD_DIM, Traits

TABLE = Table(__file__, ForwardSm80Tile)


def keys(traits: Traits, target: str) -> tuple[Key, ...]:
    scores = "functions" if traits.bias or traits.epilogues else "plain"
    return max(traits.head_dim, traits.head_dim_v), scores


def tile_for_cache(traits: Traits, call: CacheCall, target: str) -> ForwardSm80Tile:
    """The tile for attention with a cache."""
    largest = max(traits.head_dim, traits.head_dim_v)
    if traits.dtype == "fp32" or largest > LARGE_HEAD_DIM:
        many = tiles_for_few_rows(traits, target)[-1]  # tiles of 64 rows: registers hold no more
    else:
        many = TABLE.first(traits, target, *keys(traits, target))
    if target in TILES_OF and largest > 192:
        many = dataclasses.replace(many, qk_unroll=2)  # with 4, ptxas spills there
    tile = tile_for_lengths(traits, call.seqlen_q, call.group, many, target)
    return dataclasses.replace(tile, blocks_per_sm=ctas_per_multiprocessor(tile, traits, target))
