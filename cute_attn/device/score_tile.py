"""What a thread holds of a score tile, in (query, key) terms whichever MMA made it.

Epilogues see only this: ``acc[r, c]`` with the query index of row r and the key index of column c. Rows and columns are
separate: an index is the thread's own first one plus a static offset, so that a mask is one comparison a column.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from layouts.mma import row_col_modes, row_col_view, thread_row_col


@dataclass(frozen=True)
class ScoreContext:
    """What is the same for all score tiles of one work tile.

    A raw score times ``unit`` is a score in natural units, as the reference has it. Epilogues that add to a score add
    ``value * inv_unit`` instead, which costs one multiply-add and no multiply. ``unit`` is the softmax scale, or the
    cap once a softcap has brought scores into [-1, 1].
    """

    batch: Int32
    head: Int32
    nheads: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    max_seqlen_q: Int32
    max_seqlen_k: Int32
    shift: Int32  # a query's own key is at query + shift
    softmax_scale: Float32
    unit: Float32
    inv_unit: Float32
    gradient_scale: Float32 | None = None  # times a backward's dS is a gradient: 1 / (1 - dropout_p)


@dataclass(frozen=True)
class ScoreMap:
    """Which rows and columns of a score tile a thread holds; made once before the loops."""

    modes: Constexpr  # layouts.mma.RowColModes
    tile_n: Constexpr
    thr_row: Int32
    thr_col: Int32
    transposed: Constexpr = False

    @staticmethod
    def make(
        tiled_mma: cute.TiledMma, tile_m: int, tile_n: int, thread: Int32, transposed: bool = False
    ) -> "ScoreMap":
        """The map of ``thread`` in the accumulator of ``tile_m`` queries and ``tile_n`` keys.

        transposed: the accumulator is (keys, queries), K Q^T. Rows are queries and columns keys all the same.
        """
        shape = (tile_n, tile_m) if transposed else (tile_m, tile_n)
        modes = row_col_modes(tiled_mma, *shape, transposed)
        thr_row, thr_col = thread_row_col(tiled_mma, *shape, thread, transposed)
        return ScoreMap(modes, tile_n, Int32(thr_row), Int32(thr_col), transposed)

    def tile(self, acc: cute.Tensor, row0: Int32, col0: Int32) -> "ScoreTile":
        """The score tile whose first element is (query row0, key col0)."""
        rows, cols = self.modes.rows, self.modes.cols
        view = row_col_view(acc, self.modes)
        row, col = row0 + self.thr_row, col0 + self.thr_col
        return ScoreTile(view, rows, cols, self.tile_n, row, col, self.transposed)

    def view(self, fragment: cute.Tensor) -> cute.Tensor:
        """Any fragment laid out as the accumulator, such as P, as (rows, cols)."""
        return row_col_view(fragment, self.modes)


@dataclass(frozen=True)
class ScoreTile:
    """A thread's elements of one score tile: acc (rows, cols), fp32 in registers.

    Upright, neighbouring registers hold neighbouring keys: a thread has pairs of columns, and its row is shared by a
    quad of lanes. Transposed, they hold neighbouring queries, pairs of rows, and a quad of lanes shares a column.
    """

    acc: cute.Tensor
    rows: Constexpr  # tuple[int, ...]: offset of each row from row0
    cols: Constexpr  # tuple[int, ...]: offset of each column from col0
    tile_n: Constexpr  # columns of the whole tile
    row0: Int32  # the query index of the thread's first row
    col0: Int32  # the key index of the thread's first column
    transposed: Constexpr = False
    staged: Any = (
        None  # device.staged.StagedTile: a bias for each score in shared memory, where a kernel brings it
    )

    def of(self, acc: cute.Tensor) -> "ScoreTile":
        """The same elements' places with other numbers: acc (rows, cols), such as their gradients."""
        return replace(self, acc=acc)

    def registers(self) -> cute.Tensor:
        """All of ``acc`` in one dimension, in the order of the registers."""
        return registers(self.acc)


def registers(view: cute.Tensor) -> cute.Tensor:
    """All of a (rows, cols) view in one dimension, in the order of the registers."""
    size = cute.size(view)
    assert cute.cosize(view.layout) == size, "the view leaves out registers in between"
    return cute.make_tensor(view.iterator, cute.make_layout(size))
