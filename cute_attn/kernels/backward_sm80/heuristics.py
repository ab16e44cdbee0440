"""The Ampere backward's default tiles: the first of :func:`preferred_tiles` that fits the traits and the target.

Speeds are TFLOP/s, full / causal at s8192, from "Ampere backward, on an H200" in bench/notes.md (#n: its rows), and of
fp32 ratios to PyTorch's memory-efficient kernel, from "The rest of the memory-efficient family, measured". A row
without a number does not spill at its register pressure, and was not measured against others.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cute_attn.epilogues.base import held
from cute_attn.tiles import BackwardSm80Tile, padded
from cute_attn.traits import Traits

Rows = Sequence[tuple[int, int, BackwardSm80Tile]]
"""(the largest head dim, the highest register pressure at which it does not spill, tile)"""


def _tile(
    tile_m: int,
    tile_n: int,
    num_warps: int,
    along: tuple[int, int, int],
    unrolls: tuple[int, int, int] = (0, 0, 0),
    stages: tuple[int, int] = (2, 2),
    **fields: Any,
) -> BackwardSm80Tile:
    """along: warps along M in S, dK and dQ; unrolls: of S, dK and dQ, 0 for all steps; stages: of Q and dO."""
    sdp, dkv, dq = unrolls
    stages_q, stages_do = stages
    fields |= {"sdp_unroll": sdp, "dkv_unroll": dkv, "dq_unroll": dq}
    return BackwardSm80Tile(tile_m, tile_n, num_warps, *along, stages_q, stages_do, **fields)


def _in_regs(queries_at_once: int, *more: Any, tile_m: int = 64, **fields: Any) -> BackwardSm80Tile:
    """P and dS in registers, four warps of 32 keys: two CTAs share a multiprocessor. 128 x 128 loses 14%, #8."""
    fields |= {"p_in_regs": True, "queries_at_once": queries_at_once}
    return _tile(tile_m, 128, 4, (1, 4, 2), *more, **fields)


def _terms(
    tile_m: int,
    tile_n: int,
    num_warps: int,
    along: tuple[int, int, int],
    unrolls: tuple[int, int, int] = (0, 0, 0),
    stages: tuple[int, int] = (1, 1),
    **fields: int,
) -> BackwardSm80Tile:
    """Of fp32 in fp16 terms."""
    return _tile(tile_m, tile_n, num_warps, along, unrolls, stages, operands="terms", **fields)


ONE, TWO = (1, 1), (2, 2)
"""Stages of Q and dO."""
FEW = (4, 2, 2)
"""Steps at a time, where registers are scarce."""

