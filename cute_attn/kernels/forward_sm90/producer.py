"""The producer warps of the Hopper forward: one for Q, K and V, and with a TMA bias one for each consumer warpgroup.

The first one claims and broadcasts work tiles. All warps take the same tiles and key blocks in the same order.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

from cute_attn.kernels.forward_sm90.params import ForwardInputs, ForwardParams, ForwardStorage, PipelineState
from cute_attn.rows.tma_bias import ROWS, rows_of
from cute_attn.work.block_range import BlockRange
from cute_attn.work.broadcast import WorkItem
from cute_attn.work.query_tiles import QueryTile, WorkClaims
from cute_attn.work.replay import Replay

CLAIM_AHEAD = 2
"""Key blocks of a work tile still to be loaded when the next one is claimed: they hide the claim's latency."""


@cute.jit
def load_all(
    kernel: Constexpr, params: ForwardParams, inputs: ForwardInputs, storage: ForwardStorage
) -> None:
    """Claim work tiles until none is left and load their Q, K and V; after each section those of its replays."""
    order, claims = params.order, WorkClaims(params.counters)
    index, n, more = Int32(cute.arch.block_idx()[0]), Int32(0), Boolean(True)
    pipeline_state = PipelineState(Int32(0), Int32(0))
    while more:
        end = n + Replay.SECTION - 1
        while index < order.total and n < end:
            tile, claimed = order.tile(index, params.seqlens), Int32(0)
            if tile.exists:
                storage.work.publish(n, WorkItem(index, tile.row0, tile.head, tile.batch))
                n += 1
                pipeline_state, claimed = load_tile(
                    kernel, params, inputs, storage, tile, pipeline_state, claims
                )
            else:
                claimed = claims.claim()
            index = claims.index(claimed)
        more = index < order.total
        storage.work.publish_end(n, more)
        n += 1
        if cutlass.const_expr(kernel.tile.speculative):
            storage.replay.meet()
            if storage.replay.any():
                for slot in cutlass.range(Replay.SECTION, unroll=1):
                    if storage.replay.failed(slot):
                        tile = order.tile(storage.replay.index(slot), params.seqlens)
                        pipeline_state, _ = load_tile(
                            kernel, params, inputs, storage, tile, pipeline_state, None
                        )
                        claims.count_replay()
                storage.replay.reset(cute.arch.lane_idx(), True)
    claims.leave()


@cute.jit
def load_tile(
    kernel: Constexpr,
    params: ForwardParams,
    inputs: ForwardInputs,
    storage: ForwardStorage,
    tile: QueryTile,
    pipeline_state: PipelineState,
    claims: Any,  # WorkClaims, or None for a replay
) -> tuple[PipelineState, Int32]:
    """Load one work tile; returns the pipeline state after it and the pending claim."""
    queries, keys, claimed = pipeline_state.queries, pipeline_state.keys, Int32(0)
    _, state = kernel.begin(params, tile)
    blocks = kernel.key_blocks(tile, state)
    if blocks.begin < blocks.end:
        claimed = load_blocks(kernel, inputs, storage, tile, blocks, pipeline_state, claims)
        queries += 1
        keys += blocks.end - blocks.begin
    else:
        if cutlass.const_expr(claims is not None):
            claimed = claims.claim()
        if cutlass.const_expr(kernel.tile.share_qo_smem):
            load_queries(kernel, inputs, storage, tile, queries)
            queries += 1
    return PipelineState(queries, keys), claimed


@cute.jit
def loads_queries(kernel: Constexpr, blocks: BlockRange) -> Boolean | bool:
    """Whether a work tile uses Q's pipeline: if it sees a key, or if O shares Q's memory.

    With ``share_qo_smem`` a tile that sees no key stores its zeros from there, and the next Q must wait for that.
    """
    return True if kernel.tile.share_qo_smem else blocks.begin < blocks.end


@cute.jit
def load_queries(
    kernel: Constexpr, inputs: ForwardInputs, storage: ForwardStorage, tile: QueryTile, queries: Int32
) -> None:
    """Load Q of one work tile, 64 rows for each warpgroup."""
    tiles = inputs.q.sequence_of_tile(tile.info.offset_q + tile.row0, tile)
    storage.pipeline_q.producer_acquire(queries)
    for group in cutlass.range_constexpr(kernel.tile.warpgroups):
        inputs.q.load_part(tiles, group, storage.s_q[None, None, group], storage.pipeline_q, queries)


