"""Finds errors in the shared-memory layouts, copies and MMAs that a kernel lists in its ``copies``."""

import math
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cutlass
import numpy as np
from cutlass import cute

import layouts
from cute_attn.kernels.copies import Part, SmemLayout
from cute_attn.traits import kind_of
from layouts.model import read_mma, read_smem, table, trace

_PACKAGES = {Path(__file__).parents[1], Path(layouts.__file__).parent, Path(cutlass.__file__).parent}
"""Folders without a user's code."""

# ---- errors ----


def reasons(kernel: Any) -> Iterator[str]:
    """One sentence per layout, copy or MMA of the kernel that is certainly wrong."""
    if not hasattr(kernel, "copies"):
        return
    stated = kernel.copies()
    found, parts = stated.layouts, stated.parts
    read, wrong = trace(
        lambda: (
            {name: _read_layout(layout) for name, layout in found.items()},
            [_part_reason(part) for part in parts.values()],
        )
    )
    for name, layout in found.items():
        made = read[name]
        reason = made if isinstance(made, str) else _layout_reason(kernel.traits.arch, layout, *made)
        if reason:
            yield f"{layout.method} of {name} {reason}"
    yield from filter(None, wrong)


def _read_layout(layout: SmemLayout) -> Any:
    """The layout's tables of offsets with and without its swizzle, or its error as text. Runs in a trace."""
    modes = "(rows, columns, stages)" if len(layout.shape) == 3 else "(rows, columns)"
    accepted = f"accepted: a layout of {modes} = {layout.shape}"
    try:
        made = layout.make()
    except Exception as error:  # a user's method
        return f"{_raised(error)}; {accepted}"
    plain = made.outer if isinstance(made, cute.ComposedLayout) else made
    swizzled = plain is made or isinstance(made.inner, cute.Swizzle)
    if not isinstance(plain, cute.Layout) or not swizzled:
        return f"returns {_text(made)}; {accepted}, or a swizzle over one"
    if not _is_static(plain.shape) or not _is_static(plain.stride):
        return f"returns {made}; {accepted} with integers alone"
    shape = plain.shape if isinstance(plain.shape, tuple) else (plain.shape,)
    extents = tuple(_extent(mode) for mode in shape)
    if extents != layout.shape:
        return f"returns a layout of {extents}; {accepted}"
    return read_smem(made, layout.dtype), table(plain)


def _layout_reason(arch: str, layout: SmemLayout, smem: Any, plain: Any) -> str | None:
    """Why a kernel of ``arch`` cannot use this layout, whose shape is right; or None."""
    if arch == "sm90" and len(layout.shape) == 3 and not _is_wgmmas(smem, plain):
        return (
            f"returns {smem.text}; accepted on sm90: a swizzle of 32, 64 or 128 bytes or none over atoms of 8 such "
            "rows, as layouts.wgmma_smem_layout makes it, in which TMA writes and wgmma reads"
        )
    apart = _scattered(smem)
    if apart:
        return (
            f"returns {smem.text}, in which the 16 bytes at element {apart} are not contiguous and aligned; accepted: "
            "rows of whole 16 bytes, which copies and ldmatrix move at once"
        )
    clash = _same_place(smem.offsets)
    if clash:
        return f"has elements {clash[0]} and {clash[1]} in one place; accepted: a place for each"
    if smem.offsets.min() < 0:
        return "has elements before its start; accepted: strides that are not negative"
    bits = (int(smem.offsets.max()) + 1) * layout.dtype.width
    if bits > 8 * layout.room:
        return (
            f"takes {bits // 8:,} bytes of shared memory; accepted: at most {layout.room:,}, which its tile's "
            "smem_areas has for it"
        )
    return None


def _is_wgmmas(smem: Any, plain: Any) -> bool:
    """True if all atoms (8 rows of the swizzle's width) are contiguous and aligned, as wgmma's descriptors assume."""
    swizzle = smem.swizzle
    if swizzle is None or (swizzle.base, swizzle.shift) != (4, 3):
        return False
    width = (128 << swizzle.bits) // smem.width
    rows, cols, stages = plain.shape
    if rows % 8 or cols % width:
        return False
    atoms = plain.reshape(rows // 8, 8, cols // width, width, stages)
    first = atoms[:, :1, :, :1]
    inside = np.arange(8 * width).reshape(8, 1, width, 1)
    return bool((atoms - first == inside).all() and (first % (8 * width) == 0).all())


def _scattered(smem: Any) -> tuple[int, ...]:
    """Coordinates of the first 16 bytes along a row that are not contiguous or not aligned, or ()."""
    length = 128 // smem.width
    rows, cols, *stages = smem.offsets.shape
    units = smem.offsets.reshape(rows, cols // length, length, *stages)
    wrong = (np.diff(units, axis=2) != 1).any(axis=2) | (units[:, :, 0] % length != 0)
    if not wrong.any():
        return ()
    row, unit, *stage = (int(i) for i in np.argwhere(wrong)[0])
    return row, unit * length, *stage


def _same_place(offsets: Any) -> tuple[tuple[int, ...], ...]:
    """The coordinates of two elements with the same offset, or ()."""
    flat = offsets.ravel()
    order = np.argsort(flat, kind="stable")
    (again,) = np.nonzero(np.diff(flat[order]) == 0)
    if not again.size:
        return ()
    pair = order[again[0] : again[0] + 2]
    return tuple(tuple(int(i) for i in np.unravel_index(one, offsets.shape)) for one in pair)


def _part_reason(part: Part) -> str | None:
    """The error in a copy or an MMA, or None. Runs in a trace."""
    accepted = f"accepted: a cute.{part.kind} of {part.threads} threads"
    try:
        made = part.make()
    except Exception as error:  # a user's method
        return f"{part.call} {_raised(error)}; {accepted}"
    if not isinstance(made, getattr(cute, part.kind)):
        return f"{part.call} returns {_text(made)}; {accepted}"
    if made.size != part.threads:
        return f"{part.call} is of {made.size} threads; {accepted}, which its tile has"
    warps_n = _warps_of_a_row(made) if part.warps_n else 0
    if warps_n != part.warps_n:
        return (
            f"{part.call} divides the columns of a row over {warps_n} warps; accepted: {part.warps_n}, its tile's "
            "warps_n"
        )
    return None


def _warps_of_a_row(mma: Any) -> int:
    held = read_mma(mma, "C")
    return max(np.unique(np.nonzero((held.row == row).any(axis=1))[0] // 32).size for row in range(8))


def _raised(error: Exception) -> str:
    """The first line of an error raised by a user's method, and where the user's own code met it."""
    frames = [
        x for x in traceback.extract_tb(error.__traceback__) if _PACKAGES.isdisjoint(Path(x.filename).parents)
    ]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    message = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().partition("\n")[0]
    return f"raises {type(error).__name__}: {message}{where}"


def _text(made: Any) -> str:
    return "None" if made is None else kind_of(made)


def _extent(mode: Any) -> int:
    return math.prod(map(_extent, mode)) if isinstance(mode, tuple) else mode


def _is_static(nested: Any) -> bool:
    return all(map(_is_static, nested)) if isinstance(nested, tuple) else isinstance(nested, int)
