"""The warps of the Hopper forward that load a bias by TMA, one for each consumer warpgroup."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cute_attn.kernels.forward_sm90.params import PipelineState
from cute_attn.kernels.forward_sm90.role import ForwardRole
from cute_attn.rows.tma import TmaTiles
from cute_attn.rows.tma_bias import ROWS, rows_of
from cute_attn.work.query_tiles import QueryTile
from cute_attn.work.replay import WorkItemId


@dataclass(frozen=True)
class BiasProducer(ForwardRole):
    """One warp: loads the bias of every work tile for one warpgroup, ``group``."""

    tma: TmaTiles
    group: Int32

    @cute.jit
    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        """Load the warpgroup's rows of all key blocks, in the order in which they are visited."""
        _, state = self.begin(tile)
        blocks, keys = self.key_blocks(tile, state), pipeline_state.keys
        count = blocks.end - blocks.begin
        row0 = tile.row0 + self.group * ROWS
        tiles = rows_of(self.tma, row0, tile.head, tile.batch, self.kernel.tile.tile_n)
        for i in cutlass.range(count, unroll=1):
            self.storage.bias.load(tiles, self.tma, blocks.end - 1 - i, self.group, keys + i)
        return PipelineState(pipeline_state.queries, keys + count)
