"""Shared-memory layouts, tiled copies and tensor-core tilings as functions of a tile.

    import cutlass, layouts

    layouts.smem_layout(128, 64, cutlass.BFloat16)            swizzled tile in shared memory
    layouts.wgmma_smem_layout(128, 64, cutlass.BFloat16)      the same for wgmma and TMA
    layouts.gmem_tiled_copy(cutlass.BFloat16, 128, 64, asynchronous=True)      cp.async, 16-byte vectors
    layouts.tiled_mma_sm80(cutlass.BFloat16, 4)               four warps of mma.sync m16n8k16
    layouts.ldmatrix_copy_b(tiled_mma, cutlass.BFloat16)      loads that MMA's B operand from the tile above
    layouts.row_col_modes(tiled_mma, 128, 64)                 the row and column of each accumulator element
    layouts.as_operand_a(acc)                                 an accumulator as the next MMA's A operand

These return CuTe objects, so they run inside ``cute.jit`` or ``cute.kernel``. To draw one, or to count its bank
conflicts, pass a function that builds it to ``layouts.show``:

    from layouts.show import bank_conflicts, show

    show(lambda: layouts.tiled_mma_sm80(cutlass.BFloat16, 4), "mma.svg")

``layouts.host`` runs a partition for all threads on the CPU. Names are imported on first use: ``import layouts`` loads
neither the DSL nor matplotlib.
"""

import sys
from importlib import import_module
from typing import Any

from layouts.modules import Package

_NAMES = {
    "swizzle": ("BANKS", "Swizzle", "atom_cols", "choose_swizzle"),
    "smem": ("smem_layout", "transposed", "wgmma_smem_layout"),
    "copies": ("gmem_tiled_copy", "ldmatrix_copy_a", "ldmatrix_copy_b", "store_copy_c"),
    "mma": (
        *("RowColModes", "as_operand_a", "row_col_modes", "row_col_view", "thread_row_col"),
        *("tiled_mma_sm80", "tiled_mma_sm90"),
    ),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = ("show",)
_PLACES = {"bank_conflicts": "banks.bank_conflicts", "picture": "show.picture"}
"""Names that need numpy and so are not exported here -> their place in the package, for the error message."""
__all__ = list(_HOME)
sys.modules[__name__].__class__ = Package


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise sys.modules[__name__].missing(name, _PLACES.get(name))
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
