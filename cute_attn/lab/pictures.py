"""Pictures of a kernel's layouts, copies and MMAs, drawn from its methods: a variant's show its changes.

pictures("forward-sm80-bf16-d64")["smem-k"]
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_attn.compiler import registry
from cute_attn.compiler.smem_layouts import smem_layouts
from cute_attn.lab import plots
from cute_attn.tiles import padded
from cute_attn.traits import Traits

if TYPE_CHECKING:
    from layouts.show import Picture

Things = dict[str, Callable[[], Any]]
"""What to draw: by name the function that builds the layout, copy or MMA in a trace. TMA copies have no threads."""


class Pictures(dict[str, "Picture"]):
    """A kernel's pictures by name, such as ``"smem-k"`` and ``"mma"``; a notebook shows them all.

    Attributes:
        name: the kernel's.
    """

    def __init__(self, name: str, drawn: dict[str, "Picture"]) -> None:
        super().__init__(drawn)
        self.name = name

    def save(self, folder: Path, suffix: str = ".png") -> Iterator[Path]:
        """Write each into a file of the folder, which is made; yields it when written. suffix: ".png" or ".svg"."""
        folder.mkdir(parents=True, exist_ok=True)
        for what, one in self.items():
            yield one.save(folder / f"{self.name.replace(':', '_')}-{what}{suffix}")

    def inline(self) -> Iterator[tuple[str, str]]:
        """Each name, and its picture as an element of a page."""
        for what, one in self.items():
            yield what, plots.inline(one._repr_svg_(), what)

    def _repr_html_(self) -> str:
        return "\n".join(text for _, text in self.inline())

    def __repr__(self) -> str:
        return f"Pictures of {self.name}: {', '.join(self)}"


def pictures(kernel: Traits | str, tile: Any = None, target: str | None = None) -> Pictures:
    """The shared-memory layouts, copies and MMAs of a kernel, drawn.

    Args:
        kernel: traits or their name.
        tile: a tile, or text that changes the default one.
        target: as of :func:`cute_attn.compile`.

    Raises:
        ValueError: the kernel has none; or the name, the target or the tile's text is not one.
        Unsupported: no kernel supports the traits, or the tile does not fit.
    """
    from layouts.show import picture

    traits = Traits.parse(kernel) if isinstance(kernel, str) else kernel
    things = _THINGS.get((traits.op, traits.arch))
    if things is None:
        drawn = ", ".join(f"{op}-{arch}" for op, arch in _THINGS)
        raise ValueError(f"{traits} has no shared-memory layout and no MMA to draw; accepted: {drawn}")
    found = registry.lookup(traits, tile, target)
    return Pictures(
        traits.name,
        {
            what: picture(thing, dtype=found.dtype, title=f"{traits.name}: {what}")
            for what, thing in things(found).items()
        },
    )


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
