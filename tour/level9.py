"""Level 9: the backward in Ampere tiles.

A backward has five products where a forward has two. Of each tile of scores it computes P again, from Q, K and the LSE
that the forward kept, instead of reading a matrix that no memory could hold:

    S = Q K^T       P = exp(scale * S - LSE)     dV += P^T dO
    dP = dO V^T     dS = P * (dP - D)            dK += dS^T Q     dQ += dS K

D is the sum over a row of dO * O: what a row of dP loses because the probabilities of a row always add up to 1.

Which loop is outside? dK and dV are sums over queries, dQ is a sum over keys: one of them has to cross CTAs. Here a CTA
keeps 64 keys, with their dK and dV in registers, and visits the blocks of queries, of all heads that share these keys.
Its contribution to dQ is added to fp32 memory by atomic additions.

Three launches do it. The package's ``backward_preprocess`` computes D and clears the memory of dQ; this kernel follows;
``backward_convert`` rounds dQ. So LSE arrives as LSE * log2(e), +inf in rows that do not exist: exp2 then gives P = 0
there. And D arrives negated.

mma.sync wants A in rows and B in columns, 16 of the summed dimension at a time. dV and dK sum over queries, so P and dS
are read by columns. That is no work for the threads: they store both tiles to shared memory as they lie, and ldmatrix
transposes 8 x 8 elements on the way to the registers, as it did for V in level 3.

What to look at: RED, the additions to dQ, one for each of its elements; and how many registers dK and dV leave. Each
block of Q and dO is waited for. The shipped kernel loads the next one meanwhile, and keeps P and dS in registers.

Any lengths. The additions to dQ come in any order, so its last bits differ from call to call.
"""

from dataclasses import dataclass
from typing import Annotated

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, cute, memory

import layouts
from cute_attn.compiler.registry import register
from cute_attn.device.copy import block_of_rows
from cute_attn.device.seqlen import sequence
from cute_attn.kernels import fakes
from cute_attn.kernels.base import StepContent, mma_sync_count
from cute_attn.kernels.copies import Copies
from cute_attn.kernels.dq_order import accumulator_rows
from cute_attn.outputs.accumulate import add_fragment
from cute_attn.tiles import BackwardSm80Tile
from tour.common import BackwardLevel, NoScoreArgs


