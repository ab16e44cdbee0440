"""Draw a kernel's layouts, copies and MMAs as its methods state them; a variant's pictures show its changes.

pictures("forward-sm80-bf16-d64")["smem-k"]; pictures(block_mask(function, 1, 1, 4096, 4096))
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.traits import Traits

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from layouts.drawing import Panel, Picture

_MOST_BLOCKS = 64
"""Maximum query and key blocks of a mask that are drawn; more would be thinner than a line."""
_MOST_MASKS = 4
_BLOCK_COLORS = ((0.62, 0.78, 0.94), (0.25, 0.49, 0.77))
"""Colours of partly seen blocks and of wholly seen blocks."""


class Pictures(dict[str, "Picture"]):
    """A kernel's or a mask's pictures by name, such as ``"smem-k"`` and ``"mma"``; a notebook shows them all."""

    def __init__(self, name: str, drawn: dict[str, "Picture"]) -> None:
        super().__init__(drawn)
        self.name = name

    def save(self, folder: Path, suffix: str = ".png") -> Iterator[Path]:
        """Create ``folder``, and write each picture to a file in it; yields its path. suffix: ".png" or ".svg"."""
        folder.mkdir(parents=True, exist_ok=True)
        for what, one in self.items():
            yield one.save(folder / f"{self.name.replace(':', '_')}-{what}{suffix}")

    def inline(self) -> Iterator[tuple[str, str]]:
        """Yields each name and its picture as an SVG element for an HTML page."""
        for what, one in self.items():
            yield what, inline_svg(one._repr_svg_(), what)

    def _repr_html_(self) -> str:
        return "\n".join(text for _, text in self.inline())

    def __repr__(self) -> str:
        return f"Pictures of {self.name}: {', '.join(self)}"


def pictures(kernel: "Traits | str | BlockMask", tile: Any = None, target: str | None = None) -> Pictures:
    """Draw a kernel's shared-memory layouts, copies and MMAs, or the blocks that FlexAttention's ``BlockMask`` lists.
    For ``tile`` and ``target`` see :func:`cute_attn.compile`.

    Raises:
        ValueError: the kernel states nothing to draw, a user's layout cannot be right, or an argument is wrong.
    """
    if hasattr(kernel, "kv_num_blocks"):
        if tile is not None or target is not None:
            raise ValueError("a BlockMask has no tile and no target")
        return Pictures("block_mask", {"blocks": _mask(cast("BlockMask", kernel))})
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
    """Name -> function that makes what is drawn. Results are staged in operands' layouts, so they are left out."""
    if not hasattr(kernel, "copies"):
        return {}
    results = ("p", "dk", "dv") if kernel.traits.op == "backward" else ("o",)
    stated = kernel.copies()
    areas = {f"smem-{name}": one.make for name, one in stated.layouts.items() if name not in results}
    return areas | {name: part.make for name, part in stated.parts.items()}


def _mask(mask: "BlockMask") -> "Picture":
    """The listed blocks of the first sequences and heads: whole ones dark, partial ones light."""
    from layouts.drawing import Legend, Picture

    sequences, heads, rows = mask.kv_num_blocks.shape
    cols = mask.kv_indices.shape[-1]
    shown = [(b, h) for b in range(sequences) for h in range(heads)][:_MOST_MASKS]
    panels, visited, whole = [], 0, 0
    for b, h in shown:
        panel, counts = _blocks(mask, b, h, f"sequence {b}, head {h}" if sequences * heads > 1 else "blocks")
        panels.append(panel)
        visited, whole = visited + sum(counts), whole + counts[1]
    kinds = [(name, [_BLOCK_COLORS[kind]]) for kind, name in enumerate(("partly seen", "seen whole"))]
    seen = (
        f"White blocks are not visited. {visited} of {len(shown) * rows * cols} are, {whole} of them whole."
    )
    size = (
        f"{sequences} x {heads} x {rows} x {cols} blocks of {' x '.join(map(str, mask.BLOCK_SIZE))} elements"
    )
    return Picture([panels], "BlockMask", Legend(kinds, [seen], [size]))


def _blocks(mask: "BlockMask", b: int, h: int, title: str) -> "tuple[Panel, tuple[int, int]]":
    """Draw the blocks of one sequence and head; also returns how many are partial and whole, undrawn ones included."""
    from layouts.drawing import Cell, Panel

    rows, cols = mask.kv_num_blocks.shape[-1], mask.kv_indices.shape[-1]
    shape = min(rows, _MOST_BLOCKS), min(cols, _MOST_BLOCKS)
    unit = min(0.25, 6.0 / max(shape))
    cells, counts = [], []
    partial, whole = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    for color, (numbers, indices) in zip(_BLOCK_COLORS, (partial, whole), strict=True):
        listed: list[list[int]] = []
        if numbers is not None and indices is not None:  # a mask without whole blocks may have None
            lists = zip(numbers[b, h].tolist(), indices[b, h].tolist(), strict=True)
            listed = [found[:count] for count, found in lists]
        counts.append(sum(map(len, listed)))
        drawn = (
            (row, col) for row, found in enumerate(listed[: shape[0]]) for col in found if col < shape[1]
        )
        cells += [Cell(row, col, 1, 1, color, "") for row, col in drawn]
    if max(rows, cols) > _MOST_BLOCKS:
        title = f"{title}: 0-{shape[0] - 1} of {rows}, 0-{shape[1] - 1} of {cols}"
    panel = Panel(title, cells, shape, (unit, unit), ("query block", "key block"), (8, 8), (8, 8))
    return panel, (counts[0], counts[1])


def inline_svg(text: str, name: str) -> str:
    """An SVG file as an element of an HTML page: without header and metadata, with ids prefixed by ``name``."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub("<svg[^>]*", lambda svg: re.sub(r' (width|height)="[^"]*"', "", svg[0]), text, count=1)
    return re.sub(r'((?:\bid="|href="#|url\(#))', rf"\g<1>{name}-", text)
