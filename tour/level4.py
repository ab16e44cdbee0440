"""Level 4: a cp.async pipeline, and online softmax.

What level 3 wasted: it computed Q K^T twice, since the maximum has to be known before the first exponential. And the
tensor cores waited for each block of K and V, which came through registers.

Online softmax visits the keys once. With a running maximum m and everything so far in units of exp(m), a block with a
larger maximum m' only changes the units:

    factor = exp(m - m')
    sum    = factor * sum + sum of exp(s - m')
    O      = factor * O + exp(S - m') V

``cp.async`` copies 16 bytes from global to shared memory without a register in between, while the warp goes on. K and
V have ``num_stages`` places: while block j is computed, block j + 1 arrives. Copies are committed in groups and waited
for by count, all but the newest n, so a group is committed even where nothing is left to load. One barrier for each
block tells all threads that it has arrived, and that all have read the block before it, whose place may be overwritten.

Only blocks that the mask's edge crosses need a mask, so there are two loops. Between the two products, where a score is
in a register and its query and key are known, scores may be changed: SCORE_MOD is a plain Python function.

    def softcap(score, query, key, head):
        return 30.0 * cute.math.tanh(score / 30.0)

    tour.common.with_epilogue(Pipelined, softcap)

What to look at: LDGSTS, and no barrier between a load and the products that it overlaps. Any lengths.
"""

import itertools
from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32, cute, memory

import layouts
from cute_attn.compiler.registry import register
from cute_attn.device.copy import block_of_rows
from cute_attn.device.math import LN_2, LOG2_E, add, exp2, fmax, log2, quad_reduce
from cute_attn.device.seqlen import sequence
from tour.common import Tiled, TourTile


