"""Default tiles of the Hopper forward."""

import dataclasses

from cute_attn.epilogues.base import in_every_step, lists_blocks
from cute_attn.tiles import (
    ForwardSm90Tile,
    best_packing,
    first_that_fits,
    may_pack_heads,
    padded,
)
from cute_attn.traits import Traits
from cute_attn.work.block_lists import divides

SHORT_SEQLEN = 1024
"""Longest sequences that take a smaller tile: prologue and epilogue dominate them."""

FEW_KEYS = (64, 80, 96)
"""Keys of a step for sequences of no more, such as a text's 77."""


def tile_for_lengths(traits: Traits, seqlen_q: int, seqlen_k: int, group: int) -> ForwardSm90Tile | None:
    """The tile for sequences of at most these lengths, ``group`` query heads per key head; None: the default one."""
    tile = _tile_for_queries(traits, seqlen_q, seqlen_k, group)
    if seqlen_k > max(FEW_KEYS) or traits.bias:
        return tile
    chosen = tile or first_that_fits(preferred_tiles(traits), traits, "sm90")
    enough = [
        n for n in FEW_KEYS if seqlen_k <= n < chosen.tile_n and (n % 32 == 0 or traits.dropout != "flash")
    ]
    return dataclasses.replace(chosen, tile_n=enough[0]) if enough else tile


def _tile_for_queries(traits: Traits, seqlen_q: int, seqlen_k: int, group: int) -> ForwardSm90Tile | None:
    short = short_tile(traits) if max(seqlen_q, seqlen_k) <= SHORT_SEQLEN else None
    if not may_pack_heads(traits):
        return short
    plain = short or first_that_fits(preferred_tiles(traits), traits, "sm90")
    packing = _packing_tiles(traits, short)
    return best_packing(packing, plain, seqlen_q, group, traits.varlen) or short


def _packing_tiles(traits: Traits, short: ForwardSm90Tile | None) -> list[ForwardSm90Tile]:
    """Of one warpgroup and of two."""
    two = [tile for tile in ([short] if short else []) + preferred_tiles(traits) if tile.tile_m == 128]
    one = _one_warpgroup(max(padded(traits.head_dim), padded(traits.head_dim_v)))
    return [one, first_that_fits(two, traits, "sm90")]


def _one_warpgroup(d: int) -> ForwardSm90Tile:
    """For 64 rows in all: bound by memory, so many loads are kept in flight."""
    if d <= 64:
        return ForwardSm90Tile(64, 128, num_stages=3, speculative=True, blocks_per_sm=2)
    tile = ForwardSm90Tile(64, 64, num_stages=3, share_qo_smem=True, speculative=True, rescale_threshold=8)
    return dataclasses.replace(tile, blocks_per_sm=2) if d <= 128 else tile


def short_tile(traits: Traits) -> ForwardSm90Tile | None:
    """For sequences of up to ``SHORT_SEQLEN``: narrow key blocks waste less at the edges, small CTAs overlap."""
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    has_epilogue = traits.bias or traits.epilogues or traits.dropout or traits.softcap or traits.alibi
    if has_epilogue or 64 < d <= 128:
        return None
    if d <= 64:
        return ForwardSm90Tile(64, 64, speculative=True, blocks_per_sm=3)
    return ForwardSm90Tile(128, 64, rescale_threshold=8, share_qo_smem=True)


def preferred_tiles(traits: Traits) -> list[ForwardSm90Tile]:
    """Best first; the first one that fits is the default. bench/notes.md has what others did.

    An epilogue with registers beside the scores (a bias, the words of the mem_efficient mask) takes a smaller
    ``tile_n`` or leaves Q in shared memory.
    """
    d = max(padded(traits.head_dim), padded(traits.head_dim_v))
    needs_registers = bool(
        traits.bias or in_every_step(traits.epilogues) or traits.dropout == "mem_efficient"
    )
    tiles = [*_tma_bias_tiles(traits, d), *_other_tiles(traits, d, needs_registers)]
    if not lists_blocks(traits.epilogues):
        return tiles
    return [dataclasses.replace(tile, q_in_regs=False) for tile in tiles if divides(tile)]


def _tma_bias_tiles(traits: Traits, d: int) -> list[ForwardSm90Tile]:
    """For a bias that TMA loads, if it is the only epilogue."""
    other_epilogue = traits.epilogues or traits.dropout or traits.softcap or traits.alibi
    if other_epilogue or traits.bias not in ("fp16", "bf16") or d > 128:
        return []
    if d <= 64:
        return [ForwardSm90Tile(192, 96, num_stages=3, bias_stages=2, speculative=True)]
    return [
        ForwardSm90Tile(128, 96, bias_stages=2, q_in_regs=True, rescale_threshold=8, speculative=True),
    ]


def _other_tiles(traits: Traits, d: int, needs_registers: bool) -> list[ForwardSm90Tile]:
    """Without a TMA bias."""
    if d <= 64:
        several = sum(map(bool, (traits.softcap, traits.alibi, traits.bias, traits.dropout))) > 1
        tile_n = 96 if traits.epilogues or several else 128
        if traits.dropout == "mem_efficient":
            tile_n = 64
        return [
            ForwardSm90Tile(192, tile_n, num_stages=3, speculative=not needs_registers),
            ForwardSm90Tile(128, 128, speculative=not needs_registers),
            ForwardSm90Tile(128, 64),
        ]
    if d <= 128:
        tile_n = 96 if traits.bias == "fp32" else 128
        return [
            ForwardSm90Tile(
                128,
                tile_n,
                q_in_regs=not needs_registers,
                rescale_threshold=8,
                speculative=not needs_registers,
            ),
            ForwardSm90Tile(128, 64, rescale_threshold=8),
        ]
    plain = ForwardSm90Tile(128, 80, rescale_threshold=8, share_qo_smem=True)
    more_keys = padded(traits.head_dim_v) <= 192 and not needs_registers
    return [
        *(dataclasses.replace(plain, tile_n=n, speculative=True) for n in (128, 112, 96) if more_keys),
        *(dataclasses.replace(plain, tile_n=n) for n in (80, 64, 32)),
    ]
