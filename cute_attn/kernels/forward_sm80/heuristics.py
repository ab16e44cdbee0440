"""The Ampere forward's default tiles: for many rows from ``tiles.csv``, for few rows, as in decoding, by a rule.

32 rows per warp read K and V from shared memory half as often as 16 rows (#7: -10%), and two stages save a barrier. For
other tiles see "Ampere forward, on an H200" in bench/notes.md; #n is a row there.
"""

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import replace

from cute_attn.epilogues.names import held, lists_blocks
from cute_attn.tiles import (
    SHARED_MEMORY_BYTES,
    TILES_OF,
    ForwardSm80Tile,
    best_packing,
    first_that_fits,
    may_pack_heads,
    padded,
)
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import LARGE_HEAD_DIM, Traits

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


# ---- few rows ----
# By a rule, since a table would have forty rows. These tiles reached 3951 GB/s (b16 k8192), 4189 (b64 k4096) and 3885
# (pages of 64) of an H200's 4498, and 3220 with 16 queries, at commit 0dd3cfa:
# ``bench/results/2026-11-22-nvidia-h200-decode.json``.


def tile_for_lengths(
    traits: Traits, seqlen_q: int, group: int, many: ForwardSm80Tile, target: str
) -> ForwardSm80Tile:
    """The tile for at most ``seqlen_q`` queries per sequence and ``group`` heads per key head. many: for many rows."""
    if not may_pack_heads(traits):
        return many
    tiles = [*tiles_for_few_rows(traits, target), many]
    return best_packing(tiles, many, seqlen_q, group, traits.varlen) or many


@functools.lru_cache(maxsize=1024)
def tiles_for_few_rows(traits: Traits, target: str) -> tuple[ForwardSm80Tile, ...]:
    """Tiles of 16, 32 and 64 rows. They are bound by memory, so each multiprocessor keeps 64 KB or more in flight.

    A warp has 16 rows; warps beyond those that cover the rows divide the keys, since each additional warp along the
    rows reads all of K and V from shared memory again. On sm100 and sm120, above head dim 192, only the tile of 32 rows
    does not spill. Narrow copies of rows with an ``alignment`` need more registers for addresses, fp32 for terms.
    """
    large = max(traits.head_dim, traits.head_dim_v) > LARGE_HEAD_DIM
    found: list[ForwardSm80Tile] = []
    for tiles in _large_candidates(traits) if large else _candidates(traits, target):
        tile = first_that_fits(tiles, traits, target)
        if tile.reject(traits, target) is None or (
            large and not found
        ):  # one is needed, even if it is too big
            blocks = ctas_per_multiprocessor(tile, traits, target)
            found.append(dataclasses.replace(tile, blocks_per_sm=blocks))
    return tuple(found)


def _candidates(traits: Traits, target: str) -> Iterator[list[ForwardSm80Tile]]:
    """For each number of rows, the tiles to try, the best first."""
    d, single = max(padded(traits.head_dim), padded(traits.head_dim_v)), traits.dtype == "fp32"
    sizes = ((16, 1, 4), (32, 2, 2), (64, 4, 1))
    for rows, warps, groups in sizes[1:2] if target in TILES_OF and d > 192 else sizes:
        keys = 128 if d <= 64 else 64 if d <= 128 or not traits.alignment else 32
        if single:
            keys = 64 if d <= 64 else 32 if d <= 128 else 16
        fewest = max(16 * groups, min(keys, 32))
        crowded = traits.tree or traits.paged or traits.bias or traits.epilogues
        q_in_regs = not single and d <= 128 and not (rows == 64 and crowded)
        unroll = (2 if d <= 128 else 1) if single else (0 if d <= 128 else 4)
        yield [
            ForwardSm80Tile(rows, n, warps, stages, q_in_regs=q_in_regs, qk_unroll=unroll, key_groups=groups)
            for n, stages in ((keys, 3), (keys, 2), (fewest, 2), (fewest, 1))
        ]


def _large_candidates(traits: Traits) -> Iterator[list[ForwardSm80Tile]]:
    """Like :func:`_candidates`, for large head dims: warps divide the columns of O.

    With 64 rows and at least 512 columns, 64 keys may spill.
    """
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    for rows, sizes in (
        (16, ((64, 4, 4), (32, 2, 2))),
        (32, ((64, 8, 4), (32, 4, 2))),
        (64, ((64, 8, 4), (32, 8, 2))[d >= 512 :]),
    ):
        yield [ForwardSm80Tile(rows, keys, warps, 1, qk_unroll=2, warps_n=n) for keys, warps, n in sizes]


@functools.lru_cache(maxsize=4096)
def ctas_per_multiprocessor(tile: ForwardSm80Tile, traits: Traits, target: str) -> int:
    """CTAs per multiprocessor that fit in registers (8 warps in all) and shared memory (1 KB reserved per CTA)."""
    by_memory = (SHARED_MEMORY_BYTES[target] + 1024) // (tile.smem_bytes(traits) + 1024)
    return max(min(by_memory, 256 // tile.num_threads), 1)
