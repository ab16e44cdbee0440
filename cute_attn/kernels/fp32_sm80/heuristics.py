"""Default tiles of the Ampere fp32 forward with fp16 terms, from ``tiles.csv``, and the minimum size of its calls.

With two terms, 32 rows per warp read K and V from shared memory half as often as 16 rows, and with two CTAs of four
warps per multiprocessor the softmax of one CTA overlaps the products of the other. For other tiles see
"The rest of the memory-efficient family, measured" in bench/notes.md.
"""

import functools

from cute_attn.kernels.forward_sm80 import heuristics as half
from cute_attn.tiles import ForwardTermsTile, first_that_fits
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

TABLE = Table(__file__, ForwardTermsTile)


def default_tile(traits: Traits, target: str) -> ForwardTermsTile:
    """The tile for many rows; with one term that of 16-bit tensors, whose main loop is the same."""
    if traits.fp32_terms == 1:
        return _of_one_term(traits, target, *half.keys(traits, target, "half"))
    return TABLE.first(traits, target, *keys(traits, target))


def keys(traits: Traits, target: str) -> tuple[Key, ...]:
    return traits.head_dim_v, half.register_pressure(traits)


@functools.lru_cache(maxsize=1024)
def _of_one_term(traits: Traits, target: str, *keys: Key) -> ForwardTermsTile:
    tiles = [ForwardTermsTile(**vars(tile)) for tile in half.TABLE.tiles(*keys)]
    return first_that_fits(tiles, traits, target)


TERMS_LEAST_USES = {2: 512, 1: 1024}
"""Number of terms -> minimum keys per query, and queries per key, above which faster products pay for splitting rows.

The values for one term, which replaces a single tf32 product, have not been tuned.
"""
TERMS_LEAST_FLOP = {2: 2**32, 1: 2**33}
"""Number of terms -> minimum floating-point operations of a call above which terms pay for three more launches."""


def terms_pay(traits: Traits, rows: int, seqlen_q: int, seqlen_k: int, group: int) -> bool:
    """True if a call is so large that splitting fp32 tensors into fp16 terms first is faster.

    Args:
        rows: number of queries of all heads and sequences.
        seqlen_q, seqlen_k: lengths of the longest sequences.
        group: query heads per key head.
    """
    flop = 2 * rows * seqlen_k * (traits.head_dim + traits.head_dim_v)
    uses = min(seqlen_k, seqlen_q * group)
    terms = traits.fp32_terms
    return uses >= TERMS_LEAST_USES[terms] and flop >= TERMS_LEAST_FLOP[terms]
