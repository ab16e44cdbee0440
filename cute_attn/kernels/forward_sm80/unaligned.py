"""Loads and a step of the forward for rows that start anywhere: they pass through staging memory, one block at a time.

wait staging; K[j] from it; barrier; start V[j]
S = Q K[j]^T
wait staging; V[j] from it; barrier; start K[j - 1]
epilogues, online softmax, O = rescaled O + P V[j]
"""

from dataclasses import dataclass

from cutlass import Constexpr, Int32, cute

from cute_attn.device.staged_rows import StagedRows
from cute_attn.kernels.forward_sm80.params import MainloopContext


@dataclass(frozen=True)
class UnalignedLoad:
    """Loads key blocks of one head's K or V; see :class:`cute_attn.kernels.forward_sm80.loads.BlockLoad`."""

    rows: StagedRows
    s: cute.Tensor  # (tile_n, padded head_dim, 1)
    seqlen_k: Int32

    def start(self, block: Int32, stage: Int32 | int, whole: Constexpr) -> None:
        """Start loading ``block`` to staging memory."""
        keys = cute.size(self.s, mode=[0])
        self.rows.start(block * keys, self.seqlen_k - block * keys, keys)

    @cute.jit
    def finish(self, block: Int32) -> None:
        """Wait for ``block`` and move it to its place; then staging memory is free. Two barriers."""
        keys = cute.size(self.s, mode=[0])
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self.rows.finish(self.s[None, None, 0], block * keys, self.seqlen_k - block * keys)
        cute.arch.barrier()


@cute.jit
def step_of_unaligned_rows(kernel: Constexpr, ctx: MainloopContext, block: Int32, masked: Constexpr) -> None:
    """One key block."""
    ctx.load_k.finish(block)
    ctx.load_v.start(block, 0, False)
    cute.arch.cp_async_commit_group()
    acc_s, loaded = kernel.scores(ctx, block, Int32(0))
    ctx.load_v.finish(block)
    if block > ctx.blocks.begin:
        ctx.load_k.start(block - 1, 0, False)
    cute.arch.cp_async_commit_group()
    kernel.accumulate(ctx, block, acc_s, loaded, Int32(0), masked)
