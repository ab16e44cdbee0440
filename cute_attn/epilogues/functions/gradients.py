"""The gradients of captured tensors: in a backward, each score adds to the elements that it loaded.

Scores that load the same element are summed first: in registers if the index is one value for a row, a column, a
diagonal or all, and by shuffles if all of a warp's scores in a tile load it, such as far keys under a clamped distance.
The results are added to memory atomically, in any order.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import torch
from cutlass import Boolean, Constexpr, Float32, Int32, Pointer, cute

from cute_attn.device.lanes import add_to, adds_for, lanes_sum
from cute_attn.device.math import fabs, on_device
from cute_attn.device.score_tile import ScoreTile
from cute_attn.epilogues.functions.device import element_index
from cute_attn.epilogues.functions.graph import Node
from cute_attn.epilogues.functions.lowering import Slope, Term

LANES = (1, 2, 4, 8, 16)

Elements = Callable[[Callable[[Int32, Float32], None]], None]
"""A function that calls its argument with (offset in the target, number to add) for each of a thread's sums."""


def one_copy(x: torch.Tensor) -> torch.Tensor:
    """Zeros to which device code that runs on the CPU adds x's gradient: fp32 (1, *x.shape)."""
    return torch.zeros(1, *(x.shape or (1,)))


def of_this_cta(copies: cute.Tensor) -> cute.Tensor:
    """The copy of a gradient to which this CTA adds."""
    block = cute.arch.block_idx()[0] if on_device() else Int32(0)
    return copies[(block % Int32(copies.shape[0]), *(None,) * (len(copies.shape) - 1))]


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


def add_elements(target: Pointer, scale: Float32, elements: Elements, spread: bool) -> None:
    """Add a thread's sums of one tile; called by whole warps. spread: True if scores may load different elements."""
    lowest, highest, total = Int32(2**31 - 1), Int32(-1), Float32(0.0)

    def see(offset: Int32, amount: Float32) -> None:
        nonlocal lowest, highest, total
        lowest, highest = cutlass.min(lowest, offset), cutlass.max(highest, offset)
        total = total + amount

    elements(see)
    if spread:
        _add(target, scale, _all_share(lowest, highest), lowest, total, elements)
    else:
        _add_sum(target + lowest, total, scale)


def _all_share(lowest: Int32, highest: Int32) -> Boolean:
    """True if all scores of a warp (on the host, of a thread) have the same offset."""
    share = lowest == highest
    if not on_device():
        return share
    return Boolean(cute.arch.vote_all_sync(share & (lowest == cute.arch.shuffle_sync(lowest, 0))))


@cute.jit
def _add(
    target: Pointer, scale: Float32, share: Boolean, offset: Int32, total: Float32, elements: Constexpr
) -> None:
    if share:
        _add_sum(target + offset, total, scale)
    else:
        elements(lambda own, amount: _add_one(target + own, amount * scale))


@cute.jit
def _add_sum(target: Pointer, total: Float32, scale: Float32) -> None:
    total = lanes_sum(total, LANES)
    if adds_for(cute.arch.lane_idx() if on_device() else Int32(0)):
        add_to(target, total * scale)


@cute.jit
def _add_one(target: Pointer, amount: Float32) -> None:
    if amount != 0.0:
        add_to(target, amount)
