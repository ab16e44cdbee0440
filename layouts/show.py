"""Pictures of layouts (the thread of each element of a tiled copy or MMA, the bank of each word), and bank conflicts.

All functions run outside a trace; their arguments are functions that build the objects. Drawing imports matplotlib.

    show(lambda: smem_layout(128, 64, BFloat16), "smem.png", dtype=BFloat16)
    picture(lambda: smem_layout(128, 64, BFloat16), dtype=BFloat16)                 # shown by a notebook
    bank_conflicts(lambda: ldmatrix_copy_b(tiled_mma_sm80(BFloat16, 4), BFloat16),
                   lambda: smem_layout(128, 64, BFloat16), BFloat16).extra
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from cutlass import cute

from .banks import BankConflicts, bank_conflicts
from .drawing import BANK_HUES, WARP_HUES, Cell, Color, Legend, Panel, Picture, tint
from .model import COPY_SIDES, MMA_OPERANDS, SmemMap, ThreadValueMap, read_copy, read_mma, read_smem, trace
from .swizzle import BANK_BYTES

__all__ = ["BankConflicts", "Picture", "bank_conflicts", "picture", "show"]

_WARP = 32
_STRENGTH = 0.62
_VALUES = "T is the thread, v the index of its value."
# Rows and columns of a tile that are drawn by default.
_ROWS, _COLS, _CELLS = 32, 64, 16
_INSTRUCTIONS = {
    "CopyG2S": "cp.async",
    "CopyUniversal": "load or store",
    "LdMatrix8x8x16b": "ldmatrix",
    "StMatrix8x8x16b": "stmatrix",
}


def show(thing: Callable[[], Any], path: str | Path, **options: Any) -> Path:
    """Draws a shared-memory layout, a tiled copy or a tiled MMA into a .png or .svg file and returns its path.

    Accepts the arguments of :func:`picture` and raises its errors; also raises ValueError for another suffix.
    """
    return picture(thing, **options).save(path)


def picture(
    thing: Callable[[], Any],
    *,
    dtype: Any = None,
    tile: tuple[int, int] | None = None,
    rows: int | None = None,
    cols: int | None = None,
    title: str | None = None,
    arch: str = "sm_90a",
) -> Picture:
    """A picture of a shared-memory layout, a tiled copy or a tiled MMA, for a notebook to show.

    thing: a function that builds the object, called in a trace: ``lambda: smem_layout(128, 64, cutlass.BFloat16)``.
    dtype: the element type; required for a shared-memory layout, which is drawn as 4-byte words with their banks.
    tile: (rows, cols) over which a copy or an accumulator is repeated; by default one step.
    rows, cols: how many rows and columns of each tile to draw; by default enough to show the pattern.
    Raises ValueError for a missing dtype or a tile that is not whole steps, TypeError for other objects.
    """

    def read() -> Any:
        built = thing()
        if isinstance(built, cute.TiledMma):
            return {operand: read_mma(built, operand) for operand in MMA_OPERANDS}
        if isinstance(built, cute.TiledCopy):
            return {side: read_copy(built, side) for side in COPY_SIDES}
        if isinstance(built, (cute.Layout, cute.ComposedLayout)):
            if dtype is None:
                raise ValueError("dtype=None: accepted for a shared-memory layout: its element type")
            return read_smem(built, dtype)
        raise TypeError(
            f"thing builds a {type(built).__name__}; accepted: a layout, a tiled copy or a tiled MMA"
        )

    found = trace(read, arch)
    crop = (rows, cols)
    if isinstance(found, SmemMap):
        return _smem_picture(found, crop, title)
    if "C" in found:
        return _mma_picture(found, tile, crop, title)
    return _copy_picture(found, tile, crop, title)


# Shared memory


def _smem_picture(smem: SmemMap, crop: tuple[int | None, int | None], title: str | None) -> Picture:
    offsets = smem.offsets if smem.offsets.ndim == 2 else smem.offsets[:, :, 0]
    axes = ("row", "column")
    if offsets[0, 1] - offsets[0, 0] != 1:
        # Rows are contiguous: draw them from left to right, as in memory.
        offsets, axes = offsets.T, ("column", "row")
        crop = crop[::-1]
    total = offsets.shape
    banks = offsets * smem.width // 8 // BANK_BYTES % 32
    height = min(crop[0] or min(_ROWS, max(16, 2 * _period(banks))), total[0])
    width = min(crop[1] or _COLS, total[1])
    word = max(1, 8 * BANK_BYTES // smem.width)
    cells = [
        Cell(row, col, 1, word, tint(BANK_HUES[banks[row, col] // 4], _STRENGTH), str(banks[row, col]))
        for row in range(height)
        for col in range(0, width, word)
    ]
    piece = 128 // smem.width
    panel = Panel(
        f"bank of each 4-byte word, {axes[0]}s 0-{height - 1} of {total[0]}, {axes[1]}s 0-{width - 1} of {total[1]}",
        cells,
        (height, width),
        (0.19, 0.25 / word),
        axes,
        ticks=(1, piece),
        rules=(8, piece),
    )
    ways = _column_ways(banks, piece)
    verdict = "without a bank conflict" if ways == 1 else f"with a bank conflict of {ways} ways"
    names = [f"{'banks ' if i == 0 else ''}{4 * i}-{4 * i + 3}" for i in range(len(BANK_HUES))]
    legend = Legend(
        list(zip(names, [[tint(hue, _STRENGTH)] for hue in BANK_HUES], strict=True)),
        [f"A box is 16 bytes by 8 {axes[0]}s, one 8 x 8 matrix of ldmatrix: it is read {verdict}."],
        [f"{smem.text}, {smem.width}-bit elements" + (", stage 0" if smem.offsets.ndim == 3 else "")],
    )
    return Picture(
        [[panel]], title or f"Shared memory, {smem.offsets.shape[0]} x {smem.offsets.shape[1]}", legend
    )


def _period(banks: np.ndarray) -> int:
    """The number of rows after which banks repeat."""
    return next((p for p in range(1, len(banks)) if (banks[p:] == banks[:-p]).all()), len(banks))


def _column_ways(banks: np.ndarray, piece: int) -> int:
    """Maximum number of rows, in an aligned group of 8, whose 16-byte vectors of one column use the same banks."""
    first = banks[: len(banks) // 8 * 8, ::piece].reshape(-1, 8, banks.shape[1] // piece)
    return int(max((first == bank).sum(axis=1).max() for bank in np.unique(first)))


# Threads and values


def _mma_picture(
    maps: dict[str, ThreadValueMap],
    tile: tuple[int, int] | None,
    crop: tuple[int | None, int | None],
    title: str | None,
) -> Picture:
    a, b, c = (maps[operand] for operand in MMA_OPERANDS)
    from_smem = [name for name in "AB" if _held_by_all(maps[name])]
    panel_c = _panel(_repeat(c, tile), "C", ("m", "n"), crop)
    panel_a = None if "A" in from_smem else _panel(a, "A", ("m", "k"), (crop[0], None))
    flipped = ThreadValueMap(b.col, b.row, b.shape[::-1], b.vector, b.text)
    panel_b = None if "B" in from_smem else _panel(flipped, "B", ("k", "n"), (None, crop[1]))
    notes = [_VALUES]
    notes += [
        f"{name} is held by {n} threads per element; the first is named."
        for name in "AB"
        if (n := _copies(maps[name])) > 1 and name not in from_smem
    ]
    if from_smem:
        notes.append(f"Read from shared memory by a whole warpgroup: {' and '.join(from_smem)}.")
    (m, n), k = c.shape, a.shape[1]
    threads = c.row.shape[0]
    legend = Legend(
        _warp_strips([panel_a, panel_b, panel_c]), notes, [f"a step is {m} x {n} x {k} by {threads} threads"]
    )
    below: list[Panel | None] = [panel_c] if panel_a is None else [panel_a, panel_c]
    grid = [below] if panel_b is None else [[None, panel_b], below]
    return Picture(grid, title or f"Tiled MMA, {threads // _WARP} warps", legend)


def _copy_picture(
    maps: dict[str, ThreadValueMap],
    tile: tuple[int, int] | None,
    crop: tuple[int | None, int | None],
    title: str | None,
) -> Picture:
    src, dst = maps["src"], maps["dst"]
    same = src.row.shape == dst.row.shape and (src.row == dst.row).all() and (src.col == dst.col).all()
    named = {"source and destination": src} if same else {"source": src, "destination": dst}
    panels = [_panel(_repeat(side, tile), name, ("row", "column"), crop) for name, side in named.items()]
    kind = src.text.partition(",")[0]
    threads, values = src.row.shape
    copies = _copies(src)
    notes = [_VALUES]
    if copies > 1:
        notes.append(f"{copies} threads read each element; the first is named.")
    line = f"a step is {src.shape[0]} x {src.shape[1]} elements by {threads} threads, {values} values each"
    return Picture(
        [panels],
        title or f"Tiled copy, {_INSTRUCTIONS.get(kind, kind)}",
        Legend(_warp_strips(panels), notes, [line]),
    )


def _copies(held: ThreadValueMap) -> int:
    """Number of threads that hold one element."""
    return held.row.size // (held.shape[0] * held.shape[1])


def _held_by_all(operand: ThreadValueMap) -> bool:
    """True if all threads of a warp hold the same elements, as when a warpgroup reads an operand from smem."""
    return bool(
        (operand.row[:_WARP] == operand.row[0]).all() and (operand.col[:_WARP] == operand.col[0]).all()
    )


def _repeat(held: ThreadValueMap, tile: tuple[int, int] | None) -> ThreadValueMap:
    """The map repeated over a larger tile: a thread's values of all steps are concatenated, along rows first."""
    if tile is None:
        return held
    if tile[0] % held.shape[0] or tile[1] % held.shape[1]:
        raise ValueError(f"tile={tile}: must be whole steps of {held.shape[0]} x {held.shape[1]}")
    steps = [(i, j) for j in range(0, tile[1], held.shape[1]) for i in range(0, tile[0], held.shape[0])]
    row = np.concatenate([held.row + i for i, _ in steps], axis=1)
    col = np.concatenate([held.col + j for _, j in steps], axis=1)
    return ThreadValueMap(row, col, tile, held.vector, held.text)


