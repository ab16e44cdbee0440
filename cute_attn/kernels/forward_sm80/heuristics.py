"""The Ampere forward's default tiles for many rows, from ``tiles.csv``.

32 rows per warp read K and V from shared memory half as often as 16 rows (#7: -10%), and two stages save a barrier. For
other tiles see "Ampere forward, on an H200" in bench/notes.md; #n is a row there.
"""

from dataclasses import replace

from cute_attn.epilogues.names import held, lists_blocks
from cute_attn.tiles import TILES_OF, ForwardSm80Tile
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

TABLE = Table(__file__, ForwardSm80Tile)


def default_tile(traits: Traits, target: str) -> ForwardSm80Tile:
    """The tile for calls with many rows."""
    tile = TABLE.first(traits, target, *keys(traits, target))
    return _without_spills(tile, traits) if target in TILES_OF else tile


def _without_spills(tile: ForwardSm80Tile, traits: Traits) -> ForwardSm80Tile:
    """A tile that does not spill on sm100 and sm120, where ptxas spills more: Q K^T in a loop, or fewer scores."""
    columns, pressure = traits.head_dim_v, register_pressure(traits)
    if 96 < columns <= 128:
        tile = replace(tile, qk_unroll=1)
        if traits.dropout and pressure <= 3:
            return replace(tile, tile_n=32)
        fewer = traits.windowed and 1 <= pressure <= 3
        return replace(tile, tile_m=16 * tile.warps_m) if fewer else tile
    return replace(tile, qk_unroll=1) if columns <= 32 and traits.dtype != "fp32" else tile


def keys(traits: Traits, target: str, dtype: str = "") -> tuple[Key, ...]:
    """Keys of a row of ``tiles.csv``. dtype: that of the products, ``half`` for 16 bits; by default the traits'."""
    dtype = dtype or ((traits.precision or "fp32") if traits.dtype == "fp32" else "half")
    blocks = "listed" if dtype == "half" and lists_blocks(traits.epilogues) else "all"
    return traits.head_dim_v, dtype, register_pressure(traits), blocks


def register_pressure(traits: Traits) -> int:
    """Register pressure of the epilogues, from 0 to 8, ranked by ptxas's spills.

    1: softcap or ALiBi; 2: dropout; 3: a bias, or dropout with softcap or ALiBi;
    4: users' functions; 5: slow ones, ones that hold numbers and list blocks, or 1 with the greatest scores in 16 bits;
    6: an fp32 bias, or functions that hold four numbers per query and key; 7: functions that hold more numbers, many
    Philox words, or a bias and dropout; 8: a bias with its tangent and flash dropout, which needs 32 keys.
    """
    modified = traits.softcap or traits.alibi
    numbers = held(traits.epilogues, traits.op)
    if traits.bias_tangent and traits.dropout == "flash":
        return 8
    if traits.dropout == "mem_efficient" or (traits.bias and traits.dropout) or numbers > 4:
        return 7
    if traits.bias == "fp32" or numbers == 4:
        return 6
    if traits.epilogues:
        return 5 if numbers % 2 or (numbers and lists_blocks(traits.epilogues)) else 4
    if traits.bias or (traits.dropout and modified):
        return 3
    if traits.dropout:
        return 2
    if modified and traits.max_scores and traits.dtype != "fp32":
        return 5
    return 1 if modified else 0
