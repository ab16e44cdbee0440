"""Sections: an order of a table's cells that serves L2 and a balanced end of a list of work tiles."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute


@dataclass(frozen=True)
class Sections:
    """Groups of a table's columns that are visited together, row by row."""

    columns: cute.FastDivmodDivisorV2
    last_columns: cute.FastDivmodDivisorV2  # of the last section
    last: Int32

    @staticmethod
    def make(columns: Int32, most: Int32 | Int64, group: Int32 | int = 1) -> "Sections":
        """On the host: divide ``columns`` into sections of about ``most``, in whole groups of ``group`` adjacent ones.

        Sections have about the same size: a small last section would end with its longest tiles.
        """
        together = cutlass.max(Int32(cutlass.min(Int64(most), Int64(columns))), 1)
        count = cutlass.max(cute.ceil_div(columns, together), 1)
        together = cutlass.max(cute.ceil_div(cute.ceil_div(columns, count), group) * group, 1)
        last = cutlass.max(cute.ceil_div(columns, together) - 1, 0)
        last_columns = cutlass.max(columns - last * together, 1)
        divisor = cute.FastDivmodDivisorV2
        return Sections(divisor(together), divisor(last_columns), last)

    @cute.jit
    def row_and_column(self, section: Int32, position: Int32):
        """Row and column of the table at a position in a section.

        Without a branch: behind one, ptxas computes batch, head and all pointers in each thread's registers instead of
        uniform ones, and then spills.
        """
        in_last = section == self.last
        row = cutlass.select_(in_last, position // self.last_columns, position // self.columns)
        columns = cutlass.select_(in_last, self.last_columns.divisor, self.columns.divisor)
        return row, position - row * columns + section * self.columns.divisor
