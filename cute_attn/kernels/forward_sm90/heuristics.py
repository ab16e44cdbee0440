"""Default tiles of the Hopper forward."""

import dataclasses

from cute_attn.tiles import ForwardSm90Tile, first_that_fits, may_pack_heads, padded
from cute_attn.traits import Traits

SHORT_SEQLEN = 1024
"""Longest sequences that take a smaller tile: prologue and epilogue dominate them."""

PACKS = (1, 2, 4, 8, 16, 32, 64)
GAIN = 1.1
"""Heads are packed where so many times as many rows would be computed without."""
FEW_KEYS = (64, 80, 96)
"""Keys of a step for sequences of no more, such as a text's 77."""
TILE_ROWS = 64
"""Rows whose time equals what a work tile costs beside its rows: K and V, its prologue and epilogue."""


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
    candidates = [
        dataclasses.replace(tile, pack_heads=n) for tile in _packing_tiles(traits, short) for n in PACKS
    ]
    candidates = [tile for tile in candidates if tile.pack_heads < 2 * group]

    # Lengths of packed sequences differ, and only the longest is known here.
    lengths = (seqlen_q, -(-seqlen_q // 2)) if traits.varlen and group > 1 else (seqlen_q,)

    def tiles(tile: ForwardSm90Tile) -> int:
        """Work tiles of a key head."""
        return -(-group // tile.pack_heads) * sum(-(-n // tile.queries) for n in lengths)

    best = min(candidates, key=lambda tile: (tiles(tile) * (tile.tile_m + TILE_ROWS), -tile.pack_heads))
    gain = tiles(plain) * plain.tile_m / max(tiles(best) * best.tile_m, 1)
    return best if gain >= GAIN and (best.pack_heads > 1 or best.tile_m >= seqlen_q) else short


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
    needs_registers = bool(traits.bias or traits.epilogues or traits.dropout == "mem_efficient")
    return [*_tma_bias_tiles(traits, d), *_other_tiles(traits, d, needs_registers)]


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
            tile_n = 48 if traits.bias else 64
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
