"""The producer warps of the Hopper forward: one for Q, K and V, and where TMA brings a bias, one for each warpgroup.

The first claims work tiles and tells all other warps; all of them go through the same tiles and key blocks.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

from cute_attn.kernels.forward_sm90.params import Inputs, PipelineState, Problem, Shared
from cute_attn.rows.tma_bias import ROWS, rows_of
from cute_attn.work.block_range import BlockRange
from cute_attn.work.broadcast import WorkItem
from cute_attn.work.query_tiles import QueryTile, WorkClaims
from cute_attn.work.replay import Replay

CLAIM_AHEAD = 2
"""Key blocks whose loads are left of a work tile when the next one is claimed: what hides the claim's latency."""


@cute.jit
def load_all(kernel: Constexpr, problem: Problem, inputs: Inputs, shared: Shared) -> None:
    """Claim work tiles until none is left, and load Q, K and V of each; then of those that are replayed."""
    order, claims = problem.order, WorkClaims(problem.counters)
    index, n, more = Int32(cute.arch.block_idx()[0]), Int32(0), Boolean(True)
    filled = PipelineState(Int32(0), Int32(0))
    while more:
        end = n + Replay.SECTION - 1
        while index < order.total and n < end:
            tile, claimed = order.tile(index, problem.seqlens), Int32(0)
            if tile.exists:
                shared.work.publish(n, WorkItem(index, tile.row0, tile.head, tile.batch))
                n += 1
                filled, claimed = load_tile(kernel, problem, inputs, shared, tile, filled, claims)
            else:
                claimed = claims.claim()
            index = claims.index(claimed)
        more = index < order.total
        shared.work.publish_end(n, more)
        n += 1
        if cutlass.const_expr(kernel.tile.speculative):
            shared.replay.meet()
            if shared.replay.any():
                for slot in cutlass.range(Replay.SECTION, unroll=1):
                    if shared.replay.failed(slot):
                        tile = order.tile(shared.replay.index(slot), problem.seqlens)
                        filled, _ = load_tile(kernel, problem, inputs, shared, tile, filled, None)
                        claims.count_replay()
                shared.replay.reset(cute.arch.lane_idx(), True)
    claims.leave()


@cute.jit
def load_tile(
    kernel: Constexpr,
    problem: Problem,
    inputs: Inputs,
    shared: Shared,
    tile: QueryTile,
    filled: PipelineState,
    claims: Any,  # WorkClaims, or None where there is nothing to claim
) -> tuple[PipelineState, Int32]:
    """One work tile; the pipelines' fillings after it, and what was ``claimed`` meanwhile."""
    queries, keys, claimed = filled.queries, filled.keys, Int32(0)
    _, state = kernel.begin(problem, tile)
    blocks = kernel.key_blocks(tile, state)
    if blocks.begin < blocks.end:
        claimed = load_blocks(kernel, inputs, shared, tile, blocks, filled, claims)
        queries += 1
        keys += blocks.end - blocks.begin
    else:
        if cutlass.const_expr(claims is not None):
            claimed = claims.claim()
        if cutlass.const_expr(kernel.tile.share_qo_smem):
            load_queries(kernel, inputs, shared, tile, queries)
            queries += 1
    return PipelineState(queries, keys), claimed


@cute.jit
def loads_queries(kernel: Constexpr, blocks: BlockRange) -> Boolean | bool:
    """Whether a work tile comes with a filling of Q's pipeline.

    One that sees no key has no use for Q. But where O takes over Q's memory, zeros go there, and the next Q must not be
    there before they have left.
    """
    return True if kernel.tile.share_qo_smem else blocks.begin < blocks.end


@cute.jit
def load_queries(kernel: Constexpr, inputs: Inputs, shared: Shared, tile: QueryTile, queries: Int32) -> None:
    """Q of one work tile, for each warpgroup its own."""
    tiles = inputs.q.sequence(tile.info.offset_q + tile.row0, tile.head, tile.batch)
    shared.pipeline_q.producer_acquire(queries)
    for group in cutlass.range_constexpr(kernel.tile.warpgroups):
        inputs.q.load_part(tiles, group, shared.s_q[None, None, group], shared.pipeline_q, queries)