_HALF: Rows = (
    (64, 0, _in_regs(32)),  # 334/335, #13; V in registers too -3%, #6; 16 queries at a time -6%, #7
    (64, 3, _in_regs(32, (0, 0, 4))),  # dQ in groups, not S: with a bias 222, not 184, #15
    (64, 4, _in_regs(16, (2, 0, 2))),
    (64, 5, _tile(64, 64, 8, (4, 2, 2), (0, 0, 2))),
    (96, 0, _tile(64, 128, 8, (2, 4, 4))),
    (96, 2, _tile(64, 128, 8, (2, 4, 4), (2, 0, 2))),
    (96, 5, _tile(64, 64, 8, (4, 4, 4))),
    (128, 0, _tile(64, 128, 8, (2, 4, 2))),  # 313/312, #13; 64 x 64 by 4 warps -12%, #10; one dO -3%, #5
    (128, 1, _tile(64, 128, 8, (2, 4, 2), (0, 2, 0))),  # lengths, causal: 308, not 280, #15
    (128, 2, _tile(64, 128, 8, (2, 4, 2), (4, 0, 2))),  # a bias: 243, and 238 as the row above, #15
    (128, 3, _tile(64, 128, 8, (2, 4, 2), (0, 2, 0))),  # softcap, causal: 273, not 208, #15
    (128, 4, _tile(64, 128, 8, (2, 4, 2), (4, 0, 2))),
    (128, 5, _tile(64, 64, 8, (4, 2, 2))),
    (192, 0, _tile(64, 64, 8, (4, 2, 2))),
    (192, 2, _tile(64, 64, 8, (4, 2, 2), (0, 0, 2))),
    (192, 5, _tile(64, 64, 8, (4, 4, 4), (0, 0, 2))),
    (256, 0, _tile(64, 64, 8, (4, 2, 2), stages=ONE)),  # 272/275, and 267/271 with two stages, #4
    (256, 2, _tile(64, 64, 8, (4, 2, 2), (4, 0, 2), ONE)),
    (256, 4, _tile(64, 64, 8, (4, 4, 4), (4, 2, 1))),
    (256, 5, _tile(64, 64, 8, (4, 4, 4), (4, 2, 2), (2, 1))),
    (256, 5, _tile(64, 64, 8, (4, 2, 2), (4, 2, 2), ONE)),  # where the row above does not fit
)
_HALF_SM80: Rows = (  # it adds to dQ float by float, which takes registers: "Tiles for sm80"
    _HALF[0],
    (64, 2, _in_regs(32, (0, 0, 4))),
    (64, 3, _in_regs(32, (0, 0, 4), (1, 2))),  # 537 clocks for 1,000 scores, not 539; two CTAs still fit
    *_HALF[2:],
)
_HALF_SMALL: Rows = (  # sm86 and sm89, with less shared memory: what fits and does not spill
    (64, 3, _tile(64, 128, 8, (2, 4, 2), (0, 0, 2))),
    (64, 5, _tile(64, 128, 8, (2, 4, 2), (2, 0, 2))),  # the row above spills 68 bytes at 4
    (96, 5, _tile(64, 64, 8, (4, 4, 4), (0, 0, 2))),
    (128, 5, _tile(64, 64, 8, (4, 2, 2), stages=(2, 1))),
    (160, 5, _tile(64, 64, 8, (4, 4, 4), stages=ONE)),
    (192, 5, _tile(64, 32, 8, (4, 2, 2), stages=ONE)),
    (256, 5, _tile(64, 32, 8, (4, 2, 2), (0, 0, 1), ONE, v_in_regs=True)),
)
# Of users' functions on sm80 and sm90: head dims, numbers that are held beside a score, what does not spill with any;
# clocks of 1,000 scores, and of what spills with some.
_FUNCTIONS = (
    (range(65), range(1), _in_regs(32, (1, 2, 2), (1, 2))),  # 577, not 576
    (range(65), range(1, 99), _in_regs(16, (2, 0, 2), (1, 2))),  # 563, not 500
    (range(97, 129), range(6), _tile(64, 128, 8, (2, 4, 2), (1, 0, 2))),  # 991, not 967
    (range(97, 129), range(6, 99), _tile(32, 128, 8, (2, 4, 2), (4, 0, 2))),  # 1152, not 1022
)
FIT_ALWAYS = (
    _tile(64, 64, 8, (4, 4, 4), stages=ONE),
    _tile(32, 32, 4, (2, 2, 2), (0, 0, 1), ONE),
)

# fp32 in tf32, of calls too small for terms. P and dS pass through shared memory: with both in registers ptxas computes
# so many sums of dV and dK, which start from zero, before it adds them up that it spills. Not searched.
_WIDE, _LEAST = _tile(32, 64, 8, (2, 4, 2), (4, 1, 1), ONE), _tile(32, 32, 4, (2, 2, 2), (4, 1, 1), ONE)
_FP32: Rows = (
    (64, 5, _tile(64, 64, 8, (4, 2, 2), (4, 1, 1))),
    (64, 5, _tile(64, 64, 8, (4, 2, 2), (4, 1, 1), ONE)),
    (128, 5, _tile(64, 64, 8, (4, 2, 2), (4, 1, 1))),
    (128, 5, _tile(64, 64, 8, (4, 2, 2), (4, 1, 1), ONE)),
    (128, 5, _WIDE),
    (128, 5, _LEAST),
    (256, 5, _WIDE),
    (256, 5, _LEAST),
)
_TF32: Rows = (  # precision tf32: one product, whose sums fit registers
    (64, 0, _in_regs(0, (2, 0, 4), tile_m=32)),
    (64, 5, _in_regs(16, (2, 0, 2), tile_m=32)),
    (64, 5, _tile(32, 64, 4, (1, 4, 2), (0, 0, 2), ONE, p_in_regs=True)),
    (128, 5, _tile(32, 128, 8, (1, 8, 2), (4, 0, 4), ONE, p_in_regs=True)),
    (128, 5, _tile(32, 64, 4, (1, 4, 2), (4, 0, 2), ONE, p_in_regs=True)),
    (128, 5, _LEAST),
    (256, 5, _WIDE),
    (256, 5, _LEAST),
)

