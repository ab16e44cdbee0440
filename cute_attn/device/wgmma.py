"""wgmma products of Hopper kernels."""

from typing import Any

import cutlass
from cutlass import Constexpr, cute
from cutlass.cute.nvgpu import warpgroup

import layouts


@cute.jit
def start_gemm(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Constexpr
) -> None:
    """Issue acc (+)= A B^T and commit it as one wgmma group. acc must not be accessed before a wait for the group."""
    warpgroup.fence()
    issue(tiled_mma, acc, a, b, accumulate)
    warpgroup.commit_group()


@cute.jit
def issue(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Constexpr
) -> None:
    """Issue acc (+)= A B^T, one product of a wgmma group."""
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(tiled_mma, acc, a[None, None, k], b[None, None, k], acc)


def operand_layout(rows: int, cols: int, dtype: Any, *, stages: int | None = None, parts: int = 1) -> Any:
    """A shared-memory layout (rows, cols[, stages]), cols contiguous, for TMA and for wgmma with either major mode.

    parts: number of warpgroups that divide the columns. A warpgroup's columns must be whole swizzle atoms, so the
    swizzle is the widest whose atom divides them.
    """
    atom = layouts.wgmma_smem_layout(8, layouts.atom_cols(cols // parts, dtype.width), dtype)
    shape, order = ((rows, cols), (0, 1)) if stages is None else ((rows, cols, stages), (0, 1, 2))
    return cute.tile_to_shape(atom, shape, order=order)
