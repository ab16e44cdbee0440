"""Tables of text whose names fold where a column is narrow, and are never cut."""

from typing import Any

import rich.table

from cute_attn.traits import Traits


def brief_tile(name: str, target: str, tile: str) -> str:
    """A tile's text without the fields that have their class's default; all where its class is not known."""
    from cute_attn.compiler import registry

    try:
        kind = type(registry.lookup(Traits.parse(name), None, target).tile)
    except ValueError:  # a variant that is not registered here, or text in place of a tile
        return tile
    return ",".join(item for item in tile.split(",") if item not in kind.inert_fields()) or tile


class Table(rich.table.Table):
    """A table of rich's."""

    def __init__(self, *heads: str, **options: Any) -> None:
        super().__init__(**options)
        for head in heads:
            self.add_column(head)

    def add_column(self, *args: Any, **options: Any) -> None:
        super().add_column(*args, **{"overflow": "fold"} | options)
