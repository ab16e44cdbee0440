"""Which tile the Ampere backward takes when none is named."""

import dataclasses
from typing import Any

from cute_attn.tiles import SHARED_MEMORY_BYTES, BackwardSm80Tile
from cute_attn.traits import Traits


def _burden(traits: Traits) -> int:
    """What the epilogues ask of a thread's registers beside scores and gradients, from 0 to 3."""
    saves = bool(traits.softcap or traits.epilogues)  # for their derivatives
    modified = bool(saves or traits.bias or traits.alibi)
    if traits.dropout:
        return 3 if modified else 2
    if saves:
        return 2
    lengths, large = (
        traits.varlen or traits.seqused_q or traits.seqused_k,
        traits.head_dim + traits.head_dim_v > 128,
    )
    return 1 if modified or lengths + traits.windowed + large > 1 else 0


def _tile(
    tile_m: int, tile_n: int, num_warps: int, sdp: int, dkv: int, dq: int, **fields: Any
) -> BackwardSm80Tile:
    """sdp, dkv, dq: warps along M in S, in dK and in dQ."""
    return BackwardSm80Tile(tile_m, tile_n, num_warps, sdp, dkv, dq, **fields)


def _in_regs(queries_at_once: int, unroll: int) -> BackwardSm80Tile:
    """P and dS in registers: four warps of 32 keys, so that two blocks share a multiprocessor."""
    return BackwardSm80Tile(
        *(64, 128, 4, 1, 4, 2),
        p_in_regs=True,
        queries_at_once=queries_at_once,
        sdp_unroll=unroll,
        dq_unroll=unroll,
    )


_ONE_STAGE = {"stages_q": 1, "stages_do": 1}
# The larger head dim -> tiles, best first; the first that fits the traits and the target is the default. None spills.
# What the epilogues burden begins so many places further back.
_TILES: dict[int, list[BackwardSm80Tile]] = {
    64: [_in_regs(32, 0), _in_regs(16, 2), _in_regs(16, 2), _tile(64, 64, 8, 4, 2, 2, dq_unroll=2)],
    96: [
        _tile(64, 128, 8, 2, 4, 4),
        _tile(64, 128, 8, 2, 4, 4, sdp_unroll=2, dq_unroll=2),
        _tile(64, 64, 8, 4, 4, 4),
    ],
    128: [
        _tile(64, 128, 8, 2, 4, 2),
        _tile(64, 128, 8, 2, 4, 2, sdp_unroll=4, dq_unroll=2),
        _tile(64, 64, 8, 4, 2, 2),
    ],
    192: [
        _tile(64, 64, 8, 4, 2, 2),
        _tile(64, 64, 8, 4, 2, 2, dq_unroll=2),
        _tile(64, 64, 8, 4, 4, 4, dq_unroll=2),
    ],
    256: [
        _tile(64, 64, 8, 4, 2, 2, **_ONE_STAGE),
        _tile(64, 64, 8, 4, 2, 2, sdp_unroll=4, dq_unroll=2, **_ONE_STAGE),
        _tile(64, 64, 8, 4, 4, 4, sdp_unroll=4, dkv_unroll=2, dq_unroll=1),
        _tile(64, 64, 8, 4, 4, 4, sdp_unroll=4, dkv_unroll=2, dq_unroll=2, stages_do=1),
        _tile(64, 64, 8, 4, 2, 2, sdp_unroll=4, dkv_unroll=2, dq_unroll=2, **_ONE_STAGE),
    ],
}
# The same for targets with less than 100 KB of shared memory a multiprocessor.
_SMALL_TILES: dict[int, list[BackwardSm80Tile]] = {
    64: [_tile(64, 128, 8, 2, 4, 2, dq_unroll=2)],
    96: [_tile(64, 64, 8, 4, 4, 4, dq_unroll=2)],
    128: [_tile(64, 64, 8, 4, 2, 2, stages_do=1)],
    160: [_tile(64, 64, 8, 4, 4, 4, **_ONE_STAGE)],
    192: [_tile(64, 32, 8, 4, 2, 2, **_ONE_STAGE)],
    256: [_tile(64, 32, 8, 4, 2, 2, v_in_regs=True, dq_unroll=1, **_ONE_STAGE)],
}
FIT_ALWAYS = [
    _tile(64, 64, 8, 4, 4, 4, **_ONE_STAGE),
    _tile(32, 32, 4, 2, 2, 2, dq_unroll=1, **_ONE_STAGE),
]


def preferred_tiles(traits: Traits, target: str) -> list[BackwardSm80Tile]:
    """Best first."""
    tables = _TILES if SHARED_MEMORY_BYTES[target] >= SHARED_MEMORY_BYTES["sm80"] else _SMALL_TILES
    largest = max(traits.head_dim, traits.head_dim_v)
    tiles = next(tiles for dim, tiles in tables.items() if largest <= dim)
    # Reductions of single floats take registers too.
    least = 1 if target == "sm80" and largest > 192 else 0
    first = min(max(_burden(traits), least), len(tiles) - 1)
    tiles = [*tiles[first:], *FIT_ALWAYS]
    vector = 4 if target == "sm90" else 1
    return [dataclasses.replace(tile, dq_vector=vector) for tile in tiles]
