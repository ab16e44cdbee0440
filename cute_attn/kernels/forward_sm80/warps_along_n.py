"""What warps that share rows exchange: in large head dims, whose output one warp cannot hold."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.score_tile import ScoreMap


@dataclass(frozen=True)
class RowExchange:
    """One number a row from each of the warps that share it: values (tile_m, warps_n) in shared memory."""

    values: cute.Tensor
    score_map: ScoreMap
    warp_n: Int32

    def row(self, r: int) -> Int32:
        """The thread's row r in the tile."""
        return self.score_map.thr_row + self.score_map.modes.rows[r]

    @cute.jit
    def write(self, numbers: cute.Tensor, thread: Int32) -> None:
        """The warp's own, which all lanes of a quad have."""
        if thread % 4 == 0:
            for r in cutlass.range_constexpr(cute.size(numbers)):
                self.values[self.row(r), self.warp_n] = numbers[r]

    @cute.jit
    def read(self, numbers: cute.Tensor, reduce: Constexpr) -> None:
        """``reduce`` of all warps' in place of the own, after a barrier; in the same order for all of them."""
        for r in cutlass.range_constexpr(cute.size(numbers)):
            total = self.values[self.row(r), 0]
            for n in cutlass.range_constexpr(1, cute.size(self.values, mode=[1])):
                total = reduce(total, self.values[self.row(r), n])
            numbers[r] = total
