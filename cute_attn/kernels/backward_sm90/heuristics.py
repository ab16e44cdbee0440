"""Default tiles of the Hopper backward, from ``tiles.csv``; bench/notes.md has the measurements of other tiles.

Values that an epilogue keeps next to the scores (a bias, a derivative, a dropout mask) occupy registers that a larger
tile_m would need. Without a mask, CTAs of the same head add to the same dQ at once unless they are staggered.
"""

from cute_attn.epilogues.names import held, in_every_step, lists_blocks, reads_tensors
from cute_attn.tiles import BackwardSm90Tile
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

FEW_ROWS, EMPTY = 64, 1.1
"""Rows of the tile for few queries or a short window. It is chosen if the default tile computes at least EMPTY times
as many rows."""
FEW_KEYS, EMPTY_KEYS = {80: 1024, 160: 1}, 1.5
"""Keys of the tiles for few keys, such as a text's 77 or 154 -> minimum number of queries. Such a tile is chosen if the
default tile would compute at least EMPTY_KEYS times as many keys."""
MANY = 6
"""Maximum count of numbers that functions hold; above it, tiles have as few keys as for head dims above 128."""
FEW_HELD = 2
"""Maximum count of these numbers with which a block list leaves the number of queries unchanged."""
TABLE = Table(__file__, BackwardSm90Tile)


def keys(traits: Traits, target: str, lengths: str = "long", *, tma: bool = True) -> tuple[Key, ...]:
    """The keys by which rows of ``tiles.csv`` are matched.

    Args:
        lengths: ``keys_N``, with N from ``FEW_KEYS``, for many queries and at most N keys; otherwise ``long``.
        tma: whether TMA may load a 16-bit bias, which then needs almost no registers.
    """
    dim, numbers = max(traits.head_dim, traits.head_dim_v), held(traits.epilogues, traits.op)
    mask = "masked" if traits.causal or traits.windowed else "full"
    listed = lists_blocks(traits.epilogues)
    bias = _bias(traits) if tma and traits.bias in ("fp16", "bf16") else "threads"
    own_rows = traits.windowed or traits.varlen or traits.alibi or traits.seqused_q
    functions = in_every_step(traits.epilogues)
    if _needs_registers(traits, bool(functions) and (numbers > 0 or reads_tensors(functions))):
        registers = "needed"
    else:
        some = bool(functions) or (listed and numbers > FEW_HELD) or (traits.dropout and (listed or own_rows))
        registers = "some" if some else "free"
    return (
        max(dim, 129) if numbers > MANY else dim,
        *(mask, bias, registers, numbers, traits.dropout or "none", "listed" if listed else "all"),
        lengths,
    )


def lengths_of(seqlen_q: int, seqlen_k: int, tile_n: int) -> str:
    """The value of the key ``lengths``; tile_n: keys per block of the default tile."""
    few = next((n for n in FEW_KEYS if seqlen_k <= n), 0)
    computed = -(-seqlen_k // tile_n) * tile_n
    return f"keys_{few}" if few and seqlen_q >= FEW_KEYS[few] and computed >= EMPTY_KEYS * few else "long"


def visited_rows(tile_m: int, tile_n: int, seqlen_q: int, window: int) -> int:
    """Number of rows in the query blocks that a key block visits; window: keys that a query sees, 0 without a window.

    The first query whose window contains the key block may be anywhere in a query block.
    """
    rows = -(-seqlen_q // tile_m) * tile_m
    return min(rows, tile_n + window - 1 + tile_m - 1) if window else rows


def _needs_registers(traits: Traits, holds: bool) -> bool:
    """True if an epilogue holds as much as the scores: inputs of a derivative, a bias, or a dropout mask's words.

    holds: whether functions hold numbers or read tensors. Others need registers only with a dropout mask.
    """
    mask = traits.dropout and (in_every_step(traits.epilogues) or traits.dropout == "mem_efficient")
    return bool(traits.softcap or holds or traits.bias or mask)


def _bias(traits: Traits) -> str:
    """The key for a 16-bit bias: how it is loaded, and what else occupies registers, such as its gradient."""
    beside = [bool(x) for x in (traits.epilogues, traits.softcap, traits.dropout)]
    if sum(beside) + traits.alibi > 1:
        return "threads"
    if any(beside):
        return "tma_beside_grad" if traits.bias_grad else "tma_beside"
    return "tma_alibi" if traits.alibi or (traits.bias_grad and traits.bias != traits.dtype) else "tma"
