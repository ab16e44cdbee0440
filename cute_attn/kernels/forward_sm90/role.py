"""Roles of the Hopper forward: the work of a warp or a warpgroup on each work tile of its CTA."""

from dataclasses import dataclass, replace
from typing import ClassVar

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

from cute_attn.device.score_tile import ScoreContext
from cute_attn.epilogues.chain import ScoreState
from cute_attn.kernels.forward_sm90.storage import ForwardParams, ForwardStorage, PipelineState
from cute_attn.work.block_range import BlockRange, KeySplit
from cute_attn.work.broadcast import WorkItem
from cute_attn.work.query_tiles import QueryTile
from cute_attn.work.replay import Replay, WorkItemId


@dataclass(frozen=True)
class ForwardRole:
    """Base of roles: subclasses define :meth:`run_tile` for one work tile, and :meth:`run` loops over work tiles.

    All roles of a CTA process the same work tiles in the same order: the tiles of a section in the order of the
    producer's broadcasts, then with ``speculative`` the section's failed tiles again.
    """

    kernel: Constexpr
    params: ForwardParams
    storage: ForwardStorage

    CLEARS_REPLAY: ClassVar[bool] = False
    """True for the one role, run by a single warp of the CTA, that clears the replay list."""

    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        """Process one work tile; return the pipeline state after it. item: how to mark a failure; None in a replay."""
        raise NotImplementedError

    def finish_section(self) -> None:
        """Called after all work tiles of a section, before its replays."""

    @cute.jit
    def run(self) -> None:
        """Process every work tile that the producer broadcasts, section by section, with each section's replays."""
        work = self.storage.work
        pipeline_state, n, more = PipelineState(Int32(0), Int32(0)), Int32(0), Boolean(True)
        while more:
            item = work.take(n)
            n += 1
            while item.index >= 0:
                tile = self.tile_of(item)
                pipeline_state = self.run_tile(tile, pipeline_state, WorkItemId(n, item.index))
                item = work.take(n)
                n += 1
            if cutlass.const_expr(self.kernel.tile.speculative):
                self.finish_section()
                pipeline_state = self.replay(pipeline_state)
            more = item.index == WorkItem.SECTION_END

    @cute.jit
    def replay(self, pipeline_state: PipelineState) -> PipelineState:
        """Replay the section's failed work tiles with exact online softmax."""
        replay = self.storage.replay
        replay.sync()
        if replay.any():
            for slot in cutlass.range(Replay.SECTION, unroll=1):
                if replay.failed(slot):
                    tile = self.tile_at(replay.index(slot))
                    pipeline_state = self.run_tile(tile, pipeline_state, None)
            replay.reset(self.CLEARS_REPLAY)
        return pipeline_state

    def tile_at(self, index: Int32) -> QueryTile:
        """Work tile ``index`` of the order, or with splits a split of a work tile; it may be empty."""
        params = self.params
        if params.splits is None:
            return params.order.tile(index, params.seqlens)
        block, split = divmod(index, params.splits)
        tile = params.order.tile(block, params.seqlens)
        blocks, tile_n = self.blocks_of(tile), self.kernel.tile.tile_n
        return replace(tile, split=KeySplit.of(blocks, split, params.partials, tile_n))

    def tile_of(self, item: WorkItem) -> QueryTile:
        tile = self.params.order.of(item.row0, item.head, item.batch, self.params.seqlens)
        return replace(tile, split=item.split)

    def begin(self, tile: QueryTile) -> tuple[ScoreContext, ScoreState]:
        """The epilogues' context and state for one work tile."""
        return self.kernel.epilogues.begin_tile(self.params, tile, tile.head)

    def key_blocks(self, tile: QueryTile, state: ScoreState) -> BlockRange:
        """The key blocks that one work tile visits: all blocks that its queries see, or only those of its split."""
        end_row = cutlass.min(tile.row0 + self.kernel.tile.queries, tile.info.seqlen_q)
        blocks = self.kernel.epilogues.key_blocks(state, tile.row0, end_row, self.kernel.tile.tile_n)
        return blocks if tile.split is None else blocks.clipped(tile.split.begin, tile.split.end)

    def blocks_of(self, tile: QueryTile) -> BlockRange:
        """Like :meth:`key_blocks`, for callers that have no epilogue state."""
        return self.key_blocks(tile, self.begin(tile)[1])
