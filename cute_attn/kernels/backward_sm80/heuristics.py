"""The Ampere backward's default tiles."""

import dataclasses
from typing import Any

from cute_attn.device.skewed_rows import has_room
from cute_attn.tiles import BackwardSm80Tile, padded
from cute_attn.traits import Traits


def _saves(traits: Traits) -> bool:
    """Whether epilogues save values for their derivatives."""
    return bool(traits.softcap or traits.epilogues)


def _has_lengths(traits: Traits) -> bool:
    return bool(traits.varlen or traits.seqused_q or traits.seqused_k)


def _least_pressure(traits: Traits, target: str) -> int:
    """Of a target, beside :func:`_pressure`: sm80 adds to dQ float by float, which takes registers too."""
    if target != "sm80":
        return 0
    largest = max(traits.head_dim, traits.head_dim_v)
    if _saves(traits) and largest > 64:
        return 4
    if _has_lengths(traits) and largest <= 64:
        return 3
    return 1 if largest > 192 else 0


def _pressure(traits: Traits) -> int:
    """Register pressure of the epilogues, from 0 to 5.

    1: ALiBi, or lengths with wide gradients; 2: a bias; 3: values saved for a derivative, or a dropout mask; 4: a
    dropout mask or a window, with lengths or many Philox words; 5: dropout and another epilogue.
    """
    saves, lengths = _saves(traits), _has_lengths(traits)
    large = traits.head_dim + traits.head_dim_v > 128
    if traits.dropout:
        many_words = traits.dropout == "mem_efficient"
        middle = large and traits.head_dim + traits.head_dim_v <= 256
        if saves or traits.bias or traits.alibi or (many_words and (middle or (lengths and large))):
            return 5
        return 4 if (lengths if large else many_words) else 3
    if saves:
        return 3
    if traits.bias:
        return 2
    if traits.windowed and lengths and not large:
        return 4
    return 1 if traits.alibi or (lengths and large) else 0


def _tile(
    tile_m: int, tile_n: int, num_warps: int, sdp: int, dkv: int, dq: int, **fields: Any
) -> BackwardSm80Tile:
    """sdp, dkv, dq: warps along M in S, in dK and in dQ."""
    return BackwardSm80Tile(tile_m, tile_n, num_warps, sdp, dkv, dq, **fields)


def _in_regs(queries_at_once: int, sdp_unroll: int, dq_unroll: int) -> BackwardSm80Tile:
    """P and dS in registers: four warps of 32 keys, so that two CTAs fit a multiprocessor."""
    return BackwardSm80Tile(
        *(64, 128, 4, 1, 4, 2),
        p_in_regs=True,
        queries_at_once=queries_at_once,
        sdp_unroll=sdp_unroll,
        dq_unroll=dq_unroll,
    )


