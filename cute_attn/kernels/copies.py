"""A kernel's description of its shared-memory layouts, of the copies to and from shared memory, and of its MMAs.

A kernel's ``copies`` names the methods that make them, so a subclass's overrides are drawn, checked
(``cute_attn.compiler.smem_layouts``) and counted (``cute_attn.lab.copies``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import layouts

Make = Callable[[], Any]
"""Makes a layout, a tiled copy or an MMA, in a trace."""


@dataclass(frozen=True)
class SmemLayout:
    """The layout of an area of shared memory: the kernel's method that makes it, the shape (rows, columns and, if any,
    stages) and dtype that it has to have, and the size of the area in bytes.
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
        warps_n: warps that together hold the columns of one row, or 0 where any number will do.
    """

    call: str
    make: Make
    kind: str
    threads: int
    warps_n: int = 0


@dataclass(frozen=True)
class SmemCopy:
    """A copy with a side in shared memory.

    Attributes:
        name: the operand, and the instruction that copies it.
        opcode: machine instruction of the copy.
        side: the side in shared memory, "src" or "dst"; None where the instruction has only one.
    """

    name: str
    opcode: str
    copy: Make
    layout: Make
    side: str | None = None


class Copies:
    """Made by a kernel, one line each; ``threads``: default number of threads of a copy or MMA.

    Attributes:
        layouts, parts: by name.
        moves: copies whose bank conflicts can be counted. TMA and wgmma are not among them: their swizzles have none by
            construction. Nor are accesses whose addresses a kernel computes by itself: row statistics, a bias.
    """

    def __init__(self, kernel: Any, threads: int) -> None:
        self.layouts: dict[str, SmemLayout] = {}
        self.parts: dict[str, Part] = {}
        self.moves: list[SmemCopy] = []
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
        """State the layout of the area ``name`` or ``at`` in the tile's ``smem_areas``, unless the area is empty.

        of: the dtype, by default the kernel's. by: number of equal areas that it is divided into.
        """
        begin, end = self._areas[at or name]
        room = (end - begin) // by
        make = self._call(method, *args)
        if room:
            self.layouts[name] = SmemLayout(method, make, shape, of or self._kernel.dtype, room)
        return make

    def part(self, name: str, method: str, *args: Any, threads: int = 0, warps_n: int = 0) -> Self:
        """A tiled copy, if the name begins with copy, or else an MMA."""
        call = f"{method}({', '.join(map(str, args))})"
        kind = "TiledCopy" if name.startswith("copy") else "TiledMma"
        made = self._call(method, *args)
        self.parts[name] = Part(call, made, kind, threads or self._threads, warps_n)
        return self

    def move(self, name: str, opcode: str, copy: Make, layout: Make, side: str | None = None) -> Self:
        """A copy with a side in shared memory."""
        self.moves.append(SmemCopy(name, opcode, copy, layout, side))
        return self

    def ldmatrix(self, name: str, operand: str, mma: Make, layout: Make, transpose: bool = False) -> Self:
        """Operand A or B by ldmatrix; ``transpose``: of the transposed tile."""
        make = layouts.ldmatrix_copy_a if operand == "A" else layouts.ldmatrix_copy_b
        dtype = getattr(self._kernel, "operand_dtype", self._kernel.dtype)
        what = f"{name} by ldmatrix" + (".trans" if transpose else "")
        tile = transposed(layout) if transpose else layout
        return self.move(what, "LDSM", lambda: make(mma(), dtype, transpose), tile)

    def store(self, name: str, mma: Make, layout: Make) -> Self:
        """An accumulator of the MMA to shared memory: by stores on sm80, by stmatrix on sm90."""
        arch = self._kernel.traits.arch
        dtype = getattr(self._kernel, "operand_dtype", self._kernel.dtype)
        opcode, side = ("STS", "dst") if arch == "sm80" else ("STSM", None)
        what = f"{name} to shared memory"
        return self.move(what, opcode, lambda: layouts.store_copy_c(mma(), dtype, arch), layout, side)

    def _call(self, method: str, *args: Any) -> Make:
        return lambda: getattr(self._kernel, method)(*args)


def transposed(layout: Make) -> Make:
    """Makes the layout of the transposed tile."""
    return lambda: layouts.transposed(layout())
