"""Layouts, tiled copies and tiled MMAs as numpy tables.

The functions here run outside a trace. They take a function that builds the object, for example
``lambda: smem_layout(128, 64, cutlass.Float16)``, and run it in a short, separate trace.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from cutlass import cute

from .swizzle import Swizzle

# Names of the two sides of a copy, and of the operands of an MMA.
COPY_SIDES = ("src", "dst")
MMA_OPERANDS = ("A", "B", "C")


@dataclass(frozen=True)
class SmemMap:
    """A shared-memory layout: offsets[row, col(, stage)] in elements of ``width`` bits."""

    offsets: np.ndarray
    width: int
    swizzle: Swizzle | None
    text: str


@dataclass(frozen=True)
class ThreadValueMap:
    """A thread-value layout: row[thread, value] and col[thread, value] are coordinates in a (rows, cols) tile.

    ``row[:, i * vector : (i + 1) * vector]`` are contiguous elements of one instruction. Several threads may hold the
    same element, as in the B operand of an MMA with several warps along M.
    """

    row: np.ndarray
    col: np.ndarray
    shape: tuple[int, int]
    vector: int
    text: str


_lock = threading.Lock()
_readers, _arguments = 0, list[str]()


@contextlib.contextmanager
def no_arguments() -> Iterator[None]:
    """Hide the running script's command line from the DSL, which parses an option ``-diagnostic`` in it.

    The DSL would read a script's ``-d 8`` as an abbreviation of that option, and end the process.
    """
    global _readers, _arguments
    with _lock:
        _readers += 1
        if _readers == 1:
            _arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        with _lock:
            _readers -= 1
            if _readers == 0:
                sys.argv = _arguments


def _show_arguments() -> None:
    """Restore the arguments in a forked child, which lacks the threads that hid them."""
    global _lock, _readers
    _lock = threading.Lock()
    if _readers:
        _readers, sys.argv = 0, _arguments


os.register_at_fork(after_in_child=_show_arguments)


def trace(make: Callable[[], Any], arch: str = "sm_90a") -> Any:
    """Runs ``make`` in a trace for ``arch`` and returns its result, which must be plain Python or numpy.

    sm_90a accepts Ampere objects too.
    """
    results = []

    @cute.jit
    def host() -> None:
        results.append(make())

    with no_arguments():
        cute.compile[cute.GPUArch(arch)](host)
    return results[0]


def smem_map(make: Callable[[], Any], dtype: Any, arch: str = "sm_90a") -> SmemMap:
    """The table of a shared-memory layout, swizzled or not: (rows, cols[, stages])."""
    return trace(lambda: read_smem(make(), dtype), arch)


def copy_map(make: Callable[[], Any], side: str, arch: str = "sm_90a") -> ThreadValueMap:
    """The table of a tiled copy's "src" or "dst" side, over one step."""
    return trace(lambda: read_copy(make(), side), arch)


def mma_map(make: Callable[[], Any], operand: str, arch: str = "sm_90a") -> ThreadValueMap:
    """The table of a tiled MMA's operand, over one step: A is (M, K), B is (N, K), C is (M, N)."""
    return trace(lambda: read_mma(make(), operand), arch)


def read_smem(layout: Any, dtype: Any) -> SmemMap:
    """Like ``smem_map``, but inside a trace and given the layout itself."""
    if not isinstance(layout, cute.ComposedLayout):
        return SmemMap(table(layout), dtype.width, None, str(layout))
    inner = layout.inner
    if not isinstance(inner, cute.Swizzle):
        raise TypeError(f"layout={layout}: the outermost function must be a swizzle")
    # wgmma swizzles of the DSL are in bytes, with base 4 for 16 bytes; in elements the base is smaller.
    swizzle = Swizzle(inner.num_bits, inner.num_base, inner.num_shift)
    offsets = table(layout.outer) + layout.offset
    if swizzle.base == 4:
        offsets = swizzle(offsets * dtype.width // 8) * 8 // dtype.width
    else:
        offsets = swizzle(offsets)
    return SmemMap(offsets, dtype.width, swizzle, str(layout))


def read_copy(copy: cute.TiledCopy, side: str) -> ThreadValueMap:
    """Like ``copy_map``, but inside a trace and given the copy itself."""
    if side not in COPY_SIDES:
        raise ValueError(f"side={side!r}: accepted are {', '.join(map(repr, COPY_SIDES))}")
    layout = copy.layout_src_tv_tiled if side == "src" else copy.layout_dst_tv_tiled
    atom = copy.layout_src_tv if side == "src" else copy.layout_dst_tv
    for tiler in copy.tiler_mn:
        if isinstance(tiler, cute.Layout) and cute.size(tiler) > 1 and tiler.stride != 1:
            raise ValueError(f"copy has the tiler {tiler}: only contiguous tilers have a picture")
    shape = (cute.size(copy.tiler_mn[0]), cute.size(copy.tiler_mn[1]))
    text = f"{type(copy.op).__name__.removesuffix('Op')}, {side}: {layout}"
    # A thread's 32-bit registers of ldmatrix and stmatrix are of different rows.
    vector = cute.size(atom, mode=[1, 0])
    return _thread_values(layout, shape, vector, text)


def read_mma(tiled_mma: cute.TiledMma, operand: str) -> ThreadValueMap:
    """Like ``mma_map``, but inside a trace and given the MMA itself."""
    if operand not in MMA_OPERANDS:
        raise ValueError(f"operand={operand!r}: accepted are {', '.join(map(repr, MMA_OPERANDS))}")
    layout = getattr(tiled_mma, f"tv_layout_{operand}_tiled")
    m, n, k = (tiled_mma.get_tile_size(mode) for mode in range(3))
    shape = {"A": (m, k), "B": (n, k), "C": (m, n)}[operand]
    return _thread_values(layout, shape, 1, f"{operand} {shape[0]} x {shape[1]}: {layout}")


def table(layout: Any) -> np.ndarray:
    """The offsets of a static layout, one axis for each top-level mode."""
    modes = [_mode_offsets(layout[i].shape, layout[i].stride) for i in range(cute.rank(layout))]
    total = np.zeros((), dtype=np.int64)
    for offsets in modes:
        total = np.add.outer(total, offsets)
    return total


def _mode_offsets(shape: Any, stride: Any) -> np.ndarray:
    if not isinstance(shape, tuple):
        return np.arange(shape, dtype=np.int64) * stride
    offsets = np.zeros(1, dtype=np.int64)
    for extent, step in zip(shape, stride, strict=True):
        offsets = np.add.outer(_mode_offsets(extent, step), offsets).ravel()
    return offsets


def _thread_values(layout: Any, shape: tuple[int, int], vector: int, text: str) -> ThreadValueMap:
    index = table(layout)
    return ThreadValueMap(index % shape[0], index // shape[0], shape, vector, text)
