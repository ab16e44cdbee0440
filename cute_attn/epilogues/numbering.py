"""PyTorch's numbering of scores for dropout in memory-efficient attention. Light to import: no compiler.

Score (q, k) of batch b and head h draws word n % 4 of the Philox call with counter n // 4, where

    n     = (offset + plane) mod 2^64 + (q * seqlen_k + k) & score_mask
    plane = ((b * nheads + h) * max_seqlen_q * max_seqlen_k) & plane_mask

seqlen_k is the sequence's number of keys (the used ones under seqused_k), and the maxima are the call's, even if no
sequence is as long. n itself does not wrap: cuRAND's ``skipahead`` adds to a counter of 128 bits.

The masks depend on PyTorch's version:

========= ============== ============= =============
PyTorch   plane, batched plane, varlen score
========= ============== ============= =============
2.14 on   64 bits        64 bits       64 bits
2.13      low 32 bits    0             64 bits
to 2.12   low 32 bits    0             low 32 bits
========= ============== ============= =============

Up to 2.13 the forward computes planes in uint32, and in a varlen forward max_seqlen_k counts as 0: every sequence and
every head starts at the same number. Up to 2.12 it adds a query's block, a uint32, to the row within it, and so numbers
a head of more than 2^32 scores, such as one of 70,000 queries and keys, like 2^32 that repeat. The backward of these
versions does neither (int32 in place of uint32, and ``skipahead`` reads negative numbers as ones near 2^64; the given
max_seqlen_k), so its mask is not always the forward's. The mask here is the forward's, in both directions.

The forward is not followed in three cases. Up to 2.12 a thread numbers the first of its up to 32 neighbouring keys, and
counts on. If q * seqlen_k + k passes a multiple of 2^32 in between (impossible if seqlen_k is a multiple of 32 and the
query in a whole block), up to 31 of a head's 2^32 scores behind that are numbered on there and from 0 here. If moreover
offset + plane is not a multiple of 4, up to 3 scores before it that have a Philox call in common with one behind it are
numbered from 0 here too. Up to 2.13, if keys and values are expanded over the heads and no log-sum-exp is requested, a
query block of one row numbers its heads like queries.

Sources: PyTorch's ``mem_eff_attention/kernel_forward.h``, ``kernel_backward.h``, ``gemm_kernel_utils.h`` and
``_efficient_attention_forward``, 2.11 to 2.15; cuRAND's ``curand_init`` and ``skipahead`` of ``Philox4_32_10``.
"""

import functools

COUNTS_IN_64_BITS = (2, 14)
COUNTS_A_HEAD_IN_64_BITS = (2, 13)


@functools.cache
def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed PyTorch; a development version counts as its release."""
    import torch  # takes seconds, and compiling needs none

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def plane_mask(varlen: bool) -> int:
    """The bits that the installed PyTorch's forward keeps of a plane's first number.

    varlen: whether sequences are packed, by cumulative lengths.
    """
    if torch_version() >= COUNTS_IN_64_BITS:
        return 2**64 - 1
    return 0 if varlen else 2**32 - 1


def score_mask() -> int:
    """The bits that the installed PyTorch's forward keeps of a score's number within its head."""
    return 2**64 - 1 if torch_version() >= COUNTS_A_HEAD_IN_64_BITS else 2**32 - 1
