"""Level 2: the same in tiles of mma.sync.

What level 1 wasted: the CUDA cores did all multiplications, at a fifteenth of the tensor cores' rate, and each row of K
and V that was read served a single query.

Here four warps take 64 queries, 16 each, against 16 keys at a time. Both products are mma.sync m16n8k16: a warp
multiplies 16 x 16 by 16 x 8, and each lane holds a few elements of every operand, wherever the instruction wants them.
``layouts.tiled_mma_sm80`` knows where, and ``partition_A`` of an identity tensor tells: element i of a lane's fragment
is (row, column) coords[i]. So a fragment is loaded straight from global memory, element by element.

The accumulator of S is an operand of P V as it is: lane by lane, the two fragments hold the same rows and columns. P
never leaves the registers (``layouts.as_operand_a``).

What to look at: the loads. An operand's elements come in pairs along the dimension that is summed over. Those of Q and
K are neighbours in memory, so that a load is 4 bytes wide; those of V are in two rows, so that a load is 2 bytes wide.
And each of the four warps loads all of K and V: count LDG against HMMA.

Any lengths: rows beyond the end are read from the last row, their keys masked, their queries not stored. So no address
is out of bounds, and no NaN of foreign memory reaches a product.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

import layouts
from cute_attn.compiler.registry import register
from cute_attn.device.math import LN_2, LOG2_E, add, exp2, fmax, log2, quad_reduce
from tour.common import Tiled, TourTile


@dataclass(frozen=True)
class Tensorcores(Tiled):
    """Four warps, 64 queries; operands straight from global memory; two passes over the keys."""

    TILE = TourTile(tile_m=64, tile_n=16, num_warps=4)
    FACTORS = 0  # O is not rescaled

    def launch(self, mQ, mK, mV, mO, mLSE, scale: Float32, multiprocessors, stream):
        ctas = cute.ceil_div(mQ.shape[1], self.tile.tile_m) * mQ.shape[2] * mQ.shape[0]
        self.kernel(mQ, mK, mV, mO, mLSE, scale * LOG2_E).launch(
            grid=[ctas, 1, 1],
            block=[32 * self.tile.num_warps, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # or ptxas saves registers for another CTA, and spills
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

        mma = layouts.tiled_mma_sm80(BFloat16, self.tile.num_warps)
        mine = mma.get_slice(thread)
        coords_q = mine.partition_A(cute.make_identity_tensor((tile_m, d)))
        coords_k = mine.partition_B(cute.make_identity_tensor((tile_n, d)))
        coords_v = mine.partition_B(cute.make_identity_tensor((d, tile_n)))
        tSrQ = mma.make_fragment_A(mine.partition_shape_A((tile_m, d)))
        self.load_pairs(gQ, coords_q, row0, tSrQ)
        acc_O = cute.make_rmem_tensor(mine.partition_shape_C((tile_m, d)), Float32)
        acc_O.fill(0.0)

        # A lane holds scores of several rows and columns. S[r, c] is the one at (row + rows[r], col + cols[c]).
        modes = layouts.row_col_modes(mma, tile_m, tile_n)
        row, col = layouts.thread_row_col(mma, tile_m, tile_n, thread)
        row += row0
        row_max, row_sum = (cute.make_rmem_tensor(len(modes.rows), Float32) for _ in range(2))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        keys = seqlen_k
        if cutlass.const_expr(self.traits.causal):
            keys = cutlass.max(cutlass.min(keys, row0 + tile_m + seqlen_k - seqlen_q), 0)

        # The first visit of the keys: the maximum of each row.
        for block in cutlass.range(cute.ceil_div(keys, tile_n), unroll=1):
            acc_S = self.scores(mma, mine, tSrQ, gK, coords_k, block)
            S = layouts.row_col_view(acc_S, modes)
            self.mask(S, modes, row, col + block * tile_n, seqlen_q, seqlen_k)
            for r in cutlass.range_constexpr(len(modes.rows)):
                for c in cutlass.range_constexpr(len(modes.cols)):
                    row_max[r] = fmax(row_max[r], S[r, c])
        for r in cutlass.range_constexpr(len(modes.rows)):
            row_max[r] = quad_reduce(row_max[r], fmax)  # four lanes hold a row

        # The second visit: scores again, their probabilities, and O += P V.
        for block in cutlass.range(cute.ceil_div(keys, tile_n), unroll=1):
            acc_S = self.scores(mma, mine, tSrQ, gK, coords_k, block)
            S = layouts.row_col_view(acc_S, modes)
            self.mask(S, modes, row, col + block * tile_n, seqlen_q, seqlen_k)
            self.probabilities(S, row_max, row_sum, scale)
            P = cute.make_rmem_tensor_like(acc_S, BFloat16)
            P.store(acc_S.load().to(BFloat16))
            tOrP = layouts.as_operand_a(P)
            for k in cutlass.range_constexpr(tile_n // 16):
                tOrV = mma.make_fragment_B(coords_v[None, None, k].shape)
                for i in cutlass.range_constexpr(cute.size(tOrV)):
                    dim, key = coords_v[None, None, k][i]
                    tOrV[i] = gV[cutlass.min(block * tile_n + key, seqlen_k - 1), dim]
                cute.gemm(mma, acc_O, tOrP[None, None, k], tOrV, acc_O)
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
    def load_pairs(self, g: cute.Tensor, coords: cute.Tensor, row0: Int32, fragment: cute.Tensor) -> None:
        """fragment[i] = g[row0 + row, column] with (row, column) = coords[i], two neighbouring columns at a time."""
        pairs, g_pairs = cute.recast_tensor(fragment, Int32), cute.recast_tensor(g, Int32)
        for i in cutlass.range_constexpr(cute.size(pairs)):
            row, col = coords[2 * i]
            pairs[i] = g_pairs[cutlass.min(row0 + row, Int32(g.shape[0]) - 1), col // 2]

    @cute.jit
    def scores(self, mma, mine, tSrQ: cute.Tensor, gK: cute.Tensor, coords: cute.Tensor, block: Int32):
        """S = Q K^T of one key block, in the accumulator's layout."""
        tile_m, tile_n, d, _ = self.sizes
        acc_S = cute.make_rmem_tensor(mine.partition_shape_C((tile_m, tile_n)), Float32)
        acc_S.fill(0.0)
        for k in cutlass.range_constexpr(d // 16):
            tSrK = mma.make_fragment_B(coords[None, None, k].shape)
            self.load_pairs(gK, coords[None, None, k], block * tile_n, tSrK)
            cute.gemm(mma, acc_S, tSrQ[None, None, k], tSrK, acc_S)
        return acc_S

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


register(Tensorcores, variant="tour2", arch="sm80")
