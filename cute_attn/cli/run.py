"""``cute-attn run``: run an unedited program with PyTorch's attention on the kernels, and print a table of its calls.

The program decides when torch is loaded and when CUDA starts, since it may set the environment before that. So nothing
here loads torch; calls are served once the program has loaded it. The table is made when the process ends, after the
program's threads.
"""

import atexit
import contextlib
import functools
import importlib.abc
import importlib.util
import json
import os
import pkgutil
import platform
import runpy
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

import cute_attn
from cute_attn.host.activation import BACKENDS, Options
from cute_attn.host.imports import after_import
from cute_attn.lab.environment import environment
from cute_attn.lab.tables import Table, counted

ITS_OWN = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    program: Annotated[
        list[str], typer.Argument(metavar="PROGRAM", help="A file, or -m and a module, and its arguments.")
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
    """Run a program with scaled_dot_product_attention, varlen_attn and flex_attention on the kernels.

    Afterwards a table on stderr has its calls by signature, those through cute_attn.transformers and
    cute_attn.flash_attn as well: how often, served or why not and, with --shadow, the largest difference from PyTorch's
    result, microseconds of both, and what the whole run gains. Calls that PyTorch computes by plain matrix products
    reach no kernel and are not listed. Without a GPU nothing is served, and the table lists the calls that could be.

    The program is a Python file, a folder or zip file with a __main__.py, or with -m a module. Under torchrun the first
    rank reports. Processes that the program itself starts afresh, as torch.multiprocessing.spawn does, are not served:
    call cute_attn.sdpa.activate() in them. Forked ones are served and not listed.
    """
    check_program(program[0], module)
    named = tuple(filter(None, backends.split(",")))
    if not set(named) <= set(BACKENDS):
        raise ValueError(f"--backends is {backends!r}; accepted: some of {', '.join(BACKENDS)}, with commas")
    options = Options(named)
    reports = os.environ.get("RANK", "0") == "0"
    file = None if output is None or not reports else output.open("a")
    execution = Execution(" ".join(program), options, shadow, file, reports)
    atexit.register(execution.end)  # the program's registrations come first
    after_import("torch", execution.begin)
    status = execute(program, module)
    execution.signal = max(-status, 0)
    raise typer.Exit(max(status, 0))


without_starting_cuda = functools.partial(environment, "PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""Within the block, torch looks for GPUs by NVML, if available: asking CUDA would start it before the program does.
Some imported modules look for GPUs as well, such as TVM FFI.
"""


@dataclass
class Execution:
    """A program that is being run and watched; ``shadow``: how many calls of each signature are compared; ``reports``:
    whether this process prints the table; ``signal``: the signal that ended the program, or 0.
    """

    program: str
    options: Options
    shadow: int
    output: TextIO | None
    reports: bool
    signal: int = 0
    _process: int = field(default_factory=os.getpid)
    _start: float = field(default_factory=time.perf_counter)
    _observer: Any = None
    _active: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @without_starting_cuda()
    def begin(self) -> None:
        """Start to serve and watch calls. Called when torch has been loaded and CUDA has not started."""
        import torch

        from cute_attn.sdpa.observe import Observer  # loads torch, as the program has
        from cute_attn.sdpa.overrides import Activation

        self._observer = Observer(self.shadow)
        device = "cuda" if torch.cuda.is_available() else ""
        never_mind = after_import(
            "torch.nn.attention.flex_attention", functools.partial(self._begin_flex, device)
        )
        self._active.callback(never_mind)
        if device:
            self._active.callback(Activation(self.options).remove)
            self._active.enter_context(self._observer.watching())
        else:
            self._active.enter_context(self._observer.watching_functions())

    @without_starting_cuda()
    def _begin_flex(self, device: str) -> None:
        """Start to serve flex_attention, whose module has been loaded. device: as in ``flex.overrides.Activation``."""
        from cute_attn.flex import overrides

        if overrides.why_not_replaced() is None:
            self._active.callback(overrides.Activation(self.options, device).remove)

    def end(self) -> None:
        """Print the report, and end by the signal that ended the program, if any. A forked process does neither."""
        if os.getpid() != self._process:
            return
        self._active.close()
        if self.reports:
            report(self._observer, self.program, time.perf_counter() - self._start, self.output)
        if self.signal:
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(self.signal, signal.SIG_DFL)
            os.kill(os.getpid(), self.signal)


# ---- the program ----


def check_program(name: str, module: bool) -> None:
    """Raise ValueError for a program that Python could not run."""
    if module:
        sys.path.insert(0, os.getcwd())
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ValueError(f"the module is {name!r}; accepted after -m: one that can be imported")
        return
    importer = pkgutil.get_importer(name)  # for a folder or a zip file
    if importer is None and Path(name).is_file():
        return
    if importer is None or importer.find_spec("__main__", None) is None:
        raise ValueError(
            f"the program is {name!r}; accepted: a Python file, a folder or zip file with a __main__.py, or -m and a "
            "module"
        )


def execute(program: list[str], module: bool) -> int:
    """Run ``program[0]`` as Python does, with the further items as its arguments.

    Returns its exit status, or minus the number of the signal that interrupted it.
    """
    name = program[0]
    sys.argv = list(program)
    try:
        if module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            if pkgutil.get_importer(name) is None:
                sys.path.insert(0, str(Path(name).resolve().parent))
            runpy.run_path(name, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, int) or error.code is None:
            return (error.code or 0) & 0xFF  # the system keeps these bits of an exit status
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # the calls until then are reported
        error.__traceback__ = _of_the_program(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _of_the_program(error: BaseException) -> Any:
    """The error's traceback, without the frames that run the program."""
    own = traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    return traceback or own


# ---- the table ----


def report(observer: Any, program: str, seconds: float, output: TextIO | None) -> None:
    """Print the table, and write it to ``output`` as JSON. observer: None if the program did not load torch."""
    rows = [] if observer is None else sorted(observer.rows.values(), key=lambda row: -(row.gain_us or 0))
    gains = [row.gain_us for row in rows if row.reason is None and row.gain_us is not None]
    console = Console(stderr=True)
    console = console if console.is_terminal else Console(stderr=True, width=160)
    console.print(table(rows, seconds) if observer is not None else "the program did not load torch")
    if gains:
        saved = sum(gains) / 1e6
        console.print(
            f"attention on the kernels saves {saved:.3g} s of what would be {seconds + saved:.3g} s, "
            f"by the {observer.shadow} shadowed calls of each signature"
        )
    if output is not None:
        try:
            with output:
                if output.seekable():
                    output.truncate(0)
                output.write(json.dumps(summary(rows, program, seconds, gains), indent=1) + "\n")
        except OSError as error:  # the program's status stays
            print(f"error: the table was not written: {error}", file=sys.stderr)


def table(rows: list[Any], seconds: float) -> Table:
    served = sum(row.calls for row in rows if row.reason is None)
    calls = sum(row.calls for row in rows)
    title = f"{counted(calls, 'attention call')}, {served} on the kernels, in {seconds:.1f} s"
    names = ("operator", "signature", "calls", "served", "us", "PyTorch's us", "difference", "a call gains")
    found = Table(*names, title=title)
    for row in rows:
        times = [
            f"{sum(times) / len(times):.1f}" if times else "-" for times in (row.ours_us, row.pytorch_us)
        ]
        apart = "-" if row.difference is None else f"{row.difference:.1e}"
        name = row.operator.removeprefix("_").replace("scaled_dot_product_", "")
        served_here = "yes" if row.reason is None else "no"
        found.add_row(name, row.signature, str(row.calls), served_here, *times, apart, row.gain)
    return found


def summary(rows: list[Any], program: str, seconds: float, gains: list[float]) -> dict[str, Any]:
    """The table, the machine, and the kernels that calls needed, for :func:`cute_attn.lab.bundles.like`, for JSON."""
    torch: Any = sys.modules.get("torch")
    started = torch is not None and torch.cuda.is_initialized()
    compiled = sys.modules.get("cute_attn.compiler.compiled")
    kernels = [] if compiled is None else compiled.loaded_kernels()
    return {
        "program": program,
        "seconds": seconds,
        "saved_seconds": sum(gains) / 1e6 if gains else None,
        "gpu": torch.cuda.get_device_name() if started else None,
        "python": platform.python_version(),
        "torch": None if torch is None else torch.__version__,
        "cute_attn": cute_attn.__version__,
        "rows": [row.as_dict() for row in rows],
        "kernels": [{"name": x.name, "tile": x.tile.text, "target": x.target} for x in kernels],
    }
