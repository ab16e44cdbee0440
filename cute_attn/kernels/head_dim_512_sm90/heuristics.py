"""Default tiles of the Hopper forward for head dims above 256."""

from cute_attn.tiles import ForwardLargeTile, best_packing, may_pack_heads
from cute_attn.traits import Traits


def preferred_tiles(traits: Traits) -> list[ForwardLargeTile]:
    """Best first."""
    two = [ForwardLargeTile(n, num_stages=2) for n in (96, 80, 64)]
    return [*two, *(ForwardLargeTile(n) for n in (64, 32))]


def tile_for_lengths(traits: Traits, tile: ForwardLargeTile, seqlen_q: int, group: int) -> ForwardLargeTile:
    """``tile``, with packed heads where sequences of at most ``seqlen_q`` queries have few rows."""
    if not may_pack_heads(traits):
        return tile
    return best_packing([tile], tile, seqlen_q, group, traits.varlen) or tile
