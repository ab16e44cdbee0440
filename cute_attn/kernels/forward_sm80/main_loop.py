"""The main loop of the Ampere forward: computes O and row statistics of a work tile from a range of key blocks."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Uint32, cute

import layouts
from cute_attn.device.gemm import gemm_rs
from cute_attn.device.math import optimization_barrier, rematerialize
from cute_attn.device.score_tile import ScoreMap, ScoreTile
from cute_attn.epilogues.chain import ScoreState
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.kernels.forward_sm80.storage import GroupResults, KeyGroup, Operands, SharedMemory
from cute_attn.kernels.forward_sm80.warps_along_n import SharedRows
from cute_attn.work.block_range import BlockRange


@dataclass(frozen=True)
class MainLoop:
    """The steps of the CTA's work tile, one per key block."""

    kernel: Constexpr
    operands: Operands
    load_k: Any  # a ``BlockLoad`` or a ``PagedLoad``
    load_v: Any
    blocks: BlockRange
    state: ScoreState
    group: KeyGroup
    thread: Int32  # in the group
    row0: Int32
    softmax: OnlineSoftmax
    shared: SharedMemory
    acc_o: cute.Tensor
    acc_o_rows: cute.Tensor  # acc_o as (rows, head_dim_v)

    @cute.jit
    def run(self) -> None:
        """Visit all key blocks, last block first: those on the mask's right edge, unmasked ones, then its left edge."""
        blocks, tile = self.blocks, self.kernel.tile
        # A step's barrier is one of its group, and the first group has loaded Q for all.
        waits_for_q = tile.q_in_regs or tile.key_groups > 1
        if cutlass.const_expr(waits_for_q):
            self.read_queries(max(tile.num_stages - 1, 1))
        block = self.steps(blocks.end - 1, blocks.full_end, True)
        block = self.steps(block, blocks.full_begin, False)
        if cutlass.const_expr(self.kernel.traits.windowed or self.kernel.traits.leftpad):
            self.steps(block, blocks.begin, True)
        if cutlass.const_expr(self.kernel.epilogues.maxima is not None):
            thread = rematerialize(self.thread)
            # Every step has the exact row maxima.
            seen = self.stored_softmax(thread).load_stats().row_max
            self.kernel.epilogues.store_maxima(self.state, seen, self.score_map(thread), self.row0)
        # O reuses the shared memory of loads in flight.
        cute.arch.cp_async_wait_group(0)
        if cutlass.const_expr(tile.key_groups > 1):
            self.merge_groups()

    @cute.jit
    def start_loads(self) -> None:
        """Start the prologue's loads: K of the last block with one stage, else K and V of num_stages - 1 blocks."""
        last, stages = self.blocks.end - 1, self.kernel.tile.num_stages
        if cutlass.const_expr(stages == 1):
            if self.blocks.begin < self.blocks.end:
                self.find_pages(last)
                self.load_k.start(self.blocks.block(last), 0, False)
            cute.arch.cp_async_commit_group()
        else:
            for ahead in cutlass.range_constexpr(stages - 1):
                if last - ahead >= self.blocks.begin:
                    stage = self.stage(last - ahead)
                    self.find_pages(last - ahead)
                    self.load_k.start(self.blocks.block(last - ahead), stage, False)
                    self.load_v.start(self.blocks.block(last - ahead), stage, False)
                cute.arch.cp_async_commit_group()
            if cutlass.const_expr(self.kernel.traits.paged):
                if last - (stages - 1) >= self.blocks.begin:
                    self.find_pages(last - (stages - 1))

    @property
    def all_but_first_whole(self) -> bool:
        """True if only the first block visited needs a bounds check; False for blocks in the order of a list."""
        return not self.kernel.epilogues.visits_lists

    def find_pages(self, block: Int32) -> None:
        """In a paged cache, read the page numbers of ``block``, which is loaded next."""
        if self.kernel.traits.paged:
            block = self.blocks.ahead(block)
            self.load_k.find(block)
            if self.load_v.pages is not self.load_k.pages:
                self.load_v.find(block)

    @cute.jit
    def steps(self, block: Int32, begin: Int32, masked: Constexpr) -> Int32:
        """Run the steps of key blocks ``block`` down to ``begin``; return the next block."""
        while block >= begin:
            if cutlass.const_expr(self.kernel.tile.warps_n > 1):
                SharedRows(self).step(block, masked)
            elif cutlass.const_expr(self.kernel.tile.num_stages == 1):
                self.step_one_stage(block, masked)
            else:
                self.step_pipelined(block, masked)
            block -= 1
        return block

    @cute.jit
    def step_one_stage(self, block: Int32, masked: Constexpr) -> None:
        """Process one key block; each load overlaps the other operand's product."""
        cute.arch.cp_async_wait_group(0)
        self.group.barrier()
        self.load_v.start(self.blocks.block(block), 0, not masked)
        cute.arch.cp_async_commit_group()
        acc_s, loaded = self.scores(block, Int32(0))
        cute.arch.cp_async_wait_group(0)
        self.group.barrier()
        if block > self.blocks.begin:
            self.find_pages(block - 1)
            self.load_k.start(self.blocks.block(block - 1), 0, self.all_but_first_whole)
        cute.arch.cp_async_commit_group()
        self.accumulate(block, acc_s, loaded, Int32(0), masked)

    @cute.jit
    def step_pipelined(self, block: Int32, masked: Constexpr) -> None:
        """Process one key block while the loads of the next num_stages - 1 blocks are in flight."""
        stages: Constexpr = self.kernel.tile.num_stages
        stage = self.stage(block)
        cute.arch.cp_async_wait_group(stages - 2)
        self.group.barrier()
        ahead = block - (stages - 1)
        if ahead >= self.blocks.begin:
            self.load_k.start(self.blocks.block(ahead), self.stage(ahead), self.all_but_first_whole)
            self.load_v.start(self.blocks.block(ahead), self.stage(ahead), self.all_but_first_whole)
            self.find_pages(ahead - 1)
        cute.arch.cp_async_commit_group()
        acc_s, loaded = self.scores(block, stage)
        # Recomputed, or the stage would stay in a register through the softmax.
        stage = self.stage(optimization_barrier(block) + stages)
        self.accumulate(block, acc_s, loaded, stage, masked)

    def stage(self, block: Int32) -> Int32:
        return Int32(Uint32(block) % Uint32(self.kernel.tile.num_stages))

    @cute.jit
    def scores(self, block: Int32, stage: Int32):
        """Issue the epilogues' loads from global memory, then compute S = Q K^T; return S and the loaded values."""
        op, tile = self.operands, self.kernel.tile
        acc_s = cute.make_rmem_tensor(
            op.tiled_mma.get_slice(0).partition_shape_C((tile.tile_m, tile.group_keys)), Float32
        )
        acc_s.fill(0.0)
        loaded = ()
        if cutlass.const_expr(self.kernel.epilogues.modifiers):
            loaded = self.kernel.epilogues.load(
                self.state, self.score_tile(block, acc_s, rematerialize(self.thread))
            )
        if cutlass.const_expr(tile.q_in_regs):
            gemm_rs(op.tiled_mma, acc_s, op.q.terms, op.k, stage)
        else:
            self.kernel.products.qk(op, acc_s, stage, self.kernel.unroll)
        return acc_s, loaded

    def score_tile(self, block: Int32, acc_s: cute.Tensor, thread: Int32) -> ScoreTile:
        """``acc_s`` as a score tile, which knows its query and key indices."""
        tile = self.kernel.tile
        score_map = self.score_map(thread)
        part = self.group.part_of(self.blocks.block(block))
        return score_map.tile(acc_s, self.row0, part * tile.group_keys)

    def score_map(self, thread: Int32) -> ScoreMap:
        """The map of the scores that a thread holds."""
        tile = self.kernel.tile
        return ScoreMap.make(
            self.operands.tiled_mma, tile.tile_m, tile.group_keys, thread, heads=tile.pack_heads
        )

    def by_rows(self, p: cute.Tensor) -> cute.Tensor:
        """View of P, which has the layout of the scores' accumulator, as (rows, cols)."""
        tile = self.kernel.tile
        modes = layouts.row_col_modes(self.operands.tiled_mma, tile.tile_m, tile.group_keys)
        return layouts.row_col_view(p, modes)

    def stored_softmax(self, thread: Int32) -> OnlineSoftmax:
        """The online softmax with the storage of its statistics between steps: registers or shared memory."""
        if not self.kernel.tile.stats_in_smem:
            return self.softmax
        stats = self.kernel.row_stats(self.shared.stats, cute.size(self.acc_o_rows, mode=[0]), thread)
        return dataclasses.replace(self.softmax, row_max=stats[None, 0], row_sum=stats[None, 1])

    @cute.jit
    def accumulate(
        self, block: Int32, acc_s: cute.Tensor, loaded: tuple, stage: Int32, masked: Constexpr
    ) -> None:
        """Turn scores into probabilities, and add P V to O."""
        chain, op = self.kernel.epilogues, self.operands
        # Otherwise coordinates and addresses stay in registers from step to step.
        thread = rematerialize(self.thread)
        scores = self.score_tile(block, acc_s, thread)
        partial = self.blocks.visit(block)[1] if cutlass.const_expr(masked) else None
        chain.forward(self.state, scores, loaded, masked, partial)
        stored = self.stored_softmax(thread)
        softmax = stored.load_stats()
        if cutlass.const_expr(self.kernel.products.scales_output):
            factors = cute.make_rmem_tensor(cute.make_layout(cute.size(scores.acc, mode=[0])), Float32)
            softmax.advance(scores.acc, factors, masked)
            stored.store_stats(softmax)
            chain.drop(self.state, scores, scores.acc)
            self.kernel.products.pv(op, self.acc_o, acc_s, stage, factors)
        else:
            softmax.step(scores.acc, self.acc_o_rows, masked)
            stored.store_stats(softmax)
            p = self.p_in_16_bits(scores, acc_s)
            gemm_rs(op.tiled_mma, self.acc_o, (layouts.as_operand_a(p),), op.v, stage)

    @cute.jit
    def p_in_16_bits(self, scores: ScoreTile, acc_s: cute.Tensor) -> cute.Tensor:
        """P, with dropout, in the operands' dtype and in the accumulator's layout."""
        p = cute.make_rmem_tensor_like(acc_s, self.kernel.dtype)
        p.store(acc_s.load().to(self.kernel.dtype))
        self.kernel.epilogues.drop(self.state, scores, self.by_rows(p))
        return p

    @cute.jit
    def merge_groups(self) -> None:
        """Merge row statistics and O of all groups, in order, into those of the first group."""
        group, softmax = self.group, self.softmax
        cute.arch.barrier()  # K and V have been read: their memory is free
        if group.index > 0:
            self.group_results(group.index - 1).store(softmax, self.acc_o)
        cute.arch.barrier()
        if group.index == 0:
            for other in cutlass.range(group.count - 1, unroll=1):  # unrolled, its loads would spill
                self.group_results(other).merge_into(softmax, self.acc_o, self.acc_o_rows)

    def group_results(self, other: Int32) -> GroupResults:
        """The results, in shared memory, of this thread's counterpart in group ``other`` + 1."""
        rows, threads = cute.size(self.acc_o_rows, mode=[0]), self.kernel.tile.group_threads
        start = self.shared.merge + other * threads * (cute.size(self.acc_o) + 2 * rows)
        return GroupResults.make(start, cute.size(self.acc_o), rows, self.thread, threads)

    @cute.jit
    def read_queries(self, later: Constexpr) -> None:
        """Wait for Q, after which ``later`` loads were committed, and read Q if it is kept in registers."""
        cute.arch.cp_async_wait_group(later)
        cute.arch.barrier()
        if cutlass.const_expr(self.kernel.tile.q_in_regs):
            self.operands.q.load_all()
