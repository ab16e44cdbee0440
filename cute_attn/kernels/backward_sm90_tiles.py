"""Which tile the Hopper backward takes when none is named."""

import dataclasses

from cute_attn.tiles import BackwardSm90Tile, padded
from cute_attn.traits import Traits


def preferred_tiles(traits: Traits) -> list[BackwardSm90Tile]:
    """Best first; the first one that fits is the default. bench/notes.md has what others did.

    What an epilogue holds beside the scores (a bias, a derivative, a mask of dropout) takes registers that more queries
    or a late dQ would have; how many a user's needs, nobody knows here.
    """
    return [_drawn_ahead(tile, traits) for tile in (*staged_tiles(traits), *_other_tiles(traits))]


def _drawn_ahead(tile: BackwardSm90Tile, traits: Traits) -> BackwardSm90Tile:
    """Flash's mask by all warps that have nothing else to do.

    Not beside a staged bias with its gradient, which leave threads no register for where the mask lies.
    """
    if traits.dropout != "flash" or tile.p_in_smem or (tile.bias_stages and traits.bias_grad):
        return tile
    return dataclasses.replace(tile, mask_warps=tile.idle_warps)


def staged_tiles(traits: Traits) -> list[BackwardSm90Tile]:
    """For a bias that comes by TMA, which takes shared memory but hardly a register, and one epilogue beside it."""
    d = _wider_dim(traits)
    others = [bool(x) for x in (traits.epilogues, traits.softcap, traits.alibi, traits.dropout)]
    if traits.bias not in ("fp16", "bf16") or d > 128 or sum(others) > 1:
        return []
    if d == 128 and traits.softcap and traits.varlen:  # spills with the bias's gradient
        return []
    narrow = BackwardSm90Tile(64, 128, bias_stages=2)
    late = dataclasses.replace(narrow, p_rounded=True, dq_late=2)
    gradient_from_registers = traits.bias_grad and traits.bias != traits.dtype
    if not (traits.epilogues or traits.softcap or traits.dropout or gradient_from_registers):
        if d <= 64:
            return [dataclasses.replace(late, tile_m=128), late]
        return [dataclasses.replace(late, take_turns=True)]
    if d <= 64:
        return [narrow if traits.epilogues else dataclasses.replace(narrow, dq_late=1)]
    return [dataclasses.replace(narrow, tile_m=48, dq_transposed=True)] if d == 128 else [narrow]


def _wider_dim(traits: Traits) -> int:
    """Of the two head dims, as registers hold it."""
    return max(padded(traits.head_dim), padded(traits.head_dim_v))


def _other_tiles(traits: Traits) -> list[BackwardSm90Tile]:
    """Without."""
    d = _wider_dim(traits)
    heavy = bool(traits.bias or traits.epilogues or traits.dropout == "mem_efficient")
    laden = heavy or traits.softcap
    narrow = BackwardSm90Tile(64, 128)
    late = dataclasses.replace(narrow, p_rounded=True, dq_late=2)
    if d <= 64:
        if traits.epilogues or (traits.alibi and traits.bias):
            return [narrow]
        beside_products = dataclasses.replace(narrow, dq_late=1)
        if laden:
            return [beside_products]
        if traits.dropout and (traits.windowed or traits.varlen or traits.alibi or traits.seqused_q):
            return [late, beside_products]
        return [dataclasses.replace(late, tile_m=128), beside_products]
    if d <= 128:
        # Which leaves no register for an epilogue beside a late dQ.
        packed_window = traits.windowed and traits.varlen
        if not (heavy or traits.softcap or traits.alibi):
            return [dataclasses.replace(late, take_turns=traits.causal), narrow]
        fewer = BackwardSm90Tile(48, 128, dq_transposed=True)
        if d == 128 and (heavy or (traits.softcap and traits.dropout)):
            return [fewer, narrow]
        if d == 128 and not (traits.dropout or traits.alibi or packed_window):  # softcap alone
            return [dataclasses.replace(fewer, dq_late=2), narrow]
        return [narrow]
    shared = BackwardSm90Tile(64, 64, p_in_smem=True, staggered=True)
    return [
        shared,
        dataclasses.replace(shared, num_stages_do=1),
        dataclasses.replace(shared, num_stages_do=1, num_stages_ds=1),
        dataclasses.replace(shared, num_stages_q=1, num_stages_do=1, num_stages_ds=1),
    ]
