"""PyTorch's numbering of scores for dropout in memory-efficient attention, and the words that keep one.

Imports no compiler.

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

Up to 2.13 the forward computes planes in uint32, and in a varlen forward it uses 0 for max_seqlen_k, so every sequence
and every head starts at the same number. Up to 2.12 it also numbers scores within a head in uint32, so the numbers of a
head with more than 2^32 scores, such as 70,000 queries and keys, repeat. The backward of these versions uses int32
(``skipahead`` reads negative numbers as numbers near 2^64) and the given max_seqlen_k, so its mask is not always the
forward's. This module follows the forward in both directions.

It deviates from PyTorch's forward in three cases. (1) Up to 2.12 a thread computes the number of the first of its up to
32 neighbouring keys, and counts on from there. If q * seqlen_k + k passes a multiple of 2^32 in between (impossible if
seqlen_k is a multiple of 32 and the query is in a whole block), PyTorch counts on for up to 31 scores after the
multiple, while numbers here restart from 0. (2) If in this case offset + plane is not a multiple of 4, up to 3 scores
before the multiple that have the same Philox call as a score after it are numbered from 0 here too. (3) Up to 2.13, if
keys and values are expanded over the heads and no log-sum-exp is requested, PyTorch numbers the heads of a query block
of one row like queries.

Sources: PyTorch's ``mem_eff_attention/kernel_forward.h``, ``kernel_backward.h``, ``gemm_kernel_utils.h`` and
``_efficient_attention_forward``, 2.11 to 2.15; cuRAND's ``curand_init`` and ``skipahead`` of ``Philox4_32_10``.
"""

import functools
import math

import numpy as np

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


def as_signed(word: int, bits: int) -> int:
    """The signed number with the same bits."""
    return word - (1 << bits) if word >> (bits - 1) else word


@functools.lru_cache(maxsize=64)
def flash_keep_threshold(dropout_p: float) -> int:
    """The largest byte that flash's mask keeps. Like PyTorch, subtract in float32 and multiply in float64."""
    return math.floor(float(np.float32(1) - np.float32(dropout_p)) * 255.0)


@functools.lru_cache(maxsize=64)
def mem_efficient_keep_threshold(dropout_p: float) -> int:
    """The smallest 32-bit word x with ``x * 2**-32 + 2**-33 > dropout_p`` in float32, rounded like cuRAND and PyTorch.

    Rounding to float32 is monotonic in x, and so is the sum: bisection finds the threshold. 2**32 if no word is kept.
    """
    p = np.float32(dropout_p)
    low, high = 0, 2**32
    while low < high:
        middle = (low + high) // 2
        if np.float32(middle) * np.float32(2.0**-32) + np.float32(2.0**-33) > p:
            high = middle
        else:
            low = middle + 1
    return low
