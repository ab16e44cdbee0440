"""Default tiles of the Ampere forward with its forward-mode derivative, from ``tiles.csv``."""

from cute_attn.kernels.forward_sm80.heuristics import register_pressure
from cute_attn.tiles import JvpSm80Tile
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

TABLE = Table(__file__, JvpSm80Tile)


def keys(traits: Traits, target: str) -> tuple[Key, ...]:
    return traits.head_dim, traits.head_dim_v, register_pressure(traits)
