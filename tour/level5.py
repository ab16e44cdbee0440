"""Level 5: TMA and wgmma.

What level 4 wasted: every thread computed addresses and issued copies, each warp read all of K and V from shared memory
into registers of its own, and mma.sync reaches little more than half of the rate of Hopper's tensor cores.

TMA copies a box of a tensor with one instruction of one thread. The host describes the tensor (address, sizes, strides,
swizzle), the kernel names coordinates; rows beyond the tensor arrive as zeros. An mbarrier counts the bytes: a thread
announces how many to expect, others wait for the barrier's phase. Phases alternate: use n of a stage has parity n % 2.

wgmma multiplies 64 rows of a warpgroup (four warps) with B straight from shared memory, in one of four swizzles
(``layouts.wgmma_smem_layout``), and A from there or from registers. It is asynchronous: ``fence`` before it,
``commit_group`` and ``wait_group`` after it, and in between its registers must not be accessed.

What to look at: few UTMALDG and HGMMA, no LDSM. A step is still one thing after another: during a CTA's softmax only
other CTAs use the tensor cores. Any lengths; 64 queries and keys at a time.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Constexpr, Float32, Int32, Int64, cute, memory
from cutlass.cute.nvgpu import cpasync, warpgroup

import layouts
from cute_attn.compiler.registry import register
from cute_attn.device.math import LN_2, LOG2_E, add, convert_to_16_bits, exp2, fmax, log2, quad_reduce
from tour.common import Tiled, TourTile


@dataclass(frozen=True)
class OneWarpgroup(Tiled):
    """One warpgroup, 64 queries: it loads, multiplies and exponentiates."""

    TILE = TourTile(tile_m=64, tile_n=64, num_warps=4, num_stages=2)

    def smem_layout(self, rows: int, stages: int | None = None) -> cute.ComposedLayout:
        """(rows, head_dim[, stages]) in shared memory, in a swizzle of TMA and wgmma."""
        return layouts.wgmma_smem_layout(rows, self.traits.head_dim, BFloat16, stages=stages)

    def mma_qk(self) -> cute.TiledMma:
        """S = Q K^T: both operands from shared memory."""
        return layouts.tiled_mma_sm90(BFloat16, self.tile.tile_m, self.tile.tile_n, warpgroups=1)

    def mma_pv(self) -> cute.TiledMma:
        """O += P V: P from registers, V with its dims contiguous."""
        shape = (self.tile.tile_m, self.traits.head_dim)
        return layouts.tiled_mma_sm90(BFloat16, *shape, warpgroups=1, a_source="rmem", b_major="mn")

    def tma(self, x: cute.Tensor, rows: int) -> tuple:
        """TMA loads of boxes (rows, head_dim) of x, and coordinates (seqlen, head_dim, nheads, batch)."""
        view = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))
        box, op = (rows, self.traits.head_dim), cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(op, view, self.smem_layout(rows), box)

    def launch(self, mQ, mK, mV, mO, mLSE, scale: Float32, multiprocessors, stream):
        tile_m, tile_n, _, _ = self.sizes
        tmas = *self.tma(mQ, tile_m), *self.tma(mK, tile_n), *self.tma(mV, tile_n)
        ctas = cute.ceil_div(mQ.shape[1], tile_m) * mQ.shape[2] * mQ.shape[0]
        self.kernel(*tmas, mO, mLSE, scale).launch(grid=[ctas, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tma_q, mQ, tma_k, mK, tma_v, mV, mO, mLSE, scale: Float32):
        thread, index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
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
        barriers = allocator.allocate_array(Int64, stages + 1)  # of the stages, and of Q
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(stages + 1):
                    cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        gQ = cute.local_tile(mQ[None, None, head, batch], (tile_m, d), (None, 0))  # (tile_m, d, blocks)
        gK, gV = (cute.local_tile(x[None, None, head_kv, batch], (tile_n, d), (None, 0)) for x in (mK, mV))
        kv = ((tma_k, gK, sK), (tma_v, gV, sV))
        if warp == 0:
            self.load(((tma_q, gQ, sQ),), m_block, 0, barriers + stages, tile_m)
            for block in cutlass.range(cutlass.min(n_blocks, stages - 1), unroll=1):
                self.load(kv, block, block, barriers + block, 2 * tile_n)

        qk, pv = self.mma_qk(), self.mma_pv()
        mine_qk, mine_pv = qk.get_slice(0), pv.get_slice(0)  # of the whole warpgroup
        tSrQ = qk.make_fragment_A(mine_qk.partition_A(sQ))[None, None, None, 0]  # descriptors, not registers
        tSrK = qk.make_fragment_B(mine_qk.partition_B(sK))
        tOrV = pv.make_fragment_B(mine_pv.partition_B(layouts.transposed(sV)))
        acc_S = cute.make_rmem_tensor(mine_qk.partition_shape_C((tile_m, tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(mine_pv.partition_shape_C((tile_m, d)), Float32)
        P = cute.make_rmem_tensor_like(acc_S, BFloat16)
        # The thread's scores: rows[r] and cols[c] of modes after its first row and column; likewise of O.
        modes, modes_o = layouts.row_col_modes(qk, tile_m, tile_n), layouts.row_col_modes(pv, tile_m, d)
        row, col = layouts.thread_row_col(qk, tile_m, tile_n, thread)
        S, O = layouts.row_col_view(acc_S, modes), layouts.row_col_view(acc_O, modes_o)
        row_max, row_sum = (cute.make_rmem_tensor(len(modes.rows), Float32) for _ in range(2))
        acc_O.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)

        cute.arch.mbarrier_wait(barriers + stages, 0)  # Q: its barrier is used once, so the parity is 0
        for masked in (False, True):
            begin, end = (full, n_blocks) if masked else (Int32(0), full)
            for block in cutlass.range(begin, end, unroll=1):
                # All warps have read the block before; TMA may write its stage again.
                cute.arch.sync_threads()
                ahead, stage = block + stages - 1, block % stages
                if warp == 0 and ahead < n_blocks:
                    self.load(kv, ahead, ahead % stages, barriers + ahead % stages, 2 * tile_n)

                # A barrier's phase ends each time that its bytes have arrived. This is the stage's use number
                # block // stages, and a use waits for the end of a phase of its own parity.
                cute.arch.mbarrier_wait(barriers + stage, block // stages % 2)
                self.start_gemm(self.mma_qk(), acc_S, tSrQ, tSrK[None, None, None, stage], False)
                warpgroup.wait_group(0)  # S is complete
                self.modify(S, modes, row0 + row, block * tile_n + col, shift, seqlen_k, head, scale, masked)
                self.softmax(S, O, row_max, row_sum, self.scale_log2(scale))
                convert_to_16_bits(acc_S, P)

                # P is read from registers, and V from the stage: neither may change before the wait.
                tOrP = layouts.as_operand_a(P)
                self.start_gemm(self.mma_pv(), acc_O, tOrP, tOrV[None, None, None, stage], True)
                warpgroup.wait_group(0)

        for r in cutlass.range_constexpr(len(modes.rows)):
            query = row0 + row + modes.rows[r]
            factor, lse = self.finish(row_max[r], row_sum[r], self.scale_log2(scale))
            if query < seqlen_q:
                for c in cutlass.range_constexpr(len(modes_o.cols)):
                    mO[batch, query, head, col + modes_o.cols[c]] = (O[r, c] * factor).to(BFloat16)
                if col == 0:
                    mLSE[batch, head, query] = lse

    def load(self, what: tuple, n: Int32, stage: Int32, barrier: cute.Pointer, rows: int) -> None:
        """By one warp: start loading tile n of each tensor to its stage; the barrier waits for so many rows."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * rows * self.traits.head_dim)
        for tma, tiles, s in what:
            target, source = (cute.group_modes(x, 0, 2) for x in (s, tiles))
            target, source = cpasync.tma_partition(tma, 0, cute.make_layout(1), target, source)
            cute.copy(tma, source[None, n], target[None, stage], tma_bar_ptr=barrier)

    def start_gemm(self, mma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: bool) -> None:
        """Issue acc (+)= A B^T, 16 of K at a time, as one group."""
        warpgroup.fence()
        for k in range(cute.size(a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
        warpgroup.commit_group()

    def scale_log2(self, scale: Float32) -> Float32:
        """What scores are multiplied by before exp2; modified ones have the softmax scale in them."""
        return scale * LOG2_E if self.SCORE_MOD is None else Float32(LOG2_E)

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

    @cute.jit
    def softmax(self, S: cute.Tensor, O: cute.Tensor, row_max, row_sum, scale_log2: Float32) -> None:
        """Online softmax: S becomes P relative to the new maximum, and O and row_sum are rescaled."""
        for r in cutlass.range_constexpr(cute.size(row_max)):
            largest = row_max[r]
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                largest = fmax(largest, S[r, c])
            largest = quad_reduce(largest, fmax)  # four lanes hold a row
            finite = Float32(0.0) if largest == -Float32.inf else largest  # -inf minus -inf is NaN
            factor = exp2((row_max[r] - finite) * scale_log2)
            row_max[r], row_sum[r] = largest, row_sum[r] * factor
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = exp2(S[r, c] * scale_log2 - finite * scale_log2)
                row_sum[r] += S[r, c]
            for c in cutlass.range_constexpr(cute.size(O, mode=[1])):
                O[r, c] = O[r, c] * factor

    @cute.jit
    def finish(self, row_max: Float32, row_sum: Float32, scale_log2: Float32):
        """The factor of a row of O, and its LSE: 0 and -inf where no key is seen."""
        total, factor, lse = quad_reduce(row_sum, add), Float32(0.0), -Float32.inf
        if total > 0.0:
            factor, lse = 1.0 / total, (row_max * scale_log2 + log2(total)) * LN_2
        return factor, lse


register(OneWarpgroup, variant="tour5", arch="sm90")
