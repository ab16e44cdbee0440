"""Python code in separate processes, without the seconds that loading torch and the DSL takes.

A server process loads the package and forks for each call: tests do not affect it, and a call gives its exit status
and output alone.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]

Done = subprocess.CompletedProcess[str]


def run(*command: str, environment: Mapping[str, str] | None = None) -> Done:
    """``python *command``, where ``command`` is ``-m``, a module and arguments, or a script and arguments.

    ``environment``: variables to set, in addition to this process's.
    """
    return run_at_once([command], environment or {})[0]


def run_at_once(commands: Sequence[Sequence[str]], *environments: Mapping[str, str]) -> list[Done]:
    """:func:`run` of each, all at the same time; ``environments``: one for each, or one for all."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    if len(environments) < 2:
        environments = (environments or ({},)) * len(commands)
    with tempfile.TemporaryDirectory(prefix="cute_attn-test-") as folder:
        outputs = [f"{folder}/{i}" for i in range(len(commands))]
        calls = [
            {"command": [*map(str, command)], "environment": variables | environment, "output": output}
            for command, output, environment in zip(commands, outputs, environments, strict=True)
        ]
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(calls) + "\n")
        server.stdin.flush()
        statuses = json.loads(server.stdout.readline())
        return [
            Done(command, status, *(Path(f"{output}.{descriptor}").read_text() for descriptor in (1, 2)))
            for command, status, output in zip(commands, statuses, outputs, strict=True)
        ]


def alone(*command: str, environment: Mapping[str, str] | None = None, folder: Path = ROOT) -> Done:
    """:func:`run` in a new interpreter, which has loaded nothing before; also ``-c`` and code."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(
        words, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@functools.cache
def _server() -> "subprocess.Popen[str]":
    server = subprocess.Popen(
        [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)  # closes its input, which ends it
    return server


# ---- the server ----


def _serve() -> None:
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401
    import torch  # noqa: F401

    import layouts.show  # noqa: F401
    from cute_attn.lab import builds
    from tests import quick_builds

    quick_builds.apply()
    builds.build_at_once = lambda *args, **options: None  # processes that load the DSL again, on busy cores
    os.cpu_count = lambda: 1
    with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):
        _run(
            "-m", "cute_attn", "list", "--json"
        )  # the first command loads the modules that read and write a command's text
    gc.freeze()  # so that a child's garbage collection does not copy loaded objects
    for line in sys.stdin:
        children = []
        for call in json.loads(line):
            child = os.fork()
            if child == 0:
                _become(call)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)


def _become(call: dict[str, Any]) -> NoReturn:
    """Run a command and exit with its status, without the second of interpreter shutdown."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(os.open(f"{call['output']}.{descriptor}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(call["environment"])
    status = 0
    try:
        _run(*call["command"])
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = 1 if isinstance(stop.code, str) else stop.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(name: str, *arguments: str) -> None:
    if name == "-m":
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [name, *arguments]
        sys.path.insert(0, str(Path(name).parent))
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    _serve()
