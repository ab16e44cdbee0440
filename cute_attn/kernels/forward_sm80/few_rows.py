"""Tiles of the Ampere forward for few rows, as in decoding: chosen by a rule, since a table would have forty rows.

These tiles reached 3951 GB/s (b16 k8192), 4189 (b64 k4096) and 3885 (pages of 64) of an H200's 4498, and 3220
with 16 queries, at commit 0dd3cfa: ``bench/results/2026-11-22-nvidia-h200-decode.json``.
"""

import dataclasses
import functools
from collections.abc import Iterator

from cute_attn.tiles import (
    SHARED_MEMORY_BYTES,
    TILES_OF,
    ForwardSm80Tile,
    best_packing,
    first_that_fits,
    may_pack_heads,
    padded,
)
from cute_attn.traits import LARGE_HEAD_DIM, Traits


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
        crowded = traits.tree or traits.paged or traits.bias or traits.epilogues or traits.split == "stream_k"
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
