"""The producer warp of the Hopper backward loads K and V once per key block, Q with LSE and a bias, and dO with D."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.seqlen import SeqlenInfo, existing_rows, padded_row0
from cute_attn.kernels.backward_sm90.params import (
    BackwardInputs,
    BackwardOutputs,
    BackwardParams,
    BackwardStorage,
)
from cute_attn.rows.tma import TmaTiles
from cute_attn.rows.tma_bias import columns_of
from cute_attn.work.block_range import BlockRange
from cute_attn.work.broadcast import KeyTile
from cute_attn.work.query_tiles import WorkClaims


@dataclass(frozen=True)
class Producer:
    """One warp: claims key blocks, and loads each with the query blocks that see it."""

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