@cute.jit
def load_blocks(
    kernel: Constexpr,
    inputs: Inputs,
    shared: Shared,
    tile: QueryTile,
    blocks: BlockRange,
    filled: PipelineState,
    claims: Any,  # WorkClaims, or None where there is nothing to claim
) -> Int32:
    """Q and all key blocks: K[0], Q, then K[j] before V[j - 1], in the order in which they are waited for.

    The result is what was ``claimed`` when the last loads were due.
    """
    info, last, keys = tile.info, blocks.end - 1, filled.keys
    g_k = inputs.k.sequence(info.offset_k, tile.head_kv, tile.batch)
    g_v = inputs.v.sequence(info.offset_k, tile.head_kv, tile.batch)
    pipeline_k, pipeline_v = shared.pipeline_k, shared.pipeline_v
    count, claimed = blocks.end - blocks.begin, Int32(0)
    pipeline_k.producer_acquire(keys)
    inputs.k.load(g_k, last, shared.s_k, pipeline_k, keys)
    load_queries(kernel, inputs, shared, tile, filled.queries)
    claim_at = cutlass.max(count - CLAIM_AHEAD, 1)
    for i in cutlass.range(1, count, unroll=1):
        if cutlass.const_expr(claims is not None):
            if i == claim_at:
                claimed = claims.claim()
        pipeline_k.producer_acquire(keys + i)
        inputs.k.load(g_k, last - i, shared.s_k, pipeline_k, keys + i)
        pipeline_v.producer_acquire(keys + i - 1)
        inputs.v.load(g_v, last - i + 1, shared.s_v, pipeline_v, keys + i - 1)
    if cutlass.const_expr(claims is not None):
        if count == 1:
            claimed = claims.claim()
    end = keys + last - blocks.begin
    pipeline_v.producer_acquire(end)
    inputs.v.load(g_v, blocks.begin, shared.s_v, pipeline_v, end)
    return claimed


@cute.jit
def load_all_bias(kernel: Constexpr, problem: Problem, inputs: Inputs, shared: Shared, group: Int32) -> None:
    """By a warp of its own: the bias of every work tile, for one warpgroup."""
    keys, n, more = Int32(0), Int32(0), Boolean(True)
    while more:
        note = shared.work.take(n)
        n += 1
        while note.index >= 0:
            tile = problem.order.of(note.row0, note.head, note.batch, problem.seqlens)
            keys += load_bias(kernel, problem, inputs, shared, tile, group, keys)
            note = shared.work.take(n)
            n += 1
        if cutlass.const_expr(kernel.tile.speculative):
            shared.replay.meet()
            if shared.replay.any():
                for slot in cutlass.range(Replay.SECTION, unroll=1):
                    if shared.replay.failed(slot):
                        tile = problem.order.tile(shared.replay.index(slot), problem.seqlens)
                        keys += load_bias(kernel, problem, inputs, shared, tile, group, keys)
                shared.replay.reset(cute.arch.lane_idx(), False)
        more = note.index == WorkItem.SECTION_END


@cute.jit
def load_bias(
    kernel: Constexpr,
    problem: Problem,
    inputs: Inputs,
    shared: Shared,
    tile: QueryTile,
    group: Int32,
    keys: Int32,
) -> Int32:
    """The bias of one work tile for one warpgroup; the result is how many key blocks there were."""
    _, state = kernel.begin(problem, tile)
    blocks: Any = kernel.key_blocks(tile, state)
    count = blocks.end - blocks.begin
    tiles = rows_of(inputs.bias, tile.row0 + group * ROWS, tile.head, tile.batch, kernel.tile.tile_n)
    for i in cutlass.range(count, unroll=1):
        shared.bias.load(tiles, inputs.bias, blocks.end - 1 - i, group, keys + i)
    return count
