"""``cute-attn run``: a program, unedited, with PyTorch's attention on the kernels, and a table of what happened."""

import contextlib
import json
import os
import platform
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

_HELP = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run", context_settings=_HELP, no_args_is_help=True)(run)


def run(
    program: Annotated[
        list[str], typer.Argument(metavar="SCRIPT|MODULE [ARG]...", help="The program and its arguments.")
    ],
    module: Annotated[bool, typer.Option("-m", help="The program is a module.")] = False,
    backends: Annotated[
        str, typer.Option(help="Whose calls to serve: some of flash,efficient,cudnn.")
    ] = "flash,efficient,cudnn",
    shadow: Annotated[
        int, typer.Option(min=0, help="Compute so many calls of each signature by PyTorch as well.")
    ] = 0,
    output: Annotated[Path | None, typer.Option("--json", help="Write the table into this file.")] = None,
) -> None:
    """Run a program with scaled_dot_product_attention and varlen_attn on the kernels.

    Afterwards a table on stderr has its calls by signature: how often, served or why not and, with --shadow, the
    largest difference from PyTorch's result, microseconds of both, and what the whole run gains. Calls that PyTorch
    computes by plain matrix products reach no kernel and are not listed. Without a GPU nothing is served, and the
    table says what there is to serve. Under torchrun the first rank reports.
    """
    import torch

    from cute_attn import sdpa
    from cute_attn.sdpa.observe import FunctionObserver, Observer

    if not module and not Path(program[0]).is_file():
        raise ValueError(f"the program is {program[0]!r}; accepted: a Python file, or -m and a module")
    options = sdpa.Options(tuple(filter(None, backends.split(","))))
    observer = Observer(shadow)
    with contextlib.ExitStack() as active:
        if torch.cuda.is_available():
            active.enter_context(sdpa.active(backends=options.backends))
            active.enter_context(observer.watching())
        else:
            active.enter_context(FunctionObserver(observer))
        start = time.perf_counter()
        status = execute(program, module)
    if os.environ.get("RANK", "0") == "0":
        report(observer, " ".join(program), time.perf_counter() - start, output)
    raise typer.Exit(status)


def execute(program: list[str], module: bool) -> int:
    """Run a script, or a module, as Python does, with the rest of ``program`` as its arguments; returns its status."""
    name = program[0]
    before = sys.argv, sys.path[:]
    sys.argv = list(program)
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(name).resolve().parent))
            runpy.run_path(name, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, int) or error.code is None:
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:  # a KeyboardInterrupt, too: the calls until then are reported
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def report(observer: Any, program: str, seconds: float, output: Path | None) -> None:
    """Print the table, and write it as JSON."""
    rows = sorted(observer.rows.values(), key=lambda row: -(row.gain_us or 0))
    gains = [row.gain_us for row in rows if row.reason is None and row.gain_us is not None]
    if output is not None:
        output.write_text(json.dumps(summary(rows, program, seconds, gains), indent=1) + "\n")
    console = Console(stderr=True)
    console = console if console.is_terminal else Console(stderr=True, width=160)
    console.print(table(rows, seconds))
    if gains:
        saved = sum(gains) / 1e6
        console.print(
            f"attention on the kernels saves {saved:.3g} s of what would be {seconds + saved:.3g} s, "
            f"by the {observer.shadow} shadowed calls of each signature"
        )


def table(rows: list[Any], seconds: float) -> Table:
    """Calls by signature."""
    served = sum(row.calls for row in rows if row.reason is None)
    calls = sum(row.calls for row in rows)
    title = f"{calls} attention calls, {served} on the kernels, in {seconds:.1f} s"
    found = Table("operator", "signature", "calls", "served", "us", "PyTorch's us", "difference", title=title)
    for row in rows:
        times = [
            f"{sum(times) / len(times):.1f}" if times else "-" for times in (row.ours_us, row.pytorch_us)
        ]
        apart = "-" if row.difference is None else f"{row.difference:.1e}"
        name = row.operator.removeprefix("_").replace("scaled_dot_product_", "")
        found.add_row(name, row.signature, str(row.calls), row.reason or "yes", *times, apart)
    return found


def summary(rows: list[Any], program: str, seconds: float, gains: list[float]) -> dict[str, Any]:
    """The table and the machine, for JSON."""
    import torch

    import cute_attn

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "program": program,
        "seconds": seconds,
        "saved_seconds": sum(gains) / 1e6 if gains else None,
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cute_attn": cute_attn.__version__,
        "rows": [row.as_dict() for row in rows],
    }
