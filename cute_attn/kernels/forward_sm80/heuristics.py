"""Default tiles of the Ampere forward."""

from cute_attn.tiles import ForwardSm80Tile
from cute_attn.traits import Traits


def _register_need(traits: Traits) -> str:
    """Registers that the epilogues need beside the scores: a key of the tables in ``_TILES``."""
    modified = traits.softcap or traits.alibi
    if traits.dropout == "mem_efficient" or (traits.bias and traits.dropout):
        return "highest"
    if traits.bias == "fp32":
        return "high"
    if traits.bias or traits.epilogues or (traits.dropout and modified):
        return "medium"
    return "low" if traits.dropout or modified else "none"


def _tile(tile_m: int, tile_n: int, num_warps: int, num_stages: int, qk_unroll: int = 0) -> ForwardSm80Tile:
    return ForwardSm80Tile(tile_m, tile_n, num_warps, num_stages, qk_unroll=qk_unroll)


# Largest head_dim_v -> ``_register_need`` -> tiles, best first; the first that fits the traits and the target is the
# default. A need that is not listed takes "none". Fastest on an H200 of those that spill on no target: 32 queries a
# warp read K and V from shared memory half as often as 16, and two stages save a barrier. bench/notes.md has others.
_TILES: dict[int, dict[str, list[ForwardSm80Tile]]] = {
    32: {
        "none": [_tile(128, 128, 4, 2)],
        "low": [_tile(128, 64, 4, 2)],
        "medium": [_tile(128, 64, 4, 2, qk_unroll=1)],
        "high": [_tile(128, 64, 4, 2, qk_unroll=1)],
        "highest": [_tile(64, 64, 4, 1)],
    },
    64: {
        "none": [_tile(128, 96, 4, 2)],
        "low": [_tile(128, 96, 4, 2, qk_unroll=2)],
        "medium": [_tile(128, 96, 4, 2, qk_unroll=1)],
        "high": [_tile(128, 64, 4, 2, qk_unroll=2)],
        "highest": [_tile(64, 64, 4, 1)],
    },
    96: {
        "none": [_tile(128, 64, 4, 2)],
        "low": [_tile(128, 64, 4, 2, qk_unroll=1)],
        "medium": [_tile(128, 64, 4, 2, qk_unroll=1)],
        "high": [_tile(128, 32, 4, 2, qk_unroll=2)],
        "highest": [_tile(64, 64, 4, 1)],
    },
    128: {
        "none": [_tile(128, 64, 4, 2, qk_unroll=4), _tile(128, 64, 4, 1, qk_unroll=4)],
        "medium": [_tile(128, 64, 4, 2, qk_unroll=1), _tile(128, 32, 4, 2)],
        "high": [_tile(128, 32, 4, 2, qk_unroll=4)],
        "highest": [_tile(64, 64, 4, 1)],
    },
    192: {
        "none": [_tile(128, 64, 8, 1)],
        "high": [_tile(64, 64, 4, 1)],
        "highest": [_tile(64, 32, 4, 1)],
    },
    256: {
        "none": [_tile(64, 64, 4, 1)],
        "highest": [_tile(64, 32, 4, 1, qk_unroll=4)],
    },
}
_FITS_ALWAYS = _tile(64, 32, 4, 1)


def preferred_tiles(traits: Traits) -> list[ForwardSm80Tile]:
    """Tiles to try, best first."""
    table = next(table for dim, table in _TILES.items() if traits.head_dim_v <= dim)
    return [*table.get(_register_need(traits), table["none"]), *table["highest"], _FITS_ALWAYS]
