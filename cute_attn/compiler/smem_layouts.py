"""A kernel's layouts of shared memory, copies and MMAs, from its own methods: what a subclass overrides is drawn and
checked."""

import math
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cutlass import cute

from cute_attn.compiler import registry
from cute_attn.kernels.arguments import CUTE_DTYPES
from cute_attn.outputs import dq_order
from cute_attn.tiles import padded
from cute_attn.traits import kind_of
from layouts.model import read_mma, read_smem, table, trace


@dataclass(frozen=True)
class SmemLayout:
    """The layout of an area of shared memory.

    Attributes:
        method: the kernel's method that makes it.
        make: calls the method, in a trace.
        shape: rows, columns and, where there is a third, stages.
        dtype: of its elements.
        room: bytes that there are for it.
    """

    method: str
    make: Callable[[], Any]
    shape: tuple[int, ...]
    dtype: Any
    room: int


@dataclass(frozen=True)
class Part:
    """A tiled copy or a tiled MMA.

    Attributes:
        call: the call of the kernel's method that makes it, as text.
        make: that call, in a trace.
        kind: ``"TiledCopy"`` or ``"TiledMma"``.
        threads: of those that take part.
        warps_n: warps that hold the columns of one row between them, or 0 where that may be any number.
    """

    call: str
    make: Callable[[], Any]
    kind: str
    threads: int
    warps_n: int = 0


def smem_layouts(kernel: Any) -> dict[str, SmemLayout]:
    """What lies in shared memory -> its layout, where there is room for it and a layout method."""
    of = _LAYOUTS.get((kernel.traits.op, kernel.traits.arch))
    if of is None or not _extends_the_packages(kernel):
        return {}
    return {name: layout for name, layout in of(kernel).items() if layout.room}


def copies_and_mmas(kernel: Any) -> dict[str, Part]:
    """Name -> copy or MMA. TMA copies have no threads, and are not there."""
    of = _PARTS.get((kernel.traits.op, kernel.traits.arch))
    return of(kernel) if of is not None and _extends_the_packages(kernel) else {}


def _extends_the_packages(kernel: Any) -> bool:
    return isinstance(kernel, registry.KERNELS[kernel.traits.op, kernel.traits.arch, ""])


# ---- what is wrong ----


def reasons(kernel: Any) -> Iterator[str]:
    """What cannot be right in the layouts, copies and MMAs of a kernel: a sentence for each that is wrong."""
    found, parts = smem_layouts(kernel), copies_and_mmas(kernel)
    if not found:
        return
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
    """Its table, and that without its swizzle; or what is wrong with it. Runs in a trace."""
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
    """Why a kernel of ``arch`` cannot use that layout of the right shape, or None."""
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
    bits = (int(smem.offsets.max()) + 1) * layout.dtype.width
    if smem.offsets.min() < 0 or bits > 8 * layout.room:
        return (
            f"takes {bits // 8:,} bytes of shared memory; accepted: at most {layout.room:,}, which its tile's "
            "smem_areas has for it"
        )
    return None


