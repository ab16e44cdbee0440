"""How dQ leaves the Hopper backward: added to fp32 memory, by the threads that computed it or by a warp of its own."""

import cutlass
from cutlass import Constexpr, Int32, Int64, cute

from cute_attn.device.accumulate import add_fragment, add_staged, stage_fragment
from cute_attn.device.board import KeyBlock
from cute_attn.device.dq import block_floats
from cute_attn.device.math import varying
from cute_attn.device.seqlen import padded_row0, workspace_rows
from cute_attn.kernels.backward_sm90_parts import Outputs, Problem, Shared, Work


def dq_of_head(
    kernel: Constexpr, problem: Problem, outputs: Outputs, place: KeyBlock, head: Int32
) -> cute.Pointer:
    """The accumulator of one head's first query block, in the running block's split."""
    accum, packed = outputs.mDQaccum, kernel.traits.varlen
    split = cute.make_tensor(
        accum.iterator + Int64(place.split) * outputs.split_stride,
        cute.select(accum.layout, mode=[1, 2] if packed else [1, 2, 3]),
    )
    row0 = padded_row0(problem.seqlens, place.info, place.batch, kernel.tile.tile_m)
    return workspace_rows(split, place.batch, head, row0, kernel.dims[0], packed).iterator


@cute.jit
def add_dq(kernel: Constexpr, work: Work, acc_dq: cute.Tensor, block: Int32) -> None:
    """By the computing warps: add dQ to the query block's accumulator in memory, or hand it to the warp that does."""
    if cutlass.const_expr(kernel.tile.dq_bulk):
        if cutlass.const_expr(not kernel.tile.dq_late):
            work.shared.outbox.wait_empty(work.filling(block))
        stage_dq(kernel, work, acc_dq, block)
        cute.arch.fence_proxy("async.shared", space="cta")
        work.shared.outbox.put()
    else:
        base = work.dq + Int64(work.blocks.turned(block)) * block_floats(kernel.traits, kernel.tile)
        add_fragment(acc_dq, base, varying(work.thread, block), kernel.tile.dq_vector)


@cute.jit
def stage_dq(kernel: Constexpr, work: Work, acc_dq: cute.Tensor, block: Int32) -> None:
    """By the computing warps: dQ to shared memory, which is known to be empty."""
    stage_fragment(acc_dq, work.shared.s_dq, varying(work.thread, block), kernel.tile.dq_vector)


@cute.jit
def add_all_dq(kernel: Constexpr, problem: Problem, outputs: Outputs, shared: Shared) -> None:
    """By one warp: add dQ of all query blocks, as the computing warps hand it over."""
    group = problem.qheads_per_kvhead
    floats = block_floats(kernel.traits, kernel.tile)
    n, i = Int32(0), Int32(0)
    while shared.board.holds(i):
        place = shared.board.take(i, problem.seqlens)
        blocks = kernel.query_blocks(problem, place)
        for h in cutlass.range(group, unroll=1):
            head_dq = dq_of_head(kernel, problem, outputs, place, place.head_kv * group + h)
            for step in cutlass.range(blocks.begin, blocks.end, unroll=1):
                block = blocks.turned(step)
                shared.outbox.wait_full(n)
                with cute.arch.elect_one():
                    add_staged(shared.s_dq, head_dq + Int64(block) * floats, floats)
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    shared.outbox.sent()
                n += 1
        with cute.arch.elect_one():  # what the next key block adds to the same place comes after it
            cute.arch.cp_async_bulk_wait_group(0)
        i += 1
