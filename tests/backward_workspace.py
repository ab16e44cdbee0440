"""Results of the backward's preprocess and convert in plain torch, from the arguments of their launches.

The convert here reads dQ's accumulators row by row; kernels have another order within a query block.
"""

import math

import torch

from cute_attn.tiles import padded


def sequences(traits, tile, seqlens, q):
    """For each batch: slices of q's and k's rows, used ones and all, and the first row in the workspace."""
    for b in range(q.shape[0] if seqlens.cu_seqlens_q is None else len(seqlens.cu_seqlens_q) - 1):
        rows = []
        for side in "qk":
            cu, used = getattr(seqlens, f"cu_seqlens_{side}"), getattr(seqlens, f"seqused_{side}")
            start, end = (0, getattr(seqlens, f"max_seqlen_{side}")) if cu is None else cu[b : b + 2].tolist()
            used_end = end if used is None else min(end, start + int(used[b]))
            rows.append((slice(start, used_end), slice(start, end)))
        first = (rows[0][0].start // tile.tile_m + b) * tile.tile_m if traits.varlen else 0
        yield b, *rows, first


def preprocess(traits, tile, given):
    """LSE in base 2, minus D, and zeros in the accumulators."""
    width = padded(traits.head_dim)
    for b, (rows, _), _, first in sequences(traits, tile, given.seqlens, given.mO):
        at = (slice(None),) if traits.varlen else (b,)
        n, end = rows.stop - rows.start, first + -(-(rows.stop - rows.start) // tile.tile_m) * tile.tile_m
        products = (given.mDO.float() * given.mO.float()).sum(-1)
        products = (products if traits.varlen else products[b])[rows].T
        own = given.mLSE[at][:, rows]
        change = 0 if given.mDLSE is None else given.mDLSE[at][:, rows]
        given.mLSElog2[at][:, first:end] = math.inf
        given.mMinusD[at][:, first:end] = 0
        log2 = torch.where(own.isinf(), math.inf, own * math.log2(math.e))
        given.mLSElog2[at][:, first : first + n] = log2
        minus_d = torch.where(own.isinf(), 0, (change - products) * given.keep_prob)
        given.mMinusD[at][:, first : first + n] = minus_d
        for accumulator in given.mDQaccum:
            accumulator[at][:, first * width : end * width] = 0


def convert(traits, tile, given):
    """dQ in its dtype, and zeros in rows that are not used."""
    width, dq = padded(traits.head_dim), given.mDQ
    for b, (rows, all_rows), _, first in sequences(traits, tile, given.seqlens, dq):
        own, n = dq if traits.varlen else dq[b], rows.stop - rows.start
        own[all_rows] = 0
        at = (slice(None),) if traits.varlen else (b,)
        total = sum(
            a[at][:, first * width : (first + n) * width].view(dq.shape[-2], n, width) for a in given.mDQaccum
        )
        own[rows] = (given.scale * total[..., : traits.head_dim]).transpose(0, 1).to(dq.dtype)
