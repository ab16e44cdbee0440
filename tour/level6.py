"""Level 6: warp specialisation.

What level 5 wasted: a CTA left the tensor cores idle during every softmax, and every step began with a barrier of all
warps, from which the one that loads learned that all had read the block before.

Here warps have roles. One warp, the producer, does nothing but start TMA loads: as many blocks ahead as there are
stages. Two warpgroups, the consumers, take 64 of the tile's 128 queries each. No barrier joins them, so that one may
multiply while the other exponentiates. ``setmaxnreg`` moves registers from the producer's warpgroup, whose threads keep
24, to the consumers, whose threads get 240.

Roles meet in pipelines (``cute_attn.device.pipeline``): each stage has two mbarriers. Full: TMA has written the bytes.
Empty: each consumer warp has arrived, once its products had read them. Use n of a pipeline is in stage n mod stages,
and both sides wait by the parity of n div stages: the producer for the opposite one, so that its first waits pass.

    producer                          consumers
    acquire K[n]: wait empty, expect  wait full K[n]; S = Q K[n]^T
    load K[n]                         release K[n]: arrive at empty
    acquire V[n]; load V[n]           softmax
                                      wait full V[n]; O += P V[n]; release V[n]

K and V have pipelines of their own: Q K^T starts when K is there. By itself all this gains little: two CTAs of level 5
that share a multiprocessor overlap as the two consumers do. But only consumers of one CTA can agree, as in level 7.

What to look at: two roles in one kernel are two loops side by side in the machine code; USETMAXREG. Any lengths; 128
queries, 128 keys at a time.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Constexpr, Float32, Int32, Int64, cute, memory
from cutlass.cute.nvgpu import cpasync, warpgroup

import layouts
from cute_attn.compiler.registry import register
from cute_attn.device.math import LOG2_E, convert_to_16_bits
from cute_attn.device.pipeline import WARPGROUP, Accessed, Pipeline
from cute_attn.epilogues.softmax import OnlineSoftmax
from tour.common import Tiled, TourTile

GROUPS = 2  # consumer warpgroups


@dataclass(frozen=True)
class Specialized(Tiled):
    """A producer warp and two consumer warpgroups; 128 queries."""

    TILE = TourTile(tile_m=128, tile_n=128, num_warps=8, num_stages=2)

    def smem_layout(self, rows: int, stages: int | None = None) -> cute.ComposedLayout:
        """(rows, head_dim[, stages]) in shared memory, in a swizzle of TMA and wgmma."""
        return layouts.wgmma_smem_layout(rows, self.traits.head_dim, BFloat16, stages=stages)

    def mma_qk(self) -> cute.TiledMma:
        """S = Q K^T: both operands from shared memory."""
        return layouts.tiled_mma_sm90(BFloat16, self.tile.tile_m, self.tile.tile_n, warpgroups=GROUPS)

    def mma_pv(self) -> cute.TiledMma:
        """O += P V: P from registers, V with its dims contiguous."""
        shape = (self.tile.tile_m, self.traits.head_dim)
        return layouts.tiled_mma_sm90(BFloat16, *shape, warpgroups=GROUPS, a_source="rmem", b_major="mn")

    def tma(self, x: cute.Tensor, rows: int) -> tuple:
        """TMA loads of boxes (rows, head_dim) of x, and coordinates (seqlen, head_dim, nheads, batch)."""
        view = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))
        box, op = (rows, self.traits.head_dim), cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(op, view, self.smem_layout(rows), box)

    def launch(self, mQ, mK, mV, mO, mLSE, scale: Float32, multiprocessors, stream):
        tile_m, tile_n, _, _ = self.sizes
        tmas = *self.tma(mQ, tile_m), *self.tma(mK, tile_n), *self.tma(mV, tile_n)
        ctas = cute.ceil_div(mQ.shape[1], tile_m) * mQ.shape[2] * mQ.shape[0]
        self.kernel(*tmas, mO, mLSE, scale).launch(
            grid=[ctas, 1, 1], block=[WARPGROUP * (1 + GROUPS), 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, tma_q, mQ, tma_k, mK, tma_v, mV, mO, mLSE, scale: Float32):
        index, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile_m, tile_n, d, stages = self.sizes
        seqlen_q, seqlen_k, nheads = Int32(mQ.shape[0]), Int32(mK.shape[0]), mQ.shape[2]
        m_blocks = cute.ceil_div(seqlen_q, tile_m)
        m_block, head, batch = index % m_blocks, index // m_blocks % nheads, index // m_blocks // nheads
        row0, shift, head_kv = m_block * tile_m, seqlen_k - seqlen_q, head // (nheads // mK.shape[2])
        n_blocks, full = cute.ceil_div(seqlen_k, tile_n), seqlen_k // tile_n  # full: those without a mask
        if cutlass.const_expr(self.traits.causal):
            n_blocks = cutlass.max(cutlass.min(n_blocks, cute.ceil_div(row0 + tile_m + shift, tile_n)), 0)
            full = cutlass.max(cutlass.min(full, (row0 + shift + 1) // tile_n), 0)

        allocator = memory.SmemAllocator()
        sQ, sK, sV = (
            allocator.allocate_tensor(BFloat16, layout.outer, 1024, layout.inner)
            for layout in map(self.smem_layout, (tile_m, tile_n, tile_n), (1, stages, stages))
        )
        barriers = allocator.allocate_array(Int64, 2 + 4 * stages)
        q = Pipeline(barriers, 1, 2 * tile_m * d)
        k = Pipeline(barriers + 2, stages, 2 * tile_n * d)
        v = Pipeline(barriers + 2 + 2 * stages, stages, 2 * tile_n * d)
        if warp == 0:
            with cute.arch.elect_one():
                for pipeline in (q, k, v):
                    pipeline.init(4 * GROUPS)  # a stage is empty when each consumer warp has released it
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:  # the producer; the other three warps of its warpgroup only give up registers
                gQ = cute.local_tile(mQ[None, None, head, batch], (tile_m, d), (None, 0))
                gK, gV = (
                    cute.local_tile(x[None, None, head_kv, batch], (tile_n, d), (None, 0)) for x in (mK, mV)
                )
                self.load(tma_q, gQ, m_block, sQ, q, Int32(0))
                # It runs ahead until no stage is empty; use n of a pipeline is block n.
                for n in cutlass.range(n_blocks, unroll=1):
                    self.load(tma_k, gK, n, sK, k, n)
                    self.load(tma_v, gV, n, sV, v, n)
        else:
            cute.arch.setmaxregister_increase(240)
            thread = cute.arch.thread_idx()[0] - WARPGROUP
            group = cute.arch.make_warp_uniform(thread // WARPGROUP) * WARPGROUP
            mine_qk, mine_pv = self.mma_qk().get_slice(group), self.mma_pv().get_slice(group)
            # Operands in shared memory are descriptors; no registers are taken.
            tSrQ = self.mma_qk().make_fragment_A(mine_qk.partition_A(sQ))[None, None, None, 0]
            tSrK = self.mma_qk().make_fragment_B(mine_qk.partition_B(sK))
            tOrV = self.mma_pv().make_fragment_B(mine_pv.partition_B(layouts.transposed(sV)))
            acc_S = cute.make_rmem_tensor(mine_qk.partition_shape_C((tile_m, tile_n)), Float32)
            acc_O = cute.make_rmem_tensor(mine_pv.partition_shape_C((tile_m, d)), Float32)
            P = cute.make_rmem_tensor_like(acc_S, BFloat16)
            # The thread's scores: rows[r] and cols[c] of modes after its first row and column; likewise of O.
            modes = layouts.row_col_modes(self.mma_qk(), tile_m, tile_n)
            modes_o = layouts.row_col_modes(self.mma_pv(), tile_m, d)
            row, col = layouts.thread_row_col(self.mma_qk(), tile_m, tile_n, thread)
            S, O = layouts.row_col_view(acc_S, modes), layouts.row_col_view(acc_O, modes_o)
            scale_log2 = scale * LOG2_E if self.SCORE_MOD is None else Float32(LOG2_E)  # modified: scaled
            softmax = OnlineSoftmax.make(2, scale_log2, self.SCORE_MOD is not None)
            lse = cute.make_rmem_tensor(2, Float32)
            acc_O.fill(0.0)

            q.consumer_wait(Int32(0))
            for masked in (False, True):
                begin, end = (full, n_blocks) if masked else (Int32(0), full)
                for n in cutlass.range(begin, end, unroll=1):
                    k.consumer_wait(n)  # until its bytes are there
                    self.start_gemm(self.mma_qk(), acc_S, tSrQ, tSrK[None, None, None, k.stage(n)], False)
                    warpgroup.wait_group(0)
                    # Only now: the product reads the stage until it is complete.
                    k.consumer_release(n, Accessed.BY_WGMMA)

                    self.modify(S, modes, row0 + row, n * tile_n + col, shift, seqlen_k, head, scale, masked)
                    softmax.step(S, O, masked)
                    convert_to_16_bits(acc_S, P)

                    # V had the softmax's time to arrive.
                    v.consumer_wait(n)
                    tOrP = layouts.as_operand_a(P)
                    self.start_gemm(self.mma_pv(), acc_O, tOrP, tOrV[None, None, None, v.stage(n)], True)
                    warpgroup.wait_group(0)
                    v.consumer_release(n, Accessed.BY_WGMMA)

            softmax.normalize(O, lse, Float32(1.0))
            for r in cutlass.range_constexpr(len(modes.rows)):
                query = row0 + row + modes.rows[r]
                if query < seqlen_q:
                    for c in cutlass.range_constexpr(len(modes_o.cols)):
                        mO[batch, query, head, col + modes_o.cols[c]] = O[r, c].to(BFloat16)
                    if col == 0:
                        mLSE[batch, head, query] = lse[r]

    def load(
        self, tma, tiles: cute.Tensor, tile: Int32, s: cute.Tensor, pipeline: Pipeline, n: Int32
    ) -> None:
        """By the producer: wait until the stage of use n is empty, and start loading a tile into it."""
        pipeline.producer_acquire(n)
        target, source = (cute.group_modes(x, 0, 2) for x in (s, tiles))
        target, source = cpasync.tma_partition(tma, 0, cute.make_layout(1), target, source)
        cute.copy(
            tma, source[None, tile], target[None, pipeline.stage(n)], tma_bar_ptr=pipeline.full_barrier(n)
        )

    def start_gemm(self, mma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: bool) -> None:
        """Issue acc (+)= A B^T, 16 of K at a time, as one group."""
        warpgroup.fence()
        for k in range(cute.size(a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    @cute.jit
    def modify(
        self, S, modes, row: Int32, col: Int32, shift, seqlen_k, head, scale, masked: Constexpr
    ) -> None:
        """SCORE_MOD, and -inf for keys beyond the sequence or after the query's own; row, col: of S[0, 0]."""
        for r in cutlass.range_constexpr(len(modes.rows)):
            query = row + modes.rows[r]
            end = cutlass.min(seqlen_k, query + shift + 1) if self.traits.causal else seqlen_k
            for c in cutlass.range_constexpr(len(modes.cols)):
                key = col + modes.cols[c]
                if cutlass.const_expr(self.SCORE_MOD is not None):
                    S[r, c] = self.SCORE_MOD(S[r, c] * scale, query, key, head)
                if cutlass.const_expr(masked):
                    S[r, c] = S[r, c] if key < end else -Float32.inf


register(Specialized, variant="tour6", arch="sm90")
