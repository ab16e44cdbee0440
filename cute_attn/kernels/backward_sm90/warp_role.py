"""What the warps of the Hopper backward that neither compute nor load have in common."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.kernels.backward_sm90.params import BackwardParams, BackwardStorage
from cute_attn.work.broadcast import KeyTile


@dataclass(frozen=True)
class WarpRole:
    """One such warp: it follows the work of the consumers, step by step; a subclass says what it does."""

    kernel: Constexpr
    params: BackwardParams
    shared: BackwardStorage

    def begin_head(self, key_tile: KeyTile, head: Int32) -> Any:
        """Begin a query head; the result is what its steps need."""
        raise NotImplementedError

    def step(self, of_head: Any, key_tile: KeyTile, block: Int32, n: Int32) -> None:
        """A query block of that head, the CTA's n-th step."""
        raise NotImplementedError

    def finish_tile(self) -> None:
        """A key block is done."""

    @cute.jit
    def run(self) -> None:
        """All steps of the running CTA, in the order in which they are computed."""
        work, seqlens, heads = self.shared.work, self.params.seqlens, self.params.qheads_per_tile
        n, i = Int32(0), Int32(0)
        while work.holds(i):
            key_tile = work.take(i, seqlens)
            blocks = self.kernel.query_blocks(self.params, key_tile)
            for h in cutlass.range(heads, unroll=1):
                of_head = self.begin_head(key_tile, key_tile.head_dkv * heads + h)
                for step in cutlass.range(blocks.begin, blocks.end, unroll=1):
                    self.step(of_head, key_tile, blocks.turned(step), n)
                    n += 1
            self.finish_tile()
            i += 1
