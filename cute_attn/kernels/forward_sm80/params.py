"""Operands, loads and per-tile values of the Ampere forward."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, cute

from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.device.forward_fp32 import Fp32Rows
from cute_attn.device.gemm import SmemOperand
from cute_attn.epilogues.chain import ScoreState
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.tiles import ForwardSm80Tile
from cute_attn.work.block_range import BlockRange


@dataclass(frozen=True)
class KeyGroup:
    """A thread's group of warps, of ``count`` that divide the keys of a step."""

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
        """Whether it has the CTA's result at the end."""
        return True if self.count == 1 else self.index == 0

    def part_of(self, block: Int32) -> Int32:
        """The group's part of a key block, counted in such parts."""
        return block if self.count == 1 else block * self.count + self.index

    def barrier(self) -> None:
        """Wait for the group's threads."""
        if self.count == 1:
            cute.arch.barrier()
        elif self.warps == 1:
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=1 + self.index, number_of_threads=32 * self.warps)


@dataclass(frozen=True)
class Operands:
    """Operands of both products in shared memory, and their tiled MMA."""

    tiled_mma: cute.TiledMma
    q: SmemOperand
    k: SmemOperand
    v: SmemOperand | Fp32Rows


@dataclass(frozen=True)
class BlockLoad:
    """Loads a group's keys of key blocks of one head's K or V, (seqlen_k, head_dim), from global to shared memory."""

    row_copy: RowCopy
    g: cute.Tensor
    s: cute.Tensor  # (group_keys, padded head_dim, stage)
    seqlen_k: Int32
    group: KeyGroup

    @cute.jit
    def start(self, block: Int32, stage: Int32, whole: Constexpr) -> None:
        """Start loading ``block``; ``whole``: all its keys exist. Others are zeroed, since 0 * NaN is NaN."""
        rows = cute.size(self.s, mode=[0])
        block = self.group.part_of(block)
        g_block = block_of_rows(self.g, block, rows, cute.size(self.s, mode=[1]))
        self.row_copy.copy(g_block, self.s[None, None, stage], self.seqlen_k - block * rows, whole)


@dataclass(frozen=True)
class SharedMemory:
    """A CTA's shared memory, K and V those of the thread's group: (rows, cols, stage)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    stats: cute.Pointer  # fp32: row statistics of all threads
    merge: cute.Pointer  # fp32: results of all groups but the first one


@dataclass(frozen=True)
class GroupResults:
    """A thread's O and row statistics, in shared memory for the first group: vectors of 4 and single values.

    The vectors of all threads, and their values, are adjacent: no bank conflicts.
    """

    o: cute.Tensor  # (4, vectors)
    stats: cute.Tensor  # (rows, 2): row_max, row_sum

    @staticmethod
    def make(start: cute.Pointer, size: int, rows: int, thread: Int32, threads: int) -> "GroupResults":
        """Of ``size`` elements of O and ``rows`` rows; ``start``: of a group's."""
        vectors = cute.make_layout((4, size // 4), stride=(1, 4 * threads))
        stats = cute.make_layout((rows, 2), stride=(threads, rows * threads))
        return GroupResults(
            cute.make_tensor(start + 4 * thread, vectors),
            cute.make_tensor(start + size * threads + thread, stats),
        )

    @cute.jit
    def store(self, softmax: OnlineSoftmax, acc_o: cute.Tensor) -> None:
        """Write the thread's own."""
        vectors = cute.make_tensor(acc_o.iterator, cute.make_layout((4, cute.size(acc_o) // 4)))
        cute.autovec_copy(vectors, self.o)
        for r in cutlass.range_constexpr(cute.size(softmax.row_max)):
            self.stats[r, 0] = softmax.row_max[r]
            self.stats[r, 1] = softmax.row_sum[r]

    @cute.jit
    def merge_into(self, softmax: OnlineSoftmax, acc_o: cute.Tensor, acc_o_rows: cute.Tensor) -> None:
        """Add them to another group's; acc_o_rows: acc_o as (rows, head_dim_v)."""
        other = cute.make_rmem_tensor_like(acc_o)
        vectors = cute.make_tensor(other.iterator, cute.make_layout((4, cute.size(acc_o) // 4)))
        cute.autovec_copy(self.o, vectors)
        stats = cute.make_rmem_tensor(self.stats.shape, Float32)
        for i in cutlass.range_constexpr(cute.size(stats)):
            stats[i] = self.stats[i]
        other_rows = cute.make_tensor(other.iterator, acc_o_rows.layout)
        softmax.merge(stats[None, 0], stats[None, 1], acc_o_rows, other_rows)


@dataclass(frozen=True)
class MainloopContext:
    """What the steps of the main loop need of the CTA's work tile."""

    operands: Operands
    load_k: BlockLoad
    load_v: BlockLoad
    blocks: BlockRange
    state: ScoreState
    group: KeyGroup
    thread: Int32  # in the group
    row0: Int32
    softmax: OnlineSoftmax
    shared: SharedMemory
    acc_o: cute.Tensor
    acc_o_rows: cute.Tensor  # acc_o as (rows, head_dim_v)
