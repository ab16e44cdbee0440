"""The producer warps of the Hopper forward: one claims work tiles and loads their Q, K and V, others load a bias."""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Boolean, Int32, cute

from cute_attn.kernels.forward_sm90.role import ForwardRole
from cute_attn.kernels.forward_sm90.storage import ForwardInputs, ForwardStorage, PipelineState
from cute_attn.rows.tma import TmaTiles
from cute_attn.rows.tma_bias import ROWS, rows_of
from cute_attn.work.block_range import BlockRange
from cute_attn.work.broadcast import WorkItem
from cute_attn.work.query_tiles import QueryTile, WorkClaims
from cute_attn.work.replay import Replay, WorkItemId

CLAIM_AHEAD = 2
"""Key blocks still to be loaded when the next work tile is claimed: their loads hide the claim's latency."""


@dataclass(frozen=True)
class Producer(ForwardRole):
    """The warp that claims work tiles and loads Q, K and V. Other roles receive the work tiles that it broadcasts."""

    loads: Any  # ``TileLoads``, or another object with its fields and method

    CLEARS_REPLAY: ClassVar[bool] = True

    @cute.jit
    def run(self) -> None:
        """Claim, broadcast and load work tiles until none is left; after each section, load the section's replays."""
        work, claims, total = self.storage.work, WorkClaims(self.params.counters), self.total
        index, n, more = Int32(cute.arch.block_idx()[0]), Int32(0), Boolean(True)
        pipeline_state = PipelineState(Int32(0), Int32(0))
        while more:
            end = n + Replay.SECTION - 1
            while index < total and n < end:
                tile, claimed = self.tile_at(index), Int32(0)
                if tile.exists:
                    work.publish(n, WorkItem(index, tile.row0, tile.head, tile.batch, tile.split))
                    n += 1
                    pipeline_state, claimed = self.load(tile, pipeline_state, claims)
                else:
                    claimed = claims.claim()
                index = claims.index(claimed)
            more = index < total
            work.publish_end(n, more)
            n += 1
            if cutlass.const_expr(self.kernel.tile.speculative):
                pipeline_state = self.replay(pipeline_state)
        claims.leave()

    @property
    def total(self) -> Int32:
        """Number of work tiles of all CTAs."""
        total, splits = self.params.order.total, self.params.splits
        return total if splits is None else total * splits.divisor

    @cute.jit
    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        pipeline_state, _ = self.load(tile, pipeline_state, None)
        WorkClaims(self.params.counters).count_replay()
        return pipeline_state

    @cute.jit
    def load(
        self,
        tile: QueryTile,
        pipeline_state: PipelineState,
        claims: Any,  # WorkClaims, or None for a replay
    ) -> tuple[PipelineState, Int32]:
        """Load one work tile; return the pipeline state after it and the pending claim."""
        queries, keys, claimed = pipeline_state.queries, pipeline_state.keys, Int32(0)
        blocks = self.blocks_of(tile)
        if blocks.begin < blocks.end:
            claimed = self.loads.run(tile, blocks, pipeline_state, claims)
            queries += 1
            keys += blocks.end - blocks.begin
        else:
            if cutlass.const_expr(claims is not None):
                claimed = claims.claim()
            if cutlass.const_expr(self.storage.q.used_without_keys):
                self.storage.q.load(self.loads.inputs.q, tile, queries)
                queries += 1
        return PipelineState(queries, keys), claimed


@dataclass(frozen=True)
class TileLoads:
    """Loads Q and the key blocks of a work tile."""

    inputs: ForwardInputs
    storage: ForwardStorage

    @cute.jit
    def run(self, tile: QueryTile, blocks: BlockRange, pipeline_state: PipelineState, claims: Any) -> Int32:
        """Load Q and all key blocks in the order of the consumers' waits: K[0], Q, then K[j] before V[j - 1].

        Returns the pending claim, made ``CLAIM_AHEAD`` blocks before the end.
        """
        inputs, storage, info = self.inputs, self.storage, tile.info
        last, keys = blocks.end - 1, pipeline_state.keys
        g_k = inputs.k.sequence(info.offset_k, tile.head_kv, tile.batch)
        g_v = inputs.v.sequence(info.offset_k, tile.head_kv, tile.batch)
        pipeline_k, pipeline_v = storage.pipeline_k, storage.pipeline_v
        count, claimed = blocks.end - blocks.begin, Int32(0)
        pipeline_k.producer_acquire(keys)
        inputs.k.load(g_k, blocks.block(last), storage.s_k, pipeline_k, keys)
        storage.q.load(inputs.q, tile, pipeline_state.queries)
        claim_at = cutlass.max(count - CLAIM_AHEAD, 1)
        for i in cutlass.range(1, count, unroll=1):
            if cutlass.const_expr(claims is not None):
                if i == claim_at:
                    claimed = claims.claim()
            pipeline_k.producer_acquire(keys + i)
            inputs.k.load(g_k, blocks.block(last - i), storage.s_k, pipeline_k, keys + i)
            pipeline_v.producer_acquire(keys + i - 1)
            inputs.v.load(g_v, blocks.block(last - i + 1), storage.s_v, pipeline_v, keys + i - 1)
        if cutlass.const_expr(claims is not None):
            if count == 1:
                claimed = claims.claim()
        end = keys + last - blocks.begin
        pipeline_v.producer_acquire(end)
        inputs.v.load(g_v, blocks.block(blocks.begin), storage.s_v, pipeline_v, end)
        return claimed


@dataclass(frozen=True)
class BiasProducer(ForwardRole):
    """A warp that loads the bias of every work tile by TMA for one consumer warpgroup, ``group``."""

    tma: TmaTiles
    group: Int32

    @cute.jit
    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        """Load the bias for the warpgroup's rows and all key blocks, in the order in which blocks are visited."""
        blocks, keys = self.blocks_of(tile), pipeline_state.keys
        count = blocks.end - blocks.begin
        row0 = tile.row0 + self.group * ROWS
        tiles = rows_of(self.tma, row0, tile.head, tile.batch, self.kernel.tile.tile_n)
        for i in cutlass.range(count, unroll=1):
            self.storage.bias.load(tiles, self.tma, blocks.block(blocks.end - 1 - i), self.group, keys + i)
        return PipelineState(pipeline_state.queries, keys + count)
