"""The arguments that all forward kernels share, as fakes for compiling.

    mQ        (batch, seqlen_q, nheads, head_dim)       or packed (total_q, nheads, head_dim)
    mK        (batch, seqlen_k, nheads_kv, head_dim)    or packed (total_k, nheads_kv, head_dim)
    mV, mO    as mK and mQ, with head_dim_v
    mLSE      (batch, nheads, seqlen_q) fp32            or packed (nheads, total_q)
    mSoftmax  (batch, nheads, max_seqlen_q, max_seqlen_k) in the dtype of q, or None
    seqlens   Seqlens: int32 tensors or None, and the largest lengths
    softmax_scale, score_args (``EpilogueChain.host_args``), stream

Sizes and strides are symbolic, 64 bit; q, k, v and o are 16-byte aligned with strides of whole 16 bytes.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_attn.device.seqlen import Seqlens
from cute_attn.traits import Traits

CUTE_DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
ALIGN_BYTES = 16


def rows_fake(dtype: Any, ndim: int) -> cute.Tensor:
    """A tensor of head-dim rows: last dimension contiguous, everything else by 16-byte strides."""
    divisibility = ALIGN_BYTES * 8 // dtype.width
    shape = (*(cute.sym_int() for _ in range(ndim - 1)), cute.sym_int(divisibility=8))
    stride = (*(cute.sym_int64(divisibility=divisibility) for _ in range(ndim - 1)), 1)
    return make_fake_tensor(dtype, shape, stride=stride, assumed_align=ALIGN_BYTES)


def plain_fake(dtype: Any, ndim: int) -> cute.Tensor:
    """A tensor of elements: last dimension contiguous, nothing assumed of the others."""
    shape = tuple(cute.sym_int() for _ in range(ndim))
    stride = (*(cute.sym_int64() for _ in range(ndim - 1)), 1)
    return make_fake_tensor(dtype, shape, stride=stride, assumed_align=dtype.width // 8)


def seqlens_fake(traits: Traits) -> Seqlens:
    """Lengths as the traits have them."""

    def lengths(present: bool) -> cute.Tensor | None:
        return plain_fake(Int32, 1) if present else None

    return Seqlens(
        lengths(traits.varlen),
        lengths(traits.varlen),
        lengths(traits.seqused_q),
        lengths(traits.seqused_k),
        Int32(0),
        Int32(0),
    )


def forward_fake_args(traits: Traits, score_args: tuple) -> tuple:
    """Everything up to the stream."""
    dtype = CUTE_DTYPES[traits.dtype]
    ndim = 3 if traits.varlen else 4
    return (
        *(rows_fake(dtype, ndim) for _ in range(4)),
        plain_fake(Float32, ndim - 1),
        plain_fake(dtype, 4) if traits.return_softmax else None,
        seqlens_fake(traits),
        Float32(0.0),
        score_args,
    )
