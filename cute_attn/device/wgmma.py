"""The asynchronous matrix products of Hopper kernels."""

import cutlass
from cutlass import Constexpr, cute
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def start_gemm(
    tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: Constexpr
) -> None:
    """Start acc (+)= A B^T and commit it as one group; its registers belong to wgmma until it has been waited for."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(tiled_mma, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()
