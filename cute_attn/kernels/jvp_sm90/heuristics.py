"""Default tiles of the Hopper forward with its forward-mode derivative, from ``tiles.csv``."""

from cute_attn.epilogues.names import lists_blocks
from cute_attn.kernels.forward_sm90.heuristics import epilogues_beside
from cute_attn.tiles import JvpSm90Tile
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

TABLE = Table(__file__, JvpSm90Tile)


def keys(traits: Traits, target: str) -> tuple[Key, ...]:
    """Keys of a row of ``tiles.csv``. The tile's key blocks divide listed blocks: 32 or 64 keys, not 48.

    In fp16, P S_dot may overflow while P is far from its limit, so row maxima follow every score.
    """
    blocks = "listed" if lists_blocks(traits.epilogues) else "all"
    return max(traits.head_dim, traits.head_dim_v), traits.dtype, epilogues_beside(traits), blocks
