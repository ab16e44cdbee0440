"""Arguments and options of several commands, and where commands print."""

import contextlib
import ctypes
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from cute_attn import _without_dsl
from cute_attn.compiler import registry
from cute_attn.epilogues.names import user_epilogue
from cute_attn.tiles import TARGETS, check_target
from cute_attn.traits import ARCHS, DTYPES, FEATURES, OPS, Traits

ends_with_command = False
"""True if this process runs one command, so that it may do without the DSL for good."""


def complete_name(text: str) -> list[str]:
    """Shell completions of a kernel's name, each by one more word."""
    done, _, _ = text.rpartition("-")
    words = done.split("-") if done else []
    steps = (OPS, ARCHS, DTYPES, [f"d{dim}" for dim in (32, 64, 96, 128, 192, 256)])
    nexts = steps[len(words)] if len(words) < len(steps) else [word for word in FEATURES if word not in words]
    return [found for found in ("-".join([*words, one]) for one in nexts) if found.startswith(text)]


def complete_tile(context: typer.Context, text: str) -> list[str]:
    """Shell completions of a tile's text: the fields of the kernel's tile that the text does not set yet."""
    import_names()
    done, comma, begun = text.rpartition(",")
    name = context.params.get("name") or next(iter(context.args), "")  # not parsed when a word is incomplete
    try:
        tile = registry.lookup(Traits.parse(name), None).tile
    except ValueError:  # an incomplete name, or no kernel's name
        return []
    given = {item.partition("=")[0] for item in done.split(",")}
    left = (field.name for field in fields(tile) if field.name not in given and field.name.startswith(begun))
    return [f"{done}{comma}{name}=" for name in left]


def _checked_name(context: typer.Context, given: Any) -> Any:
    """Check kernels' names before the kernels are imported, which takes seconds; returns what was given."""
    names = [given] if isinstance(given, str) else given or ()
    for name in () if context.resilient_parsing else names:
        for epilogue in Traits.parse(name).epilogues:
            user_epilogue(epilogue)
    return given


def _checked_target(context: typer.Context, target: str | None) -> str | None:
    if target is not None and not context.resilient_parsing:
        check_target(target)
    return target


_TILE = "Fields of the tile to change: tile_n=128,num_stages=2."
_TARGET = (
    "sm80, sm86, sm89, sm90, sm100 or sm120; by default the GPU that is present, or the kernel's generation."
)
_LIKE = "A file of `cute-attn run --json`: the kernels that it lists; may be repeated."


def _kernel(metavar: str, meaning: str) -> Any:
    return typer.Argument(metavar=metavar, autocompletion=complete_name, callback=_checked_name, help=meaning)


Name = Annotated[str, _kernel("NAME", "A kernel, such as forward-sm80-bf16-d128-causal.")]
KnownNames = Annotated[list[str], _kernel("NAME", "Kernels, such as forward-sm80-bf16-d128-causal.")]
Other = Annotated[str | None, _kernel("NAME2", "Another kernel, such as the base of a variant.")]
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME", autocompletion=complete_name, help="Kernels, such as forward-sm90-bf16-d128."
    ),
]
TileText = Annotated[str, typer.Option("--tile", autocompletion=complete_tile, help=_TILE)]
Target = Annotated[
    str | None,
    typer.Option("--target", autocompletion=lambda: TARGETS, callback=_checked_target, help=_TARGET),
]
Like = Annotated[list[Path] | None, typer.Option("--like", help=_LIKE)]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_verbose, _pages = False, True


def _set_verbose(asked: bool) -> None:
    global _verbose
    _verbose = _verbose or asked


def set_pager(used: bool) -> None:
    """Set whether long tables go through a pager; not with ``--no-pager``."""
    global _pages
    _pages = used


def is_verbose() -> bool:
    """True if ``-v`` was given, before or after the command's name."""
    return _verbose


_VERBOSE = "All fields of tiles, all rows of a diff; of an error, all its frames."
Verbose = Annotated[bool, typer.Option("-v", "--verbose", callback=_set_verbose, help=_VERBOSE)]


