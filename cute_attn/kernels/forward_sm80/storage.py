"""Operands, shared memory, loads by cp.async and per-tile values of the Ampere forward."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, cute

from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.device.seqlen import Seqlens
from cute_attn.kernels.forward_sm80.key_groups import KeyGroup
from cute_attn.work.query_tiles import QueryGrid


@dataclass(frozen=True)
class ForwardParams:
    """Parameters of a launch: tensors, lengths, and values derived from them."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mLSE: cute.Tensor
    seqlens: Seqlens
    softmax_scale: Float32
    score_args: tuple
    scale_log2: Float32
    grid: QueryGrid
    nheads: Int32
    scales: cute.Tensor | None  # of q, k and v, for kernels that follow a split into fp16 terms


@dataclass(frozen=True)
class Operands:
    """Operands of both products in shared memory, and their tiled MMA."""

    tiled_mma: cute.TiledMma
    q: Any  # a ``SmemOperand``, or of ``device.gemm_terms``
    k: Any
    v: Any
    p: Any = None  # where warps divide columns
    scales: Any = None  # of fp16 terms: 2^-e of Q, K and V, in global memory, to keep registers free


@dataclass(frozen=True)
class SharedMemory:
    """A CTA's shared memory. k and v belong to the thread's group: (rows, cols, stage)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    stats: cute.Pointer  # fp32: row statistics of all threads
    merge: cute.Pointer  # fp32: results of all groups but the first one
    tile_range: cute.Pointer  # int32: each warp's copy of a ``TileRange``, in attention with a cache
    p: cute.Tensor | None = None  # (tile_m, tile_n, 1), where warps divide columns, and
    exchange: cute.Tensor | None = None  # (tile_m, warps_n) fp32


@dataclass(frozen=True)
class BlockLoad:
    """Loads a group's slices of key blocks from one head's K or V, (seqlen_k, head_dim), into shared memory."""

    row_copy: RowCopy
    g: cute.Tensor
    s: cute.Tensor  # (group_keys, padded head_dim, stage)
    seqlen_k: Int32
    group: KeyGroup
    first_key: Int32 | None = None  # keys before it do not exist

    @cute.jit
    def start(self, block: Int32, stage: Int32, whole: Constexpr) -> None:
        """Start loading ``block``. whole: all its keys exist. Missing keys become 0, since 0 * NaN is NaN."""
        rows = cute.size(self.s, mode=[0])
        block = self.group.part_of(block)
        cols, alignment = cute.size(self.s, mode=[1]), self.row_copy.alignment
        g_block = block_of_rows(self.g, block, rows, cols, alignment)
        target, last = self.s[None, None, stage], self.seqlen_k - block * rows
        if cutlass.const_expr(self.first_key is None):
            self.row_copy.copy(g_block, target, last, whole)
        else:
            self.row_copy.copy(g_block, target, last, False, self.first_key - block * rows)
