"""Which tile the Hopper backward takes when none is named."""

import dataclasses

from cute_attn.epilogues.base import held, in_every_step, lists_blocks
from cute_attn.tiles import BackwardSm90Tile, padded
from cute_attn.traits import Traits
from cute_attn.work.block_lists import divides

MANY = 6
"""Minimum of numbers that functions hold for which P is in shared memory; above it, tiles have fewer keys."""

SEVERAL = 4
"""Minimum for which tiles of head dim 128 have fewer queries: 48 spill 48 bytes with an index modulo a length."""

FEW_QUERIES = 64
"""Up to so many queries, tiles have no more rows than that."""


def preferred_tiles(traits: Traits) -> list[BackwardSm90Tile]:
    """Best first; the first one that fits is the default. bench/notes.md has what others did.

    What an epilogue holds beside the scores (a bias, a derivative, a mask of dropout) takes registers that more queries
    would have; how many a user's needs is not known here.
    """
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    if d > 256:
        tiles = _divided_tiles()
    elif d > 128 or held(traits.epilogues, traits.op) > MANY:
        tiles = _wide_tiles(traits)
    else:
        tiles = [
            *tma_bias_tiles(traits, d),
            *(_narrow_tiles(traits) if d <= 64 else _middle_tiles(traits, d)),
        ]
        tiles = [_with_mask_warps(tile, traits) for tile in tiles]
    return [tile for tile in tiles if divides(tile)] if lists_blocks(traits.epilogues) else tiles


def _with_mask_warps(tile: BackwardSm90Tile, traits: Traits) -> BackwardSm90Tile:
    """Flash's mask by all warps that have nothing else to do.

    Not beside a staged bias with its gradient, nor at head dim 128 beside what else an epilogue holds: threads have no
    register left for where the mask lies.
    """
    no_registers = tile.tile_m < 64 or (tile.bias_stages and traits.bias_grad)
    if traits.dropout != "flash" or no_registers:
        return tile
    return dataclasses.replace(tile, dq_bulk=False, mask_warps=3)


def _needs_registers(traits: Traits) -> bool:
    """Whether epilogues hold as much as the scores: what a derivative needs, a bias, the words of a mask."""
    epilogues = in_every_step(traits.epilogues)
    return bool(traits.softcap or epilogues or traits.bias or traits.dropout == "mem_efficient")


def tma_bias_tiles(traits: Traits, d: int) -> list[BackwardSm90Tile]:
    """For a bias that comes by TMA, which takes shared memory but hardly a register, and one epilogue beside it."""
    others = [bool(x) for x in (traits.epilogues, traits.softcap, traits.alibi, traits.dropout)]
    if traits.bias not in ("fp16", "bf16") or sum(others) > 1:
        return []
    tile = BackwardSm90Tile(64, 128, bias_stages=2)
    if d <= 64:
        narrow = dataclasses.replace(tile, dq_bulk=True)
        from_registers = traits.bias_grad and traits.bias != traits.dtype
        if any(others) or from_registers:
            return [narrow]
        full = not (traits.causal or traits.windowed)
        return [dataclasses.replace(tile, tile_m=128, staggered=full), narrow]
    if d == 128 and (traits.epilogues or traits.softcap or traits.dropout):
        return [dataclasses.replace(tile, tile_m=48, dq_transposed=True)]
    return [tile]


def _narrow_tiles(traits: Traits) -> list[BackwardSm90Tile]:
    """For head dims up to 64."""
    if held(traits.epilogues, traits.op) >= MANY:
        return [BackwardSm90Tile(64, 128, p_in_smem=True)]
    tile = BackwardSm90Tile(64, 128, dq_bulk=True)
    own_rows = traits.windowed or traits.varlen or traits.alibi or traits.seqused_q
    if _needs_registers(traits) or (traits.dropout and own_rows) or lists_blocks(traits.epilogues):
        return [tile]
    return [dataclasses.replace(tile, tile_m=128), tile]


def _middle_tiles(traits: Traits, d: int) -> list[BackwardSm90Tile]:
    """For head dims up to 128. Without a mask, CTAs that share a head add to the same dQ unless they are staggered."""
    tile = BackwardSm90Tile(64, 128, staggered=not (traits.causal or traits.windowed))
    several = held(traits.epilogues, traits.op) >= SEVERAL
    if d == 128 and (several or _needs_registers(traits)):
        tile_m = 32 if several else 48
        return [BackwardSm90Tile(tile_m, 128, dq_transposed=True), tile]
    return [tile]


def _wide_tiles(traits: Traits) -> list[BackwardSm90Tile]:
    """For head dims above 128. More keys per step where dK and dV leave registers for them."""
    tile = BackwardSm90Tile(64, 64, p_in_smem=True, staggered=True)
    transposed = dataclasses.replace(tile, dkv_transposed=True)
    more_keys = [
        dataclasses.replace(transposed, tile_n=n, num_stages_do=stages)
        for stages in (2, 1)
        for n in (112, 96)
    ]
    return [
        *([] if _needs_registers(traits) else more_keys),
        tile,
        dataclasses.replace(tile, num_stages_do=1),
        dataclasses.replace(tile, num_stages_do=1, num_stages_ds=1),
        dataclasses.replace(tile, num_stages_q=1, num_stages_do=1, num_stages_ds=1),
    ]


def _divided_tiles() -> list[BackwardSm90Tile]:
    """For head dims above 256."""
    tile = BackwardSm90Tile(64, 64, p_in_smem=True, staggered=True, scores_ahead=True, cluster=2)
    stages = [(2, 2, 1), (2, 1, 1)]
    return [
        dataclasses.replace(tile, num_stages_q=q, num_stages_do=do, num_stages_ds=ds) for q, do, ds in stages
    ]
