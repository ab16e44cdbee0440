"""Docstrings as `make docs` shows them: without the marks of roles, and with powers that are no emphasis."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_POWER = re.compile(r"(?<=\d)\*\*(?=\d)")


class Roles(griffe.Extension):
    """An extension of mkdocstrings: ``:func:`compile``` becomes ```compile```."""

    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        """Change an object's docstring."""
        if obj.docstring:
            obj.docstring.value = _POWER.sub(r"\*\*", _ROLE.sub(r"`\1`", obj.docstring.value))
