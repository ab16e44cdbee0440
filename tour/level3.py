"""Level 3: shared memory, a swizzle, ldmatrix.

What level 2 wasted: four warps each loaded all of K and V, 2 or 4 bytes at a time, with an address for every load. The
tensor cores waited for 96 loads per step of 32 matrix instructions.

Here the CTA loads each block of K and V once, in rows of 16-byte vectors, into shared memory. From there ``ldmatrix``
fills the fragments: one instruction reads four 8 x 8 matrices and leaves each lane the elements that mma.sync needs.
Its transposing form serves V, whose pairs lie along the keys.

Rows of 128 dims are 256 bytes, so the same 16 bytes of all rows lie in the same four of the 32 banks. The eight rows
of an ldmatrix would take eight turns. The swizzle permutes the 16-byte vectors of a row by the row's index (xor),
which puts those of eight rows into different banks. ``layouts.smem_layout`` is such a layout. Copies treat it as an
ordinary one, and nothing else in the kernel knows.

What to look at: LDSM in place of LDG. Pass ``swizzle_bits=0`` in :meth:`Shared.smem_layout`, and a verdict counts
eight-way bank conflicts. Every load is waited for: two barriers for each block, and no product of the CTA runs while
a block is loaded.

Any lengths: rows of K and V beyond the end are zeros in shared memory, and masked; queries there are not stored.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Int32, cute, memory

import layouts
from cute_attn.compiler.registry import register
from cute_attn.device.math import LN_2, LOG2_E, add, exp2, fmax, log2, quad_reduce
from tour.common import Tiled, TourTile


@dataclass(frozen=True)
class Shared(Tiled):
    """Four warps, 64 queries; operands through shared memory; two passes over the keys."""

    TILE = TourTile(tile_m=64, tile_n=64, num_warps=4, num_stages=1)
    FACTORS = 0  # O is not rescaled

    def smem_layout(self, rows: int) -> cute.ComposedLayout:
        """(rows, head_dim) in shared memory, without bank conflicts."""
        return layouts.smem_layout(rows, self.traits.head_dim, BFloat16)

    def launch(self, mQ, mK, mV, mO, mLSE, scale: Float32, multiprocessors, stream):
        ctas = cute.ceil_div(mQ.shape[1], self.tile.tile_m) * mQ.shape[2] * mQ.shape[0]
        self.kernel(mQ, mK, mV, mO, mLSE, scale * LOG2_E).launch(
            grid=[ctas, 1, 1], block=[32 * self.tile.num_warps, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mQ, mK, mV, mO, mLSE, scale: Float32):
        thread, index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        tile_m, tile_n, d, _ = self.sizes
        seqlen_q, seqlen_k, nheads = Int32(mQ.shape[1]), Int32(mK.shape[1]), mQ.shape[2]
        blocks = cute.ceil_div(seqlen_q, tile_m)
        row0, head, batch = index % blocks * tile_m, index // blocks % nheads, index // blocks // nheads
        head_kv = head // (nheads // mK.shape[2])
        gQ = mQ[batch, None, head, None]
        gK, gV = mK[batch, None, head_kv, None], mV[batch, None, head_kv, None]

        allocator = memory.SmemAllocator()
        sQ, sK, sV = (
            allocator.allocate_tensor(BFloat16, self.smem_layout(rows), byte_alignment=1024)
            for rows in (tile_m, tile_n, tile_n)
        )
        mma = layouts.tiled_mma_sm80(BFloat16, self.tile.num_warps)
        mine = mma.get_slice(thread)
        copy_q = layouts.ldmatrix_copy_a(mma, BFloat16)
        copy_k = layouts.ldmatrix_copy_b(mma, BFloat16)
        copy_v = layouts.ldmatrix_copy_b(mma, BFloat16, transpose=True)
        self.load(gQ, row0 // tile_m, sQ, thread)
        cute.arch.sync_threads()
        tSrQ = mma.make_fragment_A(mine.partition_A(sQ))  # stays in registers
        cute.copy(copy_q, copy_q.get_slice(thread).partition_S(sQ), copy_q.get_slice(thread).retile(tSrQ))
        acc_O = cute.make_rmem_tensor(mine.partition_shape_C((tile_m, d)), Float32)
        acc_O.fill(0.0)

        # Where the lane's scores are: rows[r] and cols[c] after its first row and column.
        modes = layouts.row_col_modes(mma, tile_m, tile_n)
        row, col = layouts.thread_row_col(mma, tile_m, tile_n, thread)
        row += row0
        row_max, row_sum = (cute.make_rmem_tensor(len(modes.rows), Float32) for _ in range(2))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        keys = seqlen_k
        if cutlass.const_expr(self.traits.causal):
            keys = cutlass.max(cutlass.min(keys, row0 + tile_m + seqlen_k - seqlen_q), 0)

        for block in cutlass.range(cute.ceil_div(keys, tile_n), unroll=1):
            cute.arch.sync_threads()  # the last block has been read
            self.load(gK, block, sK, thread)
            cute.arch.sync_threads()
            acc_S = cute.make_rmem_tensor(mine.partition_shape_C((tile_m, tile_n)), Float32)
            acc_S.fill(0.0)
            self.product(mma, copy_k, acc_S, tSrQ, sK, thread)
            S = layouts.row_col_view(acc_S, modes)
            self.mask(S, modes, row, col + block * tile_n, seqlen_q, seqlen_k)
            for r in cutlass.range_constexpr(len(modes.rows)):
                for c in cutlass.range_constexpr(len(modes.cols)):
                    row_max[r] = fmax(row_max[r], S[r, c])
        for r in cutlass.range_constexpr(len(modes.rows)):
            row_max[r] = quad_reduce(row_max[r], fmax)  # four lanes hold a row

        for block in cutlass.range(cute.ceil_div(keys, tile_n), unroll=1):
            cute.arch.sync_threads()
            self.load(gK, block, sK, thread)
            self.load(gV, block, sV, thread)
            cute.arch.sync_threads()
            acc_S = cute.make_rmem_tensor(mine.partition_shape_C((tile_m, tile_n)), Float32)
            acc_S.fill(0.0)
            self.product(mma, copy_k, acc_S, tSrQ, sK, thread)
            S = layouts.row_col_view(acc_S, modes)
            self.mask(S, modes, row, col + block * tile_n, seqlen_q, seqlen_k)
            self.probabilities(S, row_max, row_sum, scale)
            P = cute.make_rmem_tensor_like(acc_S, BFloat16)
            P.store(acc_S.load().to(BFloat16))
            self.product(mma, copy_v, acc_O, layouts.as_operand_a(P), layouts.transposed(sV), thread)
        modes_o = layouts.row_col_modes(mma, tile_m, d)
        O = layouts.row_col_view(acc_O, modes_o)
        for r in cutlass.range_constexpr(len(modes.rows)):
            query, (factor, lse) = row + modes.rows[r], self.finish(row_max[r], row_sum[r], scale)
            if query < seqlen_q:
                for c in cutlass.range_constexpr(len(modes_o.cols)):
                    mO[batch, query, head, col + modes_o.cols[c]] = (O[r, c] * factor).to(BFloat16)
                if col == 0:
                    mLSE[batch, head, query] = lse

    @cute.jit
    def load(self, g: cute.Tensor, block: Int32, s: cute.Tensor, thread: Int32) -> None:
        """A block of rows of g (rows, head_dim) to shared memory, zeros for those beyond the end."""
        rows: cutlass.Constexpr = cute.size(s, mode=[0])
        shape = (rows, self.traits.head_dim)
        copy = layouts.gmem_tiled_copy(BFloat16, 32 * self.tile.num_warps, shape[1], asynchronous=False)
        mine = copy.get_slice(thread)
        source, target = mine.partition_S(cute.local_tile(g, shape, (block, 0))), mine.partition_D(s)
        coords = mine.partition_S(cute.make_identity_tensor(shape))
        vectors = cute.make_rmem_tensor(source.shape, BFloat16)
        vectors.fill(0.0)
        for m in cutlass.range_constexpr(cute.size(source, mode=[1])):
            if block * rows + coords[0, m, 0][0] < g.shape[0]:
                cute.copy(copy, source[None, m, None], vectors[None, m, None])
        cute.copy(copy, vectors, target)

    @cute.jit
    def product(self, mma, copy, acc: cute.Tensor, a: cute.Tensor, sB: cute.Tensor, thread: Int32) -> None:
        """acc += A B^T, A in registers, B (N, K) in shared memory, read 16 of K at a time."""
        mine = copy.get_slice(thread)
        fragment = mma.make_fragment_B(mma.get_slice(thread).partition_B(sB))
        source, target = mine.partition_S(sB), mine.retile(fragment)
        for k in cutlass.range_constexpr(cute.size(fragment, mode=[2])):
            cute.copy(copy, source[None, None, k], target[None, None, k])
            cute.gemm(mma, acc, a[None, None, k], fragment[None, None, k], acc)

    @cute.jit
    def mask(self, S: cute.Tensor, modes, row: Int32, col: Int32, seqlen_q: Int32, seqlen_k: Int32) -> None:
        """-inf for keys beyond the sequence or after the query's own; row, col: of S[0, 0]."""
        for r in cutlass.range_constexpr(len(modes.rows)):
            end = seqlen_k
            if cutlass.const_expr(self.traits.causal):
                end = cutlass.min(end, row + modes.rows[r] + seqlen_k - seqlen_q + 1)
            for c in cutlass.range_constexpr(len(modes.cols)):
                S[r, c] = S[r, c] if col + modes.cols[c] < end else -Float32.inf

    @cute.jit
    def probabilities(self, S: cute.Tensor, row_max, row_sum, scale: Float32) -> None:
        """S to P = exp(S - row_max), and the lane's partial sum of P."""
        for r in cutlass.range_constexpr(cute.size(row_max)):
            largest = Float32(0.0) if row_max[r] == -Float32.inf else row_max[r]  # -inf minus -inf is NaN
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = exp2(S[r, c] * scale - largest * scale)
                row_sum[r] += S[r, c]

    @cute.jit
    def finish(self, row_max: Float32, row_sum: Float32, scale: Float32):
        """The factor of a row of O, and its LSE: 0 and -inf where no key is seen."""
        total, factor, lse = quad_reduce(row_sum, add), Float32(0.0), -Float32.inf
        if total > 0.0:
            factor, lse = 1.0 / total, (row_max * scale + log2(total)) * LN_2
        return factor, lse


register(Shared, variant="tour3", arch="sm80")
