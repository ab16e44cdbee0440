"""Loads of the Ampere forward by cp.async, block by block."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.copy import RowCopy, block_of_rows
from cute_attn.kernels.forward_sm80.key_groups import KeyGroup


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
