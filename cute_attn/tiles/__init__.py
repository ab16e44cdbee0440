"""Tiles: *how* a kernel computes: tile sizes, warps, stages, operands in registers, swizzle."""

from cute_attn.tiles.backward import BackwardPreprocessTile, BackwardSm80Tile, BackwardSm90Tile
from cute_attn.tiles.base import (
    MEASURED,
    SHARED_MEMORY_BYTES,
    TARGETS,
    TILES_OF,
    Tile,
    check_target,
    check_tile,
    first_that_fits,
    is_latent_dim,
    padded,
    text_of,
)
from cute_attn.tiles.forward import (
    MULTIPROCESSORS,
    PACKS,
    ForwardLargeTile,
    ForwardSm80Tile,
    ForwardSm90Tile,
    ForwardTermsTile,
    JvpSm80Tile,
    JvpSm90Tile,
    KvcacheLargeTile,
    KvcacheSm90Tile,
    Sizes,
    best_packing,
    may_pack_heads,
)

__all__ = [
    "MEASURED", "MULTIPROCESSORS", "PACKS", "SHARED_MEMORY_BYTES", "TARGETS", "TILES_OF", "BackwardPreprocessTile",
    "BackwardSm80Tile", "BackwardSm90Tile", "ForwardLargeTile", "ForwardSm80Tile", "ForwardSm90Tile",
    "ForwardTermsTile", "JvpSm80Tile", "JvpSm90Tile", "KvcacheLargeTile", "KvcacheSm90Tile", "Sizes", "Tile",
    "best_packing", "check_target", "check_tile", "first_that_fits", "is_latent_dim", "may_pack_heads", "padded",
    "text_of",
]  # fmt: skip
