"""Loads of rows that start anywhere: moved to column 0, or those that start alike where they are copied."""

from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

from cute_attn.device.skewed_rows import SkewedRows
from cute_attn.device.word_rows import WordRows


@dataclass(frozen=True)
class UnalignedRows:
    """Loads tiles of rows of g, (length, head_dim), that start anywhere.

    Attributes:
        head_dim, num_threads: compile-time constants; all of the threads load.
        alike: 1 where rows start alike, and stay where they are copied, for which tiles have room; otherwise they are
            moved to column 0. None if they always are.
        cleaned: whether there are to be zeros beside rows that stay.
    """

    g: cute.Tensor
    head_dim: Constexpr
    thread: Int32
    num_threads: Constexpr
    alike: Int32 | None = None
    cleaned: Constexpr = True

    def at_column(self, col: Int32, alike: Int32 | None) -> "UnalignedRows":
        """The same rows, which stay where they are copied if they start alike, and so that this is column ``col``."""
        return self if alike is None else replace(self, alike=alike & Int32(self.skewed.skew == col))

    @property
    def words(self) -> WordRows:
        """The loads that leave rows at column 0."""
        return WordRows(self.g, self.head_dim, self.thread, self.num_threads, pairs=self.alike is None)

    @property
    def skewed(self) -> SkewedRows:
        """The loads that leave rows where they are copied."""
        return SkewedRows(self.g, self.head_dim, self.thread, self.num_threads)

    @cute.jit
    def start(self, tile: cute.Tensor, row0: Int32, rows: Int32, whole: Constexpr) -> None:
        """Start loading ``tile``, of which ``rows`` rows exist; all of them and one more if ``whole``."""
        if cutlass.const_expr(self.alike is None):
            self.words.start(tile, row0, rows, whole)
        elif self.alike != 0:
            self.skewed.start(tile, row0, rows, whole)
        else:
            self.words.start(tile, row0, rows, whole)

    @cute.jit
    def finish(self, tile: cute.Tensor, row0: Int32, rows: Int32) -> None:
        """After a thread's copies have arrived, and before a barrier."""
        moves = Boolean(True)
        if cutlass.const_expr(self.alike is not None):
            moves = self.alike == 0
        if moves:
            self.words.finish(tile, row0, rows)
        elif cutlass.const_expr(self.cleaned):
            self.skewed.clean(tile)

    @cute.jit
    def first_col(self) -> Int32:
        """The column of a row's first element."""
        col = Int32(0)
        if cutlass.const_expr(self.alike is not None):
            if self.alike != 0:
                col = self.skewed.skew
        return col
