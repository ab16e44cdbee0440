"""Roles of the Hopper backward's warps that are neither producer nor consumers."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.kernels.backward_sm90.params import BackwardParams, BackwardStorage
from cute_attn.work.broadcast import KeyTile


@dataclass(frozen=True)
class BackwardRole:
    """One warp that does something in every step of the consumers; a subclass says what."""

    kernel: Constexpr
    params: BackwardParams
    shared: BackwardStorage

    def begin_head(self, key_tile: KeyTile, head: Int32) -> Any:
        """Begin a query head; returns the first argument of its steps."""
        raise NotImplementedError

    def step(self, of_head: Any, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        """One query block of that head, the CTA's n-th step."""
        raise NotImplementedError

    def finish_tile(self) -> None:
        """All steps of a key tile are done."""

    @cute.jit
    def run(self) -> None:
        """All steps of the running CTA, in the consumers' order."""
        work, seqlens, heads = self.shared.work, self.params.seqlens, self.params.qheads_per_tile
        n, i = Int32(0), Int32(0)
        while work.holds(i):
            key_tile = work.take(i, seqlens)
            blocks = self.kernel.query_blocks(self.params, key_tile)
            for h in cutlass.range(heads, unroll=1):
                of_head = self.begin_head(key_tile, key_tile.head_dkv * heads + h)
                for step in cutlass.range(blocks.begin, blocks.end, unroll=1):
                    self.step(of_head, key_tile, blocks.rotated(step), n)
                    n += 1
            self.finish_tile()
            i += 1
