"""The Hopper backward's dQ: added to fp32 global memory by the consumers, or by a warp from shared memory."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, Int64, cute

from cute_attn.device.math import rematerialize_each
from cute_attn.device.seqlen import padded_row0, workspace_rows
from cute_attn.kernels.backward_sm90.params import BackwardOutputs, BackwardParams, HeadContext
from cute_attn.kernels.backward_sm90.role import BackwardRole
from cute_attn.outputs.accumulate import add_fragment, add_staged, stage_fragment
from cute_attn.outputs.dq_order import block_floats
from cute_attn.work.broadcast import KeyTile


def dq_of_head(
    kernel: Constexpr, params: BackwardParams, outputs: BackwardOutputs, key_tile: KeyTile, head: Int32
) -> cute.Pointer:
    """The accumulator of one head's first query block, in the key tile's split."""
    accum, packed = outputs.mDQaccum, kernel.traits.varlen
    split = cute.make_tensor(
        accum.iterator + Int64(key_tile.split) * outputs.split_stride,
        cute.select(accum.layout, mode=[1, 2] if packed else [1, 2, 3]),
    )
    row0 = padded_row0(params.seqlens, key_tile.info, key_tile.batch, kernel.tile.tile_m)
    return workspace_rows(split, key_tile.batch, head, row0, kernel.dims[0], packed).iterator


@cute.jit
def add_dq(kernel: Constexpr, ctx: HeadContext, acc_dq: cute.Tensor, block: Int32) -> None:
    """By the consumer warps: add dQ to the query block's accumulator, or stage it for :class:`DqAdder`."""
    if cutlass.const_expr(kernel.tile.dq_bulk):
        stage_dq(kernel, ctx, acc_dq, block)
        cute.arch.fence_proxy("async.shared", space="cta")
        ctx.shared.dq_staging.producer_commit()
    else:
        base = ctx.dq + Int64(ctx.blocks.rotated(block)) * block_floats(kernel.traits, kernel.tile)
        add_fragment(acc_dq, base, rematerialize_each(ctx.thread, block), kernel.tile.dq_vector)


@cute.jit
def stage_dq(kernel: Constexpr, ctx: HeadContext, acc_dq: cute.Tensor, block: Int32) -> None:
    """By the consumer warps: dQ to shared memory; its stage must be empty."""
    stage_fragment(acc_dq, ctx.shared.s_dq, rematerialize_each(ctx.thread, block), kernel.tile.dq_vector)


@dataclass(frozen=True)
class DqAdder(BackwardRole):
    """One warp: adds the staged dQ of every step to global memory by a bulk reduction."""

    outputs: BackwardOutputs

    def begin_head(self, key_tile: KeyTile, head: Int32) -> cute.Pointer:
        """The accumulator of the head's first query block."""
        return dq_of_head(self.kernel, self.params, self.outputs, key_tile, head)

    @cute.jit
    def step(self, head_dq: cute.Pointer, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        """Wait for dQ and add it; release its stage once it has been read."""
        floats = block_floats(self.kernel.traits, self.kernel.tile)
        self.shared.dq_staging.consumer_wait(n)
        with cute.arch.elect_one():
            add_staged(self.shared.s_dq, head_dq + Int64(block) * floats, floats)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.shared.dq_staging.consumer_release()

    @cute.jit
    def finish_tile(self) -> None:
        """Wait for the additions, so that the next key block's to the same accumulator follow them."""
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)
