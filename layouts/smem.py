"""Shared-memory layouts. All functions run inside a trace (``cute.jit``, ``cute.kernel``) and return static layouts.

Two conventions of the DSL must not be mixed:
- ``smem_layout`` swizzles offsets in elements: ``storage.sQ.get_tensor(layout)``.
- ``wgmma_smem_layout`` swizzles addresses in bytes, as wgmma and TMA do:
  ``storage.sQ.get_tensor(layout.outer, swizzle=layout.inner)``.
"""

from typing import Any

from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from .swizzle import atom_cols, bits_of, choose_swizzle

_ATOM_ROWS = 8
_KINDS = {
    ("k", 128): warpgroup.SmemLayoutAtomKind.K_SW128,
    ("k", 64): warpgroup.SmemLayoutAtomKind.K_SW64,
    ("k", 32): warpgroup.SmemLayoutAtomKind.K_SW32,
    ("k", 16): warpgroup.SmemLayoutAtomKind.K_INTER,
    ("mn", 128): warpgroup.SmemLayoutAtomKind.MN_SW128,
    ("mn", 64): warpgroup.SmemLayoutAtomKind.MN_SW64,
    ("mn", 32): warpgroup.SmemLayoutAtomKind.MN_SW32,
    ("mn", 16): warpgroup.SmemLayoutAtomKind.MN_INTER,
}


def smem_layout(
    rows: int, cols: int, dtype: Any, *, stages: int | None = None, swizzle_bits: int | None = None
) -> cute.ComposedLayout:
    """Row-major (rows, cols[, stages]) tile for cp.async, ldmatrix and ordinary accesses.

    Atoms of 8 rows by up to 128 bytes tile it along rows first. rows: a multiple of 8; cols: a multiple of 16 bytes,
    or of 64 bytes for conflict-free access; swizzle_bits: None for the widest swizzle, 0 for none.
    Raises ValueError for other rows or cols, or swizzle_bits beyond the widest swizzle.
    """
    if rows <= 0 or rows % _ATOM_ROWS:
        raise ValueError(f"rows={rows}: a shared-memory tile needs a positive multiple of {_ATOM_ROWS} rows")
    width = atom_cols(cols, bits_of(dtype))
    swizzle = choose_swizzle(cols, bits_of(dtype), swizzle_bits)
    atom = cute.make_composed_layout(
        cute.make_swizzle(swizzle.bits, swizzle.base, swizzle.shift),
        0,
        cute.make_layout((_ATOM_ROWS, width), stride=(width, 1)),
    )
    return _tile(atom, (rows, cols), stages, (0, 1))


def wgmma_smem_layout(
    rows: int, cols: int, dtype: Any, *, stages: int | None = None, major: str = "k"
) -> cute.ComposedLayout:
    """(rows, cols[, stages]) operand tile for wgmma and TMA: rows are M or N, cols are K.

    major: "k" if cols are contiguous, "mn" if rows are. The swizzle is the widest (128, 64, 32 bytes or none)
    whose atom divides the contiguous extent. ``inner`` swizzles byte addresses: see the module.
    Raises ValueError if no atom divides the tile.
    """
    if major not in ("k", "mn"):
        raise ValueError(f"major={major!r}: accepted are 'k' (cols contiguous) and 'mn' (rows contiguous)")
    contiguous, other = (cols, rows) if major == "k" else (rows, cols)
    if other <= 0 or other % _ATOM_ROWS:
        raise ValueError(
            f"rows={rows}, cols={cols}: the extent that is not contiguous must be a multiple of {_ATOM_ROWS}"
        )
    row_bytes = atom_cols(contiguous, bits_of(dtype)) * dtype.width // 8
    atom = warpgroup.make_smem_layout_atom(_KINDS[major, row_bytes], dtype)
    return _tile(atom, (rows, cols), stages, (0, 1) if major == "k" else (1, 0))


def transposed(layout_or_tensor: Any) -> Any:
    """The (cols, rows[, stages]) view of the same memory: ``transposed(x)[j, i]`` is ``x[i, j]``."""
    if isinstance(layout_or_tensor, cute.Tensor):
        return cute.make_tensor(layout_or_tensor.iterator, transposed(layout_or_tensor.layout))
    mode = [1, 0, *range(2, cute.rank(layout_or_tensor))]
    if isinstance(layout_or_tensor, cute.ComposedLayout):
        outer = cute.select(layout_or_tensor.outer, mode=mode)
        return cute.make_composed_layout(layout_or_tensor.inner, layout_or_tensor.offset, outer)
    return cute.select(layout_or_tensor, mode=mode)


def _tile(atom: Any, shape: tuple[int, int], stages: int | None, order: tuple[int, int]) -> Any:
    if stages is None:
        return cute.tile_to_shape(atom, shape, order=order)
    if stages < 1:
        raise ValueError(f"stages={stages}: must be at least 1")
    return cute.tile_to_shape(atom, (*shape, stages), order=(*order, 2))
