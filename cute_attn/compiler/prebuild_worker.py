"""A process that builds kernels for :func:`cute_attn.compiler.prebuild`: lines of JSON in, lines of JSON out.

    [DIRECTORY, ...]                                                                    first: the module path
    {"traits": NAME, "tile": TEXT or null, "target": ..., "modules": {NAME: FILE}}      then one request per line
    {"seconds": ..., "error": TEXT or null}                                             the answer to each request

A request may have ``"lines": true`` for line info. ``modules`` register the kernel's variant and epilogues. The process
is not a spawned copy of its caller, which would run the caller's script again.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cute_attn.compiler import SpillWarning, compiled


def main() -> None:
    warnings.simplefilter("ignore", SpillWarning)  # for whoever runs the kernel
    serve(build)


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """Answer requests until stdin ends or the caller stops reading. Users' modules print to stderr."""
    results = os.dup(1)
    os.dup2(2, 1)
    path = sys.stdin.readline()
    if not path:  # the caller ended before this process had loaded
        return
    sys.path[:] = json.loads(path)
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            os.write(results, json.dumps(answer(**json.loads(line))).encode() + b"\n")


def build(
    traits: str, tile: str | None, target: str | None, modules: dict[str, str], lines: bool = False
) -> dict[str, Any]:
    """Build one kernel; return its seconds and its error, if any. lines: with line info."""
    compiled.in_prebuild_worker = True
    try:
        for name, file in modules.items():
            load(name, file)
    except Exception as failure:
        return {"seconds": 0.0, "error": f"{type(failure).__name__}: {failure}"}
    finally:
        compiled.in_prebuild_worker = False
    seconds, error = compiled.build_for_later(traits, tile, target, lines=lines)
    return {"seconds": seconds, "error": error}


def load(name: str, file: str) -> None:
    """Import a module from the caller's file, even if the module path has another module of that name."""
    if name in sys.modules:
        return
    try:
        found = importlib.util.find_spec(name)
    except ImportError:  # its package is on no path
        found = None
    if found is not None and found.origin and Path(found.origin).resolve() == Path(file).resolve():
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name!r} comes from {file!r}; accepted: a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


if __name__ == "__main__":
    main()