_ONE_STAGE = {"stages_q": 1, "stages_do": 1}
# The larger head dim -> tiles, each with the highest register pressure at which it does not spill. The default is the
# first of these that fits the traits and the target.
_TILES: dict[int, list[tuple[int, BackwardSm80Tile]]] = {
    64: [
        (0, _in_regs(32, 0, 0)),
        (3, _in_regs(32, 0, 4)),
        (4, _in_regs(16, 2, 2)),
        (5, _tile(64, 64, 8, 4, 2, 2, dq_unroll=2)),
    ],
    96: [
        (0, _tile(64, 128, 8, 2, 4, 4)),
        (2, _tile(64, 128, 8, 2, 4, 4, sdp_unroll=2, dq_unroll=2)),
        (5, _tile(64, 64, 8, 4, 4, 4)),
    ],
    128: [
        (0, _tile(64, 128, 8, 2, 4, 2)),
        (1, _tile(64, 128, 8, 2, 4, 2, dkv_unroll=2)),
        (2, _tile(64, 128, 8, 2, 4, 2, sdp_unroll=4, dq_unroll=2)),
        (3, _tile(64, 128, 8, 2, 4, 2, dkv_unroll=2)),
        (4, _tile(64, 128, 8, 2, 4, 2, sdp_unroll=4, dq_unroll=2)),
        (5, _tile(64, 64, 8, 4, 2, 2)),
    ],
    192: [
        (0, _tile(64, 64, 8, 4, 2, 2)),
        (2, _tile(64, 64, 8, 4, 2, 2, dq_unroll=2)),
        (5, _tile(64, 64, 8, 4, 4, 4, dq_unroll=2)),
    ],
    256: [
        (0, _tile(64, 64, 8, 4, 2, 2, **_ONE_STAGE)),
        (2, _tile(64, 64, 8, 4, 2, 2, sdp_unroll=4, dq_unroll=2, **_ONE_STAGE)),
        (4, _tile(64, 64, 8, 4, 4, 4, sdp_unroll=4, dkv_unroll=2, dq_unroll=1)),
        (5, _tile(64, 64, 8, 4, 4, 4, sdp_unroll=4, dkv_unroll=2, dq_unroll=2, stages_do=1)),
        (5, _tile(64, 64, 8, 4, 2, 2, sdp_unroll=4, dkv_unroll=2, dq_unroll=2, **_ONE_STAGE)),
    ],
}
# For sm80, see ``_least_pressure``. With one stage of Q nothing spills, and two CTAs fit a multiprocessor there too.
_TILES_SM80 = _TILES | {
    64: [
        *_TILES[64][:1],
        (2, _in_regs(32, 0, 4)),
        (3, dataclasses.replace(_in_regs(32, 0, 4), stages_q=1)),
        *_TILES[64][2:],
    ]
}


def _fp32_in_regs(num_warps: int, tile_n: int = 128, **fields: Any) -> BackwardSm80Tile:
    """P and dS in registers; 16 or 32 keys a warp, 32 queries."""
    return BackwardSm80Tile(32, tile_n, num_warps, 1, num_warps, 2, p_in_regs=True, **fields)


def _fp32(
    tile_m: int, tile_n: int, num_warps: int, sdp: int, dkv: int, dq: int, stages: int = 1
) -> BackwardSm80Tile:
    fields = {"sdp_unroll": 4, "dkv_unroll": 1, "dq_unroll": 1, "stages_q": stages, "stages_do": stages}
    return _tile(tile_m, tile_n, num_warps, sdp, dkv, dq, **fields)


# For targets with less shared memory than sm80.
_SMALL_TILES: dict[int, list[tuple[int, BackwardSm80Tile]]] = {
    64: [(5, _tile(64, 128, 8, 2, 4, 2, dq_unroll=2))],
    96: [(5, _tile(64, 64, 8, 4, 4, 4, dq_unroll=2))],
    128: [(5, _tile(64, 64, 8, 4, 2, 2, stages_do=1))],
    160: [(5, _tile(64, 64, 8, 4, 4, 4, **_ONE_STAGE))],
    192: [(5, _tile(64, 32, 8, 4, 2, 2, **_ONE_STAGE))],
    256: [(5, _tile(64, 32, 8, 4, 2, 2, v_in_regs=True, dq_unroll=1, **_ONE_STAGE))],
}
FIT_ALWAYS = [
    _tile(64, 64, 8, 4, 4, 4, **_ONE_STAGE),
    _tile(32, 32, 4, 2, 2, 2, dq_unroll=1, **_ONE_STAGE),
]


_FP32_TILES: dict[int, list[BackwardSm80Tile]] = {
    64: [_fp32(64, 64, 8, 4, 2, 2, 2), _fp32(64, 64, 8, 4, 2, 2)],
    128: [
        _fp32(64, 64, 8, 4, 2, 2, 2),
        _fp32(64, 64, 8, 4, 2, 2),
        _fp32(32, 64, 8, 2, 4, 2),
        _fp32(32, 32, 4, 2, 2, 2),
    ],
    256: [_fp32(32, 64, 8, 2, 4, 2), _fp32(32, 32, 4, 2, 2, 2)],
}
"""The larger head dim -> tiles of fp32 elements, the largest first.

P and dS go through shared memory: with both in registers the products of dV and dK are unrolled, and ptxas computes so
many of their sums, which start from zero, before adding them up that it spills.
"""


