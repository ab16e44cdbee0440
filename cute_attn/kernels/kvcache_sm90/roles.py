"""What the Hopper forward's roles are given for a cache: loads of key blocks, stream-K ranges, stores of results."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, cute

from cute_attn.device.math import rematerialize
from cute_attn.device.score_tile import ScoreMap
from cute_attn.device.seqlen import warm_lengths
from cute_attn.kernels.forward_sm90.consumer import MainLoop
from cute_attn.kernels.forward_sm90.producer import CLAIM_AHEAD, Producer
from cute_attn.kernels.forward_sm90.storage import ForwardInputs, ForwardParams, ForwardStorage, PipelineState
from cute_attn.outputs.partial import RowTarget, store_rows
from cute_attn.outputs.staged_output import ForwardOutputs
from cute_attn.tiles import padded
from cute_attn.work.block_range import BlockRange
from cute_attn.work.broadcast import WorkItem
from cute_attn.work.key_parts import KeyPart
from cute_attn.work.key_shares import OVERHEAD, KeyShares, Share, VisibleBlocks
from cute_attn.work.query_tiles import QueryTile


@dataclass(frozen=True)
class CacheLoads:
    """The loads of Q and of a cache's key blocks."""

    inputs: ForwardInputs
    storage: ForwardStorage
    params: ForwardParams

    @cute.jit
    def run(self, tile: QueryTile, blocks: BlockRange, pipeline_state: PipelineState, claims: Any) -> Int32:
        """As :meth:`TileLoads.run`. Where rows are is looked up some blocks ahead, so that no load waits."""
        inputs, storage, info, rows = self.inputs, self.storage, tile.info, self.params.rows
        last, keys, head = blocks.end - 1, pipeline_state.keys, tile.head_kv
        pipeline_k, pipeline_v = storage.pipeline_k, storage.pipeline_v
        count, claimed = blocks.end - blocks.begin, Int32(0)
        step: Constexpr = inputs.k.blocks_found  # V's blocks are found with K's
        found = inputs.k.find(rows, tile.batch, last, info)
        ahead = inputs.k.find(rows, tile.batch, last - step, info)
        pipeline_k.producer_acquire(keys)
        inputs.k.load(found, Int32(0), head, storage.s_k, pipeline_k, keys)
        storage.q.load(inputs.q, tile, pipeline_state.queries)
        claim_at = cutlass.max(count - CLAIM_AHEAD, 1)
        for i in cutlass.range(1, count, unroll=1):
            if cutlass.const_expr(claims is not None):
                if i == claim_at:
                    claimed = claims.claim()
            before = found
            if i % step == 0:
                found = ahead
                ahead = inputs.k.find(rows, tile.batch, last - i - step, info)
            pipeline_k.producer_acquire(keys + i)
            inputs.k.load(found, i % step, head, storage.s_k, pipeline_k, keys + i)
            pipeline_v.producer_acquire(keys + i - 1)
            inputs.v.load(before, (i - 1) % step, head, storage.s_v, pipeline_v, keys + i - 1)
        if cutlass.const_expr(claims is not None):
            if count == 1:
                claimed = claims.claim()
        end = keys + last - blocks.begin
        pipeline_v.producer_acquire(end)
        inputs.v.load(found, (count - 1) % step, head, storage.s_v, pipeline_v, end)
        return claimed


@dataclass(frozen=True)
class ShareProducer:
    """The producer warp with split "shares": its work tiles are the units of its slot's stream-K range."""

    producer: Producer

    @cute.jit
    def run(self) -> None:
        """Broadcast and load the key blocks of each unit in the CTA's stream-K range."""
        kernel, params, work = self.producer.kernel, self.producer.params, self.producer.storage.work
        slots, order = cute.arch.grid_dim()[0], params.order
        blocks = VisibleBlocks(
            params.seqlens,
            params.score_args[1],
            kernel.epilogues.mask,
            kernel.tile.queries,
            kernel.tile.tile_n,
        )
        warm_lengths(params.seqlens, params.batch, cute.arch.lane_idx())
        shares = KeyShares.make(
            blocks, params.batch, order.packs.divisor, slots, cute.arch.lane_idx(), OVERHEAD
        )
        slot = shares.slot_of_cta(cute.arch.block_idx()[0])
        position, end, n = shares.begin(slot), shares.begin(slot + 1), Int32(0)
        pipeline_state = PipelineState(Int32(0), Int32(0))
        if position < end:
            share = shares.share(position, end)
            more = Boolean(True)
            while more:
                if (share.begin < share.end) | share.whole:
                    tile = self.tile_of_share(share, slot)
                    work.publish(n, WorkItem(Int32(0), tile.row0, tile.head, tile.batch, tile.part))
                    n += 1
                    pipeline_state, _ = self.producer.load(tile, pipeline_state, None)
                more = share.next < end
                if more:
                    share = shares.following(share, end)
        work.publish_end(n, Boolean(False))

    def tile_of_share(self, share: Share, slot: Int32) -> QueryTile:
        """A ``Share`` as a work tile; its ``head`` is a pack of heads."""
        params = self.producer.params
        head = params.order.first_head(share.head)
        row0 = share.m_block * self.producer.kernel.tile.queries
        tile = params.order.of(row0, head, share.batch, params.seqlens)
        first = self.producer.blocks_of(tile).begin
        partial = cutlass.select_(share.whole, Int32(-1), share.partial(slot))
        return replace(tile, part=KeyPart(first + share.begin, first + share.end, partial))


@dataclass(frozen=True)
class CacheResults:
    """O and LSE from registers to the results, or where keys are divided to partial results."""

    params: ForwardParams
    outputs: ForwardOutputs

    @cute.jit
    def store(self, loop: MainLoop) -> None:
        """Normalize O and store it with the LSE."""
        kernel, outputs, partials = loop.kernel, self.outputs, self.params.partials
        traits, tile, acc = kernel.traits, loop.query_tile, loop.thread.fragments.acc_o_rows
        part: Any = tile.part
        thread, heads, dim = rematerialize(loop.thread.index), kernel.tile.pack_heads, traits.head_dim_v
        score_map = ScoreMap.make(kernel.mma_pv(), kernel.tile.tile_m, padded(dim), thread, heads=heads)
        chain = kernel.epilogues
        sinks = chain.sinks_of_rows(self.params.score_args, tile.head, tile.heads_left, score_map)
        if cutlass.const_expr(sinks is not None and traits.split == "shares"):
            # Partial results get theirs when they are merged.
            sinks = tuple(cutlass.select_(part.partial < 0, sink, -Float32.inf) for sink in sinks)
        lse = cute.make_rmem_tensor(cute.make_layout(cute.size(acc, mode=[0])), Float32)
        loop.softmax.normalize(acc, lse, chain.rescale(loop.state), sinks)
        whole = RowTarget.whole(outputs.mO, outputs.mLSE, tile, traits.varlen)
        if cutlass.const_expr(traits.split == "shares"):
            if part.partial < 0:
                store_rows(whole, acc, lse, score_map, tile, dim)
            else:
                target = RowTarget.share(partials, part.partial, heads)
                store_rows(target, acc, lse, score_map, tile, dim)
        elif cutlass.const_expr(traits.split == "parts"):
            target = RowTarget.part(partials, part.partial, tile, traits.varlen)
            store_rows(target, acc, lse, score_map, tile, dim)
        else:
            store_rows(whole, acc, lse, score_map, tile, dim)
