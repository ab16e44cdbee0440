"""Default tiles as rows of a kernel's ``tiles.csv``: for what each is taken, and the evidence for it.

From the left a row has its name; keys, which the kernel's ``heuristics.py`` computes from traits, target and lengths;
the tile, as what changes its class's default one; and the evidence. A key's cell is empty, for any value, or has
numbers, ranges (``33-64``) or words. Of the rows that match, the first one whose tile fits is the default.

Evidence is ``measured``: speed, workload, card and commit. Or the row was ``built`` without spills, with its registers
and shared memory, and is ``like`` a row that was measured, of this file or as ``KERNEL/ROW`` of another kernel's.
"""

import csv
import functools
import io
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from cute_attn.tiles.base import Tile, first_that_fits
from cute_attn.traits import Traits

T = TypeVar("T", bound=Tile)
Key = int | str

EVIDENCE = ("measured", "built", "like")


class Row(NamedTuple, Generic[T]):
    """A line of a table; ``keys`` are the cells of its keys."""

    name: str
    keys: tuple[str, ...]
    tile: T
    measured: str
    built: str
    like: str

    def matches(self, keys: tuple[Key, ...]) -> bool:
        """Whether the row is for these keys."""
        return all(not cell or _has(cell, key) for cell, key in zip(self.keys, keys, strict=True))


def _has(cell: str, key: Key) -> bool:
    """Whether one of a cell's words or ranges is or has ``key``."""
    if isinstance(key, str):
        return key in cell.split()
    ranges = (item.partition("-") for item in cell.split() if item[0].isdigit())
    return any(int(least) <= key <= int(most or (key if dash else least)) for least, dash, most in ranges)


class Table(Generic[T]):
    """The rows of the ``tiles.csv`` beside ``file``, with tiles of one class."""

    def __init__(self, file: str, tile: type[T]) -> None:
        self.path, self.tile = Path(file).with_name("tiles.csv"), tile
        self.tiles = functools.lru_cache(maxsize=1024)(self._tiles)
        self.first = functools.lru_cache(maxsize=4096)(self._first)

    @functools.cached_property
    def rows(self) -> tuple[Row[T], ...]:
        """All of them, read once."""
        with self.path.open(newline="") as lines:
            (name, *_, tile, measured, built, like), *rows = csv.reader(lines)
        if (name, tile, measured, built, like) != ("row", "tile", *EVIDENCE):
            raise ValueError(
                f"{self.path} begins with other columns than row, keys, tile, {', '.join(EVIDENCE)}"
            )
        default = self.tile()
        return tuple(
            Row(name, tuple(cells), default.override(tile), *evidence)
            for name, *cells, tile, measured, built, like in rows
            for evidence in [(measured, built, like)]
        )

    def _tiles(self, *keys: Key) -> tuple[T, ...]:
        """The tiles for some keys, the best first."""
        return tuple(row.tile for row in self.rows if row.matches(keys))

    def _first(self, traits: Traits, target: str, *keys: Key) -> T:
        """The first of them that fits ``traits`` on ``target``, or the last one, whose ``reject`` gives the reason."""
        return first_that_fits(self.tiles(*keys), traits, target)

    def line(self, traits: Traits, target: str, keys: tuple[Key, ...], change: str, measured: str) -> str:
        """The row of the default tile, with its tile changed and other evidence, as a line of the file.

        Raises:
            ValueError: the default is no row as it is written, but one in as many passes as it takes.
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
