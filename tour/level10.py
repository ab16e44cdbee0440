"""Level 10: the backward by TMA and wgmma.

What level 9 wasted: each product reads its operands again, by 108 ldmatrix for 160 mma.sync at head dim 128, and all
threads wait for each block of Q and dO.

The five products are those of level 9. wgmma reads both of its operands from shared memory, and a transposed one as it
lies: an operand's descriptor says which of its two dimensions is contiguous (``a_major``, ``b_major``). So one tile of
K serves S, and transposed dQ; Q serves S, and transposed dK; dO serves dP, and transposed dV. Only P and dS are stored
by threads, and read by columns for dV and dK.

Two warpgroups share 64 queries and 128 keys, and each product is divided where its rows or columns allow:

    S, dP    64 queries x 128 keys     64 keys each
    dV, dK   128 keys x head_dim       64 keys each
    dQ       64 queries x head_dim     half of head_dim each

So each warpgroup reads P and dS of both: two barriers for each step. Between the stores of P and dS and the products
stands a fence: threads write by the generic proxy, wgmma and TMA read by the asynchronous one, and a barrier alone does
not order the two.

TMA loads a block of Q and dO while the one before it is computed, as in level 5. dQ leaves by RED of four floats each.

What to look at: HGMMA with both operands in shared memory, STSM, and that nothing else is loaded by threads but LSE and
D. The shipped kernel has a producer warp, issues products of the next block early and, at head dim 64, adds dQ by bulk
copies.

Any lengths. The additions to dQ come in any order, so its last bits differ from call to call.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute, memory
from cutlass.cute.nvgpu import cpasync, warpgroup

import layouts
from cute_attn.compiler.registry import register
from cute_attn.device.gemm import operand_layout, start_gemm
from cute_attn.kernels.base import StepContent, wgmma_count
from cute_attn.kernels.dq_order import accumulator_rows, mma_dq
from cute_attn.outputs.accumulate import add_fragment
from cute_attn.tiles import BackwardSm90Tile
from tour.common import BackwardLevel

STAGES = 2  # of Q and dO


@dataclass(frozen=True)
class BackwardWgmma(BackwardLevel):
    """Two warpgroups and 128 keys; 64 queries at a time."""

    TILE = BackwardSm90Tile(tile_m=64, tile_n=128, p_in_smem=True, num_stages_ds=1)

    def smem_layout(self, rows: int, cols: int, stages: int = 1) -> cute.ComposedLayout:
        """(rows, cols, stages) in shared memory: a range of columns for each warpgroup is whole swizzle atoms."""
        return operand_layout(rows, cols, BFloat16, stages=stages, parts=2)

    def step_content(self) -> StepContent:
        """What a step of the loop over query blocks holds, by which ``verdict`` finds it in the machine code."""
        tile_m, tile_n, d = self.tile.tile_m, self.tile.tile_n, self.traits.head_dim
        products = (tile_m, tile_n, d, 2, 2), (tile_n, d, tile_m, 2), (tile_m, d, tile_n, 2, 2)
        scores, dkv, dq = (wgmma_count(*product) for product in products)
        elements = tile_m * tile_n // 256
        return StepContent(2 * scores + 2 * dkv + dq, elements, elements, 8, async_bytes=4 * tile_m * d)

    def mma_scores(self) -> cute.TiledMma:
        """S = Q K^T and dP = dO V^T, (queries, keys)."""
        shape = self.tile.tile_m, self.tile.tile_n
        return layouts.tiled_mma_sm90(BFloat16, *shape, warpgroups=2, warpgroups_n=2)

    def mma_dkv(self) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q, (keys, head_dim): in both operands the queries are not contiguous."""
        shape = self.tile.tile_n, self.traits.head_dim
        return layouts.tiled_mma_sm90(BFloat16, *shape, warpgroups=2, a_major="mn", b_major="mn")

    def mma_dq(self) -> cute.TiledMma:
        """dQ = dS K, (queries, head_dim), in the order in which the convert reads it."""
        return mma_dq(self.traits, self.tile, a_major="k", b_major="mn")

    def tma(self, x: cute.Tensor, rows: int) -> tuple:
        """TMA loads of boxes (rows, head_dim) of x, and coordinates (seqlen, head_dim, nheads, batch)."""
        view = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))
        box, op = (rows, self.traits.head_dim), cpasync.CopyBulkTensorTileG2SOp()
        layout = operand_layout(*box, BFloat16, parts=2)
        return cpasync.make_tiled_tma_atom(op, view, layout, box)

    def launch(self, mQ, mK, mV, mDO, mLSE, mMinusD, mDQ, mDK, mDV, scale: Float32, stream):
        tile_m, tile_n = self.tile.tile_m, self.tile.tile_n
        tmas = *self.tma(mQ, tile_m), *self.tma(mDO, tile_m), *self.tma(mK, tile_n), *self.tma(mV, tile_n)
        ctas = cute.ceil_div(mK.shape[1], tile_n) * mDK.shape[2] * mK.shape[0]
        self.kernel(*tmas, mLSE, mMinusD, mDQ, mDK, mDV, scale).launch(
            grid=[ctas, 1, 1], block=[256, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self, tma_q, mQ, tma_do, mDO, tma_k, mK, tma_v, mV, mLSE, mMinusD, mDQ, mDK, mDV, scale: Float32
    ):
        thread, index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile_m, tile_n, d = self.tile.tile_m, self.tile.tile_n, self.traits.head_dim
        seqlen_q, seqlen_k = Int32(mQ.shape[0]), Int32(mK.shape[0])
        n_blocks = cute.ceil_div(seqlen_k, tile_n)
        n_block, head_dkv, head_kv, batch = self.key_tile(index, n_blocks, mK, mDK)
        first, end, splits = self.query_heads(head_dkv, mQ, mK, mDK)
        heads = cute.ceil_div(end - first, splits)
        key0, shift = n_block * tile_n, seqlen_k - seqlen_q
        m_begin, m_blocks = Int32(0), cute.ceil_div(seqlen_q, tile_m)
        if cutlass.const_expr(self.traits.causal):
            m_begin = cutlass.max(key0 - shift, 0) // tile_m  # queries before see none of these keys
        visited = cutlass.max(m_blocks - m_begin, 0)
        steps = heads * visited  # one loop over the query blocks of all heads: loads cross from head to head

        allocator = memory.SmemAllocator()
        sK, sV, sQ, sDO, sP, sDS = (
            allocator.allocate_tensor(BFloat16, layout.outer, 1024, layout.inner)
            for layout in (
                *2 * (self.smem_layout(tile_n, d),),
                *2 * (self.smem_layout(tile_m, d, STAGES),),
                *2 * (self.smem_layout(tile_m, tile_n),),
            )
        )
        barriers = allocator.allocate_array(Int64, STAGES + 1)  # of the stages, and of K with V
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES + 1):
                    cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        queries = ((tma_q, mQ, sQ), (tma_do, mDO, sDO))
        if warp == 0:
            keys = ((tma_k, mK, sK), (tma_v, mV, sV))
            self.load(keys, head_kv, batch, n_block, 0, barriers + STAGES, tile_n)
            if steps > 0:
                self.load(queries, first, batch, m_begin, 0, barriers, tile_m)

        scores, dkv, dq = self.mma_scores(), self.mma_dkv(), self.mma_dq()
        mine, mine_dkv, mine_dq = (mma.get_slice(thread // 128 * 128) for mma in (scores, dkv, dq))
        # Descriptors of operands in shared memory; the last mode is the stage.
        q, do = (scores.make_fragment_A(mine.partition_A(s)) for s in (sQ, sDO))
        k, v = (scores.make_fragment_B(mine.partition_B(s)) for s in (sK, sV))
        p_t, ds_t = (dkv.make_fragment_A(mine_dkv.partition_A(layouts.transposed(s))) for s in (sP, sDS))
        do_t, q_t = (dkv.make_fragment_B(mine_dkv.partition_B(layouts.transposed(s))) for s in (sDO, sQ))
        ds = dq.make_fragment_A(mine_dq.partition_A(sDS))
        k_t = dq.make_fragment_B(mine_dq.partition_B(layouts.transposed(sK)))
        acc_S, acc_dP = (
            cute.make_rmem_tensor(mine.partition_shape_C((tile_m, tile_n)), Float32) for _ in range(2)
        )
        acc_dK, acc_dV = (
            cute.make_rmem_tensor(mine_dkv.partition_shape_C((tile_n, d)), Float32) for _ in range(2)
        )
        acc_dQ = cute.make_rmem_tensor(mine_dq.partition_shape_C((tile_m, d)), Float32)
        acc_dK.fill(0.0)
        acc_dV.fill(0.0)
        modes = layouts.row_col_modes(scores, tile_m, tile_n)
        row, col = layouts.thread_row_col(scores, tile_m, tile_n, thread)
        S, dP = layouts.row_col_view(acc_S, modes), layouts.row_col_view(acc_dP, modes)

        cute.arch.mbarrier_wait(barriers + STAGES, 0)
        for step in cutlass.range(steps, unroll=1):
            cute.arch.sync_threads()  # products of all warps have read the other stage, P and dS
            head, m_block = first + step // visited * splits, m_begin + step % visited
            stage, ahead = step % STAGES, step + 1
            if warp == 0 and ahead < steps:
                other = ahead % STAGES
                where = (first + ahead // visited * splits, batch, m_begin + ahead % visited)
                self.load(queries, *where, other, barriers + other, tile_m)
            cute.arch.mbarrier_wait(barriers + stage, step // STAGES % 2)
            at = (None, None, None, stage)
            start_gemm(self.mma_scores(), acc_S, q[at], k[None, None, None, 0], False)
            start_gemm(self.mma_scores(), acc_dP, do[at], v[None, None, None, 0], False)
            row0 = m_block * tile_m + row
            warpgroup.wait_group(1)  # S is there, dP may still run
            self.probabilities(S, modes, row0, key0 + col, shift, seqlen_k, mLSE[batch, head, None], scale)
            self.store(acc_S, sP, thread)
            warpgroup.wait_group(0)
            for r in cutlass.range_constexpr(len(modes.rows)):
                minus_d = mMinusD[batch, head, row0 + modes.rows[r]]
                for c in cutlass.range_constexpr(len(modes.cols)):
                    dP[r, c] = S[r, c] * (dP[r, c] + minus_d)
            self.store(acc_dP, sDS, thread)
            cute.arch.fence_proxy("async.shared", space="cta")  # before wgmma reads what threads wrote
            cute.arch.sync_threads()
            start_gemm(self.mma_dkv(), acc_dV, p_t[None, None, None, 0], do_t[at], True)
            start_gemm(self.mma_dq(), acc_dQ, ds[None, None, None, 0], k_t[None, None, None, 0], False)
            start_gemm(self.mma_dkv(), acc_dK, ds_t[None, None, None, 0], q_t[at], True)
            warpgroup.wait_group(0)
            rows = accumulator_rows(mDQ, Int32(0), batch, head, m_block * tile_m, d, False)
            add_fragment(acc_dQ, rows.iterator, thread, self.tile.dq_vector)
        self.write(acc_dK, dkv, mDK[batch, None, head_dkv, None], key0, scale, thread)
        self.write(acc_dV, dkv, mDV[batch, None, head_dkv, None], key0, Float32(1.0), thread)

    def load(
        self, what: tuple, head: Int32, batch: Int32, block: Int32, stage, barrier: cute.Pointer, rows: int
    ) -> None:
        """By one warp: start loading a block of rows of two tensors; the barrier waits for their bytes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * 2 * rows * self.traits.head_dim)
        for tma, x, s in what:
            tiles = cute.local_tile(x[None, None, head, batch], (rows, self.traits.head_dim), (None, 0))
            target, source = (cute.group_modes(one, 0, 2) for one in (s, tiles))
            target, source = cpasync.tma_partition(tma, 0, cute.make_layout(1), target, source)
            cute.copy(tma, source[None, block], target[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def store(self, acc: cute.Tensor, s: cute.Tensor, thread: Int32) -> None:
        """A tile of P or dS, rounded to bf16, to shared memory."""
        rounded = cute.make_rmem_tensor_like(acc, BFloat16)
        rounded.store(acc.load().to(BFloat16))
        copy = layouts.store_copy_c(self.mma_scores(), BFloat16, "sm90")
        mine = copy.get_slice(thread)
        cute.copy(copy, mine.retile(rounded), mine.partition_D(s[None, None, 0]))


register(BackwardWgmma, variant="tour10", op="backward", arch="sm90")
