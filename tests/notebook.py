"""Runs a notebook's cells as its kernel does, without one, on the CPU.

python -m tests.notebook FILE            print the notebook with what its cells show
python -m tests.notebook FILE --write    store that in the file

Classes and functions are of a ``__main__`` that has no file, and their source is that of a cell.
"""

import argparse
import ast
import base64
import contextlib
import copy
import io
import json
import linecache
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any


def cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells: printed text, and the value of the last expression."""
    done = copy.deepcopy(notebook)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    for number, cell in enumerate(cells(done), 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = _value("".join(cell["source"]), f"<cell {number}>", main.__dict__)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            text = _lines(printed.getvalue())
            outputs.append({"name": "stdout", "output_type": "stream", "text": text})
        if value is not None:
            shown = {"data": shown_as(value), "execution_count": number, "metadata": {}}
            outputs.append(shown | {"output_type": "execute_result"})
        cell |= {"execution_count": number, "outputs": outputs}
    return done


def _value(source: str, name: str, namespace: dict[str, Any]) -> Any:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), namespace)


def shown_as(value: Any) -> dict[str, Any]:
    """The outputs that a notebook shows for a value, by MIME type."""
    if hasattr(value, "_repr_svg_"):
        return {"image/png": base64.b64encode(_png(value)).decode(), "text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_html_"):
        return {"text/html": _lines(value._repr_html_()), "text/plain": _lines(str(value))}
    return {"text/plain": _lines(repr(value))}


def _png(picture: Any) -> bytes:
    """A picture of layouts in 64 colours: a third of the bytes of its SVG."""
    from PIL import Image

    packed = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        drawn = Image.open(picture.save(Path(folder) / "picture.png")).convert("RGB")
        drawn.quantize(64).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def _lines(text: str) -> list[str]:
    return [line.rstrip() + "\n" * line.endswith("\n") for line in text.splitlines(keepends=True)]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="store the outputs in the file")
    given = parser.parse_args()
    text = json.dumps(run(json.loads(given.file.read_text())), indent=1, ensure_ascii=False) + "\n"
    if given.write:
        given.file.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()
