"""The Ampere backward's default tiles, from ``tiles.csv``.

P and dS stay in registers where they fit, with four warps of 32 keys and two CTAs per multiprocessor. In fp32 they pass
through shared memory: with both in registers, ptxas computes many partial sums of dV and dK before it adds any of them
up, and spills. sm80 adds to dQ float by float, which needs registers; sm86 and sm89 have less shared memory. Other
tiles: "Ampere backward, on an H200" in bench/notes.md (#n: its rows).
"""

import functools
import math
from dataclasses import replace

from cute_attn.epilogues.names import held
from cute_attn.tiles import TILES_OF, BackwardSm80Tile, first_that_fits, padded
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

TABLE = Table(__file__, BackwardSm80Tile)
TERMS_LEAST_FLOP = {2: 2**31, 1: 2**32}
"""Number of terms -> minimum floating-point operations of a call for which products in terms pay for three more
launches. The minimum for one term has not been tuned."""
PASSES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18)
"""Numbers of dQ passes that are tried above head dim 256."""


def default_tile(traits: Traits, target: str, *, whole: bool = False) -> BackwardSm80Tile:
    """The tile that is used if none is named; whole: for fp32 operands that are not stored as terms."""
    return _first(traits, target, whole, *keys(traits, target))


def keys(traits: Traits, target: str) -> tuple[Key, ...]:
    half = traits.dtype != "fp32"
    dtype = "half" if half else traits.precision or "fp32"
    pressure = register_pressure(traits)
    if half:
        pressure = max(pressure, _least_pressure(traits, target))
    alone = half and traits.epilogues and not (traits.dropout or traits.bias)
    functions = held(traits.epilogues, traits.op) if alone else "none"
    dim = max(traits.head_dim, traits.head_dim_v)
    return dim, dtype, pressure, functions, TILES_OF.get(target, target)


@functools.lru_cache(maxsize=4096)
def _first(traits: Traits, target: str, whole: bool, *keys: Key) -> BackwardSm80Tile:
    rows = [tile for tile in TABLE.tiles(*keys) if not (whole and tile.in_terms)]
    tiles = [tile for row in rows for tile in in_passes(row, traits)]
    vector = 1 if target in ("sm80", "sm86", "sm89") else 4  # red.v4 is sm90's and later ones': +1%, #12
    return replace(first_that_fits(tiles, traits, target), dq_vector=vector)


def in_passes(tile: BackwardSm80Tile, traits: Traits) -> list[BackwardSm80Tile]:
    """The tiles to try for a row: its tile, and the tile with one pass in case its passes do not divide head_dim.

    If the row has ``dq_passes=0``: a tile for each of ``PASSES``, or one tile with a pass per chunk.
    """
    if tile.dq_passes:
        return [tile] if tile.dq_passes == 1 else [tile, replace(tile, dq_passes=1)]
    if not (tile.columns or tile.in_terms):
        return [replace(tile, dq_passes=n) for n in PASSES]
    chunk, columns = tile.chunk(traits), tile.columns
    if columns and tile.in_terms:  # the fewest CTAs, with equal numbers of columns
        largest = max(padded(traits.head_dim), padded(traits.head_dim_v))
        each = largest / math.ceil(largest / columns)
        columns = math.ceil(each / chunk) * chunk
    return [replace(tile, columns=columns, dq_passes=padded(traits.head_dim) // chunk)]


def register_pressure(traits: Traits) -> int:
    """Register pressure of the epilogues, from 0 to 5, judged by ptxas's spills.

    1: ALiBi, or lengths with large head dims; 2: a bias; 3: values saved for a derivative, or a dropout mask; 4: many
    such values, a dropout mask with lengths or many Philox words, or a window with lengths; 5: dropout with another
    epilogue, or with many Philox words in some cases.

    In the forward, a bias needs more registers than softcap; here softcap needs more.
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
        return 4 if held(traits.epilogues, traits.op) > 5 else 3
    if traits.bias:
        return 2
    if traits.windowed and lengths and not large:
        return 4
    return 1 if traits.alibi or (lengths and large) else 0


def _least_pressure(traits: Traits, target: str) -> int:
    """Minimum pressure on a target: on sm80, adding single floats to dQ needs registers too."""
    if target != "sm80":
        return 0
    largest = max(traits.head_dim, traits.head_dim_v)
    if _saves(traits) and largest > 64:
        return 4
    if _has_lengths(traits) and largest <= 64:
        return 3
    return 1 if largest > 192 else 0


def _saves(traits: Traits) -> bool:
    return bool(traits.softcap or traits.epilogues)


def _has_lengths(traits: Traits) -> bool:
    return bool(traits.varlen or traits.seqused_q or traits.seqused_k)
