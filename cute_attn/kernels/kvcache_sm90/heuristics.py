"""Default tiles of the Hopper forward for attention with a cache, from ``tiles.csv``.

Few rows are bound by memory, with about 200 KB of loads in flight; more rows are bound by the tensor cores.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from cute_attn.tiles import MULTIPROCESSORS, KvcacheSm90Tile, first_that_fits, may_pack_heads
from cute_attn.tiles.inference import FOLDED_KEYS, CacheCall
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

FEW_ROWS = 32
"""Maximum rows per key head for the tiles of ``few_32``; with few keys, they serve any number of rows."""
TILE_ROWS = 64
"""Fixed cost of a work tile, which reads all keys, expressed as a number of rows."""
THRESHOLDS = {"bf16": 42, "fp16": 14}
"""``rescale_threshold`` with ``same_bits``: up to it, stale maxima do not change P. fp16 limits P to 2^16."""
TABLE = Table(__file__, KvcacheSm90Tile)


def cache_tile(traits: Traits, call: CacheCall) -> KvcacheSm90Tile:
    """The tile for a call."""
    few = "few_32" if call.planes or call.seqlen_q * call.group <= FEW_ROWS else "few"
    packs = [n for n in (1, 2, 4, 8, 16, 32, 64) if n == 1 or (may_pack_heads(traits) and n < 2 * call.group)]
    many = _first(traits, ("many",), call.page_size, call.same_bits)
    # With the same keys per step, a row's bits do not depend on the tile.
    few_rows, keys_per_step = (("few", "few_32"), many.tile_n) if call.same_bits else ((few,), 0)
    tiles = [_first(traits, few_rows, call.page_size, call.same_bits, keys_per_step), many]

    def cost(tile: KvcacheSm90Tile, pack: int) -> tuple[float, int]:
        """Cost of a key head's work tiles in rows, fixed costs included; the larger pack wins a tie.

        With few keys, work tiles run in waves, and all work tiles of a wave cost as much as one.
        """
        count = -(-call.group // pack) * -(-call.seqlen_q // (tile.tile_m // pack))
        waves = math.ceil(call.planes * count / MULTIPROCESSORS) if call.planes else count
        return waves * (tile.tile_m + TILE_ROWS), -pack

    if call.same_bits:
        # The fold needs the registers of Q.
        own: dict[str, Any] = {"q_in_regs": False} if traits.split == "folded" else {}
        own["rescale_threshold"] = THRESHOLDS[traits.dtype]
        tiles = [dataclasses.replace(tile, **own) for tile in tiles]
    tile, pack = min(((tile, n) for tile in tiles for n in packs), key=lambda candidate: cost(*candidate))
    return dataclasses.replace(tile, pack_heads=pack)


def keys(traits: Traits, target: str, rows: str = "few_32") -> tuple[Key, ...]:
    """The keys by which rows of ``tiles.csv`` are matched; rows: ``few_32`` (up to 32), ``few`` (up to 64) or ``many``.

    The register ``pressure`` is 2 with a bias and users' epilogues, whose scores may grow along the keys: tiles do not
    speculate.
    """
    split = "divided" if traits.divides_keys else "whole"
    pressure = 2 if traits.bias or traits.epilogues else int(traits.softcap and traits.alibi)
    return max(traits.head_dim, traits.head_dim_v), rows, split, pressure


@functools.lru_cache(maxsize=1024)
def _first(
    traits: Traits, rows: tuple[str, ...], page_size: int, folds: bool = False, tile_n: int = 0
) -> KvcacheSm90Tile:
    """The first tile that fits, with TMA boxes for pages of the call's size.

    Args:
        rows: values of ``rows`` for :func:`keys`, in order of preference.
        folds: see :func:`first_for_pages`.
        tile_n: accept only tiles with this number of keys; 0 for any.
    """
    found = (tile for one in rows for tile in TABLE.tiles(*keys(traits, "sm90", one)))
    tiles = [tile for tile in found if tile_n in (0, tile.tile_n)]
    return first_for_pages(tiles, traits, page_size, folds)


def first_for_pages(tiles: Sequence[Any], traits: Traits, page_size: int, folds: bool) -> Any:
    """The first of the tiles that fits; in a paged cache with TMA boxes of the most rows that divide a page.

    folds: accept only tiles whose key blocks divide ``FOLDED_KEYS``.
    """
    tiles = [tile for tile in tiles if not (folds and FOLDED_KEYS % tile.tile_n)]
    if traits.paged:
        tiles = [dataclasses.replace(tile, page_rows=math.gcd(page_size, tile.tile_n)) for tile in tiles]
    return first_that_fits(tiles, traits, "sm90")
