"""The Hopper forward's output: O from a warpgroup's registers to global memory."""

from typing import Any

import cutlass
from cutlass import Constexpr, Int32, cute

import layouts
from cute_attn.device.copy import RowCopy
from cute_attn.device.math import convert_to_16_bits
from cute_attn.device.pipeline import warpgroup_barrier
from cute_attn.device.seqlen import sequence
from cute_attn.kernels.forward_sm90.params import ForwardOutputs, ForwardStorage, Fragments
from cute_attn.tiles import padded
from cute_attn.work.query_tiles import QueryTile


@cute.jit
def wait_for_stores(kernel: Constexpr, group: Int32, lane: Int32) -> None:
    """Wait until the warpgroup's last O has been read from shared memory; a barrier of its threads."""
    if cutlass.const_expr(kernel.stores_by_tma):
        if lane < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
    warpgroup_barrier(group)


@cute.jit
def store_output(
    kernel: Constexpr,
    outputs: ForwardOutputs,
    storage: ForwardStorage,
    fragments: Fragments,
    tile: QueryTile,
    group: Int32,
    lane: Int32,
) -> None:
    """The warpgroup's 64 rows of O through shared memory, by TMA or, where sequences end inside the tensor, stores."""
    dv, varlen, tma_o = kernel.traits.head_dim_v, kernel.traits.varlen, outputs.tma_o
    heads = kernel.tile.pack_heads
    row0 = tile.row0 + group * (64 // heads)  # the warpgroup's first query
    s_o = storage.s_o[None, None, group]
    wait_for_stores(kernel, group, lane)
    fragment = cute.make_rmem_tensor_like(fragments.acc_o, kernel.dtype)
    convert_to_16_bits(fragments.acc_o, fragment)
    one_group = layouts.tiled_mma_sm90(
        kernel.dtype, 64, padded(dv), warpgroups=1, a_source="rmem", b_major="mn"
    )
    store = layouts.store_copy_c(one_group, kernel.dtype, "sm90")
    mine = store.get_slice(lane)
    cute.copy(store, mine.retile(fragment), mine.partition_D(s_o))
    if cutlass.const_expr(kernel.stores_by_tma):
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup_barrier(group)
        if lane < 32 and row0 < tile.info.seqlen_q:
            tma_o.store(s_o, tma_o.sequence_of_tile(row0, tile), 0)
    else:
        warpgroup_barrier(group)
        o = sequence(outputs.mO, tile.batch, tile.head, tile.info.offset_q + row0, varlen)
        rows: Any = 64
        steps: Any = o.stride[0]
        if cutlass.const_expr(heads > 1):
            rows, steps = (heads, 64 // heads), (outputs.mO.stride[-2], steps)
        g_o = cute.make_tensor(o.iterator, cute.make_layout((rows, padded(dv)), stride=(steps, 1)))
        copy_o = RowCopy(kernel.gmem_store(), lane, padded(dv), dv, heads, tile.heads_left)
        copy_o.copy(s_o, g_o, (tile.info.seqlen_q - row0) * heads, False)
