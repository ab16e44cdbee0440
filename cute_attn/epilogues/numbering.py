"""How PyTorch's memory-efficient attention numbers the scores that it drops. Light to import: no compiler.

Score (q, k) of batch b and head h draws word n % 4 of the Philox call with counter n // 4, where

    n     = (offset + plane) mod 2^64 + q * seqlen_k + k
    plane = ((b * nheads + h) * max_seqlen_q * max_seqlen_k) & plane_mask

seqlen_k is the sequence's own number of keys (the used ones under seqused_k), and the maxima are those of the call,
even if no sequence is as long. n itself does not wrap: cuRAND's ``skipahead`` adds q * seqlen_k + k to a counter of
128 bits.

``plane_mask`` depends on PyTorch's version:

========= ============== =============
PyTorch   batched        varlen
========= ============== =============
2.14 on   64 bits        64 bits
to 2.13   low 32 bits    0
========= ============== =============

Up to 2.13 the forward computes in uint32, and in a varlen forward max_seqlen_k counts as 0: every sequence and every
head starts at the same number. The backward of these versions does neither (int32 in place of uint32; the given
max_seqlen_k), so its mask is not always the forward's. The mask here is the forward's, in both directions.

Two cases of the forward are not followed: up to 2.12 q * seqlen_k + k is uint32 too, which matters for a head of more
than 2^32 scores; and up to 2.13, where keys and values are expanded over the heads and no log-sum-exp is asked for, a
query block of one row numbers its heads like queries.

Sources: PyTorch's ``mem_eff_attention/kernel_forward.h``, ``kernel_backward.h``, ``gemm_kernel_utils.h`` and
``_efficient_attention_forward``, 2.11 to 2.15; cuRAND's ``curand_init`` and ``skipahead`` of ``Philox4_32_10``.
"""

import functools

COUNTS_IN_64_BITS = (2, 14)


@functools.cache
def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed PyTorch; a development version counts as its release."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def plane_mask(varlen: bool) -> int:
    """The bits that the installed PyTorch's forward keeps of a plane's first number.

    varlen: whether sequences are packed, by cumulative lengths.
    """
    if torch_version() >= COUNTS_IN_64_BITS:
        return 2**64 - 1
    return 0 if varlen else 2**32 - 1