@dataclass(frozen=True)
class Pipelined(Tiled):
    """Four warps, 64 queries; one pass over the keys, the next block in flight."""

    TILE = TourTile(tile_m=64, tile_n=64, num_warps=4, num_stages=2)

    def smem_layout(self, rows: int, stages: int) -> cute.ComposedLayout:
        """(rows, head_dim, stages) in shared memory, without bank conflicts."""
        return layouts.smem_layout(rows, self.traits.head_dim, BFloat16, stages=stages)

    def launch(self, mQ, mK, mV, mO, mLSE, scale: Float32, multiprocessors, stream):
        grid = cute.ceil_div(mQ.shape[1], self.tile.tile_m) * mQ.shape[2] * mQ.shape[0]
        self.kernel(mQ, mK, mV, mO, mLSE, scale).launch(
            grid=[grid, 1, 1], block=[32 * self.tile.num_warps, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mQ, mK, mV, mO, mLSE, scale: Float32):
        thread, index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        tile_m, tile_n, d, stages = self.sizes
        seqlen_q, seqlen_k, nheads = Int32(mQ.shape[1]), Int32(mK.shape[1]), mQ.shape[2]
        m_blocks = cute.ceil_div(seqlen_q, tile_m)
        m_block, head, batch = index % m_blocks, index // m_blocks % nheads, index // m_blocks // nheads
        row0, shift, head_kv = m_block * tile_m, seqlen_k - seqlen_q, head // (nheads // mK.shape[2])
        n_blocks, full = cute.ceil_div(seqlen_k, tile_n), seqlen_k // tile_n  # full: those without a mask
        if cutlass.const_expr(self.traits.causal):
            n_blocks = cutlass.max(cutlass.min(n_blocks, cute.ceil_div(row0 + tile_m + shift, tile_n)), 0)
            full = cutlass.max(cutlass.min(full, (row0 + shift + 1) // tile_n), 0)

        allocator = memory.SmemAllocator()
        sQ, sK, sV = (
            allocator.allocate_tensor(BFloat16, self.smem_layout(rows, n), byte_alignment=1024)
            for rows, n in ((tile_m, 1), (tile_n, stages), (tile_n, stages))
        )
        gQ, gK, gV = (sequence(x, batch, h, 0, False) for x, h in ((mQ, head), (mK, head_kv), (mV, head_kv)))
        self.load(gQ, m_block, sQ, 0, thread)
        cute.arch.cp_async_commit_group()
        for block in cutlass.range(stages - 1, unroll=1):
            self.load(gK, block, sK, block, thread)
            self.load(gV, block, sV, block, thread)
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(stages - 1)
        cute.arch.sync_threads()

        mma = layouts.tiled_mma_sm80(BFloat16, self.tile.num_warps)
        copy_q, copy_k = layouts.ldmatrix_copy_a(mma, BFloat16), layouts.ldmatrix_copy_b(mma, BFloat16)
        copy_v, sVt = layouts.ldmatrix_copy_b(mma, BFloat16, transpose=True), layouts.transposed(sV)
        mine, q_copy = mma.get_slice(thread), copy_q.get_slice(thread)
        tSrQ = mma.make_fragment_A(mine.partition_A(sQ[None, None, 0]))  # stays in registers
        cute.copy(copy_q, q_copy.partition_S(sQ[None, None, 0]), q_copy.retile(tSrQ))
        # The lane's scores: rows[r] and cols[c] of modes after its first row and column; likewise of O.
        modes, modes_o = layouts.row_col_modes(mma, tile_m, tile_n), layouts.row_col_modes(mma, tile_m, d)
        row, col = layouts.thread_row_col(mma, tile_m, tile_n, thread)
        acc_S = cute.make_rmem_tensor(mine.partition_shape_C((tile_m, tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(mine.partition_shape_C((tile_m, d)), Float32)
        S, O = layouts.row_col_view(acc_S, modes), layouts.row_col_view(acc_O, modes_o)
        P = cute.make_rmem_tensor_like(acc_S, BFloat16)
        row_max, row_sum = (cute.make_rmem_tensor(len(modes.rows), Float32) for _ in range(2))
        acc_O.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)

        # Python runs this loop when the kernel is built. It gives two on the GPU: one without a mask, one with.
        for masked in (False, True):
            begin, end = (full, n_blocks) if masked else (Int32(0), full)
            for block in cutlass.range(begin, end, unroll=1):
                # All groups of this thread but the newest stages - 2 have arrived, this block's among them.
                cute.arch.cp_async_wait_group(stages - 2)
                # So they have for all threads; and all have read the block before, whose stage is free.
                cute.arch.sync_threads()

                # The free stage takes the block that is stages - 1 ahead, while this one is computed.
                stage, ahead = block % stages, block + stages - 1
                if ahead < n_blocks:
                    self.load(gK, ahead, sK, ahead % stages, thread)
                    self.load(gV, ahead, sV, ahead % stages, thread)
                # A group even where nothing is left to load: groups are waited for by their number.
                cute.arch.cp_async_commit_group()

                acc_S.fill(0.0)
                self.product(mma, copy_k, acc_S, tSrQ, sK[None, None, stage], thread)
                self.modify(S, modes, row0 + row, block * tile_n + col, shift, seqlen_k, head, scale, masked)
                self.softmax(S, O, row_max, row_sum, self.scale_log2(scale))
                # P in 16 bits is the A operand of P V, as the lane holds it.
                P.store(acc_S.load().to(BFloat16))
                self.product(mma, copy_v, acc_O, layouts.as_operand_a(P), sVt[None, None, stage], thread)
        cute.arch.cp_async_wait_group(0)  # where no key is seen, loads are under way

        for r in cutlass.range_constexpr(len(modes.rows)):
            query, (factor, lse) = (
                row0 + row + modes.rows[r],
                self.finish(row_max[r], row_sum[r], self.scale_log2(scale)),
            )
            if query < seqlen_q:
                for c in cutlass.range_constexpr(len(modes_o.cols)):
                    mO[batch, query, head, col + modes_o.cols[c]] = (O[r, c] * factor).to(BFloat16)
                if col == 0:
                    mLSE[batch, head, query] = lse

    @cute.jit
    def load(self, g: cute.Tensor, block: Int32, s: cute.Tensor, stage, thread: Int32) -> None:
        """Start copying a block of rows of g (rows, head_dim); those beyond the end become zeros."""
        rows, d = cute.size(s, mode=[0]), self.traits.head_dim
        copy = layouts.gmem_tiled_copy(BFloat16, 32 * self.tile.num_warps, d, asynchronous=True)
        mine = copy.get_slice(thread)
        source = mine.partition_S(block_of_rows(g, block, rows, d))
        coords = mine.partition_S(cute.make_identity_tensor((rows, d)))
        exists = cute.make_rmem_tensor((1, *source.shape[1:]), Boolean)
        for m, k in itertools.product(*map(range, exists.shape[1:])):
            exists[0, m, k] = block * rows + coords[0, m, 0][0] < g.shape[0]
        cute.copy(copy, source, mine.partition_D(s[None, None, stage]), pred=exists)

    @cute.jit
    def product(self, mma, copy, acc: cute.Tensor, a: cute.Tensor, sB: cute.Tensor, thread: Int32) -> None:
        """acc += A B^T, A in registers, B (N, K) in shared memory, read 16 of K at a time."""
        mine = copy.get_slice(thread)
        b = mma.make_fragment_B(mma.get_slice(thread).partition_B(sB))
        source, target = mine.partition_S(sB), mine.retile(b)
        for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
            cute.copy(copy, source[None, None, k], target[None, None, k])
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)

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


register(Pipelined, variant="tour4", arch="sm80")