def _panel(
    held: ThreadValueMap, name: str, axes: tuple[str, str], crop: tuple[int | None, int | None]
) -> Panel:
    """A panel with a cell for each run of consecutive values of one thread, along the axis with fewer runs."""
    owner = np.full(held.shape, -1)
    value = np.full(held.shape, -1)
    # Reversed, so that the lowest of several threads that hold an element is named.
    for thread in reversed(range(held.row.shape[0])):
        owner[held.row[thread], held.col[thread]] = thread
        value[held.row[thread], held.col[thread]] = np.arange(held.row.shape[1])
    total = held.shape
    across, down = _runs(owner, value), _runs(owner.T, value.T)
    vertical = len(down) < len(across)
    longest = max(length for _, _, length in (down if vertical else across))
    most_rows, most_cols = (_ROWS, 2 * _CELLS) if vertical else (_ROWS, min(_COLS, _CELLS * longest))
    height, width = min(crop[0] or most_rows, total[0]), min(crop[1] or most_cols, total[1])
    cells = []
    for line, start, length in down if vertical else across:
        row, col = (start, line) if vertical else (line, start)
        if row >= height or col >= width:
            continue
        extent = (min(length, height - row), 1) if vertical else (1, min(length, width - col))
        thread, first = int(owner[row, col]), int(value[row, col])
        values = f"v{first}" if length == 1 else f"v{first}-{first + length - 1}"
        separator = "\n" if vertical else " "
        cells.append(Cell(row, col, *extent, _thread_tint(thread), f"T{thread}{separator}{values}"))
    # Equal element widths in both directions of runs, so that the operands of an MMA are aligned.
    unit = (max(0.36 / longest, 0.085), 0.32) if vertical else (0.19, max(0.64 / longest, 0.085))
    size = f"{total[0]} x {total[1]}"
    part = size if (height, width) == total else f"first {height} x {width} of {size}"
    ticks = (longest, 1) if vertical else (1, longest)
    return Panel(f"{name}, {part}", cells, (height, width), unit, axes, ticks, (8, 8))


def _runs(owner: np.ndarray, value: np.ndarray) -> list[tuple[int, int, int]]:
    """(line, start, length) of runs of consecutive values of one thread."""
    runs = []
    for line in range(owner.shape[0]):
        breaks = (np.diff(owner[line]) != 0) | (np.diff(value[line]) != 1)
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), owner.shape[1]]
        runs += [(line, start, stop - start) for start, stop in pairwise(edges)]
    return runs


def _thread_tint(thread: int) -> Color:
    return tint(WARP_HUES[thread // _WARP % len(WARP_HUES)], 0.2 + 0.5 * (thread % _WARP) / (_WARP - 1))


def _warp_strips(panels: Sequence[Panel | None]) -> list[tuple[str, list[Color]]]:
    threads = {int(cell.label[1:].split()[0]) for panel in panels if panel for cell in panel.cells}
    return [
        (f"warp {warp}, lanes 0-31", [_thread_tint(_WARP * warp + lane) for lane in range(_WARP)])
        for warp in sorted({thread // _WARP for thread in threads})
    ]
