"""The warp of the Hopper backward that loads: K and V once a key block, Q and dO with what belongs to their rows."""

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.board import KeyBlock
from cute_attn.device.seqlen import SeqlenInfo, existing_rows, padded_row0
from cute_attn.kernels.backward_sm90.params import Inputs, Outputs, Problem, Shared
from cute_attn.rows.tma_bias import columns_of
from cute_attn.work.block_range import BlockRange


@cute.jit
def load_all(kernel: Constexpr, problem: Problem, inputs: Inputs, outputs: Outputs, shared: Shared) -> None:
    """Key blocks until there are none left, with all query blocks of all query heads that see them."""
    order, splits = problem.order, problem.order.num_splits.divisor
    position = cute.arch.block_idx()[0]
    n, steps = Int32(0), Int32(0)  # fillings of K and V, of Q and dO so far
    while position < order.blocks:
        found = order.find(position, problem.seqlens.cu_seqlens_k)
        first, head_kv, batch = (cute.arch.make_warp_uniform(x) for x in found)
        info = SeqlenInfo.read(problem.seqlens, batch)
        rows = existing_rows(problem.seqlens.cu_seqlens_k, outputs.mDK, batch)
        for block in cutlass.range(first, cute.ceil_div(rows, kernel.tile.tile_n), splits, unroll=1):
            place = KeyBlock(block, first, head_kv, batch, info)
            steps += load_block(kernel, problem, inputs, shared, place, n, steps)
            n += 1
        position = next_position(problem)
    shared.board.write_end(n)


@cute.jit
def next_position(problem: Problem) -> Int32:
    """What the running block takes next, in the order of key blocks: by counting what all of them have taken."""
    taken = Int32(0)
    if cute.arch.lane_idx() == 0:
        counter = cute.recast_ptr(problem.next_position.iterator, dtype=Int32)
        taken = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(taken, 0)


@cute.jit
def load_block(
    kernel: Constexpr,
    problem: Problem,
    inputs: Inputs,
    shared: Shared,
    place: KeyBlock,
    n: Int32,
    steps: Int32,
) -> Int32:
    """One key block; the result is how many query blocks came with it."""
    group = problem.qheads_per_kvhead
    blocks = kernel.query_blocks(problem, place)
    load_keys(kernel, inputs, shared, place, n)
    count = blocks.end - blocks.begin
    for h in cutlass.range(group, unroll=1):
        head = place.head_kv * group + h
        load_queries(kernel, problem, inputs, shared, place, head, blocks, steps + h * count, n, steps)
    if count == 0:
        load_values(kernel, inputs, shared, place, n)
    return group * count


@cute.jit
def load_keys(kernel: Constexpr, inputs: Inputs, shared: Shared, place: KeyBlock, n: Int32) -> None:
    """K of a key block, and word of it to the other warps."""
    tiles = inputs.k.sequence(place.info.offset_k, place.head_kv, place.batch)
    shared.board.write(n, place.block, place.split, place.head_kv, place.batch)
    shared.pipeline_k.producer_acquire(n)
    inputs.k.load(tiles, place.block, shared.s_k, shared.pipeline_k, n)


@cute.jit
def load_values(kernel: Constexpr, inputs: Inputs, shared: Shared, place: KeyBlock, n: Int32) -> None:
    """V of a key block."""
    tiles = inputs.v.sequence(place.info.offset_k, place.head_kv, place.batch)
    shared.pipeline_v.producer_acquire(n)
    inputs.v.load(tiles, place.block, shared.s_v, shared.pipeline_v, n)


@cute.jit
def load_queries(
    kernel: Constexpr,
    problem: Problem,
    inputs: Inputs,
    shared: Shared,
    place: KeyBlock,
    head: Int32,
    blocks: BlockRange,
    steps: Int32,
    n_v: Int32,
    first: Int32,
) -> None:
    """Q and dO of one head, with what belongs to their rows; steps: the rings' fillings so far.

    Between the ``first`` Q and dO comes V: its memory is free only when dV has left it.
    """
    info, tile_m = place.info, kernel.tile.tile_m
    g_q = inputs.q.sequence(info.offset_q, head, place.batch)
    g_do = inputs.do.sequence(info.offset_q, head, place.batch)
    first_rows = padded_row0(problem.seqlens, info, place.batch, tile_m) // tile_m
    g_lse = inputs.lse.sequence(head, place.batch)
    g_minus_d = inputs.minus_d.sequence(head, place.batch)
    if cutlass.const_expr(kernel.loads_bias_by_tma):
        g_bias = columns_of(inputs.bias, place.block, head, place.batch, (tile_m, kernel.tile.tile_n))
    for step in cutlass.range(blocks.begin, blocks.end, unroll=1):
        n, block = steps + (step - blocks.begin), blocks.turned(step)
        shared.pipeline_q.producer_acquire(n)
        inputs.q.load(g_q, block, shared.s_q, shared.pipeline_q, n)
        if cutlass.const_expr(kernel.loads_bias_by_tma):
            inputs.bias.load(g_bias, block, shared.bias.tensor, shared.pipeline_q, n)
        inputs.lse.load(g_lse, first_rows + block, shared.s_lse, shared.pipeline_q, n)
        if n == first:
            load_values(kernel, inputs, shared, place, n_v)
        shared.pipeline_do.producer_acquire(n)
        inputs.do.load(g_do, block, shared.s_do, shared.pipeline_do, n)
        inputs.minus_d.load(g_minus_d, first_rows + block, shared.s_minus_d, shared.pipeline_do, n)
