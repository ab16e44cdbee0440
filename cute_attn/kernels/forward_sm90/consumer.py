"""The consumer warpgroups of the Hopper forward: O and LSE of 64 rows of each work tile."""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

import layouts
from cute_attn.device.math import rematerialize
from cute_attn.device.pipeline import WARPGROUP
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.forward_sm90.main_loop import MainLoop
from cute_attn.kernels.forward_sm90.output import OutputStore
from cute_attn.kernels.forward_sm90.params import ConsumerThread, ForwardOutputs, PipelineState, all_rows
from cute_attn.kernels.forward_sm90.query_buffer import LastUse
from cute_attn.kernels.forward_sm90.role import ForwardRole
from cute_attn.outputs.lse import store_lse
from cute_attn.work.query_tiles import QueryTile
from cute_attn.work.replay import WorkItemId


@dataclass(frozen=True)
class Consumer(ForwardRole):
    """One warpgroup: computes its rows of every work tile, and stores them."""

    outputs: ForwardOutputs
    thread: ConsumerThread

    def run(self) -> None:
        """All work tiles, beside the other warpgroups."""
        self.thread.ping_pong.start()
        super().run()
        self.thread.ping_pong.finish()
        cute.arch.cp_async_bulk_wait_group(0)

    def finish_section(self) -> None:
        """Wait for all stores: a replayed O must not be overwritten by its first version."""
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def run_tile(
        self, tile: QueryTile, pipeline_state: PipelineState, item: WorkItemId | None
    ) -> PipelineState:
        """Wait for Q, run the main loop, store O and LSE; with frozen row maxima unless it is a replay."""
        queries, keys = pipeline_state.queries, pipeline_state.keys
        speculative = cutlass.const_expr(self.kernel.tile.speculative and item is not None)
        q, fragments = self.storage.q, self.thread.fragments
        loop = self.main_loop(tile, pipeline_state)
        blocks = loop.blocks
        fragments.acc_o.fill(0.0)
        if q.used(blocks):
            q.pipeline.consumer_wait(queries)
        if blocks.begin < blocks.end:
            if cutlass.const_expr(self.kernel.tile.q_in_regs):
                self.read_queries()
                q.release_after(LastUse.COPY, queries)
            loop.run(queries, speculative)
            if cutlass.const_expr(speculative):
                if loop.overflowed():
                    self.storage.replay.mark(item)
        output = self.store(loop)
        if q.used(blocks):
            if cutlass.const_expr(q.last_use is LastUse.STORE):
                output.wait()
            q.release_after(LastUse.STORE, queries)
            queries += 1
            keys += blocks.end - blocks.begin
        return PipelineState(queries, keys)

    def main_loop(self, tile: QueryTile, pipeline_state: PipelineState) -> MainLoop:
        """The main loop of one work tile, with empty row maxima and sums."""
        context, state = self.begin(tile)
        blocks, score_map = self.key_blocks(tile, state), self.kernel.score_map(self.thread.index)
        chain = self.kernel.epilogues
        softmax = OnlineSoftmax.make(
            len(score_map.modes.rows),
            chain.scale_log2(context.score_scale),
            chain.may_mask_rows,
            threshold=self.kernel.tile.rescale_threshold,
            may_be_large=chain.may_be_large,
            p_dtype=self.kernel.dtype,
        )
        first_use = pipeline_state.keys
        return MainLoop(
            self.kernel, self.storage, self.thread, tile, blocks, state, score_map, softmax, first_use
        )

    @cute.jit
    def read_queries(self) -> None:
        """Q from shared memory into registers, for the whole work tile."""
        copy = layouts.ldmatrix_copy_a(self.kernel.mma_qk(), self.kernel.dtype)
        mine = copy.get_slice(self.thread.index)
        s_q = all_rows(self.storage.q.tensor)
        cute.copy(copy, mine.partition_S(s_q), mine.retile(self.thread.fragments.q))

    def sinks(self, tile: QueryTile, thread: Int32) -> tuple[Float32, ...] | None:
        """The attention sink of each of the thread's rows, or None."""
        chain = self.kernel.epilogues
        if chain.sinks is None:
            return None
        score_map = self.kernel.score_map(thread)
        return chain.sinks_of_rows(self.params.score_args, tile.head, tile.heads_left, score_map)

    @cute.jit
    def store(self, loop: MainLoop) -> OutputStore:
        """Normalize O and store it with the LSE; a TMA store may be pending afterwards."""
        # Otherwise coordinates derived from it stay in registers through the main loop.
        thread, group = rematerialize(self.thread.index), self.thread.group
        fragments, tile = self.thread.fragments, loop.query_tile
        lse = cute.make_rmem_tensor(cute.make_layout(len(loop.score_map.modes.rows)), Float32)
        sinks = self.sinks(tile, thread)
        loop.softmax.normalize(fragments.acc_o_rows, lse, self.kernel.epilogues.rescale(loop.state), sinks)
        store_lse(self.outputs.mLSE, lse, self.kernel.score_map(thread), tile, self.kernel.traits.varlen)
        s_o = self.storage.s_o[None, None, group]
        output = OutputStore(self.kernel, self.outputs, s_o, group, thread % WARPGROUP)
        output.store(fragments.acc_o, tile)
        return output