TERMS_LEAST_FLOP = {2: 2**31, 1: 2**32}
"""Terms -> floating-point operations of a call from which on products in terms pay for three more launches. Those of
one term have not been searched."""
_TERMS_32, _TERMS_LEAST = (_terms(32, n, 4, (2, 2, 2), (2, 1, 1)) for n in (64, 32))
_TWO_TERMS: Rows = (  # up to head dim 128 two CTAs of four warps: one computes while the other waits
    (64, 5, _terms(64, 64, 4, (2, 2, 2), (2, 2, 2))),  # 2.86 to 3.32
    (64, 5, _TERMS_32),
    (128, 5, _terms(32, 64, 4, (1, 2, 1), (2, 1, 1))),  # 2.77 to 2.98
    (128, 5, _TERMS_32),
    (128, 5, _TERMS_LEAST),
    (256, 5, _terms(32, 64, 8, (2, 2, 1), (2, 1, 1))),  # 2.6
    (256, 5, _terms(32, 64, 8, (2, 2, 2), (2, 1, 1))),
    (256, 5, _TERMS_LEAST),
)
_TWO_TERMS_SMALL: Rows = (  # targets with less shared memory than sm90
    (64, 5, _TERMS_32),
    (128, 5, _terms(64, 64, 8, (2, 2, 2), (2, 1, 1))),
    (128, 5, _TERMS_LEAST),
    (256, 5, _terms(32, 64, 8, (2, 2, 1), (2, 1, 1))),
    (256, 5, _terms(32, 64, 8, (2, 2, 2), (2, 1, 1))),
    (256, 5, replace(_TERMS_LEAST, dq_passes=2)),  # one pass spills where dQ is added float by float
    (256, 5, _TERMS_LEAST),
)
_ONE_TERM: Rows = (  # the tiles of 16-bit tensors that do not spill; not searched
    (64, 0, _in_regs(32, (0, 0, 4), operands="terms")),  # 5.81 to 7.90
    (64, 3, _in_regs(0, tile_m=32, operands="terms")),
    (64, 5, _terms(64, 64, 4, (2, 2, 2), FEW, stages=TWO)),
    (96, 3, _terms(64, 128, 8, (2, 4, 4), stages=TWO)),
    (96, 5, _terms(64, 64, 4, (2, 2, 2), FEW)),
    (128, 3, _terms(64, 128, 8, (2, 4, 2), stages=TWO)),  # 5.78 to 7.74
    (128, 5, _terms(64, 64, 8, (4, 2, 2), FEW, stages=TWO)),
    (192, 0, _terms(64, 64, 8, (4, 2, 2), stages=TWO)),
    (192, 5, _terms(64, 64, 8, (4, 2, 2), FEW, stages=TWO)),
    (256, 0, _terms(64, 64, 8, (4, 2, 2))),
    (256, 5, _terms(64, 64, 8, (4, 2, 2), FEW)),  # 6.2
)
# Head dims above 256, by the bytes of an element, each in as few passes of dQ as fit.
_LARGE = {
    2: (  # 4.99 to 7.03 of PyTorch's memory-efficient kernel
        _tile(64, 32, 8, (4, 2, 2), (4, 1, 1), ONE),
        _tile(64, 16, 4, (4, 1, 2), (4, 1, 1), ONE),
    ),
    4: (_LEAST,),
}
_LARGE_PASSES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18)
_MOST_COLUMNS = 256
"""Of dK and dV that eight warps hold for 64 keys without spills."""


def preferred_tiles(traits: Traits, target: str) -> list[BackwardSm80Tile]:
    """Best first."""
    largest = max(traits.head_dim, traits.head_dim_v)
    if largest > 256:
        tiles = _large_tiles(traits)
    elif traits.element_bytes == 4:
        tiles = [*_tiles_of_terms(traits, target), *_fp32_tiles(traits), _streamed(traits)]
    else:
        tiles = [*_half_tiles(traits, target), *FIT_ALWAYS]
    vector = 4 if target == "sm90" else 1  # red.v4 is sm90's: +1%, #12
    return [replace(tile, dq_vector=vector) for tile in tiles]


def _rows(table: Rows, traits: Traits, pressure: int) -> list[BackwardSm80Tile]:
    """The tiles of a table for the traits' head dims, whose registers suffice."""
    largest = max(traits.head_dim, traits.head_dim_v)
    own = next(dim for dim, _, _ in table if largest <= dim)
    return [tile for dim, highest, tile in table if dim == own and highest >= pressure]


