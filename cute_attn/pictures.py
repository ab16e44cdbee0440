"""Pictures of a kernel's layouts, drawn from the kernel's own methods, so a variant's pictures show its changes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def pictures(kernel: Any, folder: Path, suffix: str = ".png") -> Iterator[Path]:
    """Draw the shared-memory layouts, the copies and the MMA of a forward kernel; yields each file as it is done.

    Args:
        kernel: a kernel object, from ``registry.lookup``.
        folder: where the files go; it is made.
        suffix: ".png" or ".svg".
    """
    from layouts.show import show

    folder.mkdir(parents=True, exist_ok=True)
    traits, tile = kernel.traits, kernel.tile
    things: dict[str, Callable[[], Any]] = {
        "smem-q": lambda: kernel.smem_layout(tile.tile_m, traits.head_dim),
        "smem-k": lambda: kernel.smem_layout(tile.tile_n, traits.head_dim, tile.num_stages),
        "smem-v": lambda: kernel.smem_layout(tile.tile_n, traits.head_dim_v, tile.num_stages),
        "copy-gmem-to-smem": lambda: kernel.gmem_load(traits.head_dim),
        "copy-smem-to-gmem": lambda: kernel.gmem_store(traits.head_dim_v),
        "mma": kernel.tiled_mma,
    }
    base = traits.name.replace(":", "_")
    for what, thing in things.items():
        title = f"{traits.name}: {what}"
        yield show(thing, folder / f"{base}-{what}{suffix}", dtype=kernel.dtype, title=title)
