"""Which tile the Hopper backward takes when none is named."""

import dataclasses

from cute_attn.tiles import BackwardSm90Tile, padded
from cute_attn.traits import Traits


def preferred_tiles(traits: Traits) -> list[BackwardSm90Tile]:
    """Best first; the first one that fits is the default. bench/notes.md has what others did.

    What an epilogue holds beside the scores (a bias, a derivative, a mask of dropout) takes registers that more queries
    or a late dQ would have; how many a user's needs, nobody knows here.
    """
    d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
    heavy = bool(traits.bias or traits.epilogues or traits.dropout == "mem_efficient")
    laden = heavy or traits.softcap or traits.dropout
    narrow = BackwardSm90Tile(64, 128)
    late = dataclasses.replace(narrow, p_rounded=True, dq_late=2)
    if max(d, dv) <= 64:
        if traits.epilogues or (traits.alibi and traits.bias):
            return [narrow]
        beside_products = dataclasses.replace(narrow, dq_late=1)
        return [beside_products] if laden else [dataclasses.replace(late, tile_m=128), beside_products]
    if max(d, dv) <= 128:
        fewer = [BackwardSm90Tile(48, 128, dq_transposed=True)] if heavy and d == 128 else []
        return [*fewer, narrow] if laden or traits.alibi else [late, narrow]
    wide = BackwardSm90Tile(64, 64, p_in_smem=True)
    return [
        wide,
        dataclasses.replace(wide, num_stages_do=1),
        dataclasses.replace(wide, num_stages_do=1, num_stages_ds=1),
        dataclasses.replace(wide, num_stages_q=1, num_stages_do=1, num_stages_ds=1),
    ]
