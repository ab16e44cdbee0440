"""Operands, shared memory, loads by cp.async and groups of warps of the Ampere forward."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, cute

from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.device.seqlen import Seqlens
from cute_attn.epilogues.softmax import OnlineSoftmax, multiply_rows
from cute_attn.tiles import ForwardSm80Tile
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
    p: cute.Tensor | None = None  # (tile_m, tile_n, 1), where warps divide columns, and
    exchange: cute.Tensor | None = None  # (tile_m, warps_n) fp32


@dataclass(frozen=True)
class KeyGroup:
    """A thread's group of warps; ``count`` groups divide the keys of a step."""

    index: Int32
    thread: Int32  # in the group
    count: Constexpr
    warps: Constexpr  # of a group

    @staticmethod
    def of(tile: ForwardSm80Tile, thread: Int32) -> "KeyGroup":
        """The group of thread ``thread`` of the CTA."""
        if tile.key_groups == 1:
            return KeyGroup(Int32(0), thread, 1, tile.num_warps)
        index = cute.arch.make_warp_uniform(thread // tile.group_threads)
        return KeyGroup(index, thread % tile.group_threads, tile.key_groups, tile.num_warps)

    @property
    def is_first(self) -> Any:
        """True in the first group, which holds the CTA's result at the end."""
        return True if self.count == 1 else self.index == 0

    def part_of(self, block: Int32) -> Int32:
        """Index of the group's slice of key block ``block``, counted in slices from the first key."""
        return block if self.count == 1 else block * self.count + self.index

    def barrier(self) -> None:
        if self.count == 1:
            cute.arch.barrier()
        elif self.warps == 1:
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=1 + self.index, number_of_threads=32 * self.warps)


@dataclass(frozen=True)
class GroupResults:
    """A thread's O and row statistics, stored in shared memory for the first group: vectors of 4, and single values.

    Vectors of adjacent threads are adjacent, and so are single values, so that there are no bank conflicts.
    """

    o: cute.Tensor  # (4, vectors)
    stats: cute.Tensor  # (rows, 2): row_max, row_sum

    @staticmethod
    def make(start: cute.Pointer, size: int, rows: int, thread: Int32, threads: int) -> "GroupResults":
        """The results of a thread: ``size`` elements of O and ``rows`` rows. start: of its group's results."""
        vectors = cute.make_layout((4, size // 4), stride=(1, 4 * threads))
        stats = cute.make_layout((rows, 2), stride=(threads, rows * threads))
        return GroupResults(
            cute.make_tensor(start + 4 * thread, vectors),
            cute.make_tensor(start + size * threads + thread, stats),
        )

    @cute.jit
    def store(self, softmax: OnlineSoftmax, acc_o: cute.Tensor) -> None:
        vectors = cute.make_tensor(acc_o.iterator, cute.make_layout((4, cute.size(acc_o) // 4)))
        cute.autovec_copy(vectors, self.o)
        for r in cutlass.range_constexpr(cute.size(softmax.row_max)):
            self.stats[r, 0] = softmax.row_max[r]
            self.stats[r, 1] = softmax.row_sum[r]

    @cute.jit
    def merge_into(self, softmax: OnlineSoftmax, acc_o: cute.Tensor, acc_o_rows: cute.Tensor) -> None:
        """Merge these results into another group's softmax and acc_o. acc_o_rows: acc_o as (rows, head_dim_v)."""
        stats = cute.make_rmem_tensor(self.stats.shape, Float32)
        for i in cutlass.range_constexpr(cute.size(stats)):
            stats[i] = self.stats[i]
        own, other = softmax.merge(stats[None, 0], stats[None, 1])
        multiply_rows(acc_o_rows, own)
        rows, cols = (cute.size(acc_o_rows, mode=[i]) for i in range(2))
        row_of = {cute.crd2idx((r, c), acc_o_rows.layout): r for r in range(rows) for c in range(cols)}
        flat = cute.make_tensor(acc_o.iterator, cute.make_layout(cute.size(acc_o)))
        vector = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        for i in cutlass.range_constexpr(cute.size(acc_o) // 4):
            cute.autovec_copy(self.o[None, i], vector)
            for e in cutlass.range_constexpr(4):
                flat[4 * i + e] = flat[4 * i + e] + vector[e] * other[row_of[4 * i + e]]


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
