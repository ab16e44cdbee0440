"""The Hopper backward's dK, dV and bias gradient: from registers and shared memory to global memory."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Float32, Int32, cute

import layouts
from cute_attn.device.copy import RowCopy
from cute_attn.device.math import rematerialize
from cute_attn.device.pipeline import WARPGROUP, Accessed, consumer_barrier
from cute_attn.device.seqlen import existing_rows, sequence
from cute_attn.kernels.backward_sm90.params import BackwardOutputs, BackwardParams, BackwardStorage, Fragments
from cute_attn.kernels.backward_sm90.role import BackwardRole
from cute_attn.rows.tma_bias import columns_of
from cute_attn.tiles import padded
from cute_attn.work.broadcast import KeyTile


@cute.jit
def store_keys(
    kernel: Constexpr,
    params: BackwardParams,
    outputs: BackwardOutputs,
    shared: BackwardStorage,
    fragments: Fragments,
    i: Int32,
) -> None:
    """Store dK and dV of the i-th key tile through shared memory, and release K and V. Writes all rows that exist.

    The key tile is read again, so that no register holds it through the main loop. If dK is not stored from K's memory,
    the memory that it is stored from is free for the next key tile once the next V has been loaded.
    """
    thread = rematerialize(cute.arch.thread_idx()[0] - WARPGROUP)
    key_tile = shared.work.read(i, params.seqlens)
    block, leaves_k = key_tile.block, kernel.tile.dk_leaves_k(kernel.traits)
    _, state = kernel.begin(params, key_tile, key_tile.head_dkv * params.qheads_per_tile)
    rescale = kernel.epilogues.rescale(state)
    d, dv = kernel.dims
    consumer_barrier(kernel.tile.warpgroups)  # no product reads K, V and dS any more
    if cutlass.const_expr(leaves_k):
        shared.pipeline_k.consumer_release(i, Accessed.BY_THREADS)
    to_smem(kernel, fragments.acc_dv, rescale, dv, shared.s_v[None, None, 0], thread)
    scale = rescale * params.softmax_scale
    to_smem(kernel, fragments.acc_dk, scale, d, shared.s_dk[None, None, 0], thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    consumer_barrier(kernel.tile.warpgroups)
    if cutlass.const_expr(kernel.traits.varlen):
        rows = (
            existing_rows(params.seqlens.cu_seqlens_k, outputs.mDK, key_tile.batch)
            - block * kernel.tile.tile_n
        )
        store_rows(kernel, shared.s_dk, outputs.mDK, kernel.traits.head_dim, key_tile, rows, thread)
        store_rows(kernel, shared.s_v, outputs.mDV, kernel.traits.head_dim_v, key_tile, rows, thread)
        consumer_barrier(kernel.tile.warpgroups)
    elif thread < 32:
        where = (Int32(0), key_tile.head_dkv, key_tile.batch)
        outputs.tma_dv.store(shared.s_v[None, None, 0], outputs.tma_dv.sequence(*where), block)
        outputs.tma_dk.store(shared.s_dk[None, None, 0], outputs.tma_dk.sequence(*where), block)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    if cutlass.const_expr(not leaves_k):
        shared.pipeline_k.consumer_release(i, Accessed.BY_THREADS)
    shared.pipeline_v.consumer_release(i, Accessed.BY_THREADS)


@dataclass(frozen=True)
class BiasGradientStorer(BackwardRole):
    """One warp: stores dS of every step as the bias gradient, once all warpgroups have written it.

    It arrives at dS's buffer like the warps that write it, after its reads of the stage: ``SharedDoubleBuffer``.
    """

    outputs: BackwardOutputs

    def begin_head(self, key_tile: KeyTile, head: Int32) -> cute.Tensor:
        """The key block's columns of the gradient."""
        shape = (self.kernel.tile.tile_m, self.kernel.tile.tile_n)
        return columns_of(self.outputs.tma_dbias, key_tile.block, head, key_tile.batch, shape)

    @cute.jit
    def step(self, tiles: cute.Tensor, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        """Wait for dS and store it."""
        self.shared.ds_buffer.arrive(n)
        self.shared.ds_buffer.wait(n)
        ds = self.shared.s_ds[None, None, self.kernel.ds_stage(n)]
        self.outputs.tma_dbias.store(ds, tiles, block)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # reads of the stage are done


@cute.jit
def to_smem(
    kernel: Constexpr,
    acc: cute.Tensor,
    factor: Float32,
    head_dim: Constexpr,
    target: cute.Tensor,
    thread: Int32,
) -> None:
    """An accumulator of dK or dV times ``factor`` in 16 bits to ``target`` (keys, head_dim)."""
    fragment = cute.make_rmem_tensor_like(acc, kernel.dtype)
    fragment.store((acc.load() * factor).to(kernel.dtype))
    store = kernel.gradient_store(head_dim)
    mine = store.get_slice(thread)
    transpose: Constexpr = kernel.tile.dkv_transposed
    as_accumulator = layouts.transposed(target) if cutlass.const_expr(transpose) else target
    cute.copy(store, mine.retile(fragment), mine.partition_D(as_accumulator))


@cute.jit
def store_rows(
    kernel: Constexpr,
    source: cute.Tensor,
    target: cute.Tensor,
    head_dim: Constexpr,
    key_tile: KeyTile,
    rows: Int32,
    thread: Int32,
) -> None:
    """Store the first ``rows`` keys of a key tile to varlen ``target``."""
    cols = padded(head_dim)
    # Which need not be a multiple of the rows of one copy.
    rows = cutlass.min(rows, kernel.tile.tile_n)
    plane = sequence(target, key_tile.batch, key_tile.head_dkv, key_tile.info.offset_k, True)
    tiles = cute.local_tile(plane, (kernel.tile.tile_n, cols), (key_tile.block, 0))
    RowCopy(kernel.gmem_store(cols), thread, cols, head_dim).copy(source[None, None, 0], tiles, rows, False)