def _is_wgmmas(smem: Any, plain: Any) -> bool:
    """Whether 8 rows of a swizzle's width lie in one piece, aligned to their size, as wgmma's descriptors say."""
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
    """The first element of 16 bytes along a row that are not contiguous or not aligned, or ()."""
    length = 128 // smem.width
    rows, cols, *stages = smem.offsets.shape
    units = smem.offsets.reshape(rows, cols // length, length, *stages)
    wrong = (np.diff(units, axis=2) != 1).any(axis=2) | (units[:, :, 0] % length != 0)
    if not wrong.any():
        return ()
    row, unit, *stage = (int(i) for i in np.argwhere(wrong)[0])
    return row, unit * length, *stage


def _same_place(offsets: Any) -> tuple[tuple[int, ...], ...]:
    """The coordinates of two elements with one offset, or ()."""
    flat = offsets.ravel()
    order = np.argsort(flat, kind="stable")
    (again,) = np.nonzero(np.diff(flat[order]) == 0)
    if not again.size:
        return ()
    pair = order[again[0] : again[0] + 2]
    return tuple(tuple(int(i) for i in np.unravel_index(one, offsets.shape)) for one in pair)


def _part_reason(part: Part) -> str | None:
    """What is wrong with a copy or an MMA, or None. Runs in a trace."""
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
    """The first line of an error of a user's method, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().partition("\n")[0]
    return f"raises {type(error).__name__}: {message} ({Path(frame.filename).name}, line {frame.lineno})"


def _text(made: Any) -> str:
    return "None" if made is None else kind_of(made)


def _extent(mode: Any) -> int:
    return math.prod(map(_extent, mode)) if isinstance(mode, tuple) else mode


def _is_static(nested: Any) -> bool:
    return all(map(_is_static, nested)) if isinstance(nested, tuple) else isinstance(nested, int)


# ---- layouts ----


class _Areas:
    """Makes the layouts of a kernel; the room of each is that of its tile's area."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._areas = kernel.tile.smem_areas(kernel.traits)

    def room(self, area: str) -> int:
        begin, end = self._areas[area]
        return end - begin

    def layout(
        self, area: str, method: str, args: tuple, shape: tuple[int, ...], dtype: Any, copies: int = 1
    ) -> SmemLayout:
        """The same area, for ``copies`` that share it."""
        return SmemLayout(method, _call(self._kernel, method, *args), shape, dtype, self.room(area) // copies)


def _call(kernel: Any, method: str, *args: Any) -> Callable[[], Any]:
    return lambda: getattr(kernel, method)(*args)


def _forward_sm80(kernel: Any) -> dict[str, SmemLayout]:
    tile, (d, dv), areas = kernel.tile, kernel.row_widths, _Areas(kernel)
    stages, groups = tile.num_stages, tile.key_groups

    def rows(area: str, *args: int, copies: int = 1) -> SmemLayout:
        shape = (args[0], padded(args[1]), *(args[2:] or (1,)))
        return areas.layout(area, "smem_layout", args, shape, kernel.dtype, copies)

    return {
        "q": rows("q", tile.tile_m, d),
        "k": rows("k", tile.group_keys, d, stages, copies=groups),
        "v": rows("v", tile.group_keys, dv, stages, copies=groups),
        "o": rows("o", tile.tile_m, dv),
    }


def _forward_sm90(kernel: Any) -> dict[str, SmemLayout]:
    traits, tile, dtype, areas = kernel.traits, kernel.tile, kernel.dtype, _Areas(kernel)
    d, dv, stages, groups = traits.head_dim, traits.head_dim_v, tile.num_stages, tile.warpgroups

    def rows(area: str, *args: int) -> SmemLayout:
        return areas.layout(area, "smem_layout", args, (args[0], padded(args[1]), args[2]), dtype)

    found = {"k": rows("k", tile.tile_n, d, stages)}
    if kernel.divides_columns:
        values, scores = (tile.tile_n, tile.columns_of_v(traits)), (tile.tile_m, tile.tile_n)
        return found | {
            "q": rows("q", tile.tile_m, d, 1),
            "v": areas.layout("v", "values_layout", (stages,), (*values, stages), dtype),
            "p": areas.layout("p", "probabilities_layout", (tile.p_stages,), (*scores, tile.p_stages), dtype),
        }
    found |= {
        "q": rows("q", 64, d, groups),
        "v": rows("v", tile.tile_n, dv, stages),
        "o": rows("o", 64, dv, groups),
    }
    if kernel.loads_bias_by_tma:
        shape = (64, tile.tile_n, tile.bias_stages)
        of = (CUTE_DTYPES[traits.bias], groups)
        found["bias"] = areas.layout("bias", "bias_layout", (tile.bias_stages,), shape, *of)
    return found


def _backward_sm80(kernel: Any) -> dict[str, SmemLayout]:
    tile, terms, areas = kernel.tile, kernel.stored_terms, _Areas(kernel)
    d, dv = padded(kernel.traits.head_dim), padded(kernel.traits.head_dim_v)

    def operand(area: str, rows: int, cols: int, stages: int = 1) -> SmemLayout:
        shape = (rows, cols, stages * terms)
        return areas.layout(area, "smem_layout", shape, shape, kernel.operand_dtype)

    def gradient(area: str, cols: int) -> SmemLayout:
        return areas.layout(area, "gradient_layout", (cols,), (tile.tile_n, cols), kernel.dtype)

    scores = (tile.tile_m, tile.tile_n)
    if tile.columns:
        chunk = tile.chunk(kernel.traits)
        return {
            "queries": operand("queries", tile.tile_m, chunk, 2),
            "keys": operand("keys", tile.tile_n, chunk, 2),
            "p": operand("p", *scores),
            "ds": operand("ds", *scores),
            "dk": gradient("keys", chunk),
        }
    return {
        "k": operand("k", tile.tile_n, d),
        "v": operand("v", tile.tile_n, dv),
        "q": operand("q", tile.queries, d, tile.pieces * tile.stages_q),
        "do": operand("do", tile.queries, dv, tile.pieces * tile.stages_do),
        "p": operand("p", *scores),
        "ds": operand("ds", *kernel.products.scores_plane),
        "dk": gradient("dk", d),
        "dv": gradient("dv", dv),
    }


def _backward_sm90(kernel: Any) -> dict[str, SmemLayout]:
    tile, (d, dv), areas = kernel.tile, kernel.dims, _Areas(kernel)

    def of(area: str, which: str, *shape: int, dtype: Any = kernel.dtype) -> SmemLayout:
        return areas.layout(area, f"layout_{which}", (), shape, dtype)

    scores = (tile.tile_m, tile.tile_n)
    found = {
        "k": of("k", "k", tile.tile_n, d, 1),
        "v": of("v", "v", tile.tile_n, dv, 1),
        "q": of("q", "q", tile.tile_m, d, tile.num_stages_q),
        "do": of("do", "do", tile.tile_m, dv, tile.num_stages_do),
        "ds": of("ds", "ds", *scores, tile.num_stages_ds),
        "p": of("p", "ds", *scores, tile.num_stages_ds),
        "dk": of("dk", "k", tile.tile_n, d, 1),
    }
    if kernel.loads_bias_by_tma:
        dtype = CUTE_DTYPES[kernel.traits.bias]
        found["bias"] = of("bias", "bias", *scores, tile.bias_stages, dtype=dtype)
    return found


def _convert(kernel: Any) -> dict[str, SmemLayout]:
    shape = (kernel.tile.tile_m, padded(kernel.traits.head_dim) // dq_order.passes(kernel.tile))
    room = kernel.traits.element_bytes * math.prod(shape)
    return {"dq": SmemLayout("smem_layout", _call(kernel, "smem_layout"), shape, kernel.dtype, room)}


_LAYOUTS: dict[tuple[str, str], Callable[[Any], dict[str, SmemLayout]]] = {
    ("forward", "sm80"): _forward_sm80,
    ("kvcache", "sm80"): _forward_sm80,
    ("forward", "sm90"): _forward_sm90,
    ("kvcache", "sm90"): _forward_sm90,
    ("backward", "sm80"): _backward_sm80,
    ("backward", "sm90"): _backward_sm90,
    ("backward_convert", "sm80"): _convert,
    ("backward_convert", "sm90"): _convert,
}

DRAWN = tuple(f"{op}-{arch}" for op, arch in _LAYOUTS)
"""Kernels whose layouts, copies and MMAs are known here."""


# ---- copies and MMAs ----


def _copy(kernel: Any, threads: int, method: str, *args: Any) -> Part:
    return Part(_shown(method, args), _call(kernel, method, *args), "TiledCopy", threads)


def _mma(kernel: Any, threads: int, method: str, *args: Any, warps_n: int = 0) -> Part:
    return Part(_shown(method, args), _call(kernel, method, *args), "TiledMma", threads, warps_n)


def _shown(method: str, args: tuple) -> str:
    return f"{method}({', '.join(map(str, args))})"


def _parts_forward_sm80(kernel: Any) -> dict[str, Part]:
    traits, tile = kernel.traits, kernel.tile
    threads = tile.group_threads
    return {
        "copy-gmem-to-smem": _copy(kernel, threads, "gmem_load", traits.head_dim),
        "copy-smem-to-gmem": _copy(kernel, threads, "gmem_store", traits.head_dim_v),
        "mma": _mma(kernel, threads, "tiled_mma", warps_n=tile.warps_n),
    }


def _parts_forward_sm90(kernel: Any) -> dict[str, Part]:
    threads = 128 * kernel.tile.warpgroups
    return {
        "copy-smem-to-gmem": _copy(kernel, 128, "gmem_store"),
        "mma-qk": _mma(kernel, 128 if kernel.divides_columns else threads, "mma_qk"),
        "mma-pv": _mma(kernel, threads, "mma_pv"),
    }


def _parts_backward_sm80(kernel: Any) -> dict[str, Part]:
    threads = kernel.tile.num_threads
    mmas = {f"mma-{name}": _mma(kernel, threads, f"mma_{name}") for name in ("sdp", "dkv", "dq")}
    load = _copy(kernel, threads, "gmem_copy", padded(kernel.traits.head_dim), True)
    return {"copy-gmem-to-smem": load} | mmas


def _parts_backward_sm90(kernel: Any) -> dict[str, Part]:
    threads, (d, dv) = kernel.tile.mma_threads, kernel.dims
    return {
        "mma-scores": _mma(kernel, threads, "mma_scores"),
        "mma-dk": _mma(kernel, threads, "mma_dkv", d),
        "mma-dv": _mma(kernel, threads, "mma_dkv", dv),
        "mma-dq": _mma(kernel, threads, "mma_dq"),
        "copy-scores-to-smem": _copy(kernel, threads, "scores_store"),
        "copy-gradient-to-smem": _copy(kernel, threads, "gradient_store", d),
        "copy-smem-to-gmem": _copy(kernel, threads, "gmem_store", d),
    }


def _parts_convert(kernel: Any) -> dict[str, Part]:
    threads = kernel.tile.mma_threads

    def store() -> Any:
        return kernel.store_copy(kernel.tiled_mma())

    return {
        "copy-registers-to-smem": Part("store_copy(tiled_mma)", store, "TiledCopy", threads),
        "mma-dq": _mma(kernel, threads, "tiled_mma"),
    }


_PARTS: dict[tuple[str, str], Callable[[Any], dict[str, Part]]] = {
    ("forward", "sm80"): _parts_forward_sm80,
    ("kvcache", "sm80"): _parts_forward_sm80,
    ("forward", "sm90"): _parts_forward_sm90,
    ("kvcache", "sm90"): _parts_forward_sm90,
    ("backward", "sm80"): _parts_backward_sm80,
    ("backward", "sm90"): _parts_backward_sm90,
    ("backward_convert", "sm80"): _parts_convert,
    ("backward_convert", "sm90"): _parts_convert,
}
