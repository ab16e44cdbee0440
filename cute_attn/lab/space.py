"""Spaces of tiles: values of some fields around a good tile, and which of them a kernel accepts.

    space = Space.parse("tile_n=64..192:16,num_stages=1|2", tile)
    tiles, declined = space.tiles(traits, "sm90")

A tile has a dozen fields, and a build takes seconds, so the whole product suits only a few fields. Otherwise one field
at a time is changed (``neighbours``), with a second field if the first change alone does not fit (``repaired``); then
the changes that helped are combined (``pairs``).
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cute_attn.tiles import Tile
from cute_attn.traits import Traits

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?::(\d+))?")
_NEEDS_MEMORY = re.compile(r"(\d+ CTAs of )?tile .* needs? \d+ bytes of shared memory")
_NEEDS_REGISTERS = re.compile(r"tile .* needs about \d+ registers")
_FIELD_IS = re.compile(r"^(\w+) is \S+; ")


@dataclass(frozen=True)
class Space:
    """Values to try for some of a tile's fields, in the tile's order; the other fields keep their values."""

    tile: Tile
    values: tuple[tuple[str, tuple[Any, ...]], ...]

    @classmethod
    def parse(cls, text: str, tile: Tile) -> "Space":
        """From a text such as ``"tile_n=64..192:16,num_stages=1|2,q_in_regs"``.

        A field's values are ``A|B|...``, ``FIRST..LAST`` or ``FIRST..LAST:STEP``. A field without values gets those
        that the tile's class lists for it, or both values of a bool.
        """
        known = _known_values(tile)
        names = [field.name for field in dataclasses.fields(tile)]  # type: ignore[arg-type]
        found: dict[str, tuple[Any, ...]] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, given = (part.strip() for part in item.partition("="))
            if name not in names:
                raise ValueError(
                    f"space has {name!r}; accepted: fields of {type(tile).__name__} ({', '.join(names)})"
                )
            if not equals and name not in known:
                raise ValueError(f"space has {name!r} without values; accepted: {name}=A|B or {name}=A..B")
            found[name] = tuple(_values(name, given, tile)) if equals else known[name]
        if not found:
            raise ValueError(f"space is {text!r}; accepted: FIELD=VALUES of {', '.join(names)}")
        return cls(tile, tuple((name, found[name]) for name in names if name in found))

    @classmethod
    def around(cls, tile: Tile) -> "Space":
        """Every field of the tile that has values to try."""
        return cls(tile, tuple(_known_values(tile).items()))

    def neighbours(self, tile: Tile | None = None) -> Iterator[Tile]:
        """Yields a tile, by default the space's, with one field changed; each field's nearest values come first.

        If time runs short, the values farthest from the tile's are thus left out.
        """
        tile = tile or self.tile
        orders = []
        for name, values in self.values:
            own = getattr(tile, name)
            others = [value for value in values if value != own]
            near = sorted(others, key=lambda value: abs(value - own)) if isinstance(own, int) else others
            orders.append([dataclasses.replace(tile, **{name: value}) for value in near])  # type: ignore[type-var]
        for steps in itertools.zip_longest(*orders):
            yield from (step for step in steps if step is not None)

    def repaired(self, traits: Traits, target: str) -> Iterator[Tile]:
        """Yields neighbours that do not fit, each with the nearest change of a second field that makes it fit."""
        for tile in self.neighbours():
            if tile.reject(traits, target) is None:
                continue
            (changed,) = tile.changes(self.tile)
            others = (two for two in self.neighbours(tile) if getattr(two, changed) == getattr(tile, changed))
            found = next((two for two in others if two.reject(traits, target) is None), None)
            if found is not None:
                yield found

    def pairs(self, helped: Sequence[Tile]) -> Iterator[Tile]:
        """Yields tiles with the changes of two ``helped`` tiles, the best first, if these change different fields."""
        changes = [tile.changes(self.tile) for tile in helped]
        for i, j in sorted(itertools.combinations(range(len(helped)), 2), key=sum):
            if not changes[i].keys() & changes[j].keys():
                yield dataclasses.replace(self.tile, **changes[i], **changes[j])  # type: ignore[type-var]

    def tiles(self, traits: Traits, target: str) -> tuple[list[Tile], Counter[str]]:
        """The tiles of the product that fit, and how many did not for each reason."""
        choices = ([(name, value) for value in values] for name, values in self.values)
        product = (dataclasses.replace(self.tile, **dict(one)) for one in itertools.product(*choices))  # type: ignore[type-var]
        return accepted(product, traits, target)


def accepted(tiles: Iterable[Tile], traits: Traits, target: str) -> tuple[list[Tile], Counter[str]]:
    """The tiles that fit, without repetitions, and how many did not for each reason."""
    found: dict[Tile, None] = {}
    declined: Counter[str] = Counter()
    for tile in tiles:
        reason = tile.reject(traits, target)
        if reason is None:
            found[tile] = None
        else:
            declined[kind_of(reason, target)] += 1
    return list(found), declined


def kind_of(reason: str, target: str) -> str:
    """The reason why a tile does not fit, without numbers, so that equal reasons can be counted."""
    if _NEEDS_MEMORY.match(reason):
        return f"need more shared memory than {target} has"
    if _NEEDS_REGISTERS.match(reason):
        return "need more registers than there are"
    return "have another " + _FIELD_IS.sub(r"\1; ", reason)


def _known_values(tile: Tile) -> dict[str, tuple[Any, ...]]:
    """Field -> values to try: those in its metadata, or both for a bool."""
    known = {}
    for field in dataclasses.fields(tile):  # type: ignore[arg-type]
        both = (False, True) if isinstance(field.default, bool) else ()
        if values := tuple(field.metadata.get("values", both)):
            known[field.name] = values
    return known


def _values(name: str, text: str, tile: Tile) -> Iterator[Any]:
    for part in text.split("|"):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            try:
                yield getattr(tile.override(f"{name}={part.strip()}"), name)
            except ValueError as error:
                raise ValueError(f"{error}, several as A|B, or FIRST..LAST[:STEP]") from None
            continue
        first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
        if type(getattr(tile, name)) is not int or step < 1 or first > last:
            raise ValueError(
                f"space has {name}={text}; accepted: FIRST..LAST[:STEP] of whole numbers that grow"
            )
        yield from range(first, last + 1, step)
