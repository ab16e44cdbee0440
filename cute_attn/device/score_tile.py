"""A thread's fragment of a score tile as (query, key) elements, for any MMA.

Epilogues see ``acc[r, c]`` with the query index of row r and the key index of column c. An index is the thread's
first index plus a static offset, so that a mask is one comparison per column.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from layouts.mma import row_col_modes, row_col_view, thread_row_col


@dataclass(frozen=True)
class ScoreContext:
    """Values shared by all score tiles of one work tile.

    ``acc * score_scale`` is the reference's score. An epilogue that adds to scores adds
    ``value * inv_score_scale``: one multiply-add. ``score_scale`` is the softmax scale, or the cap of a softcap,
    after which acc is in [-1, 1]. After a bias, acc is the score itself: both scales are 1 for later epilogues.
    """

    batch: Int32
    head: Int32
    nheads: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    max_seqlen_q: Int32
    max_seqlen_k: Int32
    shift: Int32  # query i is aligned with key i + shift
    softmax_scale: Float32
    score_scale: Float32
    inv_score_scale: Float32
    gradient_scale: Float32 | None = None  # factor of a backward's dS: 1 / (1 - dropout_p)
    tangent_scale: Float32 | None = None  # factor of scores' tangents; 1 once a tensor's was added
    first_key: Int32 | None = None  # the first key, if that is not key 0
    first_row: Int32 | None = (
        None  # query 0's row among all sequences' rows, for an epilogue with a row per query
    )
    heads_left: Int32 | None = None  # ``QueryTile.heads_left``, in tiles of several heads


@dataclass(frozen=True)
class ScoreMap:
    """Rows and columns of a score tile that a thread holds; made once before the mainloop.

    With ``heads`` > 1, a power of two, row r is query r // heads of head r % heads. A thread's first row and its rows'
    offsets have no bit in common, so each is divided separately.
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
        """The map of ``thread`` for a score tile of ``tile_m`` rows and ``tile_n`` keys.

        transposed: the accumulator is K Q^T, (keys, queries). Rows of the map are queries nevertheless.
        """
        shape = (tile_n, tile_m) if transposed else (tile_m, tile_n)
        modes = row_col_modes(tiled_mma, *shape, transposed)
        thr_row, thr_col = thread_row_col(tiled_mma, *shape, thread, transposed)
        return ScoreMap(modes, tile_n, Int32(thr_row), Int32(thr_col), transposed, heads)

    def query(self, r: int) -> Int32:
        """The query of row r, relative to the tile's first query."""
        return self._first_query + self._queries[r]

    def head(self, r: int) -> Int32:
        """The head of row r, relative to the tile's first head."""
        return self.thr_row % self.heads + self.modes.rows[r] % self.heads

    @property
    def _first_query(self) -> Int32:
        return self.thr_row if self.heads == 1 else self.thr_row >> (self.heads.bit_length() - 1)

    @property
    def _queries(self) -> tuple[int, ...]:
        return tuple(row // self.heads for row in self.modes.rows)

    def tile(self, acc: cute.Tensor, row0: Int32, col0: Int32) -> "ScoreTile":
        """The thread's score tile, for the tile whose first element is (query row0, key col0)."""
        view = row_col_view(acc, self.modes)
        row, col = row0 + self._first_query, col0 + self.thr_col
        heads = None
        if self.heads > 1:
            heads = tuple(self.head(r) for r in range(len(self.modes.rows)))
        return ScoreTile(
            view, self._queries, self.modes.cols, self.tile_n, row, col, self.transposed, heads=heads
        )

    def view(self, fragment: cute.Tensor) -> cute.Tensor:
        """A fragment with the accumulator's layout, such as P, as (rows, cols)."""
        return row_col_view(fragment, self.modes)


@dataclass(frozen=True)
class ScoreTile:
    """A thread's elements of one score tile: acc (rows, cols), fp32 in registers.

    A thread holds pairs of neighbouring keys, and a quad of lanes holds a row. If ``transposed``, it holds pairs of
    neighbouring queries, and a quad holds a column.

    A tile may reach beyond the sequences: query indices row0 + rows[r] from seqlen_q on and key indices col0 + cols[c]
    from seqlen_k on are out of bounds (``ScoreContext``).
    """

    acc: cute.Tensor
    rows: Constexpr  # tuple[int, ...]: offset of each row's query from row0
    cols: Constexpr  # tuple[int, ...]: offset of each column from col0
    tile_n: Constexpr  # columns of the whole tile
    row0: Int32  # the query index of the thread's first row
    col0: Int32  # the key index of the thread's first column
    transposed: Constexpr = False
    tma_bias: Any = (
        None  # rows.tma_bias.TmaBiasTile: the bias tile in shared memory, in kernels that load it by TMA
    )
    heads: Any = (
        None  # tuple[Int32, ...]: each row's head relative to the tile's first one, in tiles of several heads
    )

    def of(self, acc: cute.Tensor) -> "ScoreTile":
        """This tile with another acc (rows, cols), such as the scores' gradients."""
        return replace(self, acc=acc)

    def registers(self) -> cute.Tensor:
        """``acc`` in one dimension, in register order."""
        return registers(self.acc)


def registers(view: cute.Tensor) -> cute.Tensor:
    """A (rows, cols) view in one dimension, in register order."""
    size = cute.size(view)
    assert cute.cosize(view.layout) == size, "the view leaves out registers in between"
    return cute.make_tensor(view.iterator, cute.make_layout(size))


@dataclass(frozen=True)
class Band:
    """Query i sees key j if i + left <= j < i + right and first <= j < seqlen_k.

    ``has_left``, ``has_right``: bounds in use. ``first``: the sequence's first key, None for key 0.
    """

    has_left: Constexpr
    has_right: Constexpr
    left: Int32
    right: Int32
    seqlen_k: Int32
    first: Int32 | None = None

    @property
    def has_first(self) -> bool:
        """True if a left bound or a first key may hide leading keys."""
        return self.has_left or self.first is not None

    def first_key(self, query: Int32) -> Int32:
        """The first key that ``query`` sees (may be beyond the last key)."""
        first = Int32(0) if self.first is None else self.first
        return cutlass.max(query + self.left, first) if self.has_left else first

    def end_key(self, query: Int32) -> Int32:
        """One past the last key that ``query`` sees (may be negative)."""
        return cutlass.min(query + self.right, self.seqlen_k) if self.has_right else self.seqlen_k

    def visible_keys(self, query: Int32) -> Int32:
        """Number of keys that ``query`` sees, or 1 if it sees none."""
        return cutlass.max(self.end_key(query) - self.first_key(query), 1)

    def first_query(self, key: Int32) -> Int32:
        """The first query that would see ``key`` (may be beyond the last query)."""
        return cutlass.max(key - self.right + 1, 0) if self.has_right else Int32(0)

    def end_query(self, key: Int32, seqlen_q: Int32) -> Int32:
        """One past the last of ``seqlen_q`` queries that would see ``key`` (may be negative)."""
        return cutlass.min(key - self.left + 1, seqlen_q) if self.has_left else seqlen_q
