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
    ``value * inv_score_scale`` instead, which costs one multiply-add and no multiply. ``score_scale`` is the softmax scale, or the
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
    score_scale: Float32
    inv_score_scale: Float32
    gradient_scale: Float32 | None = None  # times a backward's dS is a gradient: 1 / (1 - dropout_p)


@dataclass(frozen=True)
class ScoreMap:
    """Which rows and columns of a score tile a thread holds; made once before the loops.

    Where ``heads`` > 1 row r is query r // heads of head r % heads, a power of two. A thread's first row has no bit in
    common with its rows' offsets from there, so that the two are divided each by itself.
    """

    modes: Constexpr  # layouts.mma.RowColModes
    tile_n: Constexpr
    thr_row: Int32
    thr_col: Int32
    transposed: Constexpr = False
    heads: Constexpr = 1

    @staticmethod
    def make(
        tiled_mma: cute.TiledMma,
        tile_m: int,
        tile_n: int,
        thread: Int32,
        transposed: bool = False,
        heads: int = 1,
    ) -> "ScoreMap":
        """The map of ``thread`` in the accumulator of ``tile_m`` rows and ``tile_n`` keys.

        transposed: the accumulator is (keys, queries), K Q^T. Rows are queries and columns keys all the same.
        """
        shape = (tile_n, tile_m) if transposed else (tile_m, tile_n)
        modes = row_col_modes(tiled_mma, *shape, transposed)
        thr_row, thr_col = thread_row_col(tiled_mma, *shape, thread, transposed)
        return ScoreMap(modes, tile_n, Int32(thr_row), Int32(thr_col), transposed, heads)

    def query(self, r: int) -> Int32:
        """Of row r, counted from the tile's first."""
        return self._first_query + self._queries[r]

    def head(self, r: int) -> Int32:
        """Of row r, counted from the tile's first."""
        return self.thr_row % self.heads + self.modes.rows[r] % self.heads

    @property
    def _first_query(self) -> Int32:
        return self.thr_row if self.heads == 1 else self.thr_row >> (self.heads.bit_length() - 1)

    @property
    def _queries(self) -> tuple[int, ...]:
        return tuple(row // self.heads for row in self.modes.rows)

    def tile(self, acc: cute.Tensor, row0: Int32, col0: Int32) -> "ScoreTile":
        """The score tile whose first element is (query row0, key col0)."""
        view = row_col_view(acc, self.modes)
        row, col = row0 + self._first_query, col0 + self.thr_col
        heads = None
        if self.heads > 1:
            heads = tuple(self.head(r) for r in range(len(self.modes.rows)))
        return ScoreTile(
            view, self._queries, self.modes.cols, self.tile_n, row, col, self.transposed, heads=heads
        )

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
    rows: Constexpr  # tuple[int, ...]: offset of each row's query from row0
    cols: Constexpr  # tuple[int, ...]: offset of each column from col0
    tile_n: Constexpr  # columns of the whole tile
    row0: Int32  # the query index of the thread's first row
    col0: Int32  # the key index of the thread's first column
    transposed: Constexpr = False
    tma_bias: Any = (
        None  # device.staged.TmaBiasTile: a bias for each score in shared memory, where a kernel brings it
    )
    heads: Any = (
        None  # tuple[Int32, ...]: each row's head, counted from the block's first, where it has several
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
