"""Which tile the Hopper forward takes when none is named."""

import dataclasses
import math

from cute_attn.tiles import ForwardSm90Tile, first_that_fits, may_pack_heads, padded
from cute_attn.traits import Traits

SHORT = 1024
"""The longest sequences whose first and last steps weigh so much that they have a tile of their own."""

FEW = 64
"""The most queries whose heads are packed into blocks, which they would fill by half or less on their own."""


def tile_for_lengths(traits: Traits, seqlen_q: int, seqlen_k: int, group: int) -> ForwardSm90Tile | None:
    """What takes the default's place for sequences of such lengths, with ``group`` query heads to a key head."""
    short = short_tile(traits) if max(seqlen_q, seqlen_k) <= SHORT else None
    if seqlen_q > FEW or not may_pack_heads(traits):
        return short
    heads = math.gcd(group, 64)
    if seqlen_q * heads <= 64:
        tile = _one_warpgroup(max(padded(traits.head_dim), padded(traits.head_dim_v)))
    else:
        two = [tile for tile in preferred_tiles(traits) if tile.tile_m == 128]
        tile = short or first_that_fits(two, traits, "sm90")
    return dataclasses.replace(tile, pack_heads=heads)


def _one_warpgroup(d: int) -> ForwardSm90Tile:
    """For 64 rows in all: memory bounds it, so that as much as possible has to be on its way."""
    if d <= 64:
        return ForwardSm90Tile(64, 128, num_stages=3, speculative=True, blocks_per_sm=2)
    tile = ForwardSm90Tile(64, 64, num_stages=3, share_qo_smem=True, speculative=True, rescale_threshold=8)
    return dataclasses.replace(tile, blocks_per_sm=2) if d <= 128 else tile


def short_tile(traits: Traits) -> ForwardSm90Tile | None:
    """For sequences of up to ``SHORT``: convert_to_16_bits steps waste less at the edges, small blocks run beside each other."""
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    laden = traits.bias or traits.epilogues or traits.dropout or traits.softcap or traits.alibi
    if laden or 64 < d <= 128:
        return None
    if d <= 64:
        return ForwardSm90Tile(64, 64, speculative=True, blocks_per_sm=3)
    return ForwardSm90Tile(128, 64, rescale_threshold=8, share_qo_smem=True)


def preferred_tiles(traits: Traits) -> list[ForwardSm90Tile]:
    """Best first; the first one that fits is the default. bench/notes.md has what others did.

    What an epilogue holds beside the scores (a bias, the words of the mem_efficient mask) narrows the step or takes the
    registers that Q would have.
    """
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    heavy = bool(traits.bias or traits.epilogues or traits.dropout == "mem_efficient")
    return [*_staged_tiles(traits, d), *_other_tiles(traits, d, heavy)]


def _staged_tiles(traits: Traits, d: int) -> list[ForwardSm90Tile]:
    """For a bias that comes by TMA, if it is all that is added."""
    laden = traits.epilogues or traits.dropout or traits.softcap or traits.alibi
    if laden or traits.bias not in ("fp16", "bf16") or d > 128:
        return []
    if d <= 64:
        return [ForwardSm90Tile(192, 96, num_stages=3, bias_stages=2, speculative=True)]
    return [
        ForwardSm90Tile(128, 96, bias_stages=2, q_in_regs=True, rescale_threshold=8, speculative=True),
    ]


def _other_tiles(traits: Traits, d: int, heavy: bool) -> list[ForwardSm90Tile]:
    """Without."""
    if d <= 64:
        several = sum(map(bool, (traits.softcap, traits.alibi, traits.bias, traits.dropout))) > 1
        tile_n = 96 if traits.epilogues or several else 128
        if traits.dropout == "mem_efficient":
            tile_n = 48 if traits.bias else 64
        return [
            ForwardSm90Tile(192, tile_n, num_stages=3, speculative=not heavy),
            ForwardSm90Tile(128, 128, speculative=not heavy),
            ForwardSm90Tile(128, 64),
        ]
    if d <= 128:
        tile_n = 96 if traits.bias == "fp32" else 128
        return [
            ForwardSm90Tile(128, tile_n, q_in_regs=not heavy, rescale_threshold=8, speculative=not heavy),
            ForwardSm90Tile(128, 64, rescale_threshold=8),
        ]
    return [
        ForwardSm90Tile(128, 80, rescale_threshold=8, share_qo_smem=True),
        ForwardSm90Tile(128, 64, rescale_threshold=8, share_qo_smem=True),
        ForwardSm90Tile(128, 32, rescale_threshold=8, share_qo_smem=True),
    ]
