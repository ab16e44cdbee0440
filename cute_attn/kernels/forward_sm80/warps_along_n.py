"""Exchange of row statistics between warps of the same rows: with large head dims one warp cannot hold the output."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.score_tile import ScoreMap


@dataclass(frozen=True)
class RowExchange:
    """One number per row and warp of the row: values (tile_m, warps_n) in shared memory."""

    values: cute.Tensor
    score_map: ScoreMap
    warp_n: Int32

    def row(self, r: int) -> Int32:
        """The thread's row r in the tile."""
        return self.score_map.thr_row + self.score_map.modes.rows[r]

    @cute.jit
    def write(self, numbers: cute.Tensor, thread: Int32) -> None:
        """Write the warp's numbers; all lanes of a quad have the same."""
        if thread % 4 == 0:
            for r in cutlass.range_constexpr(cute.size(numbers)):
                self.values[self.row(r), self.warp_n] = numbers[r]

    @cute.jit
    def read(self, numbers: cute.Tensor, reduce: Constexpr) -> None:
        """After a barrier, replace the warp's numbers by ``reduce`` of all warps', in the same order for all."""
        for r in cutlass.range_constexpr(cute.size(numbers)):
            total = self.values[self.row(r), 0]
            for n in cutlass.range_constexpr(1, cute.size(self.values, mode=[1])):
                total = reduce(total, self.values[self.row(r), n])
            numbers[r] = total
