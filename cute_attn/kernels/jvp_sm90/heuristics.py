"""Default tiles of the Hopper forward with its forward-mode derivative, from ``tiles.csv``."""

from cute_attn.epilogues.names import lists_blocks
from cute_attn.kernels.forward_sm90.heuristics import epilogues_beside
from cute_attn.tiles import JvpSm90Tile
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

TABLE = Table(__file__, JvpSm90Tile)


def keys(traits: Traits, target: str) -> tuple[Key, ...]:
    """A row's keys. Listed blocks are whole blocks of a tile's: of 32 or 64 keys, not of 48.

    P S_dot exceeds fp16 while P alone is far below, so that row maxima follow every score there.
    """
    blocks = "listed" if lists_blocks(traits.epilogues) else "all"
    return max(traits.head_dim, traits.head_dim_v), traits.dtype, epilogues_beside(traits), blocks
