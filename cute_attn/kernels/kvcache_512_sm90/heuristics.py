"""Default tiles of the Hopper forward with a cache for head dims above 256, from ``tiles.csv``."""

from cute_attn.kernels.head_dim_512_sm90.heuristics import tile_for_lengths
from cute_attn.kernels.kvcache_sm90.heuristics import first_for_pages
from cute_attn.tiles import KvcacheLargeTile
from cute_attn.tiles.inference import CacheCall
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

TABLE = Table(__file__, KvcacheLargeTile)


def keys(traits: Traits, target: str) -> tuple[Key, ...]:
    return max(traits.head_dim, traits.head_dim_v), "latent" if traits.latent else "two"


def cache_tile(traits: Traits, call: CacheCall) -> KvcacheLargeTile:
    """The tile for a call, with the number of packed heads that leaves the fewest rows empty."""
    tiles = TABLE.tiles(*keys(traits, "sm90"))
    tile = first_for_pages(tiles, traits, call.page_size, call.same_bits)
    return tile_for_lengths(traits, tile, call.seqlen_q, call.group)
