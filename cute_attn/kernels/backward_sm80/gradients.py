"""dK and dV of the Ampere backward: accumulators in registers, and their way to global memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, cute

from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.device.element_copy import store_elements
from cute_attn.device.seqlen import sequence
from cute_attn.tiles import padded
from cute_attn.work.key_tiles import KeyTiles


@dataclass(frozen=True)
class Gradients:
    """dK and dV of a key block, accumulated in fp32 registers."""

    dk: cute.Tensor
    dv: cute.Tensor

    @staticmethod
    def zeros(kernel: Any, mma_dkv: cute.TiledMma, thread: Int32) -> "Gradients":
        """Before the first query block."""
        traits, keys = kernel.traits, kernel.tile.tile_n
        dk, dv = (
            cute.make_rmem_tensor(mma_dkv.get_slice(thread).partition_shape_C((keys, padded(dim))), Float32)
            for dim in (traits.head_dim, traits.head_dim_v)
        )
        dk.fill(0.0)
        dv.fill(0.0)
        return Gradients(dk, dv)


@cute.jit
def stage_gradient(
    kernel: Constexpr,
    acc: cute.Tensor,
    factor: Float32,
    mma_dkv: cute.TiledMma,
    s: cute.Tensor,
    thread: Int32,
) -> None:
    """Write acc * factor to shared memory, in the gradients' dtype."""
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * factor
    fragment = cute.make_rmem_tensor_like(acc, kernel.dtype)
    fragment.store(acc.load().to(kernel.dtype))
    kernel.products.result(mma_dkv, s, thread).store(fragment)


@cute.jit
def store_gradient(
    kernel: Constexpr,
    s: cute.Tensor,
    m: cute.Tensor,
    head_dim: int,
    key_tile: KeyTiles,
    key0: Int32,
    keys: Int32,
    thread: Int32,
    first_col: Int32,
) -> None:
    """dK or dV from shared to global memory, in 16-byte vectors, or of unaligned rows from a column on by elements."""
    cols = padded(head_dim)
    g = sequence(m, key_tile.batch, key_tile.head_dkv, key_tile.info.offset_k, kernel.traits.varlen)
    if cutlass.const_expr(not kernel.traits.aligned):
        store_elements(s, g, key0, keys, thread, kernel.tile.num_threads, first_col)
    else:
        tile = block_of_rows(g, key0 // kernel.tile.tile_n, kernel.tile.tile_n, cols)
        RowCopy(kernel.gmem_copy(head_dim, False), thread, cols, head_dim).copy(s, tile, keys, False)
