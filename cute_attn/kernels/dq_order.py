"""The product dQ = dS K of a backward: its MMA, and the order of its accumulator in memory.

The main kernel adds accumulators to fp32 memory in register order (``cute_attn.outputs.accumulate``), and the convert
kernel reads them in the same order. Both derive it here, from the traits and from the main kernel's tile:

    tile_m          queries of a block
    mma_threads     threads of the MMA
    dq_transposed   True if the accumulator is dQ^T, (padded head_dim, tile_m), not dQ, (tile_m, padded head_dim)
    dq_warps_n      warps (sm80) or warpgroups (sm90) along the accumulator's second extent
    dq_vector       floats that one reduction adds
    dq_passes       ranges of head_dim, each with an accumulator, consecutive in memory

:func:`block_floats` and :func:`accumulator_shape` run anywhere; the other functions need a trace.
"""

from typing import Any

from cutlass import Constexpr, Float32, Int32, Int64, cute

import layouts
from cute_attn.device.seqlen import workspace_rows
from cute_attn.kernels.fakes import CUTE_DTYPES
from cute_attn.tiles import padded
from cute_attn.traits import Traits


def block_floats(traits: Traits, tile: Any) -> int:
    """Floats of one query block in a dQ accumulator."""
    return tile.tile_m * padded(traits.head_dim)


def accumulator_shape(traits: Traits, tile: Any) -> tuple[int, int]:
    """(M, N) of a pass of the product: (queries, head_dim of the pass), swapped if ``dq_transposed``."""
    queries, dims = tile.tile_m, padded(traits.head_dim) // tile.dq_passes
    return (dims, queries) if tile.dq_transposed else (queries, dims)


def mma_dq(traits: Traits, tile: Any, **operands: str) -> cute.TiledMma:
    """The MMA of the product.

    operands: on sm90, arguments ``a_source``, ``a_major`` and ``b_major`` of ``layouts.tiled_mma_sm90``. The convert
    kernel omits them, since the accumulator does not depend on them.
    """
    m, n = accumulator_shape(traits, tile)
    dtype = CUTE_DTYPES[traits.dtype]
    if traits.arch == "sm80":
        return layouts.tiled_mma_sm80(dtype, tile.mma_threads // 32, warps_n=tile.dq_warps_n)
    return layouts.tiled_mma_sm90(
        dtype, m, n, warpgroups=tile.mma_threads // 128, warpgroups_n=tile.dq_warps_n, **operands
    )


def make_accumulator(tiled_mma: cute.TiledMma, traits: Traits, tile: Any) -> cute.Tensor:
    """A thread's accumulator in registers, uninitialized."""
    return cute.make_rmem_tensor(
        tiled_mma.get_slice(0).partition_shape_C(accumulator_shape(traits, tile)), Float32
    )


@cute.jit
def accumulator_rows(
    mDQaccum: cute.Tensor,
    accumulator: Int32,
    batch: Int32,
    head: Int32,
    row0: Int32,
    width: Constexpr,
    varlen: Constexpr,
) -> cute.Tensor:
    """One accumulator of one head, flat, starting at row ``row0``. width: padded head_dim.

    mDQaccum: (accumulators, batch, nheads, rows * width), or varlen (accumulators, nheads, rows * width).
    """
    modes = list(range(1, cute.rank(mDQaccum)))
    start = cute.assume(Int64(accumulator) * mDQaccum.stride[0], divby=4)
    one = cute.make_tensor(mDQaccum.iterator + start, cute.select(mDQaccum.layout, mode=modes))
    return workspace_rows(one, batch, head, row0, width, varlen)
