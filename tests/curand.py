"""The memory-efficient attention's dropout in plain Python integers, from PyTorch's and cuRAND's sources.

This file shares no code with the package, and is the reference for the package's masks.
"""

import numpy as np
import torch
from torch import Tensor

WORD, DOUBLE = 2**32, 2**64


def philox(counter: tuple[int, ...], key: tuple[int, ...], rounds: int) -> tuple[int, ...]:
    """Philox4x32 of one counter, from the figure in Salmon et al., SC 2011."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for r in range(rounds):
        round_key_0, round_key_1 = (k0 + r * 0x9E3779B9) % WORD, (k1 + r * 0xBB67AE85) % WORD
        high_0, low_0 = divmod(0xD2511F53 * x0, WORD)
        high_2, low_2 = divmod(0xCD9E8D57 * x2, WORD)
        x0, x1, x2, x3 = high_2 ^ x1 ^ round_key_0, low_2, high_0 ^ x3 ^ round_key_1, low_0
    return x0, x1, x2, x3


class Generator:
    """cuRAND's Philox4_32_10, subsequence 0, after ``curand_init(seed, 0, offset)`` and one ``skipahead``.

    Both arguments are of 64 bits; the counter of calls has 128.
    """

    def __init__(self, seed: int, offset: int) -> None:
        self.key = (seed % WORD, seed // WORD % WORD)
        self.call, self.word = divmod(offset % DOUBLE, 4)
        self.calls: dict[int, tuple[int, ...]] = {}

    def word_after(self, skip: int) -> int:
        """The word that comes next after ``skipahead(skip)``."""
        calls, words = divmod(skip % DOUBLE, 4)
        call, word = self.call + calls, self.word + words
        if word > 3:
            call, word = call + 1, word - 4
        if call not in self.calls:
            counter = tuple(call // WORD**i % WORD for i in range(4))
            self.calls[call] = philox(counter, self.key, 10)
        return self.calls[call][word]


def first_number(
    version: tuple[int, int],
    varlen: bool,
    batch: int,
    head: int,
    nheads: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> int:
    """``dropout_batch_head_rng_offset`` of a version's forward.

    Up to 2.13 it is computed in uint32, and the launch of varlen sequences has num_keys 0.
    """
    if version >= (2, 14):
        return (batch * nheads + head) * max_seqlen_q * max_seqlen_k
    num_keys = 0 if varlen else max_seqlen_k
    return (batch * nheads * max_seqlen_q * num_keys + head * max_seqlen_q * num_keys) % WORD


RUN = 32
"""Neighbouring keys of a thread of the forward, in whole blocks of queries and keys."""


def skip(version: tuple[int, int], query: int, key: int, seqlen_k: int) -> int:
    """Number of a head's words before a score's word: a thread skips to its first key, and counts from there.

    Up to 2.12 ``skipahead`` gets (query_start + thread_i) * num_keys + (iter_key_start + thread_start_j), of which
    query_start is uint32_t, and the others are int.
    """
    first = query * seqlen_k + key // RUN * RUN
    return (first if version >= (2, 13) else first % WORD) + key % RUN


def keep_mask(
    version: tuple[int, int],
    seed: int,
    offset: int,
    first: int,
    queries: range,
    keys: range,
    seqlen_k: int,
    dropout_p: float,
) -> Tensor:
    """The scores of a head that are kept: (queries, keys)."""
    generator = Generator(seed, offset + first)
    words = [[generator.word_after(skip(version, q, k, seqlen_k)) for k in keys] for q in queries]
    uniform = np.array(words, dtype=np.uint32).astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    return torch.from_numpy(uniform > np.float32(dropout_p)).reshape(len(queries), len(keys))
