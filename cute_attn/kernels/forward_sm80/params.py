"""Operands, loads and per-tile values of the Ampere forward."""

from dataclasses import dataclass

from cutlass import Constexpr, Int32, cute

from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.device.gemm import SmemOperand
from cute_attn.epilogues.chain import ScoreState
from cute_attn.epilogues.softmax import OnlineSoftmax
from cute_attn.work.block_range import BlockRange


@dataclass(frozen=True)
class Operands:
    """Operands of both products in shared memory, and their tiled MMA."""

    tiled_mma: cute.TiledMma
    q: SmemOperand
    k: SmemOperand
    v: SmemOperand


@dataclass(frozen=True)
class BlockLoad:
    """Loads key blocks of one head's K or V, (seqlen_k, head_dim), from global to shared memory."""

    row_copy: RowCopy
    g: cute.Tensor
    s: cute.Tensor  # (tile_n, padded head_dim, stage)
    seqlen_k: Int32

    @cute.jit
    def start(self, block: Int32, stage: Int32, whole: Constexpr) -> None:
        """Start loading ``block``; ``whole``: all its keys exist. Others are zeroed, since 0 * NaN is NaN."""
        rows = cute.size(self.s, mode=[0])
        g_block = block_of_rows(self.g, block, rows, cute.size(self.s, mode=[1]))
        self.row_copy.copy(g_block, self.s[None, None, stage], self.seqlen_k - block * rows, whole)


@dataclass(frozen=True)
class MainloopContext:
    """What the steps of the main loop need of the CTA's work tile."""

    operands: Operands
    load_k: BlockLoad
    load_v: BlockLoad
    blocks: BlockRange
    state: ScoreState
    thread: Int32
    row0: Int32
    softmax: OnlineSoftmax
    stats: cute.Pointer  # row statistics of all threads in shared memory
    acc_o: cute.Tensor
    acc_o_rows: cute.Tensor  # acc_o as (rows, head_dim_v)
