"""Level 7: ping-pong, overlap within a warpgroup, and persistent CTAs.

What level 6 wasted: each warpgroup still waited for its products before its softmax, and for its softmax before its
products; whether the other one filled the gap was left to chance. And every CTA began with an empty pipeline.

Overlap within a warpgroup: S[j] = Q K[j]^T and O += P[j-1] V[j-1] are issued together, and the softmax of S[j]
overlaps the latter: ``wait_group(1)`` waits for the older one only. Ping-pong (FlashAttention-3, arXiv:2407.08608):
named barriers let the warpgroups issue in turns: one has the tensor cores while the other exponentiates.

Persistent: n CTAs, one per multiprocessor, take n work tiles in each round; a CTA's producer loads the next one while
the consumers finish the last. Under a causal mask work tiles have unlike lengths, so every other round is dealt from
the other end: a CTA with a long one then gets a short one. The producer loads in the order of the consumers' waits,
K[j] before V[j-1]: in the order of levels 5 and 6 each K would wait for a stage of V.

What levels 4 to 6 wrote out is imported from the package. Its softmax keeps a row's maximum until an exponential would
exceed 2^8, so O is rarely rescaled: a warp votes, and reduces the maxima of its rows over lanes only if one exceeds.
No digits are lost: O and the row's sum only have another common factor.

What to look at: the order of HGMMA, MUFU and the waits between. Any lengths; 128 queries and keys at a time.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Constexpr, Float32, Int32, Int64, cute, memory
from cutlass.cute.nvgpu import cpasync, warpgroup

import layouts
from cute_attn.compiler.registry import register
from cute_attn.device.gemm import start_gemm
from cute_attn.device.math import LOG2_E, convert_to_16_bits
from cute_attn.device.pipeline import WARPGROUP, Accessed, PingPong, Pipeline
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.rows.tma import TmaTiles
from tour.common import Tiled, TourTile

GROUPS = 2  # consumer warpgroups


@dataclass(frozen=True)
class Overlapped(Tiled):
    """A producer warp and two consumer warpgroups that alternate; persistent."""

    TILE = TourTile(tile_m=128, tile_n=128, num_warps=8, num_stages=2)
    FACTORS = 0  # of O: only a score above the threshold changes them

    def mma_qk(self) -> cute.TiledMma:
        """S = Q K^T: both operands from shared memory."""
        return layouts.tiled_mma_sm90(BFloat16, self.tile.tile_m, self.tile.tile_n, warpgroups=GROUPS)

    def mma_pv(self) -> cute.TiledMma:
        """O += P V: P from registers, V with its dims contiguous."""
        shape = (self.tile.tile_m, self.traits.head_dim)
        return layouts.tiled_mma_sm90(BFloat16, *shape, warpgroups=GROUPS, a_source="rmem", b_major="mn")

    def smem_layout(self, rows: int, stages: int | None = None) -> cute.ComposedLayout:
        """(rows, head_dim[, stages]) in shared memory, in a swizzle of TMA and wgmma."""
        return layouts.wgmma_smem_layout(rows, self.traits.head_dim, BFloat16, stages=stages)

    def launch(self, mQ, mK, mV, mO, mLSE, scale: Float32, multiprocessors, stream):
        (tile_m, tile_n, d, _), load = self.sizes, cpasync.CopyBulkTensorTileG2SOp()
        sizes = ((mQ, tile_m), (mK, tile_n), (mV, tile_n))
        tmas = [TmaTiles.make(load, x, self.smem_layout(n), (n, d), False) for x, n in sizes]
        tiles = cute.ceil_div(mQ.shape[1], tile_m) * mQ.shape[2] * mQ.shape[0]
        ctas, threads = cutlass.min(tiles, multiprocessors), WARPGROUP * (1 + GROUPS)
        self.kernel(*tmas, mK, mO, mLSE, scale, tiles).launch(
            grid=[ctas, 1, 1], block=[threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.jit
    def place(self, round_: Int32) -> Int32:
        """This CTA's work tile among those of a round."""
        cta, last = cute.arch.block_idx()[0], cute.arch.grid_dim()[0] - 1
        return cta if round_ % 2 == 0 else last - cta

    @cute.jit
    def rounds(self, tiles: Int32) -> Int32:
        """How many work tiles this CTA computes. The last round has fewer than CTAs."""
        full, rest = tiles // cute.arch.grid_dim()[0], tiles % cute.arch.grid_dim()[0]
        return full + Int32(self.place(full) < rest)

    @cute.jit
    def work(self, round_: Int32, mO: cute.Tensor, mK: cute.Tensor):
        """The CTA's work tile: (query block, head, kv head, batch, key blocks, those without a mask)."""
        (tile_m, tile_n, _, _), (_, seqlen_q, nheads, _) = self.sizes, mO.shape
        index = round_ * cute.arch.grid_dim()[0] + self.place(round_)
        m_blocks, seqlen_k = cute.ceil_div(Int32(seqlen_q), tile_m), Int32(mK.shape[1])
        m_block, head = m_blocks - 1 - index % m_blocks, index // m_blocks % nheads
        n_blocks, full = cute.ceil_div(seqlen_k, tile_n), seqlen_k // tile_n
        if cutlass.const_expr(self.traits.causal):
            end = m_block * tile_m + seqlen_k - seqlen_q + 1  # of the keys that the tile's first query sees
            n_blocks = cutlass.max(cutlass.min(n_blocks, cute.ceil_div(end + tile_m - 1, tile_n)), 0)
            full = cutlass.max(cutlass.min(full, end // tile_n), 0)
        return m_block, head, head // (nheads // mK.shape[2]), index // m_blocks // nheads, n_blocks, full

    @cute.kernel
    def kernel(self, tma_q, tma_k, tma_v, mK, mO, mLSE, scale: Float32, tiles: Int32):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile_m, tile_n, d, stages = self.sizes
        allocator = memory.SmemAllocator()
        sQ, sK, sV = (
            allocator.allocate_tensor(BFloat16, layout.outer, 1024, layout.inner)
            for layout in map(self.smem_layout, (tile_m, tile_n, tile_n), (1, stages, stages))
        )
        barriers = allocator.allocate_array(Int64, 2 + 4 * stages, byte_alignment=8)
        q = Pipeline(barriers, 1, 2 * tile_m * d)
        k, v = (Pipeline(barriers + 2 + 2 * stages * i, stages, 2 * tile_n * d) for i in (0, 1))
        if warp == 0:
            with cute.arch.elect_one():
                for pipeline in (q, k, v):
                    pipeline.init(4 * GROUPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                # Uses of Q's pipeline, and of K's and V's. They count on across work tiles, in the consumers
                # as well, so stages and parities go on where the last tile left them.
                use_q, use = Int32(0), Int32(0)
                for round_ in cutlass.range(self.rounds(tiles), unroll=1):
                    m_block, head, head_kv, batch, n_blocks, _ = self.work(round_, mO, mK)
                    gQ, gK = tma_q.sequence(0, head, batch), tma_k.sequence(0, head_kv, batch)
                    gV = tma_v.sequence(0, head_kv, batch)
                    # Last block first: it has the mask. K[0], Q; then K[n] before V[n - 1].
                    for n in cutlass.range(n_blocks + 1, unroll=1):
                        if n < n_blocks:
                            k.producer_acquire(use + n)
                            tma_k.load(gK, n_blocks - 1 - n, sK, k, use + n)
                        if n > 0:
                            v.producer_acquire(use + n - 1)
                            tma_v.load(gV, n_blocks - n, sV, v, use + n - 1)
                        else:
                            q.producer_acquire(use_q)  # until both consumers have used the last tile's Q
                            tma_q.load(gQ, m_block, sQ, q, use_q)
                    use_q, use = use_q + 1, use + n_blocks
        else:
            cute.arch.setmaxregister_increase(240)
            self.consume(warp, sQ, sK, sV, q, k, v, mK, mO, mLSE, scale, tiles)

    @cute.jit
    def consume(self, warp: Int32, sQ, sK, sV, q, k, v, mK, mO, mLSE, scale: Float32, tiles: Int32):
        """By two warpgroups: O and LSE of every work tile."""
        tile_m, tile_n, d, _ = self.sizes
        thread, group = cute.arch.thread_idx()[0] - WARPGROUP, warp // 4 - 1
        qk, pv = self.mma_qk(), self.mma_pv()
        mine_qk, mine_pv = qk.get_slice(group * WARPGROUP), pv.get_slice(group * WARPGROUP)
        tSrQ = qk.make_fragment_A(mine_qk.partition_A(sQ))[None, None, None, 0]
        tSrK = qk.make_fragment_B(mine_qk.partition_B(sK))
        tOrV = pv.make_fragment_B(mine_pv.partition_B(layouts.transposed(sV)))
        acc_S = cute.make_rmem_tensor(mine_qk.partition_shape_C((tile_m, tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(mine_pv.partition_shape_C((tile_m, d)), Float32)
        P = cute.make_rmem_tensor_like(acc_S, BFloat16)
        tOrP = layouts.as_operand_a(P)
        modes, modes_o = layouts.row_col_modes(qk, tile_m, tile_n), layouts.row_col_modes(pv, tile_m, d)
        row, col = layouts.thread_row_col(qk, tile_m, tile_n, thread)
        S, O = layouts.row_col_view(acc_S, modes), layouts.row_col_view(acc_O, modes_o)
        factors, lse = (cute.make_rmem_tensor(len(modes.rows), Float32) for _ in range(2))
        scale_log2 = scale * LOG2_E if self.SCORE_MOD is None else Float32(LOG2_E)  # modified: scaled

        ping_pong, use_q, use = PingPong(group, GROUPS, True), Int32(0), Int32(0)
        ping_pong.start()  # the first turn is the first warpgroup's
        for round_ in cutlass.range(self.rounds(tiles), unroll=1):
            m_block, head, _, batch, n_blocks, full = self.work(round_, mO, mK)
            at = (m_block * tile_m + row, col, mK.shape[1] - mO.shape[1], mK.shape[1], head, scale)
            softmax = OnlineSoftmax.make(2, scale_log2, self.SCORE_MOD is not None, threshold=8)
            acc_O.fill(0.0)
            q.consumer_wait(use_q)

            # The first block has no P V beside it: S[0], its softmax, P[0].
            if n_blocks > 0:
                k.consumer_wait(use)
                start_gemm(self.mma_qk(), acc_S, tSrQ, tSrK[None, None, None, k.stage(use)], False)
                warpgroup.wait_group(0)
                k.consumer_release(use, Accessed.BY_WGMMA)
                self.modify(S, modes, at, n_blocks - 1, True)
                softmax.advance(S, factors, True)
                convert_to_16_bits(acc_S, P)

            # From then on S[n] and P[n - 1] V[n - 1] are issued together: P and V are one block late.
            for masked in (True, False):
                begin, end = (1, n_blocks - full) if masked else (cutlass.max(n_blocks - full, 1), n_blocks)
                for n in cutlass.range(use + begin, use + end, unroll=1):
                    k.consumer_wait(n)
                    ping_pong.sync()  # this warpgroup's turn to issue products
                    start_gemm(self.mma_qk(), acc_S, tSrQ, tSrK[None, None, None, k.stage(n)], False)
                    v.consumer_wait(n - 1)
                    start_gemm(self.mma_pv(), acc_O, tOrP, tOrV[None, None, None, v.stage(n - 1)], True)
                    ping_pong.arrive()  # the other one's turn

                    warpgroup.wait_group(1)  # all groups but the newest: S is there, P V may still run
                    k.consumer_release(n, Accessed.BY_WGMMA)
                    self.modify(S, modes, at, n_blocks - 1 - (n - use), masked)
                    softmax.advance(S, factors, masked)

                    # P V is complete: its V may go, its P may be overwritten, and O rescaled.
                    warpgroup.wait_group(0)
                    v.consumer_release(n - 1, Accessed.BY_WGMMA)
                    convert_to_16_bits(acc_S, P)
                    softmax.rescale(O, factors)

            # No product reads Q again, so the next tile's may come while the last P V runs and O is stored.
            q.consumer_release(use_q, Accessed.BY_WGMMA)
            use_q, use = use_q + 1, use + n_blocks
            if n_blocks > 0:
                v.consumer_wait(use - 1)
                start_gemm(self.mma_pv(), acc_O, tOrP, tOrV[None, None, None, v.stage(use - 1)], True)
                warpgroup.wait_group(0)
                v.consumer_release(use - 1, Accessed.BY_WGMMA)

            softmax.normalize(O, lse, Float32(1.0))
            for r in cutlass.range_constexpr(len(modes.rows)):
                query = m_block * tile_m + row + modes.rows[r]
                if query < mO.shape[1]:
                    for c in cutlass.range_constexpr(len(modes_o.cols)):
                        mO[batch, query, head, col + modes_o.cols[c]] = O[r, c].to(BFloat16)
                    if col == 0:
                        mLSE[batch, head, query] = lse[r]
        ping_pong.finish()

    @cute.jit
    def modify(self, S: cute.Tensor, modes, at: tuple, block: Int32, masked: Constexpr) -> None:
        """SCORE_MOD, and -inf for keys beyond the sequence or after the query's own."""
        row, col, shift, seqlen_k, head, scale = at
        for r in cutlass.range_constexpr(len(modes.rows)):
            query = row + modes.rows[r]
            end = cutlass.min(seqlen_k, query + shift + 1) if self.traits.causal else seqlen_k
            for c in cutlass.range_constexpr(len(modes.cols)):
                key = block * self.tile.tile_n + col + modes.cols[c]
                if cutlass.const_expr(self.SCORE_MOD is not None):
                    S[r, c] = self.SCORE_MOD(S[r, c] * scale, query, key, head)
                if cutlass.const_expr(masked):
                    S[r, c] = S[r, c] if key < end else -Float32.inf


register(Overlapped, variant="tour7", arch="sm90")
