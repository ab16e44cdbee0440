"""Default tiles of the Hopper forward for head dims above 256, from ``tiles.csv``."""

from typing import Any

from cute_attn.tiles import ForwardLargeTile, best_packing, may_pack_heads
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

TABLE = Table(__file__, ForwardLargeTile)


def keys(traits: Traits, target: str) -> tuple[Key, ...]:
    return (max(traits.head_dim, traits.head_dim_v),)


def tile_for_lengths(traits: Traits, tile: Any, seqlen_q: int, group: int) -> Any:
    """``tile``, with packed heads if sequences of at most ``seqlen_q`` queries would leave many rows empty."""
    if not may_pack_heads(traits):
        return tile
    return best_packing([tile], tile, seqlen_q, group, traits.varlen) or tile
