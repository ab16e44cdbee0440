"""A kernel's description of its shared-memory layouts, its copies to and from shared memory, and its MMAs.

A kernel's ``copies`` names the methods that make these, so that a subclass's overrides are drawn, checked
(``cute_attn.compiler.smem_layouts``) and counted (``cute_attn.lab.copies``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import layouts

Make = Callable[[], Any]
"""A function that makes a layout, a tiled copy or an MMA inside a trace."""


@dataclass(frozen=True)
class SmemLayout:
    """The layout of an area of shared memory: the kernel's method that makes the layout, its required shape (rows,
    columns and, if any, stages) and dtype, and the size of the area in bytes.
    """

    method: str
    make: Make
    shape: tuple[int, ...]
    dtype: Any
    room: int


@dataclass(frozen=True)
class Part:
    """A tiled copy or MMA: the call of the kernel's method as text, and the expected kind.

    Attributes:
        threads: number of participating threads.
        warps_n: required number of warps that together hold the columns of one row, or 0 for any number.
    """

    call: str
    make: Make
    kind: str
    threads: int
    warps_n: int = 0


@dataclass(frozen=True)
class SmemCopy:
    """A copy to or from shared memory.

    Attributes:
        name: the operand, and the instruction that copies it.
        opcode: machine instruction of the copy.
        side: which side is in shared memory, "src" or "dst"; None if the instruction implies it.
    """

    name: str
    opcode: str
    copy: Make
    layout: Make
    side: str | None = None


class Copies:
    """The layouts, copies and MMAs that a kernel states. threads: default number of threads of a copy or MMA.

    Attributes:
        layouts, parts: by name; ``parts`` are tiled copies and MMAs.
        moves: copies whose bank conflicts can be counted. Excluded are TMA and wgmma, whose swizzles are free of
            conflicts, and accesses to addresses that the kernel computes: row statistics, a bias.
    """

    def __init__(self, kernel: Any, threads: int) -> None:
        self.layouts: dict[str, SmemLayout] = {}
        self.parts: dict[str, Part] = {}
        self.moves: list[SmemCopy] = []
        self._dtype = getattr(kernel, "operand_dtype", kernel.dtype)
        self._kernel, self._threads, self._areas = kernel, threads, kernel.tile.smem_areas(kernel.traits)

    def area(
        self,
        name: str,
        shape: tuple[int, ...],
        method: str,
        *args: Any,
        at: str = "",
        of: Any = None,
        by: int = 1,
    ) -> Make:
        """State the layout of area ``at``, by default ``name``, in the tile's ``smem_areas``, unless the area is empty.

        of: the dtype, by default the kernel's. by: number of equal sub-areas; the layout fills one of them.
        """
        begin, end = self._areas[at or name]
        room = (end - begin) // by
        make = self._call(method, *args)
        if room:
            self.layouts[name] = SmemLayout(method, make, shape, of or self._kernel.dtype, room)
        return make

    def part(self, name: str, method: str, *args: Any, threads: int = 0, warps_n: int = 0) -> Self:
        """State a tiled copy if ``name`` begins with copy, else an MMA."""
        call = f"{method}({', '.join(map(str, args))})"
        kind = "TiledCopy" if name.startswith("copy") else "TiledMma"
        made = self._call(method, *args)
        self.parts[name] = Part(call, made, kind, threads or self._threads, warps_n)
        return self

    def move(self, name: str, opcode: str, copy: Make, layout: Make, side: str | None = None) -> Self:
        """State a copy to or from shared memory."""
        self.moves.append(SmemCopy(name, opcode, copy, layout, side))
        return self

    def ldmatrix(self, name: str, operand: str, mma: Make, layout: Make, transpose: bool = False) -> Self:
        """State the load of operand A or B by ldmatrix. transpose: load the transposed tile."""
        make = layouts.ldmatrix_copy_a if operand == "A" else layouts.ldmatrix_copy_b
        what = f"{name} by ldmatrix" + (".trans" if transpose else "")
        tile = transposed(layout) if transpose else layout
        return self.move(what, "LDSM", lambda: make(mma(), self._dtype, transpose), tile)

    def store(self, name: str, mma: Make, layout: Make) -> Self:
        """State the copy of an MMA's accumulator to shared memory: by stores on sm80, by stmatrix on sm90."""
        arch = self._kernel.traits.arch
        opcode, side = ("STS", "dst") if arch == "sm80" else ("STSM", None)
        what = f"{name} to shared memory"
        return self.move(what, opcode, lambda: layouts.store_copy_c(mma(), self._dtype, arch), layout, side)

    def _call(self, method: str, *args: Any) -> Make:
        return lambda: getattr(self._kernel, method)(*args)


def transposed(layout: Make) -> Make:
    """A function that makes the layout of the transposed tile."""
    return lambda: layouts.transposed(layout())