@cute.jit
def load_blocks(
    kernel: Constexpr,
    inputs: ForwardInputs,
    storage: ForwardStorage,
    tile: QueryTile,
    blocks: BlockRange,
    pipeline_state: PipelineState,
    claims: Any,  # WorkClaims, or None for a replay
) -> Int32:
    """Load Q and all key blocks in the order of the consumers' waits: K[0], Q, then K[j] before V[j - 1].

    Returns the pending claim, made ``CLAIM_AHEAD`` blocks before the end.
    """
    info, last, keys = tile.info, blocks.end - 1, pipeline_state.keys
    g_k = inputs.k.sequence(info.offset_k, tile.head_kv, tile.batch)
    g_v = inputs.v.sequence(info.offset_k, tile.head_kv, tile.batch)
    pipeline_k, pipeline_v = storage.pipeline_k, storage.pipeline_v
    count, claimed = blocks.end - blocks.begin, Int32(0)
    pipeline_k.producer_acquire(keys)
    inputs.k.load(g_k, last, storage.s_k, pipeline_k, keys)
    load_queries(kernel, inputs, storage, tile, pipeline_state.queries)
    claim_at = cutlass.max(count - CLAIM_AHEAD, 1)
    for i in cutlass.range(1, count, unroll=1):
        if cutlass.const_expr(claims is not None):
            if i == claim_at:
                claimed = claims.claim()
        pipeline_k.producer_acquire(keys + i)
        inputs.k.load(g_k, last - i, storage.s_k, pipeline_k, keys + i)
        pipeline_v.producer_acquire(keys + i - 1)
        inputs.v.load(g_v, last - i + 1, storage.s_v, pipeline_v, keys + i - 1)
    if cutlass.const_expr(claims is not None):
        if count == 1:
            claimed = claims.claim()
    end = keys + last - blocks.begin
    pipeline_v.producer_acquire(end)
    inputs.v.load(g_v, blocks.begin, storage.s_v, pipeline_v, end)
    return claimed


@cute.jit
def load_all_bias(
    kernel: Constexpr, params: ForwardParams, inputs: ForwardInputs, storage: ForwardStorage, group: Int32
) -> None:
    """Load the bias of every work tile for one warpgroup; run by a warp of its own."""
    keys, n, more = Int32(0), Int32(0), Boolean(True)
    while more:
        item = storage.work.take(n)
        n += 1
        while item.index >= 0:
            tile = params.order.of(item.row0, item.head, item.batch, params.seqlens)
            keys += load_bias(kernel, params, inputs, storage, tile, group, keys)
            item = storage.work.take(n)
            n += 1
        if cutlass.const_expr(kernel.tile.speculative):
            storage.replay.meet()
            if storage.replay.any():
                for slot in cutlass.range(Replay.SECTION, unroll=1):
                    if storage.replay.failed(slot):
                        tile = params.order.tile(storage.replay.index(slot), params.seqlens)
                        keys += load_bias(kernel, params, inputs, storage, tile, group, keys)
                storage.replay.reset(cute.arch.lane_idx(), False)
        more = item.index == WorkItem.SECTION_END


@cute.jit
def load_bias(
    kernel: Constexpr,
    params: ForwardParams,
    inputs: ForwardInputs,
    storage: ForwardStorage,
    tile: QueryTile,
    group: Int32,
    keys: Int32,
) -> Int32:
    """Load one work tile's bias for one warpgroup; returns its number of key blocks."""
    _, state = kernel.begin(params, tile)
    blocks: Any = kernel.key_blocks(tile, state)
    count = blocks.end - blocks.begin
    tiles = rows_of(inputs.bias, tile.row0 + group * ROWS, tile.head, tile.batch, kernel.tile.tile_n)
    for i in cutlass.range(count, unroll=1):
        storage.bias.load(tiles, inputs.bias, blocks.end - 1 - i, group, keys + i)
    return count
