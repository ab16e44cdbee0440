"""Default tiles of the Ampere forward."""

import dataclasses

from cute_attn.tiles import (
    ForwardSm80Tile,
    best_packing,
    first_that_fits,
    may_pack_heads,
    padded,
)
from cute_attn.traits import Traits

SHARED_MEMORY = {"sm80": 167_936, "sm86": 102_400, "sm89": 102_400, "sm90": 233_472}
"""Shared memory of a multiprocessor of each target, in bytes; each CTA reserves 1024 of it beside its own."""


def tile_for_lengths(
    traits: Traits, seqlen_q: int, group: int, few: list[ForwardSm80Tile], plain: ForwardSm80Tile
) -> ForwardSm80Tile:
    """The tile for sequences of at most ``seqlen_q`` queries, ``group`` heads per key head.

    Args:
        few: tiles for few rows.
        plain: the tile for many.
    """
    if not may_pack_heads(traits):
        return plain
    return best_packing([*few, plain], plain, seqlen_q, group, traits.varlen) or plain


def tiles_for_few_rows(traits: Traits, target: str) -> list[ForwardSm80Tile]:
    """Of 16, 32 and 64 rows: bound by memory, so many loads are kept in flight, 64 KB or more a multiprocessor.

    A warp has 16 rows, and the other warps divide the keys: each additional warp along the rows reads all of K and V
    from shared memory once more.
    """
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    found = []
    for rows, warps, groups in ((16, 1, 4), (32, 2, 2), (64, 4, 1)):
        keys = 128 if d <= 64 else 64
        fewest = max(16 * groups, 32)
        keeps_q = d <= 128 and not (rows == 64 and (traits.tree or traits.paged or traits.split == "shares"))
        tiles = [
            ForwardSm80Tile(
                rows, n, warps, stages, q_in_regs=keeps_q, qk_unroll=0 if d <= 128 else 4, key_groups=groups
            )
            for n, stages in ((keys, 3), (keys, 2), (fewest, 2), (fewest, 1))
        ]
        tile = first_that_fits(tiles, traits, target)
        if tile.reject(traits, target) is None:
            found.append(
                dataclasses.replace(tile, blocks_per_sm=ctas_per_multiprocessor(tile, traits, target))
            )
    return found


