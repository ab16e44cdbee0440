"""The Ampere forward's default tiles: the first of :func:`preferred_tiles` that fits the traits and the target.

Speeds are TFLOP/s, full / causal, from "Ampere forward, on an H200" in bench/notes.md (#n: its rows), and of fp32
ratios to PyTorch's memory-efficient kernel, from "The rest of the memory-efficient family, measured". A row without a
number does not spill on any target at its register pressure, and was not measured against others.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from cute_attn.epilogues.base import held, lists_blocks
from cute_attn.tiles import ForwardSm80Tile, best_packing, first_that_fits, may_pack_heads, padded
from cute_attn.traits import Traits
from cute_attn.work.block_lists import divides

T = TypeVar("T", bound=ForwardSm80Tile)
Rows = Sequence[tuple[int, int, T]]
"""(the largest head_dim_v, the highest register pressure at which it does not spill, tile)"""

SHARED_MEMORY = {"sm80": 167_936, "sm86": 102_400, "sm89": 102_400, "sm90": 233_472}
"""Shared memory of a multiprocessor of each target, in bytes; each CTA reserves 1024 of it beside its own."""


def _tile(tile_m: int, tile_n: int, num_warps: int, num_stages: int, qk_unroll: int = 0) -> ForwardSm80Tile:
    return ForwardSm80Tile(tile_m, tile_n, num_warps, num_stages, qk_unroll=qk_unroll)


# 32 rows per warp read K and V from shared memory half as often as 16 (#7: -10%), and two stages save a barrier.
_HALF: Rows[ForwardSm80Tile] = (
    (32, 0, _tile(128, 128, 4, 2)),
    (32, 2, _tile(128, 64, 4, 2)),
    (32, 4, _tile(128, 64, 4, 2, 1)),
    (32, 5, _tile(64, 64, 4, 1)),
    (64, 0, _tile(128, 96, 4, 2)),  # 316/305, #5; 128 x 128 is 1.5% faster, with 150 bytes of spills, #6
    (64, 2, _tile(128, 96, 4, 2, 2)),  # 210 with dropout
    (64, 3, _tile(128, 96, 4, 2, 1)),  # 202 with a bias
    (64, 4, _tile(128, 64, 4, 2, 2)),
    (64, 5, _tile(64, 64, 4, 1)),
    (96, 0, _tile(128, 64, 4, 2)),
    (96, 3, _tile(128, 64, 4, 2, 1)),
    (96, 4, _tile(128, 32, 4, 2, 2)),
    (96, 5, _tile(64, 64, 4, 1)),
    (128, 1, _tile(128, 64, 4, 2, 4)),  # 349/329, #5; 372/335 with 100 to 300 bytes of spills, #1
    (128, 1, _tile(128, 64, 4, 1, 4)),  # where two stages do not fit
    (128, 2, _tile(128, 64, 4, 2, 4)),  # 262 with dropout
    (128, 2, _tile(128, 32, 4, 2, 4)),  # sm86: with 64 keys 4 or 8 bytes of spills ("Tiles for sm80")
    (128, 3, _tile(128, 64, 4, 2, 1)),  # 250 with a bias
    (128, 3, _tile(128, 32, 4, 2)),
    (128, 4, _tile(128, 32, 4, 2, 4)),
    (128, 5, _tile(64, 64, 4, 1)),
    (192, 3, _tile(128, 64, 8, 1)),
    (192, 4, _tile(64, 64, 4, 1)),
    (192, 5, _tile(64, 32, 4, 1)),
    (256, 4, _tile(64, 64, 4, 1)),  # 332/316, #5; 32 rows per warp do not fit, #7
    (256, 5, _tile(64, 32, 4, 1, 4)),
)
_FUNCTIONS = ((range(65), _tile(128, 80, 4, 2, 1)), (range(97, 129), _tile(128, 48, 4, 2, 1)))
"""Head dims, and what spills with none of users' functions that hold and compute little: up to 5% more clocks than the
rows of pressure 3, which spill up to 24 bytes with reads of a table by distance."""
_FIT_ALWAYS = [_tile(64, 32, 4, 1), _tile(32, 32, 2, 1)]

# fp32 in tf32, by precision, of small calls and where parts do not serve: two CTAs or eight warps per multiprocessor.
# Not searched.
_FP32: dict[str, Rows[ForwardSm80Tile]] = {
    "": (
        (32, 0, _tile(128, 64, 4, 2, 2)),
        (32, 5, _tile(64, 32, 4, 2, 2)),
        (64, 0, _tile(128, 32, 4, 2, 2)),  # 1.85, full
        (64, 5, _tile(64, 32, 4, 2, 2)),
        (128, 0, _tile(128, 64, 8, 2, 2)),  # 1.37, 1.27
        (128, 0, _tile(128, 64, 8, 1, 2)),
        (128, 5, _tile(128, 32, 8, 2, 2)),
        (128, 5, _tile(128, 32, 8, 1, 2)),
        (192, 5, _tile(128, 32, 8, 1, 2)),
        (224, 5, _tile(64, 16, 4, 1, 1)),
    ),
    "tf32": (
        (32, 0, _tile(128, 64, 4, 2, 4)),
        (32, 5, _tile(64, 64, 4, 2, 2)),
        (64, 0, _tile(128, 64, 4, 2, 4)),  # 3.6 to 4.1
        (64, 5, _tile(64, 64, 4, 2, 2)),
        (128, 0, _tile(128, 32, 4, 1, 2)),  # 2.5 to 3.05
        (128, 5, _tile(64, 32, 4, 1, 2)),
        (192, 5, _tile(128, 32, 8, 1, 2)),
        (256, 5, _tile(64, 32, 4, 1, 2)),
    ),
}
_FIT_ALWAYS_FP32 = [
    _tile(64, 32, 4, 1, 1),
    _tile(64, 16, 4, 1, 1),
    _tile(32, 32, 2, 1, 1),
    _tile(16, 16, 1, 1, 1),
]

# A head_dim_v above 256, and in fp32 above 224: warps divide the columns of O. Ratios are full, causal.
_DIVIDED_FEW_REGISTERS = [
    ForwardSm80Tile(128, 64, 8, qk_unroll=4, warps_n=2),  # d320 2.14, 1.89
    ForwardSm80Tile(
        64, 64, 8, qk_unroll=0, warps_n=4
    ),  # d512 1.81, 2.07: 6% more than with 4 steps at a time
]
_DIVIDED = [
    ForwardSm80Tile(64, 64, 8, qk_unroll=4, warps_n=4),
    ForwardSm80Tile(64, 32, 8, qk_unroll=2, warps_n=2),
    ForwardSm80Tile(32, 32, 4, qk_unroll=2, warps_n=2),
    ForwardSm80Tile(16, 32, 2, qk_unroll=2, warps_n=2),
]
_DIVIDED_FP32 = [
    ForwardSm80Tile(64, 32, 8, qk_unroll=2, warps_n=2),
    ForwardSm80Tile(32, 32, 4, qk_unroll=1, warps_n=2),  # spills 20 bytes at head dim 512
    ForwardSm80Tile(16, 32, 2, qk_unroll=1, warps_n=2),
]


def preferred_tiles(traits: Traits) -> list[ForwardSm80Tile]:
    """Best first."""
    dim, pressure, fp32 = traits.head_dim_v, register_pressure(traits), traits.dtype == "fp32"
    if dim > (224 if fp32 and not traits.precision else 256):
        few = _DIVIDED_FEW_REGISTERS if pressure == 0 else []
        return _DIVIDED_FP32 if fp32 else [*few, *_DIVIDED]
    if fp32:
        return [*rows(_FP32[traits.precision], dim, pressure), *_FIT_ALWAYS_FP32]
    tiles = [*rows(_HALF, dim, pressure), *rows(_HALF, dim, MOST), *_FIT_ALWAYS]
    if traits.epilogues and pressure == 3:
        tiles = [*_tiles_of_functions(traits), *tiles]
    return [tile for tile in tiles if divides(tile)] if lists_blocks(traits.epilogues) else tiles


def _tiles_of_functions(traits: Traits) -> list[ForwardSm80Tile]:
    """At pressure 3. Functions that take long, or hold numbers beside listed blocks, take tiles of pressure 4."""
    dim, numbers = traits.head_dim_v, held(traits.epilogues, traits.op)
    if numbers % 2 or (numbers and lists_blocks(traits.epilogues)):
        return rows(_HALF, dim, 4) if dim <= 128 else []
    return [tile for dims, tile in _FUNCTIONS if dim in dims]


def rows(table: Rows[T], dim: int, pressure: int) -> list[T]:
    """The tiles of a table for a head_dim_v, of the lowest pressure listed there that is no less than this one."""
    own = next(largest for largest, _, _ in table if dim <= largest)
    least = min(highest for largest, highest, _ in table if largest == own and highest >= pressure)
    return [tile for largest, highest, tile in table if (largest, highest) == (own, least)]


MOST = 5
"""The highest register pressure."""


def register_pressure(traits: Traits) -> int:
    """Of what the epilogues keep beside the scores, from 0 to ``MOST``, by what ptxas spills.

    1: softcap or ALiBi; 2: dropout; 3: a bias, users' epilogues, or dropout with softcap or ALiBi; 4: a bias in fp32,
    or functions that hold four numbers of a query and a key; 5: more, many Philox words, or a bias and dropout.
    """
    modified = traits.softcap or traits.alibi
    numbers = held(traits.epilogues, traits.op)
    if traits.dropout == "mem_efficient" or (traits.bias and traits.dropout) or numbers > 4:
        return MOST
    if traits.bias == "fp32" or numbers == 4:
        return 4
    if traits.bias or traits.epilogues or (traits.dropout and modified):
        return 3
    if traits.dropout:
        return 2
    return 1 if modified else 0


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