def _parts(
    tile_m: int, tile_n: int, num_warps: int, sdp: int, dkv: int, dq: int, unrolls: tuple[int, int, int]
) -> BackwardSm80Tile:
    """unrolls: of S and dP, of dK and dV, of dQ."""
    fields = dict(zip(("sdp_unroll", "dkv_unroll", "dq_unroll"), unrolls, strict=True))
    return _tile(tile_m, tile_n, num_warps, sdp, dkv, dq, operands="parts", **fields, **_ONE_STAGE)


PARTS_LEAST_FLOP = {2: 2**31, 1: 2**32}
"""Parts -> floating-point operations of a call from which on products in parts pay for three more launches. Those of
one part have not been searched."""
_PARTS_32 = _parts(32, 64, 4, 2, 2, 2, (2, 1, 1))
_PARTS_LEAST = _parts(32, 32, 4, 2, 2, 2, (2, 1, 1))
_PARTS_TILES: dict[int, list[BackwardSm80Tile]] = {
    64: [_parts(64, 64, 4, 2, 2, 2, (2, 2, 2)), _PARTS_32],
    128: [_parts(32, 64, 4, 1, 2, 1, (2, 1, 1)), _PARTS_32, _PARTS_LEAST],
    256: [
        _parts(32, 64, 8, 2, 2, 1, (2, 1, 1)),
        _parts(32, 64, 8, 2, 2, 2, (2, 1, 1)),
        _PARTS_LEAST,
    ],
}
"""The larger head dim -> tiles of fp32 elements in two fp16 parts, the largest first.

On sm90 two CTAs of four warps fit a multiprocessor up to head dims of 128: one computes while the other waits.
"""
_PARTS_SM80: dict[int, list[BackwardSm80Tile]] = {
    64: [_PARTS_32],
    128: [_parts(64, 64, 8, 2, 2, 2, (2, 1, 1)), _PARTS_LEAST],
    256: [*_PARTS_TILES[256][:-1], dataclasses.replace(_PARTS_LEAST, dq_passes=2), _PARTS_LEAST],
}
"""The same for targets with less shared memory than sm90. dQ in one pass spills at head dim 256 where it is added by
single floats, on sm80."""


def _one_part(
    tile_m: int, tile_n: int, num_warps: int, sdp: int, dkv: int, dq: int, stages: int = 2, **fields: Any
) -> BackwardSm80Tile:
    """stages: of Q and dO."""
    stages_of = {"stages_q": stages, "stages_do": stages}
    return _tile(tile_m, tile_n, num_warps, sdp, dkv, dq, operands="parts", **stages_of, **fields)


