"""Tables of text whose names fold where a column is narrow, and are never cut."""

from typing import Any

import rich.table


class Table(rich.table.Table):
    """A table of rich's."""

    def __init__(self, *heads: str, **options: Any) -> None:
        super().__init__(**options)
        for head in heads:
            self.add_column(head)

    def add_column(self, *args: Any, **options: Any) -> None:
        super().add_column(*args, **{"overflow": "fold"} | options)
