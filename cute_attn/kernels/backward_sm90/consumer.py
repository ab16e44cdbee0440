"""The consumer warpgroups of the Hopper backward: they compute dK and dV of key blocks, and add dQ."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Float32, Int32, cute

import layouts
from cute_attn.device.copy import RowCopy, zero_rows
from cute_attn.device.math import rematerialize, rematerialize_each
from cute_attn.device.pipeline import WARPGROUP, Accessed, consumer_barrier
from cute_attn.device.score_tile import ScoreMap
from cute_attn.device.seqlen import existing_rows, sequence
from cute_attn.kernels.backward_sm90.params import BackwardOutputs, BackwardParams, BackwardStorage, Fragments
from cute_attn.kernels.backward_sm90.steps import Head
from cute_attn.work.broadcast import KeyTile


@dataclass(frozen=True)
class Consumer:
    """All consumer warpgroups. ``loop``: the class of the loop over a head's query blocks."""

    kernel: Constexpr
    params: BackwardParams
    outputs: BackwardOutputs
    shared: BackwardStorage
    loop: Constexpr

    @cute.jit
    def run(self, thread: Int32) -> None:
        """Process the CTA's key blocks, each with the query blocks that see it. ``thread``: index among consumers."""
        kernel, params, shared = self.kernel, self.params, self.shared
        if cutlass.const_expr(not kernel.rematerializes_thread):
            # Otherwise ptxas reads the special register again at each use; see ``rematerialize_each``.
            thread = rematerialize(thread)
        fragments = self.make_fragments(cute.arch.make_warp_uniform(thread // WARPGROUP))
        i, steps = Int32(0), Int32(0)  # uses so far of the pipelines of K and V, of Q and dO
        while shared.work.holds(i):
            key_tile = shared.work.read(i, params.seqlens)
            blocks, heads = kernel.query_blocks(params, key_tile), params.query_heads(key_tile)
            score_map = self.score_map(
                rematerialize_each(thread, i) if kernel.rematerializes_thread else thread
            )
            fragments.acc_dk.fill(0.0)
            fragments.acc_dv.fill(0.0)
            if cutlass.const_expr(not kernel.waits_for_v_late):
                shared.pipeline_v.consumer_wait(i)
            key0, info = key_tile.block * kernel.tile.tile_n, key_tile.info
            self.zero_keys_out_of_bounds(info.seqlen_k - key0, thread)
            for n in cutlass.range(heads.first, heads.end, unroll=1):
                context, state = kernel.epilogues.begin_tile(params, key_tile, n)
                head = Head(
                    *(kernel, shared, fragments, blocks, state, score_map, key0, info.seqlen_q),
                    kernel.epilogues.scale_log2(context.score_scale),
                    kernel.dq_of_head(params, self.outputs, key_tile, n),
                    kernel.epilogues.rescale(state) * params.softmax_scale if kernel.tile.dq_direct else None,
                    steps,
                    thread,
                    shared.bias.address_of(thread) if kernel.loads_bias_by_tma else None,
                    i,
                )
                if cutlass.const_expr(kernel.tile.dq_rows > 0):
                    if key_tile.block == 0:
                        head.clear_dq()
                self.loop(head).run()
                if cutlass.const_expr(kernel.tile.dq_rows > 0):
                    if key0 + kernel.tile.tile_n >= info.seqlen_k:
                        head.store_all_dq()
                steps += blocks.end - blocks.begin
            self.store_keys(fragments, i)
            i += 1

    def score_map(self, thread: Int32) -> ScoreMap:
        """The map of the scores that a thread holds."""
        kernel, tile = self.kernel, self.kernel.tile
        return ScoreMap.make(
            kernel.mma_scores(), tile.tile_m, tile.tile_n, thread, transposed=not tile.p_in_smem
        )

    def make_fragments(self, group: Int32) -> Fragments:
        """Make the descriptors of a warpgroup's operands, and the accumulators of dK and dV."""
        kernel, shared, transposed = self.kernel, self.shared, layouts.transposed
        tile, (d, dv) = kernel.tile, kernel.dims
        scores, dk, dv_mma, dq = kernel.mma_scores(), kernel.mma_dkv(d), kernel.mma_dkv(dv), kernel.mma_dq()
        in_scores, in_dk, in_dv, in_dq = (
            mma.get_slice(group * WARPGROUP) for mma in (scores, dk, dv_mma, dq)
        )
        p_in_smem = tile.p_in_smem
        a_scores, b_scores = (shared.s_q, shared.s_k) if p_in_smem else (shared.s_k, shared.s_q)
        a_dp, b_dp = (shared.s_do, shared.s_v) if p_in_smem else (shared.s_v, shared.s_do)
        ds, k = shared.s_ds, transposed(shared.s_k)
        a_dq, b_dq = (k, ds) if tile.dq_transposed else (ds, k)
        return Fragments(
            scores.make_fragment_A(in_scores.partition_A(a_scores)),
            scores.make_fragment_B(in_scores.partition_B(b_scores)),
            scores.make_fragment_A(in_scores.partition_A(a_dp)),
            scores.make_fragment_B(in_scores.partition_B(b_dp)),
            _operand(dv_mma, in_dv, transposed(shared.s_do), tile.dkv_transposed),
            _operand(dk, in_dk, transposed(shared.s_q), tile.dkv_transposed),
            dq.make_fragment_A(in_dq.partition_A(a_dq)),
            dq.make_fragment_B(in_dq.partition_B(b_dq)),
            _operand(dv_mma, in_dv, transposed(shared.s_p), not tile.dkv_transposed) if p_in_smem else None,
            _operand(dk, in_dk, transposed(shared.s_ds), not tile.dkv_transposed) if p_in_smem else None,
            cute.make_rmem_tensor(in_dk.partition_shape_C(kernel.gradient_shape(d)), Float32),
            cute.make_rmem_tensor(in_dv.partition_shape_C(kernel.gradient_shape(dv)), Float32),
        )

    @cute.jit
    def zero_keys_out_of_bounds(self, rows: Int32, thread: Int32) -> None:
        """Zero K and V beyond the sequence, which ends before row ``rows`` of the key block."""
        traits, tile, shared = self.kernel.traits, self.kernel.tile, self.shared
        if cutlass.const_expr(traits.varlen or traits.seqused_k):
            if rows < tile.tile_n:
                where = (cutlass.max(rows, 0), tile.tile_n, thread, tile.mma_threads)
                zero_rows(shared.s_k[None, None, 0], *where)
                zero_rows(shared.s_v[None, None, 0], *where)
                cute.arch.fence_proxy("async.shared", space="cta")
                consumer_barrier(tile.warpgroups)

    @cute.jit
    def store_keys(self, fragments: Fragments, i: Int32) -> None:
        """Store dK and dV of the i-th key tile through shared memory, and release K and V. Writes all rows that exist.

        The key tile is read again, so that no register holds it through the main loop. If dK is stored from dS's
        memory, the next key tile may overwrite that memory once its V has been loaded, or after the barrier of its
        first step.
        """
        kernel, params, outputs, shared = self.kernel, self.params, self.outputs, self.shared
        traits, tile, (d, dv) = kernel.traits, kernel.tile, kernel.dims
        thread = rematerialize(cute.arch.thread_idx()[0] - WARPGROUP)
        key_tile = shared.work.read(i, params.seqlens)
        block = key_tile.block
        leaves_k: Constexpr = tile.dk_leaves_k(traits)
        leaves_v: Constexpr = tile.dv_leaves_v(traits)
        _, state = kernel.epilogues.begin_tile(params, key_tile, params.query_heads(key_tile).first)
        rescale = kernel.epilogues.rescale(state)
        consumer_barrier(tile.warpgroups)  # no product reads K, V and dS any more
        if cutlass.const_expr(leaves_k):
            shared.pipeline_k.consumer_release(i, Accessed.BY_THREADS)
        if cutlass.const_expr(leaves_v):
            shared.pipeline_v.consumer_release(i, Accessed.BY_THREADS)
        self.to_smem(fragments.acc_dv, rescale, dv, shared.s_dv[None, None, 0], thread)
        scale = rescale * params.softmax_scale
        self.to_smem(fragments.acc_dk, scale, d, shared.s_dk[None, None, 0], thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        consumer_barrier(tile.warpgroups)
        if cutlass.const_expr(traits.varlen):
            rows = (
                existing_rows(params.seqlens.cu_seqlens_k, outputs.mDK, key_tile.batch) - block * tile.tile_n
            )
            self.store_rows(shared.s_dk, outputs.mDK, traits.head_dim, key_tile, rows, thread)
            self.store_rows(shared.s_dv, outputs.mDV, traits.head_dim_v, key_tile, rows, thread)
            consumer_barrier(tile.warpgroups)
        elif thread < 32:
            where = (Int32(0), key_tile.head_dkv, key_tile.batch, kernel.part())
            outputs.tma_dv.store(shared.s_dv[None, None, 0], outputs.tma_dv.sequence(*where), block)
            outputs.tma_dk.store(shared.s_dk[None, None, 0], outputs.tma_dk.sequence(*where), block)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(not leaves_k):
            shared.pipeline_k.consumer_release(i, Accessed.BY_THREADS)
        if cutlass.const_expr(not leaves_v):
            shared.pipeline_v.consumer_release(i, Accessed.BY_THREADS)

    @cute.jit
    def to_smem(
        self, acc: cute.Tensor, factor: Float32, head_dim: Constexpr, target: cute.Tensor, thread: Int32
    ) -> None:
        """Store an accumulator of dK or dV, times ``factor`` and in 16 bits, to ``target`` (keys, head_dim)."""
        fragment = cute.make_rmem_tensor_like(acc, self.kernel.dtype)
        fragment.store((acc.load() * factor).to(self.kernel.dtype))
        store = self.kernel.gradient_store(head_dim)
        mine = store.get_slice(thread)
        transpose: Constexpr = self.kernel.tile.dkv_transposed
        as_accumulator = layouts.transposed(target) if cutlass.const_expr(transpose) else target
        cute.copy(store, mine.retile(fragment), mine.partition_D(as_accumulator))

    @cute.jit
    def store_rows(
        self,
        source: cute.Tensor,
        target: cute.Tensor,
        head_dim: Constexpr,
        key_tile: KeyTile,
        rows: Int32,
        thread: Int32,
    ) -> None:
        """Store the first ``rows`` keys of a key tile to varlen ``target``."""
        kernel, tile = self.kernel, self.kernel.tile
        cols = tile.columns_of(head_dim)
        # The tile's rows need not be a multiple of the rows of one copy.
        rows = cutlass.min(rows, tile.tile_n)
        plane = sequence(target, key_tile.batch, key_tile.head_dkv, key_tile.info.offset_k, True)
        for part in cutlass.range_constexpr(tile.cluster):
            tiles = cute.local_tile(plane, (tile.tile_n, cols), (key_tile.block, part))
            exist: Constexpr = min(head_dim - part * cols, cols)
            own = rows if cutlass.const_expr(tile.cluster == 1) else rows * Int32(kernel.part() == part)
            copy = RowCopy(kernel.gmem_store(cols), thread, cols, exist)
            copy.copy(source[None, None, 0], tiles, own, False)


def _operand(mma: cute.TiledMma, own: cute.TiledMma, smem: cute.Tensor, is_a: bool) -> cute.Tensor:
    """Descriptors of a product's first or second operand, for the warpgroup's slice ``own`` of the MMA."""
    if is_a:
        return mma.make_fragment_A(own.partition_A(smem))
    return mma.make_fragment_B(own.partition_B(smem))