def ctas_per_multiprocessor(tile: ForwardSm80Tile, traits: Traits, target: str) -> int:
    """CTAs of up to 8 warps in all, so that registers suffice, whose shared memory fits."""
    by_memory = SHARED_MEMORY[target] // (tile.smem_bytes(traits) + 1024)
    return max(min(by_memory, 256 // tile.num_threads), 1)


def register_need(traits: Traits) -> str:
    """Registers that the epilogues need beside the scores: a key of the tables in ``_TILES``."""
    modified = traits.softcap or traits.alibi
    if traits.dropout == "mem_efficient" or (traits.bias and traits.dropout):
        return "highest"
    if traits.bias == "fp32":
        return "high"
    if traits.bias or traits.epilogues or (traits.dropout and modified):
        return "medium"
    if traits.dropout:
        return "dropout"
    return "low" if modified else "none"


def _row(
    table: dict[str, list[ForwardSm80Tile]], need: str, others: list[ForwardSm80Tile] | None = None
) -> list[ForwardSm80Tile]:
    """A table's tiles for a need; ``others``: in place of "none", for needs that are not listed."""
    if need == "dropout" and need not in table:
        need = "low"
    return table.get(need, table["none"] if others is None else others)


def _tile(tile_m: int, tile_n: int, num_warps: int, num_stages: int, qk_unroll: int = 0) -> ForwardSm80Tile:
    return ForwardSm80Tile(tile_m, tile_n, num_warps, num_stages, qk_unroll=qk_unroll)


# Largest head_dim_v -> ``register_need`` -> tiles, best first; the first that fits the traits and the target is the
# default. A need that is not listed takes "none", and dropout "low" before it. Fastest on an H200 of those that do not
# spill on any target: 32 queries a warp read K and V from shared memory half as often as 16, and two stages save a
# barrier. bench/notes.md has others.
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
        "dropout": [_tile(128, 64, 4, 2, qk_unroll=4), _tile(128, 32, 4, 2, qk_unroll=4)],
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
_FIT_ALWAYS = [_tile(64, 32, 4, 1), _tile(32, 32, 2, 1)]

# The same in fp32, by precision; "low" and above take "high" where it is listed. They compute small calls, and where
# parts do not serve: those that do not spill, with two CTAs or eight warps a multiprocessor, without a search.
_TILES_FP32: dict[str, dict[int, dict[str, list[ForwardSm80Tile]]]] = {
    "": {
        32: {"none": [_tile(128, 64, 4, 2, 2)], "high": [_tile(64, 32, 4, 2, 2)]},
        64: {"none": [_tile(128, 32, 4, 2, 2)], "high": [_tile(64, 32, 4, 2, 2)]},
        128: {
            "none": [_tile(128, 64, 8, 2, 2), _tile(128, 64, 8, 1, 2)],
            "high": [_tile(128, 32, 8, 2, 2), _tile(128, 32, 8, 1, 2)],
        },
        192: {"none": [_tile(128, 32, 8, 1, 2)]},
        224: {"none": [_tile(64, 16, 4, 1, 1)]},
    },
    "tf32": {
        32: {"none": [_tile(128, 64, 4, 2, 4)], "high": [_tile(64, 64, 4, 2, 2)]},
        64: {"none": [_tile(128, 64, 4, 2, 4)], "high": [_tile(64, 64, 4, 2, 2)]},
        128: {"none": [_tile(128, 32, 4, 1, 2)], "high": [_tile(64, 32, 4, 1, 2)]},
        192: {"none": [_tile(128, 32, 8, 1, 2)]},
        256: {"none": [_tile(64, 32, 4, 1, 2)]},
    },
}
_FIT_ALWAYS_FP32 = [
    _tile(64, 32, 4, 1, 1),
    _tile(64, 16, 4, 1, 1),
    _tile(32, 32, 2, 1, 1),
    _tile(16, 16, 1, 1, 1),
]


# A head_dim_v above 256, and in fp32 above 224: warps divide the columns of O. The second one of fp32 spills 20 bytes
# at head dim 512.
_DIVIDED_FEW_REGISTERS = [
    ForwardSm80Tile(128, 64, 8, qk_unroll=4, warps_n=2),
    ForwardSm80Tile(64, 64, 8, qk_unroll=0, warps_n=4),
]
_DIVIDED = [
    ForwardSm80Tile(64, 64, 8, qk_unroll=4, warps_n=4),
    ForwardSm80Tile(64, 32, 8, qk_unroll=2, warps_n=2),
    ForwardSm80Tile(32, 32, 4, qk_unroll=2, warps_n=2),
    ForwardSm80Tile(16, 32, 2, qk_unroll=2, warps_n=2),
]
_DIVIDED_FP32 = [
    ForwardSm80Tile(64, 32, 8, qk_unroll=2, warps_n=2),
    ForwardSm80Tile(32, 32, 4, qk_unroll=1, warps_n=2),
    ForwardSm80Tile(16, 32, 2, qk_unroll=1, warps_n=2),
]


# The same for rows that start anywhere, whose copies take more registers: those that do not spill. At head dims 59 and
# 123 tiles of 256 rows are no faster on an H200.
_UNALIGNED: dict[int, ForwardSm80Tile] = {
    32: _tile(128, 64, 4, 2),
    64: _tile(128, 96, 4, 2),
    96: _tile(128, 64, 4, 1, qk_unroll=1),
    128: _tile(128, 64, 4, 2, qk_unroll=4),
    192: _tile(128, 64, 8, 1),
    256: _tile(128, 64, 8, 1),
}


def preferred_tiles(traits: Traits) -> list[ForwardSm80Tile]:
    """Tiles to try, best first."""
    if not traits.aligned:
        return _unaligned_tiles(traits)
    single = traits.dtype == "fp32"
    if traits.head_dim_v > (224 if single and not traits.precision else 256):
        plain = [] if register_need(traits) != "none" else _DIVIDED_FEW_REGISTERS
        return _DIVIDED_FP32 if single else [*plain, *_DIVIDED]
    tables = _TILES_FP32[traits.precision] if single else _TILES
    table = next(table for dim, table in tables.items() if traits.head_dim_v <= dim)
    need = register_need(traits)
    if single:
        preferred = table["none"] if need == "none" else table.get("high", table["none"])
        return [*preferred, *_FIT_ALWAYS_FP32]
    return [*_row(table, need), *table["highest"], *_FIT_ALWAYS]


def _unaligned_tiles(traits: Traits) -> list[ForwardSm80Tile]:
    need, single = register_need(traits), traits.dtype == "fp32"
    if single:
        exact = not traits.precision and traits.head_dim_v > 192
        return [_tile(64, 16, 4, 1, 1), *_FIT_ALWAYS_FP32] if exact else _FIT_ALWAYS_FP32
    dim = next(dim for dim in _UNALIGNED if traits.head_dim_v <= dim)
    table = _TILES[dim]
    own = [_UNALIGNED[dim]] if need == "none" else _row(table, need, [_UNALIGNED[dim]])
    return [*own, *table["highest"], *_FIT_ALWAYS]
