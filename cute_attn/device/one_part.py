"""fp32 numbers as one fp16 part: x times a power of two in fp16, which has tf32's 11 significant bits.

Of Q, K, V and dO see :mod:`cute_attn.kernels.split_fp32`. Score gradients have no bound that is known before, so their
power of two follows from the largest one that a CTA has seen. dK, which is added up in tensor cores, is in units of it,
and is multiplied when it changes: a few times a CTA.
"""

import cutlass
from cutlass import Constexpr, Float16, Float32, Int32, cute

from cute_attn.device.gemm_hi_lo import largest_finite, scale_of
from cute_attn.device.math import convert_to_16_bits


@cute.jit
def scaled_to_fp16(words: cute.Tensor, factor: Float32) -> cute.Tensor:
    """fp32 registers times ``factor``, a power of two, in fp16."""
    scaled, part = cute.make_rmem_tensor_like(words, Float32), cute.make_rmem_tensor_like(words, Float16)
    for i in cutlass.range_constexpr(cute.size(words)):
        scaled[i] = words[i] * factor
    convert_to_16_bits(scaled, part)
    return part


@cute.jit
def running_scale(
    words: cute.Tensor, of_warps: cute.Tensor, applied: cute.Tensor, thread: Int32, piece: Constexpr
) -> tuple[Float32, Float32, Float32]:
    """(scale, its inverse, what sums in units of the last scale have to be times), with a barrier.

    The scale is :func:`scale_of` the largest finite |x| of all threads' registers, now and in calls before. In one part
    x then errs by at most 2^-11 of itself or 2^-39 of the largest.

    Args:
        of_warps: (warps, pieces) int32 in shared memory, 0 before the first call; the largest so far.
        applied: (warps,) fp32, 1 before the first call; the last inverse.
        thread: of the CTA.
        piece: which of the calls between two further barriers this is. Each has its own column of ``of_warps``: a warp
            that is ahead must not change what others have still to read.
    """
    warps, pieces = (cute.size(of_warps, mode=[i]) for i in range(2))
    warp, largest = thread // 32, largest_finite(words)
    if cutlass.const_expr(pieces > 1):
        cute.arch.sync_warp()  # ``applied`` of the piece before
    before = applied[warp]
    if thread % 32 == 0:
        for own in cutlass.range_constexpr(pieces):
            largest = cutlass.max(largest, of_warps[warp, own])
        of_warps[warp, piece] = largest
    cute.arch.barrier()
    for other in cutlass.range_constexpr(warps):
        largest = cutlass.max(largest, of_warps[other, piece])
    scale, inverse = scale_of(largest)
    if thread % 32 == 0:
        applied[warp] = inverse
    return scale, inverse, before * scale


@cute.jit
def change_units(acc: cute.Tensor, factor: Float32) -> None:
    """acc *= factor, which is mostly 1, and the same for all threads of a warp."""
    if factor != 1.0:
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * factor
