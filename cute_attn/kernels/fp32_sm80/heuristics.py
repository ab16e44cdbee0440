"""Default tiles of the Ampere forward of fp32 in fp16 terms, and which calls are large enough for it."""

import dataclasses

from cute_attn.kernels.forward_sm80.heuristics import Rows, preferred_tiles, register_pressure, rows
from cute_attn.tiles import ForwardTermsTile, padded
from cute_attn.traits import Traits

# Of two terms. 32 rows per warp read K and V from shared memory half as often as 16, and of two CTAs of four warps per
# multiprocessor one's softmax overlaps the other's products. Numbers are ratios to PyTorch's memory-efficient kernel,
# from "The rest of the memory-efficient family, measured" in bench/notes.md; rows without one only do not spill.
_TWO_TERMS: Rows[ForwardTermsTile] = (
    (64, 0, ForwardTermsTile(128, 64, 4, 1)),  # 3.07 to 3.81; two stages +1 to 3%, but on sm90 alone
    (64, 5, ForwardTermsTile(128, 32, 4, 1)),  # 3.11 with a bias, 2.63 with dropout
    (96, 0, ForwardTermsTile(128, 32, 4, 2)),
    (96, 4, ForwardTermsTile(128, 32, 4, 1)),
    (96, 5, ForwardTermsTile(64, 64, 4, 1)),
    (128, 0, ForwardTermsTile(128, 32, 4, 1)),  # 2.32 to 2.83; 256 rows, 16 or 64 keys, one step -2 to -14%
    (128, 5, ForwardTermsTile(64, 64, 4, 1)),
    (256, 5, ForwardTermsTile(128, 32, 8, 1)),  # 2.4
)
_DIVIDED = [  # d320 2.2 to 2.7, d512 1.37 to 1.70
    ForwardTermsTile(64, 32, 8, warps_n=2),
    ForwardTermsTile(32, 32, 4, warps_n=2),
    ForwardTermsTile(16, 32, 2, warps_n=2),
]
_FIT_ALWAYS = [ForwardTermsTile(64, 32, 4, 1), ForwardTermsTile(64, 16, 4, 1), ForwardTermsTile(32, 16, 2, 1)]


def tiles_of_terms(traits: Traits) -> list[ForwardTermsTile]:
    """Tiles for fp32 in fp16 terms, best first."""
    if traits.fp32_terms == 1:  # its main loop is that of 16-bit tensors
        d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
        half = dataclasses.replace(traits, dtype="fp16", precision="", head_dim=d, head_dim_v=dv)
        return [ForwardTermsTile(**vars(tile)) for tile in preferred_tiles(half)]
    if traits.head_dim_v > 256:
        return _DIVIDED
    return [*rows(_TWO_TERMS, traits.head_dim_v, register_pressure(traits)), *_FIT_ALWAYS]


TERMS_LEAST_USES = {2: 512, 1: 1024}
"""Terms -> keys of a query, and queries of a key, from which on products by terms pay for splitting the rows.

Those of one term, in place of one product of tf32, have not been searched.
"""
TERMS_LEAST_FLOP = {2: 2**32, 1: 2**33}
"""Terms -> floating-point operations of a call from which on they pay for three more launches."""


def terms_pay(traits: Traits, rows: int, seqlen_q: int, seqlen_k: int, group: int) -> bool:
    """Whether a call in fp32 is large enough for kernels that split its tensors first.

    Args:
        rows: queries of all heads and sequences.
        seqlen_q, seqlen_k: of the longest sequences.
        group: query heads of a key head.
    """
    flop = 2 * rows * seqlen_k * (traits.head_dim + traits.head_dim_v)
    uses = min(seqlen_k, seqlen_q * group)
    terms = traits.fp32_terms
    return uses >= TERMS_LEAST_USES[terms] and flop >= TERMS_LEAST_FLOP[terms]
