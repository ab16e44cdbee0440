"""Docstrings as `make docs` shows them: without the marks of roles, and with powers that are no emphasis.

A function whose overloads stand in ``__init__.pyi`` is shown as its module has it.
"""

import re
from typing import Any

import griffe

import cute_attn

_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_POWER = re.compile(r"(?<=\d)\*\*(?=\d)")


class Roles(griffe.Extension):
    """An extension of mkdocstrings: ``:func:`compile``` becomes ```compile```."""

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Let a name that has only overloads stand for the function that they are of."""
        for name, home in cute_attn._HOME.items() if pkg.path == "cute_attn" else ():
            if name not in pkg.members:
                pkg.set_member(name, griffe.Alias(name, f"cute_attn.{home}.{name}"))

    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        """Change an object's docstring."""
        if obj.docstring:
            obj.docstring.value = _POWER.sub(r"\*\*", _ROLE.sub(r"`\1`", obj.docstring.value))
