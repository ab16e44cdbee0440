"""Default tiles of the Ampere forward for attention with a cache."""

import dataclasses

from cute_attn.kernels.forward_sm80.heuristics import (
    ctas_per_multiprocessor,
    tile_for_lengths,
    tiles_for_few_rows,
)
from cute_attn.tiles import ForwardSm80Tile, first_that_fits, padded
from cute_attn.tiles.inference import CacheCall
from cute_attn.traits import Traits


def tile_for_cache(traits: Traits, call: CacheCall, target: str) -> ForwardSm80Tile:
    """The tile for attention with a cache."""
    plain = first_that_fits(_tiles_for_prefill(traits), traits, target)
    few = tiles_for_few_rows(traits, target)
    tile = tile_for_lengths(traits, call.seqlen_q, call.group, few, plain)
    return dataclasses.replace(tile, blocks_per_sm=ctas_per_multiprocessor(tile, traits, target))


def _tiles_for_prefill(traits: Traits) -> list[ForwardSm80Tile]:
    """For many rows, best first: with fewer keys than the forward's, as pages and shares take registers too."""
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    if d <= 128:
        return [ForwardSm80Tile(128, 64 if d <= 64 else 32, 4, 2, qk_unroll=1)]
    if d <= 192:
        return [ForwardSm80Tile(128, 64, 8, 1), ForwardSm80Tile(64, 32, 4, 2, qk_unroll=4)]
    return [ForwardSm80Tile(64, 32, 4, 2, qk_unroll=4)]