def writable_file(context: typer.Context, param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Check that an option's file can be written, and create its folder, before the work whose result it will hold."""
    if path is not None and not context.resilient_parsing:
        with writes(param.opts[0], path, "a file"):
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            path.open("a").close()
            if is_new:
                path.unlink()
    return path


def writable_folder(context: typer.Context, param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Create an option's folder, and check that it can be written; see :func:`writable_file`."""
    if path is not None and not context.resilient_parsing:
        with writes(param.opts[0], path, "a folder"):
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
    return path


@contextlib.contextmanager
def writes(option: str, path: Path, what: str) -> Iterator[None]:
    """Raise ValueError if the block cannot write ``path``, which is ``what``."""
    try:
        yield
    except OSError as error:
        accepted = f"{what} that can be written ({error.strerror or error})"
        raise ValueError(f"{option} is {str(path)!r}; accepted: {accepted}") from None


OutputFolder = Annotated[
    Path, typer.Option("-o", "--output", callback=writable_folder, help="The folder to write into.")
]
_PAGE = "Also write one HTML page here, with layouts and steady steps; it needs no network."
Page = Annotated[Path | None, typer.Option("--html", callback=writable_file, help=_PAGE)]


def import_kernels() -> None:
    """Import the kernels, and with them the DSL, in half the usual time: without garbage collection.

    The import makes a million objects that live until the process ends, so the collector also ignores them afterwards.
    """
    gc.disable()
    try:
        registry.KERNELS  # noqa: B018
    finally:
        gc.enable()
    gc.freeze()


def import_names() -> None:
    """Import the kernels to read names, tiles and docstrings.

    If the process ends with this command, placeholders replace the DSL, unless the file of ``--load`` has imported it.
    """
    if ends_with_command and "cutlass" not in sys.modules:
        _without_dsl.install()
    import_kernels()


def check_first(look: Callable[[], object]) -> None:
    """Call ``look``, and raise its ValueError before the command loads torch and the DSL, which takes seconds.

    A forked process calls it without the DSL. After ``--load`` the DSL is imported already: this does nothing, and the
    command itself raises the error.
    """
    if not ends_with_command or "cutlass" in sys.modules:
        return
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        refused = ""
        try:
            _without_dsl.install()
            look()
        except ValueError as reason:
            refused = str(reason)
        finally:  # the command raises all other errors, too
            os.write(writing, refused.encode())
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        refused = pipe.read()
    os.waitpid(child, 0)
    if refused:
        raise ValueError(refused)


def look_up(name: str, tile: str | None = None, target: str | None = None) -> Any:
    """The kernel on ``target``, by default on the oldest that it fits; raises as :func:`registry.lookup` does."""
    traits = Traits.parse(name)
    for on in [target] if target else registry.RUNS_ON[traits.arch]:
        with contextlib.suppress(registry.Unsupported):
            return registry.lookup(traits, tile or None, on)
    return registry.lookup(traits, tile or None, target)


def check_kernels(names: Iterable[str], tile: str | None = None, target: str | None = None) -> None:
    """Check by :func:`check_first` that each kernel exists and that the tile fits on the target."""
    check_first(lambda: [look_up(name, tile, target) for name in names])


def need_compiler() -> None:
    """Raise ValueError if the DSL, which builds kernels, is not installed."""
    if not _without_dsl.is_installed():
        raise ValueError(_without_dsl.REASON)


def need_gpu(otherwise: str = "timing a kernel needs one") -> None:
    """Raise ValueError if CUDA's driver is missing, before torch is loaded, which takes seconds; later do nothing."""
    if "torch" not in sys.modules:  # if loaded, torch is asked later instead
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise ValueError(f"there is no GPU; {otherwise}") from None


def make_console() -> Console:
    """A console; if the output is no terminal, of ``COLUMNS`` columns, by default 120."""
    console = Console()
    return console if console.is_terminal else Console(width=int(os.environ.get("COLUMNS", 120)))


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` and the elapsed time on a terminal's stderr; yields a function that changes the text."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with live_progress(*columns) as progress:
        task = progress.add_task(text)
        yield lambda now: progress.update(task, description=now)


def show_building(builds: Iterable[Any], total: int) -> None:
    """Run the builds of :func:`cute_attn.prebuild` with a progress bar. Raises ValueError if a kernel failed."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = 0
    with Progress(*columns) as progress:
        task = progress.add_task("building", total=total)
        for built in builds:
            progress.advance(task)
            failed += built.error is not None
            if built.error is not None or built.seconds:
                said = f"{built.seconds:.1f} s" if built.error is None else f"[red]{built.error}"
                progress.console.print(f"{built.traits.name}  {said}")
    if failed:
        raise ValueError(f"{failed} of {total} kernels could not be built")


def live_progress(*columns: ProgressColumn) -> Progress:
    """Progress on a terminal's stderr, kept while the compiler replaces the process's stderr, and erased at the end."""
    console = Console(file=sys.stderr)
    return Progress(*columns, transient=True, console=console, disable=not console.is_terminal)


def show(*parts: Any) -> None:
    """Print; on a terminal, through a pager if the text is longer than the screen."""
    console = make_console()
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    os.environ.setdefault("LESS", "FRX")  # git's setting: the last page stays on the screen
    is_long = console.is_terminal and sys.stdin.isatty() and captured.get().count("\n") >= console.height
    with console.pager(styles=True) if is_long and _pages else contextlib.nullcontext():
        console.print(*parts, sep="\n")


def answer(
    as_json: bool, values: Any, shown: Callable[[], Any], print_shown: Callable[[Any], None] = show
) -> None:
    """Print ``values`` as JSON, or what ``shown`` returns, by ``print_shown``."""
    if as_json:
        print(json.dumps(values, indent=1))
    else:
        print_shown(shown())
