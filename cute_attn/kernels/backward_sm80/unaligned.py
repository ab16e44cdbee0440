"""Loads of the Ampere backward for rows that start anywhere.

Rows of Q and dO that start alike stay where they are copied. Before the first query block K is brought to Q's columns
and V to dO's, so that dK's and dQ's columns lie where Q's do, and dV's where dO's do. That takes one place for all
query heads of a CTA.
"""

from typing import Any

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.seqlen import sequence
from cute_attn.device.skewed_rows import has_room, heads_start_alike, shift_rows
from cute_attn.device.unaligned_rows import UnalignedRows
from cute_attn.outputs.dq_order import queries_stay
from cute_attn.tiles import padded
from cute_attn.work.key_tiles import KeyTiles


def start_alike(kernel: Any, mQ: cute.Tensor, mDO: cute.Tensor, nheads_kv: Int32) -> tuple:
    """Whether rows of Q, and of dO, start alike; Nones where they are moved, or always aligned."""
    traits, tile, group = kernel.traits, kernel.tile, mQ.shape[-2] // cutlass.max(nheads_kv, 1)
    if traits.element_bytes != 2 or traits.aligned:
        return None, None
    of_q = heads_start_alike(mQ, group) if queries_stay(traits, tile) else None
    dim = traits.head_dim_v
    stays = not tile.columns and has_room(tile.tile_m, padded(dim), dim, tile.num_threads)
    return of_q, heads_start_alike(mDO, group) if stays else None


@cute.jit
def first_cols(
    kernel: Constexpr, inputs: tuple, alike: tuple, key_tile: KeyTiles, head: Int32
) -> tuple[Int32, Int32]:
    """The columns where rows of Q and of dO start; head: a query head of the CTA."""
    mQ, _, _, mDO, _, _ = inputs
    (of_q, of_do), traits = alike, kernel.traits
    cols = []
    for m, dim, one in ((mQ, traits.head_dim, of_q), (mDO, traits.head_dim_v, of_do)):
        g = sequence(m, key_tile.batch, head, key_tile.info.offset_q, traits.varlen)
        rows = UnalignedRows(g, dim, Int32(0), kernel.tile.num_threads, one)
        cols.append(rows.first_col())
    return cols[0], cols[1]


@cute.jit
def finish_keys(
    kernel: Constexpr,
    inputs: tuple,
    alike: tuple,
    stages: tuple,
    key_tile: KeyTiles,
    heads: tuple,
    key0: Int32,
    thread: Int32,
) -> None:
    """Wait for a thread's copies of K and V, and put their rows where Q's and dO's start; a barrier follows.

    stages: K and V in shared memory. heads: of K and V, and how many query heads the CTA has.
    """
    traits, threads, (head_kv, queries) = kernel.traits, kernel.tile.num_threads, heads
    cute.arch.cp_async_wait_group(0)
    for m, s, dim in zip(inputs[1:3], stages, (traits.head_dim, traits.head_dim_v), strict=True):
        g = sequence(m, key_tile.batch, head_kv, key_tile.info.offset_k, traits.varlen)
        rows = UnalignedRows(g, dim, thread, threads)
        rows.finish(s[None, None, 0], key0, key_tile.info.seqlen_k - key0)
    if cutlass.const_expr(any(one is not None for one in alike)):
        cols = first_cols(kernel, inputs, alike, key_tile, key_tile.head_dkv * queries)
        if (cols[0] | cols[1]) != 0:
            cute.arch.barrier()
            for s, col in zip(stages, cols, strict=True):
                shift_rows(s[None, None, 0], col, thread, threads)
