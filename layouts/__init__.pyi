"""What the package imports on first use, for type checkers and editors."""

from layouts import show as show
from layouts.copies import gmem_tiled_copy, ldmatrix_copy_a, ldmatrix_copy_b, store_copy_c
from layouts.mma import (
    RowColModes,
    as_operand_a,
    row_col_modes,
    row_col_view,
    thread_row_col,
    tiled_mma_sm80,
    tiled_mma_sm90,
)
from layouts.smem import smem_layout, transposed, wgmma_smem_layout
from layouts.swizzle import BANKS, Swizzle, atom_cols, choose_swizzle

__all__ = [
    "BANKS",
    "RowColModes",
    "Swizzle",
    "as_operand_a",
    "atom_cols",
    "choose_swizzle",
    "gmem_tiled_copy",
    "ldmatrix_copy_a",
    "ldmatrix_copy_b",
    "row_col_modes",
    "row_col_view",
    "smem_layout",
    "store_copy_c",
    "thread_row_col",
    "tiled_mma_sm80",
    "tiled_mma_sm90",
    "transposed",
    "wgmma_smem_layout",
]