_FEW = {"sdp_unroll": 4, "dkv_unroll": 2, "dq_unroll": 2}
_ONE_PART_LEAST = _one_part(32, 64, 4, 2, 2, 2, stages=1, **_FEW)
_ONE_PART_TILES: dict[int, list[tuple[int, BackwardSm80Tile]]] = {
    64: [
        (0, _one_part(64, 128, 4, 1, 4, 2, p_in_regs=True, queries_at_once=32, dq_unroll=4)),
        (3, _one_part(32, 128, 4, 1, 4, 2, p_in_regs=True)),
        (5, _one_part(64, 64, 4, 2, 2, 2, **_FEW)),
    ],
    96: [(3, _one_part(64, 128, 8, 2, 4, 4)), (5, _one_part(64, 64, 4, 2, 2, 2, stages=1, **_FEW))],
    128: [(3, _one_part(64, 128, 8, 2, 4, 2)), (5, _one_part(64, 64, 8, 4, 2, 2, **_FEW))],
    192: [(0, _one_part(64, 64, 8, 4, 2, 2)), (5, _one_part(64, 64, 8, 4, 2, 2, **_FEW))],
    256: [
        (0, _one_part(64, 64, 8, 4, 2, 2, stages=1)),
        (5, _one_part(64, 64, 8, 4, 2, 2, stages=1, **_FEW)),
    ],
}
"""The larger head dim -> tiles of fp32 elements in one fp16 part, as ``_TILES``: those of 16-bit tensors
that do not spill, without a search."""
_TF32_TILES: dict[int, list[BackwardSm80Tile]] = {
    64: [
        _fp32_in_regs(4, dq_unroll=4, sdp_unroll=2),
        _fp32_in_regs(4, queries_at_once=16, dq_unroll=2, sdp_unroll=2),
        _fp32_in_regs(4, 64, dq_unroll=2, **_ONE_STAGE),
    ],
    128: [
        _fp32_in_regs(8, sdp_unroll=4, dq_unroll=4, **_ONE_STAGE),
        _fp32_in_regs(4, 64, sdp_unroll=4, dq_unroll=2, **_ONE_STAGE),
        _fp32(32, 32, 4, 2, 2, 2),
    ],
    256: [_fp32(32, 64, 8, 2, 4, 2), _fp32(32, 32, 4, 2, 2, 2)],
}
"""The same of fp32 elements rounded to tf32."""
_LARGE_UNROLLS = {"sdp_unroll": 4, "dkv_unroll": 1, "dq_unroll": 1, **_ONE_STAGE}
_LARGE_TILES = {
    2: [
        _tile(64, 32, 8, 4, 2, 2, **_LARGE_UNROLLS),
        _tile(64, 16, 4, 4, 1, 2, **_LARGE_UNROLLS),
    ],
    4: [_fp32(32, 32, 4, 2, 2, 2)],
}
"""Bytes of an element -> tiles for head dims beyond 256, the largest first."""


