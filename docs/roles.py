"""Docstrings as `make docs` shows them: without the marks of roles, and with powers that are no emphasis.

Parameters without a type, which are as another function's, stand in one line. A function whose overloads stand in
``__init__.pyi`` is shown as its module has it.
"""

import re
from typing import Any

import griffe

import cute_attn

_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_POWER = re.compile(r"(?<=\d)\*\*(?=\d)")
_PARAMETERS = re.compile(r"^Parameters\n-+\n((?:(?!.*\n-+\n).*\n?)*)", re.M)
_ELSEWHERE = re.compile(r"^(\w+(?:, \w+)*)\n((?: {4}.*\n?)+)", re.M)  # without a type


class Roles(griffe.Extension):
    """An extension of mkdocstrings: ``:func:`compile``` becomes ```compile```."""

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Let a name that has only overloads stand for the function that they are of."""
        for name, home in cute_attn._HOME.items() if pkg.path == "cute_attn" else ():
            if name not in pkg.members:
                pkg.set_member(name, griffe.Alias(name, f"cute_attn.{home}.{name}"))

    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        if obj.docstring:
            text = _PARAMETERS.sub(_gathered, obj.docstring.value)
            obj.docstring.value = _POWER.sub(r"\*\*", _ROLE.sub(r"`\1`", text))


def _gathered(section: re.Match[str]) -> str:
    """The section, after a line for each entry that names parameters without a type."""
    lines = []
    for names, text in _ELSEWHERE.findall(section[1]):
        marked = ", ".join(f"`{name}`" for name in names.split(", ")) if "," in names else names
        lines.append(f"{marked}: {' '.join(text.split())}\n\n")
    return "".join(lines) + section[0].replace(section[1], _ELSEWHERE.sub("", section[1]))
