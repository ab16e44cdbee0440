"""The warp of the Hopper backward that loads: K and V once a key block, Q and dO with what belongs to their rows."""

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.block_range import BlockRange
from cute_attn.device.key_order import KeyBlocks
from cute_attn.device.seqlen import padded_row0, workspace_rows
from cute_attn.device.staged import columns_of
from cute_attn.device.tma import load_row
from cute_attn.kernels.backward_sm90_parts import Inputs, Outputs, Problem, Shared


@cute.jit
def load_all(kernel: Constexpr, problem: Problem, inputs: Inputs, outputs: Outputs, shared: Shared) -> None:
    """All key blocks, with all query blocks of all query heads that see them."""
    place = problem.order.place(problem.seqlens)
    group = problem.qheads_per_kvhead
    _, state = kernel.begin(problem, place, place.head_kv * group)
    (d, dv), info, packed = kernel.dims, place.info, kernel.traits.varlen
    g_k = inputs.k.block(info.offset_k, place.head_kv, place.batch, kernel.tile.tile_n, d, packed)
    g_v = inputs.v.block(info.offset_k, place.head_kv, place.batch, kernel.tile.tile_n, dv, packed)
    steps = Int32(0)  # fillings of Q and dO so far
    for i in cutlass.range(kernel.key_blocks(problem, place, outputs.mDK), unroll=1):
        block = place.first + i * problem.order.num_splits.divisor
        blocks = kernel.query_blocks(place, state, block)
        shared.ring_k.acquire(i)
        inputs.k.load(g_k, block, shared.s_k, shared.ring_k, i)
        shared.ring_v.acquire(i)
        inputs.v.load(g_v, block, shared.s_v, shared.ring_v, i)
        for h in cutlass.range(group, unroll=1):
            head = place.head_kv * group + h
            load_queries(kernel, problem, inputs, shared, place, block, head, blocks, steps)
            steps += blocks.end - blocks.begin


@cute.jit
def load_queries(
    kernel: Constexpr,
    problem: Problem,
    inputs: Inputs,
    shared: Shared,
    place: KeyBlocks,
    key_block: Int32,
    head: Int32,
    blocks: BlockRange,
    steps: Int32,
) -> None:
    """Q and dO of one head, with what belongs to their rows."""
    (d, dv), info, packed, tile_m = kernel.dims, place.info, kernel.traits.varlen, kernel.tile.tile_m
    g_q = inputs.q.block(info.offset_q, head, place.batch, tile_m, d, packed)
    g_do = inputs.do.block(info.offset_q, head, place.batch, tile_m, dv, packed)
    row0 = padded_row0(problem.seqlens, info, place.batch, tile_m)
    g_lse = workspace_rows(inputs.mLSElog2, place.batch, head, row0, 1, packed)
    g_dpsum = workspace_rows(inputs.mDPsum, place.batch, head, row0, 1, packed)
    if cutlass.const_expr(kernel.stages_bias):
        g_bias = columns_of(inputs.bias, key_block, head, place.batch, (tile_m, kernel.tile.tile_n))
    for block in cutlass.range(blocks.begin, blocks.end, unroll=1):
        n = steps + (block - blocks.begin)
        shared.ring_q.acquire(n)
        inputs.q.load(g_q, block, shared.s_q, shared.ring_q, n)
        if cutlass.const_expr(kernel.stages_bias):
            inputs.bias.load(g_bias, block, shared.bias.tensor, shared.ring_q, n)
        load_row(cute.local_tile(g_lse, (tile_m,), (block,)), shared.s_lse, shared.ring_q, n)
        shared.ring_do.acquire(n)
        inputs.do.load(g_do, block, shared.s_do, shared.ring_do, n)
        load_row(cute.local_tile(g_dpsum, (tile_m,), (block,)), shared.s_dpsum, shared.ring_do, n)