def streamed_tile(traits: Traits, dq_vector: int) -> BackwardSm80Tile:
    """The tile of any head dim: it fits every target."""
    tile = _tile(
        64, 64, 8, 4, 4, 4, columns=256, dq_vector=dq_vector, sdp_unroll=2, dkv_unroll=1, dq_unroll=1
    )
    return dataclasses.replace(tile, dq_passes=padded(traits.head_dim) // tile.chunk(traits))


_MOST_COLUMNS = 256
"""Of dK and dV that eight warps hold for 64 keys without spills."""


def streamed_parts_tile(traits: Traits, dq_vector: int) -> BackwardSm80Tile:
    """As :func:`streamed_tile`, of operands in two parts: the fewest CTAs, with equal shares of the columns."""
    unrolls = {"sdp_unroll": 1, "dkv_unroll": 1, "dq_unroll": 1}
    tile = _tile(64, 64, 8, 4, 4, 4, columns=64, dq_vector=dq_vector, operands="parts", **unrolls)
    largest, chunk = max(padded(traits.head_dim), padded(traits.head_dim_v)), tile.chunk(traits)
    share = -(-largest // -(-largest // _MOST_COLUMNS))
    passes = padded(traits.head_dim) // chunk
    return dataclasses.replace(tile, columns=-(-share // chunk) * chunk, dq_passes=passes)


def _tiles_of_one_part(traits: Traits) -> list[BackwardSm80Tile]:
    """Of fp32 elements in one fp16 part, for head dims up to 256.

    One of them has an exact kernel whose operands are streamed, for targets with little shared memory, and for head
    dims that four warps cannot divide.
    """
    largest = max(traits.head_dim, traits.head_dim_v)
    tiles = next(tiles for dim, tiles in _ONE_PART_TILES.items() if largest <= dim)
    fitting = [tile for highest, tile in tiles if highest >= _pressure(traits)]
    streamed = _one_part(64, 64, 8, 4, 4, 4, stages=1, **_FEW)
    passes = padded(traits.head_dim) // streamed.chunk(traits)
    others = [_ONE_PART_LEAST, dataclasses.replace(streamed, dq_passes=passes)]
    return [*fitting, *(others if largest <= 128 else reversed(others))]


def _large_tiles_in_parts(traits: Traits, vector: int) -> list[BackwardSm80Tile]:
    """Of fp32 elements in parts, for head dims beyond 256. One part may stay in shared memory, as 16 bits do."""
    streamed = streamed_parts_tile(traits, vector)
    if traits.fp16_parts == 2:
        return [streamed]
    unrolls = {"sdp_unroll": 4, "dkv_unroll": 1, "dq_unroll": 1}
    resident = _one_part(
        64, 32, 8, 4, 2, 2, stages=1, dq_vector=vector, dq_passes=streamed.dq_passes, **unrolls
    )
    return [resident, streamed]


def _rows_stay(traits: Traits, tile: BackwardSm80Tile) -> bool:
    """Whether unaligned rows may stay where they are copied, so that copies take few registers."""
    dim = traits.head_dim
    stay = dim == traits.head_dim_v and has_room(tile.tile_m, padded(dim), dim, tile.num_threads)
    return stay and not (traits.windowed and dim <= 64)


def preferred_tiles(traits: Traits, target: str) -> list[BackwardSm80Tile]:
    """Best first."""
    vector = 4 if target == "sm90" else 1
    if max(traits.head_dim, traits.head_dim_v) > 256:
        passes = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18)
        resident = [
            dataclasses.replace(tile, dq_vector=vector, dq_passes=n)
            for tile in _LARGE_TILES[traits.element_bytes]
            for n in passes
        ]
        in_parts = _large_tiles_in_parts(traits, vector) if traits.element_bytes == 4 else []
        return [*in_parts, *resident, streamed_tile(traits, vector)]
    if traits.element_bytes == 4:
        largest = max(traits.head_dim, traits.head_dim_v)
        of_precision = _TF32_TILES if traits.precision == "tf32" else _FP32_TILES
        of_fp32 = next((tiles for dim, tiles in of_precision.items() if largest <= dim), of_precision[256])
        if traits.precision == "tf32" and largest <= 64 and (_pressure(traits) or not traits.aligned):
            of_fp32 = of_fp32[1:]
        if traits.fp16_parts == 1:
            of_fp32 = [*_tiles_of_one_part(traits), *of_fp32]
        else:
            of_target = _PARTS_TILES if target == "sm90" else _PARTS_SM80
            of_fp32 = [*next(tiles for dim, tiles in of_target.items() if largest <= dim), *of_fp32]
        return [
            *(dataclasses.replace(tile, dq_vector=vector) for tile in of_fp32),
            streamed_tile(traits, vector),
        ]
    tables = {"sm80": _TILES_SM80, "sm90": _TILES}.get(target, _SMALL_TILES)
    largest = max(traits.head_dim, traits.head_dim_v)
    tiles = next((tiles for dim, tiles in tables.items() if largest <= dim), tables[256])
    pressure = max(_pressure(traits), _least_pressure(traits, target))
    own = []
    if not (traits.aligned or (target == "sm90" and pressure == 0 and _rows_stay(traits, tiles[0][1]))):
        if largest <= 64 and pressure <= 1 and tables is not _SMALL_TILES:
            few = target == "sm90" and pressure == 0 and traits.head_dim == traits.head_dim_v
            own = [_in_regs(32, 0, 4) if few else _in_regs(32, 1, 2)]
        pressure = max(pressure, 4 if largest <= 64 or (largest <= 128 and target == "sm80") else 3)
    fitting = [*own, *(tile for highest, tile in tiles if highest >= pressure)]
    return [dataclasses.replace(tile, dq_vector=vector) for tile in (*fitting, *FIT_ALWAYS)]
