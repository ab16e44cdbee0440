"""Runs a notebook's cells as its kernel does, without one: ``python -m tests.notebook FILE`` prints what each shows.

Classes and functions are of a ``__main__`` that has no file, and their source is that of a cell.
"""

import ast
import json
import linecache
import sys
import types
from pathlib import Path
from typing import Any


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of code."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def run(path: Path) -> list[Any]:
    """The value of each cell's last expression, None where it ends in a statement."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    return [
        _value("".join(cell["source"]), f"<cell {n}>", main.__dict__) for n, cell in enumerate(cells(path))
    ]


def _value(source: str, name: str, namespace: dict[str, Any]) -> Any:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), namespace)


def shown(value: Any) -> str:
    """What a notebook shows of a value."""
    for method in ("_repr_html_", "_repr_svg_"):
        if hasattr(value, method):
            return f"{method}: {getattr(value, method)()}"
    return repr(value)


if __name__ == "__main__":
    for value in run(Path(sys.argv[1])):
        print(json.dumps(shown(value)))
