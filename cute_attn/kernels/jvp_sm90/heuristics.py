"""Default tiles of the Hopper forward with its forward-mode derivative, from ``tiles.csv``."""

from cute_attn.epilogues.names import adds_tangents, held, lists_blocks
from cute_attn.kernels.forward_sm90.heuristics import epilogues_beside
from cute_attn.tiles import JvpSm90Tile
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

TABLE = Table(__file__, JvpSm90Tile)


def keys(traits: Traits, target: str) -> tuple[Key, ...]:
    """Keys of a row of ``tiles.csv``. The tile's key blocks divide listed blocks: 32 or 64 keys, not 48.

    ``held`` are the numbers that functions hold, if tensors that they capture have tangents; else 0.

    In fp16, P S_dot may overflow while P is far from its limit, so row maxima follow every score.
    """
    blocks = "listed" if lists_blocks(traits.epilogues) else "all"
    dim, numbers = max(traits.head_dim, traits.head_dim_v), 0
    if adds_tangents(traits.epilogues):
        numbers = held(traits.epilogues, traits.op)
    return dim, traits.dtype, epilogues_beside(traits), blocks, numbers
