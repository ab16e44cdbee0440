"""Dropout's mask in the Hopper backward, mask by warps that would only wait, for those that compute."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.math import rematerialize_each
from cute_attn.epilogues.chain import ScoreState
from cute_attn.epilogues.dropout_words import UNIT_KEYS, draw_words
from cute_attn.kernels.backward_sm90.params import HeadContext
from cute_attn.kernels.backward_sm90.warp_role import WarpRole
from cute_attn.work.broadcast import KeyTile


@dataclass(frozen=True)
class PhiloxProducer(WarpRole):
    """One of ``mask_warps`` warps: generates its part of every step's mask as soon as a stage is free."""

    number: Int32  # of the warp among them

    def begin_head(self, key_tile: KeyTile, head: Int32) -> ScoreState:
        """The mask's key and counters."""
        return self.kernel.begin(self.params, key_tile, head)[1]

    @cute.jit
    def step(self, state: ScoreState, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        """Units of 32 keys, rotated among the warps, since they may not divide evenly."""
        tile, ring = self.kernel.tile, self.shared.pipeline_mask
        row0, key0 = block * tile.tile_m, key_tile.block * tile.tile_n
        halves = self.shared.s_mask[None, None, None, ring.stage(n)]
        ring.producer_wait(n)
        first = (self.number + n) % tile.mask_warps
        for unit in cutlass.range(first, tile.tile_n // UNIT_KEYS, tile.mask_warps, unroll=1):
            draw_words(state.dropout, halves, row0, key0, unit, tile.tile_m, cute.arch.lane_idx())
        ring.producer_commit(n)


@cute.jit
def dropout_mask_of(kernel: Constexpr, ctx: HeadContext, n: Int32) -> tuple[Int32, ...]:
    """By the computing warps: a thread's part of a step's mask, as :meth:`EpilogueChain.dropout_mask` gives it."""
    ring, words = ctx.shared.pipeline_mask, kernel.tile.mask_words
    ring.consumer_wait(n)
    mask = cute.recast_tensor(ctx.shared.s_mask[None, None, None, ring.stage(n)], Int32)
    thread = rematerialize_each(ctx.thread, n)
    mask = tuple(mask[0, thread, word] for word in range(words))
    ring.consumer_release_reads(n)
    return mask
