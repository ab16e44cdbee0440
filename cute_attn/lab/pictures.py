"""Pictures of a kernel's layouts, copies and MMAs, drawn from its methods: a variant's show its changes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cute_attn.compiler.smem_layouts import smem_layouts
from cute_attn.tiles import padded

Things = dict[str, Callable[[], Any]]
"""What to draw: by name the function that builds the layout, copy or MMA in a trace. TMA copies have no threads."""


def pictures(kernel: Any, folder: Path, suffix: str = ".png") -> Iterator[Path]:
    """Draw the shared-memory layouts, copies and MMAs of a kernel; yields each file when written.

    Args:
        kernel: a kernel object, from ``registry.lookup``.
        folder: where the files go; it is made.
        suffix: ".png" or ".svg".

    Raises:
        ValueError: the kernel has none.
    """
    from layouts.show import show

    traits = kernel.traits
    things = _THINGS.get((traits.op, traits.arch))
    if things is None:
        drawn = ", ".join(f"{op}-{arch}" for op, arch in _THINGS)
        raise ValueError(f"{traits} has no shared-memory layout and no MMA to draw; accepted: {drawn}")
    folder.mkdir(parents=True, exist_ok=True)
    base = traits.name.replace(":", "_")
    for what, thing in things(kernel).items():
        path = folder / f"{base}-{what}{suffix}"
        yield show(thing, path, dtype=kernel.dtype, title=f"{traits.name}: {what}")


def _smem(kernel: Any) -> Things:
    """The operands' shared memory: what results are stored through is laid out as they are."""
    results = ("o",) if kernel.traits.op == "forward" else ("p", "dk", "dv")
    found = smem_layouts(kernel)
    return {f"smem-{name}": layout.make for name, layout in found.items() if name not in results}


def _forward_sm80(kernel: Any) -> Things:
    traits = kernel.traits
    return _smem(kernel) | {
        "copy-gmem-to-smem": lambda: kernel.gmem_load(traits.head_dim),
        "copy-smem-to-gmem": lambda: kernel.gmem_store(traits.head_dim_v),
        "mma": kernel.tiled_mma,
    }


def _forward_sm90(kernel: Any) -> Things:
    others = {"copy-smem-to-gmem": kernel.gmem_store, "mma-qk": kernel.mma_qk, "mma-pv": kernel.mma_pv}
    return _smem(kernel) | others


def _backward_sm80(kernel: Any) -> Things:
    d = padded(kernel.traits.head_dim)
    return _smem(kernel) | {
        "copy-gmem-to-smem": lambda: kernel.gmem_copy(d, True),
        "mma-sdp": kernel.mma_sdp,
        "mma-dkv": kernel.mma_dkv,
        "mma-dq": kernel.mma_dq,
    }


def _backward_sm90(kernel: Any) -> Things:
    d, dv = kernel.dims
    return _smem(kernel) | {
        "mma-scores": kernel.mma_scores,
        "mma-dk": lambda: kernel.mma_dkv(d),
        "mma-dv": lambda: kernel.mma_dkv(dv),
        "mma-dq": kernel.mma_dq,
    }


def _convert(kernel: Any) -> Things:
    return {
        "smem-dq": kernel.smem_layout,
        "copy-registers-to-smem": lambda: kernel.store_copy(kernel.tiled_mma()),
        "mma-dq": kernel.tiled_mma,
    }


_THINGS: dict[tuple[str, str], Callable[[Any], Things]] = {
    ("forward", "sm80"): _forward_sm80,
    ("forward", "sm90"): _forward_sm90,
    ("backward", "sm80"): _backward_sm80,
    ("backward", "sm90"): _backward_sm90,
    ("backward_convert", "sm80"): _convert,
    ("backward_convert", "sm90"): _convert,
}
