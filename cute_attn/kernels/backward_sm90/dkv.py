"""How dK and dV of a key block leave the Hopper backward's registers."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Float32, Int32, cute

import layouts
from cute_attn.device.board import KeyBlock
from cute_attn.device.copy import RowCopy
from cute_attn.device.math import rematerialize
from cute_attn.device.pipeline import WARPGROUP, consumer_barrier
from cute_attn.device.seqlen import existing_rows, sequence
from cute_attn.kernels.backward_sm90.params import Fragments, Outputs, Problem, Shared
from cute_attn.kernels.backward_sm90.warp_role import WarpRole
from cute_attn.rows.tma_bias import columns_of
from cute_attn.tiles import padded


@cute.jit
def store_keys(
    kernel: Constexpr, problem: Problem, outputs: Outputs, shared: Shared, fragments: Fragments, i: Int32
) -> None:
    """dK and dV of the i-th key block, through shared memory; K and V are free then. All rows that exist are written.

    Which key block that is, is read again: the registers that would hold it are the main loop's. Where dK leaves K
    alone, what it takes over is free for the next key block when the next V is there.
    """
    thread = rematerialize(cute.arch.thread_idx()[0] - WARPGROUP)
    place = shared.board.read(i, problem.seqlens)
    block, leaves_k = place.block, kernel.tile.dk_leaves_k(kernel.traits)
    _, state = kernel.begin(problem, place, place.head_kv * problem.qheads_per_kvhead)
    rescale = kernel.epilogues.rescale(state)
    d, dv = kernel.dims
    consumer_barrier(kernel.tile.warpgroups)  # no products read K, V and dS any more
    if cutlass.const_expr(leaves_k):
        shared.pipeline_k.consumer_release(i)
    to_smem(kernel, fragments.acc_dv, rescale, kernel.mma_dkv(dv), shared.s_v[None, None, 0], thread)
    scale = rescale * problem.softmax_scale
    to_smem(kernel, fragments.acc_dk, scale, kernel.mma_dkv(d), shared.s_dk[None, None, 0], thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    consumer_barrier(kernel.tile.warpgroups)
    if cutlass.const_expr(kernel.traits.varlen):
        rows = (
            existing_rows(problem.seqlens.cu_seqlens_k, outputs.mDK, place.batch) - block * kernel.tile.tile_n
        )
        store_rows(kernel, shared.s_dk, outputs.mDK, kernel.traits.head_dim, place, rows, thread)
        store_rows(kernel, shared.s_v, outputs.mDV, kernel.traits.head_dim_v, place, rows, thread)
        consumer_barrier(kernel.tile.warpgroups)
    elif thread < 32:
        where = (Int32(0), place.head_kv, place.batch)
        outputs.tma_dv.store(shared.s_v[None, None, 0], outputs.tma_dv.sequence(*where), block)
        outputs.tma_dk.store(shared.s_dk[None, None, 0], outputs.tma_dk.sequence(*where), block)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    if cutlass.const_expr(not leaves_k):
        shared.pipeline_k.consumer_release(i)
    shared.pipeline_v.consumer_release(i)


@dataclass(frozen=True)
class BiasGradientStorer(WarpRole):
    """One warp stores dS of every step as the bias's gradient, as soon as all warpgroups have written theirs.

    The warp is one more of those that fill dS and read it, though it has nothing to fill: see ``SharedDoubleBuffer``.
    """

    outputs: Outputs

    def begin_head(self, place: KeyBlock, head: Int32) -> cute.Tensor:
        """The key block's columns of the gradient."""
        shape = (self.kernel.tile.tile_m, self.kernel.tile.tile_n)
        return columns_of(self.outputs.tma_dbias, place.block, head, place.batch, shape)

    @cute.jit
    def step(self, tiles: cute.Tensor, place: KeyBlock, block: Int32, n: Int32) -> None:
        """Wait for dS, and store it."""
        self.shared.exchange.arrive(n)
        self.shared.exchange.wait(n)
        ds = self.shared.s_ds[None, None, self.kernel.ds_stage(n)]
        self.outputs.tma_dbias.store(ds, tiles, block)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # that all has been read is enough


@cute.jit
def to_smem(
    kernel: Constexpr,
    acc: cute.Tensor,
    factor: Float32,
    tiled_mma: cute.TiledMma,
    target: cute.Tensor,
    thread: Int32,
) -> None:
    """An accumulator times ``factor`` in 16 bits to ``target`` (keys, head_dim)."""
    fragment = cute.make_rmem_tensor_like(acc, kernel.dtype)
    fragment.store((acc.load() * factor).to(kernel.dtype))
    store = layouts.store_copy_c(tiled_mma, kernel.dtype, "sm90")
    mine = store.get_slice(thread)
    cute.copy(store, mine.retile(fragment), mine.partition_D(target))


@cute.jit
def store_rows(
    kernel: Constexpr,
    source: cute.Tensor,
    target: cute.Tensor,
    head_dim: Constexpr,
    place: KeyBlock,
    rows: Int32,
    thread: Int32,
) -> None:
    """The first ``rows`` keys of a block to packed ``target``."""
    cols = padded(head_dim)
    plane = sequence(target, place.batch, place.head_kv, place.info.offset_k, True)
    tiles = cute.local_tile(plane, (kernel.tile.tile_n, cols), (place.block, 0))
    RowCopy(kernel.gmem_store(cols), thread, cols, head_dim).copy(source[None, None, 0], tiles, rows, False)