@dataclass(frozen=True)
class BackwardTiles(BackwardLevel):
    """Eight warps and 64 keys; 64 queries at a time."""

    TILE = BackwardSm80Tile(stages_q=1, stages_do=1)

    def smem_layout(self, rows: int, cols: int, stages: int | None = None) -> cute.ComposedLayout:
        """(rows, cols[, stages]) in shared memory, without bank conflicts."""
        return layouts.smem_layout(rows, cols, BFloat16, stages=stages)

    def mma(self) -> cute.TiledMma:
        """The MMA of all products."""
        return layouts.tiled_mma_sm80(BFloat16, self.tile.num_warps, warps_n=2)

    def copies(self) -> Copies:
        """Operands in shared memory: what ``show`` draws, and the copies whose bank conflicts a verdict counts."""
        found, d, scores = Copies(self, 32 * self.tile.num_warps), self.traits.head_dim, (64, 64)
        shapes = {"q": (64, d), "do": (64, d), "k": (64, d), "v": (64, d), "p": scores, "ds": scores}
        at = {name: found.area(name, (*shape, 1), "smem_layout", *shape, 1) for name, shape in shapes.items()}
        for name, operand in (("q", "A"), ("k", "B"), ("do", "A"), ("v", "B"), ("ds", "A")):
            found.ldmatrix(name, operand, self.mma, at[name])
        for name, operand in (("p", "A"), ("do", "B"), ("ds", "A"), ("q", "B"), ("k", "B")):
            found.ldmatrix(f"{name} transposed", operand, self.mma, at[name], transpose=True)
        return found

    def step_content(self) -> StepContent:
        """What a step of the loop over query blocks holds, by which ``verdict`` finds it in the machine code."""
        tile_m, tile_n, d, warps = (
            self.tile.tile_m,
            self.tile.tile_n,
            self.traits.head_dim,
            self.tile.num_warps,
        )
        elements = tile_m * tile_n // (32 * warps)
        return StepContent(5 * mma_sync_count(tile_m, tile_n, d, warps), elements, elements, warps)

    @cute.jit
    def __call__(
        self,
        mQ: fakes.HeadRows,
        mK: fakes.HeadRows,
        mV: fakes.HeadRows,
        mDO: fakes.HeadRows,
        mLSElog2: fakes.QueryNumbers,
        mMinusD: fakes.QueryNumbers,
        mDQaccum: fakes.Accumulators,
        mDK: fakes.HeadRows,
        mDV: fakes.HeadRows,
        seqlens: fakes.Lengths,
        softmax_scale: Float32,
        schedule: fakes.BackwardCounters,
        score_args: NoScoreArgs,
        scales: Annotated[None, lambda kernel: None],
        stream: cuda.CUstream,
    ) -> None:
        """Launch; as in level 10, and no scales, which only split fp32 has."""
        tensors = (mQ, mK, mV, mDO, mLSElog2, mMinusD, mDQaccum, mDK, mDV)
        self.launch(*tensors, softmax_scale, stream)

    def launch(self, mQ, mK, mV, mDO, mLSE, mMinusD, mDQ, mDK, mDV, scale: Float32, stream):
        ctas = cute.ceil_div(mK.shape[1], self.tile.tile_n) * mDK.shape[2] * mK.shape[0]
        self.kernel(mQ, mK, mV, mDO, mLSE, mMinusD, mDQ, mDK, mDV, scale).launch(
            grid=[ctas, 1, 1], block=[32 * self.tile.num_warps, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, mQ, mK, mV, mDO, mLSE, mMinusD, mDQ, mDK, mDV, scale: Float32):
        thread, index = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        tile_m, tile_n, d = self.tile.tile_m, self.tile.tile_n, self.traits.head_dim
        seqlen_q, seqlen_k = Int32(mQ.shape[1]), Int32(mK.shape[1])
        n_blocks = cute.ceil_div(seqlen_k, tile_n)
        n_block, head_dkv, head_kv, batch = self.key_tile(index, n_blocks, mK, mDK)
        first, end, splits = self.query_heads(head_dkv, mQ, mK, mDK)
        key0, shift = n_block * tile_n, seqlen_k - seqlen_q
        m_begin, m_end = Int32(0), cute.ceil_div(seqlen_q, tile_m)
        if cutlass.const_expr(self.traits.causal):
            m_begin = cutlass.max(key0 - shift, 0) // tile_m  # queries before see none of these keys

        allocator = memory.SmemAllocator()
        sK, sV, sQ, sDO, sP, sDS = (
            allocator.allocate_tensor(BFloat16, self.smem_layout(*shape), byte_alignment=1024)
            for shape in (*2 * ((tile_n, d),), *2 * ((tile_m, d),), *2 * ((tile_m, tile_n),))
        )
        self.load(sequence(mK, batch, head_kv, 0, False), n_block, sK, thread)
        self.load(sequence(mV, batch, head_kv, 0, False), n_block, sV, thread)

        # One MMA makes all five. Rows are queries of S, dP and dQ, and keys of dK and dV. Four warps take 16 rows each,
        # and two take the columns in turns. With four warps in all, dK, dV and dQ would fill a thread's registers.
        mma = self.mma()
        mine = mma.get_slice(thread)
        acc_S, acc_dP, acc_dQ, acc_dK, acc_dV = (
            cute.make_rmem_tensor(mine.partition_shape_C(shape), Float32)
            for shape in (*2 * ((tile_m, tile_n),), (tile_m, d), *2 * ((tile_n, d),))
        )
        acc_dK.fill(0.0)
        acc_dV.fill(0.0)
        modes = layouts.row_col_modes(mma, tile_m, tile_n)
        row, col = layouts.thread_row_col(mma, tile_m, tile_n, thread)
        S, dP = layouts.row_col_view(acc_S, modes), layouts.row_col_view(acc_dP, modes)

        for head in cutlass.range(first, end, splits, unroll=1):
            gQ, gDO = sequence(mQ, batch, head, 0, False), sequence(mDO, batch, head, 0, False)
            for m_block in cutlass.range(m_begin, m_end, unroll=1):
                cute.arch.sync_threads()  # the last step's operands have been read
                self.load(gQ, m_block, sQ, thread)
                self.load(gDO, m_block, sDO, thread)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
                acc_S.fill(0.0)
                acc_dP.fill(0.0)
                self.product(mma, acc_S, sQ, sK, thread)
                self.product(mma, acc_dP, sDO, sV, thread)
                row0 = m_block * tile_m + row
                self.probabilities(
                    S, modes, row0, key0 + col, shift, seqlen_k, mLSE[batch, head, None], scale
                )
                self.store(mma, acc_S, sP, thread)
                for r in cutlass.range_constexpr(len(modes.rows)):
                    minus_d = mMinusD[batch, head, row0 + modes.rows[r]]
                    for c in cutlass.range_constexpr(len(modes.cols)):
                        dP[r, c] = S[r, c] * (dP[r, c] + minus_d)
                self.store(mma, acc_dP, sDS, thread)
                cute.arch.sync_threads()  # P and dS are complete
                self.product(
                    mma, acc_dV, layouts.transposed(sP), layouts.transposed(sDO), thread, (True, True)
                )
                self.product(
                    mma, acc_dK, layouts.transposed(sDS), layouts.transposed(sQ), thread, (True, True)
                )
                acc_dQ.fill(0.0)
                self.product(mma, acc_dQ, sDS, layouts.transposed(sK), thread, (False, True))
                # In the order of registers, not of a matrix: a warp's additions are whole cache lines.
                rows = accumulator_rows(mDQ, Int32(0), batch, head, m_block * tile_m, d, False)
                add_fragment(acc_dQ, rows.iterator, thread, self.tile.dq_vector)
        cute.arch.cp_async_wait_group(0)  # where no query sees these keys, K and V are under way
        self.write(acc_dK, mma, mDK[batch, None, head_dkv, None], key0, scale, thread)
        self.write(acc_dV, mma, mDV[batch, None, head_dkv, None], key0, Float32(1.0), thread)

    @cute.jit
    def load(self, g: cute.Tensor, block: Int32, s: cute.Tensor, thread: Int32) -> None:
        """Start copying a block of rows of g (rows, head_dim); those beyond the end become zeros."""
        rows, d = cute.size(s, mode=[0]), self.traits.head_dim
        copy = layouts.gmem_tiled_copy(BFloat16, 32 * self.tile.num_warps, d, asynchronous=True)
        mine = copy.get_slice(thread)
        source = mine.partition_S(block_of_rows(g, block, rows, d))
        coords = mine.partition_S(cute.make_identity_tensor((rows, d)))
        exists = cute.make_rmem_tensor((1, *source.shape[1:]), Boolean)
        for m in cutlass.range_constexpr(exists.shape[1]):
            for k in cutlass.range_constexpr(exists.shape[2]):
                exists[0, m, k] = block * rows + coords[0, m, 0][0] < g.shape[0]
        cute.copy(copy, source, mine.partition_D(s), pred=exists)

    @cute.jit
    def product(
        self,
        mma,
        acc: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        thread: Int32,
        by_columns=(False, False),
    ) -> None:
        """acc += A B^T, A (M, K) and B (N, K) in shared memory; by_columns: those in which K is not contiguous."""
        copy_a = layouts.ldmatrix_copy_a(mma, BFloat16, by_columns[0])
        copy_b = layouts.ldmatrix_copy_b(mma, BFloat16, by_columns[1])
        mine, mine_a, mine_b = (x.get_slice(thread) for x in (mma, copy_a, copy_b))
        a, b = mma.make_fragment_A(mine.partition_A(sA)), mma.make_fragment_B(mine.partition_B(sB))
        source_a, target_a = mine_a.partition_S(sA), mine_a.retile(a)
        source_b, target_b = mine_b.partition_S(sB), mine_b.retile(b)
        for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
            cute.copy(copy_a, source_a[None, None, k], target_a[None, None, k])
            cute.copy(copy_b, source_b[None, None, k], target_b[None, None, k])
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)

    @cute.jit
    def store(self, mma, acc: cute.Tensor, s: cute.Tensor, thread: Int32) -> None:
        """A tile of P or dS, rounded to bf16, to shared memory."""
        rounded = cute.make_rmem_tensor_like(acc, BFloat16)
        rounded.store(acc.load().to(BFloat16))
        copy = layouts.store_copy_c(mma, BFloat16, "sm80")
        mine = copy.get_slice(thread)
        cute.copy(copy, mine.retile(rounded), mine.partition_D(s))


register(BackwardTiles, variant="tour9", op="backward", arch="sm80")
