"""Pictures of a kernel's layouts, copies and MMAs, drawn from its methods: a variant's show its changes.

pictures("forward-sm80-bf16-d64")["smem-k"]
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.traits import Traits

if TYPE_CHECKING:
    from layouts.show import Picture


class Pictures(dict[str, "Picture"]):
    """A kernel's pictures by name, such as ``"smem-k"`` and ``"mma"``; a notebook shows them all."""

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
            yield what, inline_svg(one._repr_svg_(), what)

    def _repr_html_(self) -> str:
        return "\n".join(text for _, text in self.inline())

    def __repr__(self) -> str:
        return f"Pictures of {self.name}: {', '.join(self)}"


def pictures(kernel: Traits | str, tile: Any = None, target: str | None = None) -> Pictures:
    """The shared-memory layouts, copies and MMAs of a kernel, drawn; arguments are those of :func:`cute_attn.compile`.

    Raises:
        ValueError: the kernel has none, one of a user's cannot be right, or an argument is wrong.
    """
    from layouts.show import picture  # loads the DSL

    traits = Traits.of(kernel)
    found = registry.lookup(traits, tile, target)
    compiler.check_layouts(found)
    things = _things(found)
    if not things:
        known = (registry.label(key) for key, cls in registry.KERNELS.items() if hasattr(cls, "copies"))
        raise ValueError(
            f"{traits} states no layout and no MMA to draw (method copies); accepted: {', '.join(known)}, and classes "
            "that extend them"
        )
    title = traits.name
    drawn = {
        what: picture(made, dtype=found.dtype, title=f"{title}: {what}") for what, made in things.items()
    }
    return Pictures(title, drawn)


def _things(kernel: Any) -> dict[str, Callable[[], Any]]:
    """Name -> layout to draw. Of shared memory, the operands only: results are staged in the same layouts."""
    if not hasattr(kernel, "copies"):
        return {}
    results = ("p", "dk", "dv") if kernel.traits.op == "backward" else ("o",)
    stated = kernel.copies()
    areas = {f"smem-{name}": one.make for name, one in stated.layouts.items() if name not in results}
    return areas | {name: part.make for name, part in stated.parts.items()}


def inline_svg(text: str, name: str) -> str:
    """An SVG file as an element of a page: without its head and metadata, with ids that begin with ``name``."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text, count=1)
    return re.sub(r'((?:\bid="|href="#|url\(#))', rf"\g<1>{name}-", text)
