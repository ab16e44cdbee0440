"""Roles of the warps of the Hopper backward that are not consumers: the producer and helpers."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Int32, Int64, cute

from cute_attn.device.seqlen import SeqlenInfo, existing_rows, padded_row0
from cute_attn.epilogues.chain import ScoreState
from cute_attn.epilogues.dropout import UNIT_KEYS, generate_words
from cute_attn.kernels.backward_sm90.params import (
    BackwardInputs,
    BackwardOutputs,
    BackwardParams,
    BackwardStorage,
)
from cute_attn.kernels.dq_order import block_floats
from cute_attn.outputs.accumulate import DqTurns, add_staged
from cute_attn.rows.tma import TmaTiles
from cute_attn.rows.tma_bias import columns_of
from cute_attn.work.block_range import BlockRange
from cute_attn.work.broadcast import KeyTile
from cute_attn.work.query_tiles import WorkClaims


@dataclass(frozen=True)
class BackwardRole:
    """One warp with a task in every step of the consumers; a subclass defines the task."""

    kernel: Constexpr
    params: BackwardParams
    shared: BackwardStorage

    def begin_head(self, key_tile: KeyTile, head: Int32) -> Any:
        """Begin a query head; returns the first argument of its steps."""
        raise NotImplementedError

    def step(self, of_head: Any, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        """Process one query block of that head, the CTA's n-th step."""
        raise NotImplementedError

    def finish_tile(self) -> None:
        """Called when all steps of a key tile are done."""

    @cute.jit
    def run(self) -> None:
        """Run all steps of the CTA, in the consumers' order."""
        work, seqlens = self.shared.work, self.params.seqlens
        n, i = Int32(0), Int32(0)
        while work.holds(i):
            key_tile = work.take(i, seqlens)
            blocks, heads = self.kernel.query_blocks(self.params, key_tile), self.params.query_heads(key_tile)
            for head in cutlass.range(heads.first, heads.end, unroll=1):
                of_head = self.begin_head(key_tile, head)
                for step in cutlass.range(blocks.begin, blocks.end, unroll=1):
                    self.step(of_head, key_tile, blocks.block(step), n)
                    n += 1
            self.finish_tile()
            i += 1


