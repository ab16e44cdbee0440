"""Default tiles of the Hopper forward, from ``tiles.csv``; bench/notes.md has the measurements of other tiles.

If an epilogue needs registers (a bias, the words of the mem_efficient mask), the tile has fewer keys per step or leaves
Q in shared memory. Narrow key blocks waste less at the ends of short sequences, and several small CTAs overlap.
"""

from cute_attn.epilogues.names import are_functions, held, in_every_step, lists_blocks
from cute_attn.tiles import ForwardSm90Tile, padded
from cute_attn.tiles.table import Key, Table
from cute_attn.traits import Traits

FEW_HELD = 3
"""Maximum count of numbers that a user's function may hold for the tiles of ``function`` rows."""
TABLE = Table(__file__, ForwardSm90Tile)


def keys(traits: Traits, target: str, lengths: str = "long", *, tma: bool = True) -> tuple[Key, ...]:
    """Keys of a row of ``tiles.csv``.

    Args:
        lengths: ``long``, ``short``, ``four_warpgroups``, ``two_warpgroups``, or ``one_warpgroup`` for tiles of 64
            rows, which are bound by memory, so that many loads are kept in flight.
        tma: True if TMA may load a 16-bit bias.
    """
    d, dv = traits.head_dim, traits.head_dim_v
    tma = tma and traits.bias in ("fp16", "bf16") and epilogues_beside(traits) == 1
    dim = d if d >= dv else padded(dv)  # only V's rows do not begin within sectors of L2
    blocks = "listed" if lists_blocks(traits.epilogues) else "all"
    numbers = held(traits.epilogues, traits.op)
    return dim, lengths, "tma" if tma else "threads", _features(traits), _registers(traits), numbers, blocks


def epilogues_beside(traits: Traits) -> int:
    """Number of operations on scores, without the mask."""
    return sum(map(bool, (traits.bias, traits.epilogues, traits.dropout, traits.softcap, traits.alibi)))


def _features(traits: Traits) -> str:
    """``none``, ``one`` or ``several`` operations on scores; users' functions count as several. ``softcap`` for only a
    softcap, ``philox`` for a mem_efficient mask's words."""
    if traits.dropout == "mem_efficient":
        return "philox"
    if traits.epilogues:
        return "several"
    beside = epilogues_beside(traits)
    if beside == 1:
        return "softcap" if traits.softcap else "one"
    return "several" if beside else "none"


def _registers(traits: Traits) -> str:
    """``free`` if registers are left for keys or Q, else ``needed``, or ``fp32`` with an fp32 bias (fewest left).

    ``function``: users' functions with only a causal mask, in bf16. Row maxima are stale after the nearest keys; what a
    function adds to farther keys rarely makes P exceed bf16. Without a mask the first keys may be the farthest, and
    each work tile may be computed twice: a distance penalty then took 1.3 to 1.5 times as long.
    """
    if traits.bias == "fp32":
        return "fp32"
    epilogues = in_every_step(traits.epilogues)
    alone = epilogues_beside(traits) == 1 and not lists_blocks(traits.epilogues)
    few = held(traits.epilogues, traits.op) <= FEW_HELD and max(traits.head_dim, traits.head_dim_v) <= 128
    if epilogues and alone and few and traits.causal and traits.dtype == "bf16" and are_functions(epilogues):
        return "function"
    needed = traits.bias or epilogues or traits.dropout == "mem_efficient"
    return "needed" if needed or padded(traits.head_dim_v) > 192 else "free"
