"""Text tables whose cells wrap in narrow columns and are never truncated."""

import io
from importlib import resources
from typing import Any

import rich.table
from rich.console import Console, Group

from cute_attn.compiler import registry
from cute_attn.traits import Traits


def template(name: str) -> str:
    return resources.files("cute_attn.lab").joinpath("templates", name).read_text()


def counted(count: int, noun: str) -> str:
    """The count with its noun, such as 1 kernel and 2 kernels; the plural takes an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def sized(count: int) -> str:
    """A number of bytes as text: KB below a megabyte, else MB."""
    return f"{count / 1e3:.0f} KB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def brief_tile(name: str, target: str | None, tile: str) -> str:
    """A tile's text without fields at their class's default; the whole text if the class is not known."""
    try:
        kind = type(registry.lookup(Traits.parse(name), None, target).tile)
    except ValueError:  # a variant that is not registered here, or text in place of a tile
        return tile
    return ",".join(item for item in tile.split(",") if item not in kind.inert_fields()) or tile


class Table(rich.table.Table):
    def add_column(self, *args: Any, **options: Any) -> None:
        super().add_column(*args, **{"overflow": "fold"} | options)


class Printed(Group):
    """Renderables of rich as text, or in notebooks as HTML."""

    def __str__(self) -> str:
        return self._console().file.getvalue()  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        code = "<pre style='line-height: 1.2; white-space: pre'>{code}</pre>"
        return self._console().export_html(inline_styles=True, code_format=code)

    def _console(self) -> Console:
        console = Console(file=io.StringIO(), width=96, record=True)
        console.print(self)
        return console