@dataclass(frozen=True)
class BiasGradientStorer(BackwardRole):
    """One warp: stores dS of every step as the bias gradient, once all warpgroups have written it.

    After its reads of a stage, the warp arrives at dS's buffer like the warps that write dS: ``SharedDoubleBuffer``.
    """

    outputs: BackwardOutputs

    def begin_head(self, key_tile: KeyTile, head: Int32) -> cute.Tensor:
        """The gradient's tiles in the columns of the key block."""
        shape = (self.kernel.tile.tile_m, self.kernel.tile.tile_n)
        return columns_of(self.outputs.tma_dbias, key_tile.block, head, key_tile.batch, shape)

    @cute.jit
    def step(self, tiles: cute.Tensor, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        """Wait for dS and store it."""
        self.shared.ds_buffer.arrive(n)
        self.shared.ds_buffer.wait(n)
        ds = self.shared.s_ds[None, None, self.kernel.ds_stage(n)]
        self.outputs.tma_dbias.store(ds, tiles, block)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # reads of the stage are done


@dataclass(frozen=True)
class DqAdder(BackwardRole):
    """One warp: adds the staged dQ of every step to global memory by a bulk reduction."""

    outputs: BackwardOutputs

    def begin_head(self, key_tile: KeyTile, head: Int32) -> tuple[cute.Pointer, DqTurns | None]:
        """The accumulator of the head's first query block, and the turns to add to it."""
        head_dq = self.kernel.dq_of_head(self.params, self.outputs, key_tile, head)
        if not self.kernel.tile.dq_in_order:
            return head_dq, None
        return head_dq, self.kernel.dq_turns(self.params, self.outputs, key_tile, head_dq)

    @cute.jit
    def step(self, of_head: tuple, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        """Wait for dQ and add it; release its stage once it has been read."""
        floats, (head_dq, turns) = block_floats(self.kernel.traits, self.kernel.tile), of_head
        if cutlass.const_expr(turns is not None):
            turns.wait(block)  # while the consumers compute
            cute.arch.fence_proxy("async.global")
        self.shared.dq_staging.consumer_wait(n)
        with cute.arch.elect_one():
            add_staged(self.shared.s_dq, head_dq + Int64(block) * floats, floats)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.shared.dq_staging.release_by_one()
            if cutlass.const_expr(turns is not None):
                cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.fence_proxy("async.global")
                turns.finish(block)

    @cute.jit
    def finish_tile(self) -> None:
        """Wait for the additions, so that the next key block adds to the same accumulator after them."""
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)


@dataclass(frozen=True)
class TurnGiver(BackwardRole):
    """One warp: gives the consumers their turns to add dQ from registers, and ends the turns.

    If the next turn has come when all consumers have added dQ, it is given before the current turn is ended, because
    ending a turn waits until the additions are in L2.
    """

    outputs: BackwardOutputs

    def begin_head(self, key_tile: KeyTile, head: Int32) -> tuple[DqTurns, cute.Tensor, Int32]:
        """The head's turns, whether the next one is given already, (1,), and the end of its query blocks."""
        head_dq = self.kernel.dq_of_head(self.params, self.outputs, key_tile, head)
        given = cute.make_rmem_tensor(cute.make_layout(1), Boolean)
        given.fill(False)
        turns = self.kernel.dq_turns(self.params, self.outputs, key_tile, head_dq)
        return turns, given, self.kernel.query_blocks(self.params, key_tile).end

    @cute.jit
    def step(self, of_head: tuple, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        """Give the n-th turn unless it is given, and end it; give the next block's turn before, if that has come."""
        staging, (turns, given, end) = self.shared.dq_staging, of_head
        if not given[0]:
            turns.wait(block)
            with cute.arch.elect_one():
                staging.release_by_one()
        following = (block + 1 < end) & turns.has_come(block + 1)
        staging.consumer_wait(n)
        with cute.arch.elect_one():
            if following:
                staging.release_by_one()
            turns.finish(block)
        given[0] = following


@dataclass(frozen=True)
class PhiloxProducer(BackwardRole):
    """One of ``mask_warps`` warps: generates some of every step's mask, up to ``MASK_STAGES`` steps ahead."""

    number: Int32  # index of the warp among them

    def begin_head(self, key_tile: KeyTile, head: Int32) -> ScoreState:
        """The mask's key and counters."""
        return self.kernel.epilogues.begin_tile(self.params, key_tile, head)[1]

    @cute.jit
    def step(self, state: ScoreState, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        """Generate the mask of every ``mask_warps``-th group of 32 keys; the first group rotates to balance warps."""
        tile, pipeline = self.kernel.tile, self.shared.pipeline_mask
        row0, key0 = block * tile.tile_m, key_tile.block * tile.tile_n
        halves = self.shared.s_mask[None, None, None, pipeline.stage(n)]
        pipeline.producer_wait(n)
        first = (self.number + n) % tile.mask_warps
        for unit in cutlass.range(first, tile.tile_n // UNIT_KEYS, tile.mask_warps, unroll=1):
            generate_words(state.dropout, halves, row0, key0, unit, tile.tile_m, cute.arch.lane_idx())
        pipeline.producer_commit(n)


@dataclass(frozen=True)
class Producer:
    """One warp: claims key blocks, and loads K and V once for each, then Q with LSE and a bias, and dO with D."""

    kernel: Constexpr
    params: BackwardParams
    inputs: BackwardInputs
    outputs: BackwardOutputs
    shared: BackwardStorage

    @cute.jit
    def run(self) -> None:
        """Claim key blocks until none is left; load each with the query blocks of its query heads that see it."""
        params, tile_n = self.params, self.kernel.tile.tile_n
        order, splits = params.order, params.order.num_splits.divisor
        counter = cute.recast_ptr(params.counter.iterator, dtype=Int32)
        claims = WorkClaims(cute.make_tensor(counter, cute.make_layout(1)))
        in_order: Constexpr = self.kernel.tile.dq_in_order
        position = cute.arch.block_idx()[0] // self.kernel.tile.cluster
        n, steps = Int32(0), Int32(0)  # uses so far of the pipelines of K and V, of Q and dO
        claimed = Int32(0)  # by a cluster
        if cutlass.const_expr(in_order):
            position = self.claim(claims, claimed)
            claimed += 1
        while position < order.blocks:
            found = order.find(position, params.seqlens.cu_seqlens_k)
            first, head_dkv, batch = (cute.arch.make_warp_uniform(x) for x in found)
            info = SeqlenInfo.read(params.seqlens, batch)
            rows = existing_rows(params.seqlens.cu_seqlens_k, self.outputs.mDK, batch)
            for block in cutlass.range(first, cute.ceil_div(rows, tile_n), splits, unroll=1):
                split = first
                if cutlass.const_expr(in_order):
                    split = block % self.outputs.mDQaccum.shape[0]
                key_tile = KeyTile(block, split, head_dkv, batch, info)
                steps = self.load_block(key_tile, n, steps)
                n += 1
            position = self.claim(claims, claimed)
            claimed += 1
        self.shared.work.write_end(n)

    @cute.jit
    def claim(self, claims: WorkClaims, claimed: Int32) -> Int32:
        """Claim the next work tile of this CTA or cluster and return its position; claimed: earlier claims.

        The first work tile of each CTA or cluster is not claimed, except with ``dq_in_order``, where CTAs may wait
        only for work tiles of CTAs that run.
        """
        cluster: Constexpr = self.kernel.tile.cluster
        position = Int32(0)
        if cutlass.const_expr(cluster == 1):
            position = claims.index(claims.claim())
        else:
            position = self.shared.cluster_claims.claim(claims, claimed)
        if cutlass.const_expr(self.kernel.tile.dq_in_order):
            position -= cute.arch.grid_dim()[0] // cluster
        return position

    @cute.jit
    def load_block(self, key_tile: KeyTile, n: Int32, steps: Int32) -> Int32:
        """Broadcast and load a key block and its queries. steps and the result count uses of Q's and dO's pipelines."""
        heads, shared = self.params.query_heads(key_tile), self.shared
        blocks = self.kernel.query_blocks(self.params, key_tile)
        count, first = blocks.end - blocks.begin, steps
        shared.work.write(n, key_tile.block, key_tile.split, key_tile.head_dkv, key_tile.batch)
        if count == 0:
            # No query sees these keys: dK and dV are zeros, and K and V are not loaded. K last: it lets consumers
            # release both.
            for pipeline in (shared.pipeline_v, shared.pipeline_k):
                pipeline.producer_wait(n)
                pipeline.producer_commit(n)
        for head in cutlass.range(heads.first, heads.end, unroll=1):
            self.load_queries(key_tile, head, blocks, steps, n, first)
            steps += count
        return steps

    @cute.jit
    def load_keys(self, key_tile: KeyTile, n: Int32) -> None:
        inputs, shared = self.inputs, self.shared
        shared.pipeline_k.producer_acquire(n)
        inputs.k.load(self.of_keys(inputs.k, key_tile), key_tile.block, shared.s_k, shared.pipeline_k, n)

    @cute.jit
    def load_values(self, key_tile: KeyTile, n: Int32) -> None:
        inputs, shared = self.inputs, self.shared
        shared.pipeline_v.producer_acquire(n)
        inputs.v.load(self.of_keys(inputs.v, key_tile), key_tile.block, shared.s_v, shared.pipeline_v, n)

    def of_keys(self, rows: TmaTiles, key_tile: KeyTile) -> cute.Tensor:
        """Blocks of K or V for the sequence and kv head of a work tile."""
        head_kv = self.params.query_heads(key_tile).head_kv
        return rows.sequence(key_tile.info.offset_k, head_kv, key_tile.batch, self.kernel.part())

    @cute.jit
    def load_queries(
        self, key_tile: KeyTile, head: Int32, blocks: BlockRange, steps: Int32, n_keys: Int32, first: Int32
    ) -> None:
        """Load Q and dO of one head, with LSE, bias and D; steps: earlier uses of their pipelines.

        K and V are loaded after the Q and dO of use ``first``, because memory for those is free earlier.
        """
        kernel, inputs, shared = self.kernel, self.inputs, self.shared
        info, tile_m = key_tile.info, kernel.tile.tile_m
        g_q = inputs.q.sequence(info.offset_q, head, key_tile.batch, kernel.part())
        g_do = inputs.do.sequence(info.offset_q, head, key_tile.batch, kernel.part())
        first_rows = padded_row0(self.params.seqlens, info, key_tile.batch, tile_m) // tile_m
        g_lse = inputs.lse.sequence(head, key_tile.batch)
        g_minus_d = inputs.minus_d.sequence(head, key_tile.batch)
        if cutlass.const_expr(kernel.loads_bias_by_tma):
            g_bias = columns_of(
                inputs.bias, key_tile.block, head, key_tile.batch, (tile_m, kernel.tile.tile_n)
            )
        for step in cutlass.range(blocks.begin, blocks.end, unroll=1):
            n, block = steps + (step - blocks.begin), blocks.block(step)
            shared.pipeline_q.producer_acquire(n)
            inputs.q.load(g_q, block, shared.s_q, shared.pipeline_q, n)
            if cutlass.const_expr(kernel.loads_bias_by_tma):
                inputs.bias.load(g_bias, block, shared.bias.tensor, shared.pipeline_q, n)
            inputs.lse.load(g_lse, first_rows + block, shared.s_lse, shared.pipeline_q, n)
            shared.pipeline_do.producer_acquire(n)
            inputs.do.load(g_do, block, shared.s_do, shared.pipeline_do, n)
            inputs.minus_d.load(g_minus_d, first_rows + block, shared.s_minus_d, shared.pipeline_do, n)
            if n == first:
                self.load_keys(key_tile, n_keys)
                self.load_values(key_tile, n_keys)
