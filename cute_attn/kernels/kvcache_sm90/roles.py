"""Objects that fit the Hopper forward's roles to a cache: loads of key blocks, folded splits, stores of results."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Constexpr, Float32, Int32, cute

from cute_attn.device.math import optimization_barrier, rematerialize
from cute_attn.device.pipeline import WARPGROUP
from cute_attn.device.score_tile import ScoreMap
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.forward_sm90.consumer import Consumer, MainLoop
from cute_attn.kernels.forward_sm90.producer import CLAIM_AHEAD
from cute_attn.kernels.forward_sm90.storage import ForwardInputs, ForwardParams, ForwardStorage, PipelineState
from cute_attn.outputs.fold import Fold, RowSums
from cute_attn.outputs.partial import RowTarget, store_rows
from cute_attn.outputs.staged_output import ForwardOutputs
from cute_attn.tiles import padded
from cute_attn.tiles.inference import FOLDED_KEYS
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import QueryTile


@dataclass(frozen=True)
class CacheLoads:
    """The loads of Q and of a cache's key blocks."""

    inputs: ForwardInputs
    storage: ForwardStorage
    params: ForwardParams

    @cute.jit
    def run(self, tile: QueryTile, blocks: BlockRange, pipeline_state: PipelineState, claims: Any) -> Int32:
        """Like :meth:`TileLoads.run`, but looks up a key block's rows some blocks ahead, so that no load waits."""
        inputs, storage, info, rows = self.inputs, self.storage, tile.info, self.params.rows
        last, keys, head = blocks.end - 1, pipeline_state.keys, tile.head_kv
        pipeline_k, pipeline_v = storage.pipeline_k, storage.pipeline_v
        count, claimed = blocks.end - blocks.begin, Int32(0)
        step: Constexpr = inputs.k.blocks_found  # V's blocks are found with K's
        found = inputs.k.find(rows, tile.batch, blocks, last, info)
        ahead = inputs.k.find(rows, tile.batch, blocks, last - step, info)
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
                ahead = inputs.k.find(rows, tile.batch, blocks, last - i - step, info)
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
class CacheResults:
    """Stores O and LSE from registers to the results, or to partial results if keys are divided."""

    params: ForwardParams
    outputs: ForwardOutputs

    @cute.jit
    def store(self, loop: MainLoop) -> None:
        """Normalize O and store it with the LSE."""
        kernel, tile, acc = loop.kernel, loop.query_tile, loop.thread.fragments.acc_o_rows
        thread, dim = rematerialize(loop.thread.index), padded(kernel.traits.head_dim_v)
        score_map = ScoreMap.make(
            kernel.mma_pv(), kernel.tile.tile_m, dim, thread, heads=kernel.tile.pack_heads
        )
        lse = cute.make_rmem_tensor(cute.make_layout(cute.size(acc, mode=[0])), Float32)
        sinks: Any = loop.sinks(self.params, thread)
        if cutlass.const_expr(kernel.traits.split == "folded"):
            loop.finish(lse, sinks)  # type: ignore[attr-defined]
        else:
            loop.softmax.normalize(acc, lse, kernel.epilogues.rescale(loop.state), sinks)
        self.write(kernel, tile, acc, lse, score_map)
        kernel.epilogues.store_maxima(loop.state, loop.softmax.seen, kernel.score_map(thread), tile.row0)

    @cute.jit
    def write(
        self,
        kernel: Constexpr,
        tile: QueryTile,
        acc: cute.Tensor | None,
        lse: cute.Tensor | None,
        score_map: ScoreMap,
    ) -> None:
        """Write normalised O and LSE, or one of them, to the results or to partial results."""
        outputs, traits = self.outputs, kernel.traits
        if cutlass.const_expr(traits.split == "fixed"):
            split: Any = tile.split
            target = RowTarget.split(self.params.partials, split.partial, tile, traits.varlen)
        else:
            target = RowTarget.whole(outputs.mO, outputs.mLSE, tile, traits.varlen)
        store_rows(target, acc, lse, score_map, tile, traits.head_dim_v)


