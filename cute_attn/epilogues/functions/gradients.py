"""The gradients of captured tensors: in a backward, each score adds to the elements that it loaded.

Scores that load the same element are summed first: in registers if the index is one value for a row, a column, a
diagonal or all, and by shuffles if all of a warp's scores in a tile load it, such as far keys under a clamped distance.
The results are added to memory atomically, in any order.

A gradient that must not depend on this order is added up exactly, in int64. An element then has bins, each of them for
``width`` exponents of fp32. A number is added to the bin of its exponent as an integer, in units of 2^(i * width - 151)
for bin i. It is below 2^(23 + width) units, so a bin has room for 2^(40 - width) numbers. There are 256 / width
of them, and a last one, which is not 0 if a number is infinite or NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Pointer, cute

from cute_attn.device.lanes import add_integer, adds_for, lanes_sum
from cute_attn.device.math import fabs, on_device
from cute_attn.device.score_tile import ScoreTile
from cute_attn.epilogues.functions.device import element_index
from cute_attn.epilogues.functions.graph import Node
from cute_attn.epilogues.functions.lowering import Slope, Term

LANES = (1, 2, 4, 8, 16)

Elements = Callable[[Callable[[Int32, Float32], None]], None]
"""A function that calls its argument with (offset in the target, number to add) for each of a thread's sums."""


Add = Callable[[Pointer, Float32], None]
"""A function that adds a number to an element of a gradient."""


def one_copy(x: torch.Tensor, bins: int = 0) -> torch.Tensor:
    """Zeros to which device code on the CPU adds x's gradient: fp32 (1, *x.shape), or int64 (1, bins, *x.shape)."""
    shape = x.shape or (1,)
    return torch.zeros(1, bins, *shape, dtype=torch.int64) if bins else torch.zeros(1, *shape)


def of_this_cta(copies: cute.Tensor) -> cute.Tensor:
    """The copy of a gradient to which this CTA adds."""
    block = cute.arch.block_idx()[0] if on_device() else Int32(0)
    return _slice(copies, block % Int32(copies.shape[0]))


def first_of(copy: cute.Tensor) -> cute.Tensor:
    """The first bin of each element of a gradient: (bins, ...) -> (...)."""
    return _slice(copy, Int32(0))


def _slice(x: cute.Tensor, number: Int32) -> cute.Tensor:
    return x[(number, *(None,) * (len(x.shape) - 1))]


@dataclass(frozen=True)
class Bins:
    """The bins of an element: elements from one to the next, and log2 of the exponents that each one has."""

    step: Int64
    log2_width: Int32

    @staticmethod
    def of(copy: cute.Tensor) -> "Bins":
        """copy: (bins, ...), of at least two."""
        exponent = Float32(Int32(copy.shape[0]) - 1).bitcast(Int32) >> 23  # 2^(8 - log2_width), 127 added
        return Bins(Int64(copy.stride[0]), 135 - exponent)

    def add_to(self, first: Pointer, x: Float32) -> None:
        """Add x to the element whose first bin is ``first``. Subnormal numbers count as 0, as in fp32's additions."""
        bits = x.bitcast(Int32)
        exponent = (bits >> 23) & 255
        number = cutlass.select_(exponent == 0, Int32(0), (bits & 0x7FFFFF) | 0x800000)
        number = cutlass.select_(bits < -0x800000, -number, number)  # what is not finite counts as positive
        place = exponent + 1  # so that the last bin has 255 alone
        number = Int64(number) << Int64(place & ((Int32(1) << self.log2_width) - 1))
        add_integer(first + Int64(place >> self.log2_width) * self.step, number)


def offset_in(target: cute.Tensor, nodes: tuple[Node, ...], indices: tuple[Any, ...]) -> Int32:
    """The offset of an element, with indices clamped to the tensor; 0 in a tensor without dimensions."""
    offset = Int32(0)
    for node, index, size, step in zip(nodes, indices, target.shape, target.stride, strict=False):
        offset = offset + element_index(node, index, size) * Int32(step)
    return offset


def times_slope(gradient: Float32, factor: Any, slope: Slope) -> Float32:
    """The gradient times a slope's value; 0 for a score without gradient, such as a hidden one."""
    if slope.node.is_const(1.0):
        return gradient
    if (
        not slope.node.depends_on
    ):  # the head's scores are all hidden; visible ones would not be finite, either
        factor = cutlass.select_(fabs(factor) < Float32.inf, factor, Float32(0.0))
    if not slope.unbounded:
        return gradient * factor
    return cutlass.select_(gradient == 0.0, Float32(0.0), gradient * factor)


def amount_of(term: Term, tile: ScoreTile, at: tuple[int, int], slope: Any, exists: Boolean) -> Float32:
    """The summand of a score for its element, without factors common to all scores; 0 beyond the sequences."""
    return cutlass.select_(exists, times_slope(tile.acc[at], slope, term.slope), Float32(0.0))


def add_elements(target: Pointer, scale: Float32, elements: Elements, spread: bool, add: Add) -> None:
    """Add a thread's sums of one tile; called by whole warps. spread: True if scores may load different elements."""
    lowest, highest, total = Int32(2**31 - 1), Int32(-1), Float32(0.0)

    def see(offset: Int32, amount: Float32) -> None:
        nonlocal lowest, highest, total
        lowest, highest = cutlass.min(lowest, offset), cutlass.max(highest, offset)
        total = total + amount

    elements(see)
    if spread:
        _add(target, scale, _all_share(lowest, highest), lowest, total, elements, add)
    else:
        _add_sum(target + lowest, total, scale, add)


def _all_share(lowest: Int32, highest: Int32) -> Boolean:
    """True if all scores of a warp (on the host, of a thread) have the same offset."""
    share = lowest == highest
    if not on_device():
        return share
    return Boolean(cute.arch.vote_all_sync(share & (lowest == cute.arch.shuffle_sync(lowest, 0))))


@cute.jit
def _add(
    target: Pointer,
    scale: Float32,
    share: Boolean,
    offset: Int32,
    total: Float32,
    elements: Constexpr,
    add: Constexpr,
) -> None:
    if share:
        _add_sum(target + offset, total, scale, add)
    else:
        elements(lambda own, amount: _add_one(target + own, amount * scale, add))


@cute.jit
def _add_sum(target: Pointer, total: Float32, scale: Float32, add: Constexpr) -> None:
    total = lanes_sum(total, LANES)
    if adds_for(cute.arch.lane_idx() if on_device() else Int32(0)):
        add(target, total * scale)


@cute.jit
def _add_one(target: Pointer, amount: Float32, add: Constexpr) -> None:
    if amount != 0.0:
        add(target, amount)
