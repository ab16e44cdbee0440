"""The warps of the Hopper forward that load: one Q, K and V, and where TMA brings a bias, one for each warpgroup.

All of them walk over the same query blocks and key blocks as those that compute; in a cluster, over the key blocks that
any of its query blocks needs.
"""

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

from cute_attn.device.block_range import BlockRange
from cute_attn.device.cluster import meet_cluster
from cute_attn.device.redo import SECTION
from cute_attn.device.staged import ROWS, rows_of
from cute_attn.device.work import QueryBlock
from cute_attn.kernels.forward_sm90_parts import Inputs, Problem, Shared, Walk
from cute_attn.tiles import padded


@cute.jit
def load_all(
    kernel: Constexpr, problem: Problem, inputs: Inputs, shared: Shared, bias_of: Int32 | None
) -> None:
    """Q, K and V of every query block that this block is dealt, or ``bias_of`` one of the warpgroups."""
    counts = (Int32(0), Int32(0))
    rounds = problem.order.rounds
    for first in cutlass.range(0, rounds, SECTION, unroll=1):
        end = cutlass.min(first + SECTION, rounds)
        for deal in cutlass.range(first, end, unroll=1):
            counts = load_deal(kernel, problem, inputs, shared, bias_of, deal, counts)
        if cutlass.const_expr(kernel.tile.optimistic):
            shared.redo.meet()
            if shared.redo.any():
                for deal in cutlass.range(first, end, unroll=1):
                    if shared.redo.failed(deal):
                        counts = load_deal(kernel, problem, inputs, shared, bias_of, deal, counts)
                shared.redo.forget(cute.arch.lane_idx(), bias_of is None)
    if cutlass.const_expr(kernel.tile.cluster > 1):
        meet_cluster()


@cute.jit
def load_deal(
    kernel: Constexpr,
    problem: Problem,
    inputs: Inputs,
    shared: Shared,
    bias_of: Int32 | None,
    deal: Int32,
    counts: tuple,
) -> tuple:
    """One query block; counts: fillings so far of Q's ring, and of K's and V's."""
    queries, keys = counts
    place = problem.order.place(deal, problem.seqlens, kernel.tile.queries)
    _, state = kernel.begin(problem, place)
    blocks = kernel.key_blocks(place, state)
    if cutlass.const_expr(kernel.tile.cluster > 1):
        walk = Walk.of(kernel, place, blocks, state)
        has_queries = (place.row0 < place.info.seqlen_q) & (blocks.begin < blocks.end)
        if walk.begin < walk.end:
            load_one(kernel, inputs, shared, place, walk, has_queries, queries, keys)
            queries += Int32(has_queries)
            keys += walk.count
    elif place.row0 < place.info.seqlen_q and blocks.begin < blocks.end:
        if cutlass.const_expr(bias_of is None):
            load_one(kernel, inputs, shared, place, blocks, True, queries, keys)
        else:
            load_bias(kernel, inputs, shared, place, blocks, bias_of, keys)
        queries += 1
        keys += (blocks.end - blocks.begin) * kernel.walks
    if cutlass.const_expr(kernel.tile.share_qo_smem and bias_of is None):
        if place.row0 < place.info.seqlen_q and blocks.begin == blocks.end:
            load_queries(kernel, inputs, shared, place, queries)
            queries += 1
    return queries, keys


def brings_queries(kernel: Constexpr, blocks: BlockRange) -> Boolean | bool:
    """Whether a query block that exists comes with a filling of Q's ring.

    One that sees no key has no use for Q. But where O takes over Q's memory, zeros go there, and the next Q must not be
    there before they have left.
    """
    return True if kernel.tile.share_qo_smem else blocks.begin < blocks.end


@cute.jit
def load_queries(
    kernel: Constexpr, inputs: Inputs, shared: Shared, place: QueryBlock, queries: Int32
) -> None:
    """Q of one query block, for each warpgroup its own."""
    d, packed = padded(kernel.traits.head_dim), kernel.traits.varlen
    tiles = inputs.q.block(place.info.offset_q + place.row0, place.head, place.batch, 64, d, packed)
    shared.ring_q.acquire(queries)
    for group in cutlass.range_constexpr(kernel.tile.warpgroups):
        inputs.q.load_part(tiles, group, shared.s_q[None, None, group], shared.ring_q, queries)


@cute.jit
def load_one(
    kernel: Constexpr,
    inputs: Inputs,
    shared: Shared,
    place: QueryBlock,
    blocks: BlockRange | Walk,
    has_queries: Boolean | bool,
    queries: Int32,
    keys: Int32,
) -> None:
    """One query block: K[0], Q, then K[j] before V[j - 1], in the order in which they are waited for.

    Without ``has_queries`` the keys are for the other block of the cluster only, and there is no Q.
    """
    d, dv = padded(kernel.traits.head_dim), padded(kernel.traits.head_dim_v)
    tile, packed = kernel.tile, kernel.traits.varlen
    tma_k, tma_v = inputs.k, inputs.v
    info, last = place.info, blocks.end - 1
    g_k = tma_k.block(info.offset_k, place.head_kv, place.batch, tile.tile_n, d, packed)
    g_v = tma_v.block(info.offset_k, place.head_kv, place.batch, tile.tile_n, dv, packed)
    ring_k, ring_v = shared.ring_k, shared.ring_v
    ring_k.acquire(keys)
    tma_k.load(g_k, last, shared.s_k, ring_k, keys)
    if has_queries:
        load_queries(kernel, inputs, shared, place, queries)
    for i in cutlass.range(1, blocks.end - blocks.begin, unroll=1):
        ring_k.acquire(keys + i)
        tma_k.load(g_k, last - i, shared.s_k, ring_k, keys + i)
        ring_v.acquire(keys + i - 1)
        tma_v.load(g_v, last - i + 1, shared.s_v, ring_v, keys + i - 1)
    end = keys + last - blocks.begin
    ring_v.acquire(end)
    tma_v.load(g_v, blocks.begin, shared.s_v, ring_v, end)
    if cutlass.const_expr(kernel.walks == 2):
        for i in cutlass.range(blocks.end - blocks.begin, unroll=1):
            ring_k.acquire(end + 1 + i)
            tma_k.load(g_k, last - i, shared.s_k, ring_k, end + 1 + i)
            ring_v.acquire(end + 1 + i)  # unread, but so the rings' fillings keep one number
            tma_v.load(g_v, last - i, shared.s_v, ring_v, end + 1 + i)


@cute.jit
def load_bias(
    kernel: Constexpr,
    inputs: Inputs,
    shared: Shared,
    place: QueryBlock,
    blocks: BlockRange,
    group: Int32,
    keys: Int32,
) -> None:
    """The bias of one query block for one warpgroup, as it walks over the keys."""
    row0, count = place.row0 + group * ROWS, blocks.end - blocks.begin
    tiles = rows_of(inputs.bias, row0, place.head, place.batch, kernel.tile.tile_n)
    for walk in cutlass.range_constexpr(kernel.walks):
        for i in cutlass.range(count, unroll=1):
            block, filling = blocks.end - 1 - i, keys + walk * count + i
            shared.bias.load(tiles, inputs.bias, block, group, filling)