@dataclass(frozen=True)
class FoldedLoop(MainLoop):
    """The loop with split "folded": adds up O of splits of ``FOLDED_KEYS`` keys, from the last split to the first.

    A split's first step begins with empty statistics while P V of the previous split, the one behind it, still runs.
    When that is complete, O is the previous split's result. A row's maximum is that of the first block of a split in
    which the row sees a key, until a score exceeds it by ``rescale_threshold``. Stale maxima are not checked for that:
    if a check would have changed them, sums exceed ``largest_sum``, and the work tile is replayed.

    Attributes:
        fold: the sum of the splits so far.
        behind: statistics of the previous split, whose O is complete.
        failed: (1,): 1 if a sum of a complete split is too large.
    """

    fold: Fold
    behind: OnlineSoftmax
    failed: cute.Tensor

    @staticmethod
    def of(loop: MainLoop, fold: Fold) -> "FoldedLoop":
        """A loop like ``loop`` that adds splits to ``fold``."""
        softmax, failed = loop.softmax, cute.make_rmem_tensor(cute.make_layout(1), Int32)
        failed.fill(0)
        row_max, row_sum = (cute.make_rmem_tensor_like(x) for x in (softmax.row_max, softmax.row_sum))
        behind = replace(softmax, row_max=row_max, row_sum=row_sum)
        return FoldedLoop(**vars(loop), fold=fold, behind=behind, failed=failed)

    @property
    def blocks_of_split(self) -> int:
        """Number of key blocks per split."""
        return FOLDED_KEYS // self.kernel.tile.tile_n

    @property
    def largest_sum(self) -> float:
        return 2.0 ** (self.kernel.tile.rescale_threshold - 1)

    @cute.jit
    def steps(self, begin: Int32, end: Int32, masked: Constexpr, frozen: Constexpr) -> None:
        """Visit key blocks [begin, end), last first. If ``frozen``, row maxima are stale after a split's last block."""
        if cutlass.const_expr(not frozen):
            super().steps(begin, end, masked, False)
        else:
            begin, end = optimization_barrier(begin), optimization_barrier(end)
            size: Constexpr = self.blocks_of_split
            # The split of block ``end`` has begun, unless ``end`` is its first block.
            first = cutlass.max(begin, end // size * size)
            super().steps(first, end, masked, True)
            end = first
            splits = cute.ceil_div(end - begin // size * size, size) if begin < end else Int32(0)
            for _ in cutlass.range(splits, unroll=1):
                self.step(end - 1, masked, False)
                first = cutlass.max(begin, end - size)
                for i in cutlass.range(end - 1 - first, unroll=1):
                    self.step(end - 2 - i, masked, True)
                end = first

    @cute.jit
    def before_softmax(self, step: Int32) -> None:
        """At a split's last block, visited first: move the previous split's statistics to ``behind`` and empty them."""
        (row_max, row_sum), behind = (self.softmax.row_max, self.softmax.row_sum), self.behind
        behind_max, behind_sum = behind.row_max, behind.row_sum
        if (step + 1) % self.blocks_of_split == 0:
            for r in cutlass.range_constexpr(cute.size(row_max)):
                behind_max[r], behind_sum[r] = row_max[r], row_sum[r]
                row_max[r], row_sum[r] = -Float32.inf, Float32(0.0)

    @cute.jit
    def rescale(self, step: Int32) -> None:
        """Rescale O, or at a split's last block, visited first, add O to the fold and set it to zero."""
        acc, failed, size = self.thread.fragments.acc_o_rows, self.failed, self.blocks_of_split
        if (step + 1) % size == 0:
            if cutlass.const_expr(self.kernel.tile.speculative):
                failed[0] = failed[0] | Int32(replace(self, softmax=self.behind).sums_overflowed())
            lse = cute.make_rmem_tensor(cute.make_layout(cute.size(acc, mode=[0])), Float32)
            self.behind.normalize(acc, lse, Float32(1.0))
            self.fold.add(acc, lse, step + size >= self.blocks.end - 1, True)
            acc.fill(0.0)
        else:
            self.softmax.rescale(acc, self.thread.fragments.factors)

    def sums_overflowed(self) -> Boolean:
        """True if in this split a row's sum is too large, or its O is not finite."""
        return super().overflowed()

    def overflowed(self) -> Boolean:
        """True if :meth:`sums_overflowed` is true for this or a previous split."""
        return self.sums_overflowed() | (self.failed[0] != 0)

    @cute.jit
    def finish(self, lse: cute.Tensor, sinks: Constexpr) -> None:
        """After the last step: add the first split, and normalise O and LSE of all splits."""
        acc, blocks, size = self.thread.fragments.acc_o_rows, self.blocks, self.blocks_of_split
        self.softmax.normalize(acc, lse, Float32(1.0))
        self.fold.add(acc, lse, (blocks.end - 1) // size <= blocks.begin // size, False)
        self.fold.finish(acc, lse, sinks)


@dataclass(frozen=True)
class FoldedConsumer(Consumer):
    """The consumer that runs ``FoldedLoop``."""

    def main_loop(self, tile: QueryTile, uses: PipelineState) -> MainLoop:
        loop, acc = super().main_loop(tile, uses), self.thread.fragments.acc_o_rows
        threads, partials = self.kernel.tile.warpgroups * WARPGROUP, self.params.partials
        sums = RowSums.make(cute.size(acc, mode=[0]))
        return FoldedLoop.of(loop, Fold(sums, partials.out, self.thread.index, threads))  # type: ignore[union-attr]