def _half_tiles(traits: Traits, target: str) -> list[BackwardSm80Tile]:
    """Of 16-bit elements."""
    table = {"sm80": _HALF_SM80, "sm90": _HALF}.get(target, _HALF_SMALL)
    pressure = max(_pressure(traits), _least_pressure(traits, target))
    return [*_tiles_of_functions(traits, target), *_rows(table, traits, pressure)]


def _tiles_of_functions(traits: Traits, target: str) -> list[BackwardSm80Tile]:
    """With users' functions alone, where shared memory suffices."""
    if not traits.epilogues or traits.dropout or traits.bias or target not in ("sm80", "sm90"):
        return []
    largest, numbers = max(traits.head_dim, traits.head_dim_v), held(traits.epilogues, traits.op)
    return [tile for dims, values, tile in _FUNCTIONS if largest in dims and numbers in values]


def _fp32_tiles(traits: Traits) -> list[BackwardSm80Tile]:
    """Of whole fp32 elements."""
    return _rows(_TF32, traits, _pressure(traits)) if traits.precision == "tf32" else _rows(_FP32, traits, 0)


def _tiles_of_terms(traits: Traits, target: str) -> list[BackwardSm80Tile]:
    """Of fp32 elements in terms.

    One of those of one term has a fallback kernel whose operands are streamed, for targets with little shared memory,
    and for head dims that four warps cannot divide.
    """
    if traits.fp32_terms == 2:
        return _rows(_TWO_TERMS if target == "sm90" else _TWO_TERMS_SMALL, traits, 0)
    streamed = _terms(64, 64, 8, (4, 4, 4), FEW)
    streamed = replace(streamed, dq_passes=padded(traits.head_dim) // streamed.chunk(traits))
    others = [_terms(32, 64, 4, (2, 2, 2), FEW), streamed]
    if max(traits.head_dim, traits.head_dim_v) > 128:
        others.reverse()
    return [*_rows(_ONE_TERM, traits, _pressure(traits)), *others]


def _large_tiles(traits: Traits) -> list[BackwardSm80Tile]:
    """For head dims above 256. One term may stay in shared memory, as 16 bits do; two are streamed."""
    in_terms = []
    if traits.element_bytes == 4:
        in_terms = [_streamed_terms(traits)]
        if traits.fp32_terms == 1:
            passes = in_terms[0].dq_passes
            in_terms.insert(0, _terms(64, 32, 8, (4, 2, 2), (4, 1, 1), dq_passes=passes))
    resident = [replace(tile, dq_passes=n) for tile in _LARGE[traits.element_bytes] for n in _LARGE_PASSES]
    return [*in_terms, *resident, _streamed(traits)]


def _streamed(traits: Traits) -> BackwardSm80Tile:
    """The tile of any head dim: it fits every target."""
    tile = _tile(64, 64, 8, (4, 4, 4), (2, 1, 1), columns=_MOST_COLUMNS)
    return replace(tile, dq_passes=padded(traits.head_dim) // tile.chunk(traits))


def _streamed_terms(traits: Traits) -> BackwardSm80Tile:
    """The same of operands in terms: the fewest CTAs, with equal numbers of columns."""
    tile = _terms(64, 64, 8, (4, 4, 4), (1, 1, 1), stages=TWO, columns=64)
    largest, chunk = max(padded(traits.head_dim), padded(traits.head_dim_v)), tile.chunk(traits)
    columns = -(-largest // -(-largest // _MOST_COLUMNS))
    passes = padded(traits.head_dim) // chunk
    return replace(tile, columns=-(-columns // chunk) * chunk, dq_passes=passes)


def _pressure(traits: Traits) -> int:
    """Register pressure of the epilogues, from 0 to 5, by what ptxas spills.

    1: ALiBi, or lengths with wide gradients; 2: a bias; 3: values saved for a derivative, or a dropout mask; 4: many
    of them, or a dropout mask or a window with lengths or many Philox words; 5: dropout and another epilogue.
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
    """Of a target, beside :func:`_pressure`: on sm80 single floats added to dQ take registers too."""
    if target != "sm80":
        return 0
    largest = max(traits.head_dim, traits.head_dim_v)
    if _saves(traits) and largest > 64:
        return 4
    if _has_lengths(traits) and largest <= 64:
        return 3
    return 1 if largest > 192 else 0


def _saves(traits: Traits) -> bool:
    """Whether epilogues save values for their derivatives."""
    return bool(traits.softcap or traits.epilogues)


def _has_lengths(traits: Traits) -> bool:
    return bool(traits.varlen or traits.seqused_q or traits.seqused_k)
