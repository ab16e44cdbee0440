"""Default tiles as rows of a kernel's ``tiles.csv``, each with its conditions and its evidence.

The columns are the row's name; its keys, which the kernel's ``heuristics.py`` computes from traits, target and lengths;
the tile, as changes to its class's default tile; and the evidence. A key's cell contains numbers, ranges (``33-64``) or
words; an empty cell accepts any value. The default is the tile of the first matching row whose tile fits.

The evidence of a measured row, ``measured``, is its speed, workload, card and commit. Other rows have ``built``, the
registers and shared memory of a build without spills, and ``like``, the name of a similar measured row in this file, or
``KERNEL/ROW`` for one in another kernel's file.
"""

import csv
import functools
import io
import sys
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from cute_attn.tiles.base import Tile, first_that_fits
from cute_attn.traits import Traits

T = TypeVar("T", bound=Tile)
Key = int | str

EVIDENCE = ("measured", "built", "like")


class Cell(NamedTuple):
    """Values of one key that a row accepts: words and ranges of numbers."""

    words: frozenset[str]
    ranges: tuple[range, ...]

    @staticmethod
    def of(text: str) -> "Cell | None":
        """Parse a cell; None if it is empty."""
        items = text.split()
        numbers = [item.partition("-") for item in items if item[0].isdigit()]
        ranges = [
            range(int(least), 1 + int(most or (sys.maxsize - 1 if dash else least)))
            for least, dash, most in numbers
        ]
        return Cell(frozenset(items), tuple(ranges)) if items else None

    def accepts(self, key: Key) -> bool:
        """True if ``key`` is one of the words or in one of the ranges."""
        return key in self.words if isinstance(key, str) else any(key in one for one in self.ranges)


class Row(NamedTuple, Generic[T]):
    name: str
    keys: tuple[str, ...]
    cells: tuple[Cell | None, ...]
    tile: T
    measured: str
    built: str
    like: str

    def matches(self, keys: tuple[Key, ...]) -> bool:
        """True if every cell is empty or accepts its key."""
        pairs = zip(self.cells, keys, strict=True)
        return all(cell is None or cell.accepts(key) for cell, key in pairs)


class Table(Generic[T]):
    """The rows of the ``tiles.csv`` next to ``file``, with tiles of one class."""

    def __init__(self, file: str, tile: type[T]) -> None:
        self.path, self.tile = Path(file).with_name("tiles.csv"), tile
        self.tiles = functools.lru_cache(maxsize=1024)(self._tiles)
        self.first = functools.lru_cache(maxsize=4096)(self._first)

    @functools.cached_property
    def rows(self) -> tuple[Row[T], ...]:
        """All rows of the table; the file is read once."""
        with self.path.open(newline="") as lines:
            (name, *_, tile, measured, built, like), *rows = csv.reader(lines)
        if (name, tile, measured, built, like) != ("row", "tile", *EVIDENCE):
            raise ValueError(
                f"{self.path} begins with other columns than row, keys, tile, {', '.join(EVIDENCE)}"
            )
        default = self.tile()
        return tuple(
            Row(name, tuple(keys), tuple(map(Cell.of, keys)), default.override(tile), measured, built, like)
            for name, *keys, tile, measured, built, like in rows
        )

    def _tiles(self, *keys: Key) -> tuple[T, ...]:
        """The tiles of all rows that match ``keys``, the best first."""
        return tuple(row.tile for row in self.rows if row.matches(keys))

    def _first(self, traits: Traits, target: str, *keys: Key) -> T:
        """The first tile that fits ``traits`` on ``target``; if none does, the last: its ``reject`` says why."""
        return first_that_fits(self.tiles(*keys), traits, target)

    def line(self, traits: Traits, target: str, keys: tuple[Key, ...], change: str, measured: str) -> str:
        """The default tile's row as CSV text, with ``change`` applied to its tile and ``measured`` as its evidence.

        Raises:
            ValueError: the default tile is not a row's tile, but derived from one, e.g. with another number of passes.
        """
        for row in self.rows:
            if row.matches(keys) and row.tile.reject(traits, target) is None:
                text, tile = io.StringIO(), row.tile.override(change)
                csv.writer(text, lineterminator="").writerow(
                    (row.name, *row.keys, str(tile), measured, "", "")
                )
                return text.getvalue()
        raise ValueError(
            f"the default tile of {traits} on {target} is no row of {self.path} as it is written"
        )
