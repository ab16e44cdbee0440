"""Base classes of all tiles.

A tile is a frozen value; its :attr:`~Tile.text` parses back, and ``str`` gives a shorter form. Before anything is
compiled, a tile computes its shared memory and registers, and why it does not fit given traits or a target. The choice
of a tile changes results only by the order of roundings.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self, TypeVar

from cute_attn.traits import LARGE_HEAD_DIM, Traits, did_you_mean

SHARED_MEMORY_BYTES = {
    "sm80": 166_912,
    "sm86": 101_376,
    "sm89": 101_376,
    "sm90": 232_448,
    "sm100": 232_448,
    "sm120": 101_376,
}
"""Largest shared memory of one CTA on each target, in bytes."""

TARGETS = tuple(SHARED_MEMORY_BYTES)
MEASURED = "sm90"
"""The target on which all kernels are timed, including the Ampere kernels."""
TILES_OF = {"sm100": "sm86", "sm120": "sm86"}
"""Target -> the target whose default tiles it uses: on sm100, ptxas spills with the tiles of sm80 and sm90."""
REGISTERS_PER_THREAD = 255
HEAD_DIM_PAD = 32


def atom_bytes(row_bytes: int) -> int:
    """Bytes of a row in a swizzle atom of shared memory, at most 128; see ``layouts.swizzle.atom_cols``."""
    return math.gcd(row_bytes, 128)


def padded(head_dim: int) -> int:
    """Round head_dim up to a multiple of ``HEAD_DIM_PAD``, the extent in shared memory and registers.

    Above ``LARGE_HEAD_DIM`` the multiple is twice as large, because several warps divide the columns.
    """
    pad = HEAD_DIM_PAD if head_dim <= LARGE_HEAD_DIM else 2 * HEAD_DIM_PAD
    return -(-head_dim // pad) * pad


def is_latent_dim(head_dim_v: int) -> bool:
    """True if two warpgroups can read ``head_dim_v`` columns of values from the keys' swizzle atoms of 64 columns."""
    return -(-head_dim_v // 64) % 2 == 0


def row_bytes(traits: Traits) -> tuple[int, int]:
    """Bytes of a padded row of head_dim elements, and of head_dim_v elements."""
    return traits.element_bytes * padded(traits.head_dim), traits.element_bytes * padded(traits.head_dim_v)


def choice(default: Any, *values: Any) -> Any:
    """Declare a tile's field with the values worth trying; :mod:`cute_attn.lab.space` chooses neighbours from them.

    A field without values, such as one derived from other fields, is not varied. A bool field needs no values.
    """
    return dataclasses.field(default=default, metadata={"values": values})


def areas_in_order(sizes: dict[str, int], start: int = 0) -> dict[str, tuple[int, int]]:
    """Lay out areas of these sizes one after the other: name -> first byte and end."""
    ends = itertools.accumulate(sizes.values(), initial=start)
    return dict(zip(sizes, itertools.pairwise(ends), strict=True))


class Tile:
    """Base of all tiles: conversion to and from text, and the checks of shared memory and registers."""

    def __str__(self) -> str:
        """:attr:`text` without fields at their class's default, except ``tile_m`` and ``tile_n``."""
        hidden, text = self.inert_fields(), self.text
        return ",".join(item for item in text.split(",") if item not in hidden) or text

    @property
    def text(self) -> str:
        """All fields as text. :meth:`override` with this text turns any tile of the class into this one."""
        return ",".join(f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self))  # type: ignore[arg-type]

    @classmethod
    def inert_fields(cls) -> frozenset[str]:
        """``FIELD=VALUE`` for the default of each field that has one, except ``tile_m`` and ``tile_n``."""
        return frozenset(
            f"{f.name}={_text(f.default)}"
            for f in fields(cls)  # type: ignore[arg-type]
            if f.default is not dataclasses.MISSING and f.name not in ("tile_m", "tile_n")
        )

    def changes(self, base: Self) -> dict[str, Any]:
        """Field -> value, of the fields in which this tile differs from ``base``."""
        return {name: value for name, value in vars(self).items() if value != getattr(base, name)}

    def override(self, text: str) -> Self:
        """This tile with the fields of ``text`` changed, such as ``"tile_n=128,q_in_regs=true"``.

        Raises:
            ValueError: a field that does not exist or that is given twice, or a value that does not parse.
        """
        types = {f.name: type(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        changes: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (word.strip() for word in item.partition("="))
            if not equals or name not in types:
                meant = "" if name in types else did_you_mean(name, types)
                raise ValueError(
                    f"tile has {item!r}{meant}; accepted: FIELD=VALUE with a field of {', '.join(types)}"
                )
            if name in changes:
                raise ValueError(f"tile has {name} twice; accepted: each field once")
            changes[name] = _parse(name, value, types[name])
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """Name -> first byte and end of each area of shared memory; by default one empty area."""
        return {"none": (0, 0)}

    def smem_bytes(self, traits: Traits) -> int:
        """Shared memory of one CTA, in bytes."""
        return max(end for _, end in self.smem_areas(traits).values())

    def registers(self, traits: Traits) -> int:
        """Estimated registers per thread, from the fragments that are live in the main loop."""
        raise NotImplementedError

    def shape_reason(self, traits: Traits) -> str | None:
        """Why these fields cannot be combined for ``traits``, or None."""
        return next(filter(None, self.reasons(traits)), None)

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        """The checks of the fields for ``traits``, in order: the first that is not None is the :meth:`shape_reason`."""
        raise NotImplementedError

    def unless(self, holds: bool, name: str, accepted: str) -> str | None:
        """The reason to refuse the value of field ``name``, or None if ``holds``."""
        return None if holds else f"{name} is {_text(getattr(self, name))}; accepted: {accepted}"

    def unless_positive(self, *names: str) -> str | None:
        """The reason to refuse one of several fields that have to be 1 or more, or None."""
        return next(filter(None, (self.unless(getattr(self, x) >= 1, x, "1 or more") for x in names)), None)

    def threads_reason(self) -> str | None:
        """Why a field ``num_threads`` is out of range, or None."""
        threads: int = self.num_threads  # type: ignore[attr-defined]
        holds = 0 < threads <= 1024 and threads % 32 == 0
        return self.unless(holds, "num_threads", "multiples of 32 up to 1024")

    def reject(self, traits: Traits, target: str) -> str | None:
        """Why this tile does not fit ``traits`` on ``target``, or None."""
        reason = self.shape_reason(traits)
        if reason:
            return reason
        capacity, needed = SHARED_MEMORY_BYTES[target], self.smem_bytes(traits)
        if needed > capacity:
            return f"tile {self} needs {needed} bytes of shared memory for {traits}; {target} has {capacity}"
        return self.registers_reason(traits, REGISTERS_PER_THREAD)

    def registers_reason(self, traits: Traits, most: int, where: str = "") -> str | None:
        """Why ``most`` registers per thread do not suffice for ``traits``, or None."""
        needed = self.registers(traits)
        if needed <= most:
            return None
        return f"tile {self} needs about {needed} registers per thread for {traits}; {where}there are {most}"


class WarpTile(Tile):
    """Base of tiles for kernels in which all warps do the same; subclasses have a field ``num_warps``."""

    num_warps: int
    MIN_WARPS: ClassVar[int] = 1
    MAX_WARPS: ClassVar[int] = 16

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @staticmethod
    def mma_depth(traits: Traits) -> int:
        """Elements along K of one mma.sync: 32 bytes."""
        return 32 // traits.element_bytes

    @staticmethod
    def steps_at_once(extent: int, unroll: int, element_bytes: int = 2) -> int:
        """MMA steps (32 bytes of ``extent``) that a product unrolls: a divisor of all steps, at most ``unroll``.

        Unrolled steps stay within one swizzle atom or cover whole atoms, so their addresses are xors of the first
        step's address.
        """
        steps = extent * element_bytes // 32
        atom = atom_bytes(32 * steps) // 32
        divisors = (n for n in range(min(unroll or steps, steps), 0, -1) if steps % n == 0)
        return next(n for n in divisors if n % atom == 0 or atom % n == 0)

    def num_warps_reason(self) -> str | None:
        """Why ``num_warps`` is out of range, or None."""
        # Copies and addresses of stores combine bits of a thread's index.
        powers = (2**i for i in range(self.MAX_WARPS.bit_length()))
        accepted = [n for n in powers if n >= self.MIN_WARPS]
        return self.unless(self.num_warps in accepted, "num_warps", ", ".join(map(str, accepted)))

    def copies_reason(self, traits: Traits, element_bytes: int = 0, **extents: int) -> str | None:
        """Why the warps cannot copy tiles of ``extents`` (name -> rows) in whole passes, or None.

        element_bytes: bytes per element in shared memory; 0 for q's.
        """
        for dim in sorted({padded(traits.head_dim), padded(traits.head_dim_v)}):
            whole = dim * (element_bytes or traits.element_bytes) % 128 == 0
            rows_per_pass = self.num_threads // (8 if whole else 4)
            for name, rows in extents.items():
                if rows % rows_per_pass:
                    return (
                        f"{name} is {rows}; accepted: multiples of {rows_per_pass} rows, which {self.num_warps} "
                        f"warps copy at once at head dim {dim}"
                    )
        return None


COMPUTE_REGISTERS = {1: 255, 2: 240, 3: 160, 4: 112}
"""Consumer warpgroups -> registers per consumer thread. With the producer's, a CTA has at most 65,536."""
LOAD_REGISTERS = {1: 56, 2: 24, 3: 32, 4: 32}
"""Consumer warpgroups -> registers per producer thread."""


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse(name: str, value: str, kind: type) -> Any:
    if kind is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind is int and value.lstrip("-").isdigit():
        return int(value)
    if kind is str:
        return value
    accepted = {bool: "true or false", int: "a whole number"}.get(kind, kind.__name__)
    raise ValueError(f"tile field {name} is {value!r}; accepted: {accepted}")


def check_tile(tile: Any) -> None:
    """Raise TypeError unless ``tile`` is a Tile, text that overrides the default tile, or None."""
    if not isinstance(tile, Tile | str | None):
        raise TypeError(f"tile is {tile!r:.100}; accepted: a Tile, text such as 'tile_n=32', or None")


def text_of(tile: "Tile | str | None") -> str:
    """The text of a Tile, a text unchanged, or "" for None."""
    return tile.text if isinstance(tile, Tile) else tile or ""


def check_target(target: Any) -> None:
    """Raise ValueError unless ``target`` is a target's name."""
    if target not in TARGETS:
        raise ValueError(f"target is {target!r}; accepted: {', '.join(TARGETS)}")


T = TypeVar("T", bound=Tile)


def first_that_fits(tiles: Sequence[T], traits: Traits, target: str) -> T:
    """The first tile that fits ``traits`` on ``target``. If none fits, the last, whose ``reject`` gives the reason."""
    return next((tile for tile in tiles if tile.reject(traits, target) is None), tiles[-1])
