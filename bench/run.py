"""Common code of benchmarks: arguments, the choice of rows, and a runner of workloads."""

import argparse
import fnmatch
import functools
import importlib.util
import json
import multiprocessing
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import cliffs
from bench.isolated import Message, Task, Work, run_tasks
from cute_attn.lab.benchmark.workload import Workload

RESULTS = Path(__file__).parent / "results"
NEWEST = "newest"
"""``--impl``'s name for the kernel that a call uses by default."""
CLOCK_EVERY = 10
"""The GPU's clock is read after one of so many rows."""
_CALLS_PER_MS = 2.5  # at most, of an implementation in a round; each flushes the L2


# ---- the command ----


def parser(doc: str) -> argparse.ArgumentParser:
    """Parser of a command whose rows are chosen by name; ``doc``: its module's docstring."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("patterns", nargs="*", default=["*"], help="which rows, by shell patterns")
    made.add_argument("--list", action="store_true", help="print the rows' names and stop")
    return made


def timing_parser(doc: str, impl: Sequence[str], milliseconds: float = 20.0) -> argparse.ArgumentParser:
    """Parser of a command that times rows in another process; ``impl``: default patterns of implementations."""
    made = parser(doc)
    made.add_argument("-o", "--output", type=Path, help="the file to write")
    which = f"which implementations, by shell patterns; default: {' '.join(impl)}"
    made.add_argument("--impl", nargs="*", default=impl, help=which)
    made.add_argument(
        "--milliseconds", type=float, default=milliseconds, help="how long each is timed a row, at the most"
    )
    made.add_argument("--workers", type=int, default=8, help="processes that build kernels")
    made.add_argument(
        "--patience", type=float, default=90, help="after how many seconds an implementation counts as hung"
    )
    made.add_argument("--picture", type=Path, help="the picture to write; default: beside the file")
    made.add_argument("--result", type=Path, help="show this result instead of measuring one")
    return made


def choose(
    options: argparse.Namespace,
    rows: Mapping[str, Any],
    show: Callable[[dict[str, Any], Path], None] | None = None,
    titles: Mapping[str, str] | None = None,
) -> list[Any]:
    """The rows whose name or title matches; exits if there is none.

    Prints their names, or calls ``show`` with a stored result, and exits where that is asked for.
    """
    titles = titles or {}
    if show is not None and options.result:
        show(json.loads(options.result.read_text()), options.picture or options.result.with_suffix(".png"))
        sys.exit()
    names = [n for n in rows if any(matches(x, options.patterns) for x in (n, titles.get(n, n)))]
    if options.list:
        print("\n".join(f"{name:44} {titles.get(name, '')}".rstrip() for name in names))
        sys.exit()
    if not names:
        sys.exit(f"no row matches {options.patterns}; --list names them")
    return [rows[name] for name in names]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if any of the shell patterns matches."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def need_gpu() -> None:
    """Exit with a sentence if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU: a benchmark needs one")


def machine_of_tests() -> Any:
    """``tests.machine``, which plans calls without a GPU; exits with a sentence if pytest is missing."""
    if importlib.util.find_spec("pytest") is None:
        sys.exit("error: planning calls without a GPU needs pytest; pip install pytest")
    return importlib.import_module("tests.machine")


def build(found: Mapping[str, tuple[Any, str]], group: str) -> None:
    """Build one of several groups of kernels, ``PART/PARTS``, into the disk cache, and print how many.

    found: (kernel, target) by a name.
    """
    from cute_attn import compiler

    part, parts = map(int, group.split("/"))
    own = {name: one for name, one in found.items() if zlib.crc32(name.encode()) % parts == part}
    for name, one in own.items():
        try:
            compiler.build(*one)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    print(len(own), "kernels")


# ---- rows in another process ----


def build_by_calls(call: Callable[[Any], str], items: Sequence[Any], workers: int) -> None:
    """Build kernels by calls on the GPU in parallel processes, and print their errors.

    call: makes an item's first calls, and returns an error, which comes again when the item is timed, or "".
    """
    context = multiprocessing.get_context("spawn")
    # Neighbouring items share kernels, for which one process would wait while another builds them.
    mixed = [item for first in range(workers) for item in items[first::workers]]
    with context.Pool(min(workers, len(items))) as pool:
        for error in pool.imap_unordered(call, mixed):
            if error:
                print(error, flush=True)


def measure(
    question: str,
    options: argparse.Namespace,
    tasks: Sequence[Task],
    work: Work,
    show: Callable[[dict[str, Any], Path], None],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Time the tasks, and show the result, which is also written after each task in case the run is interrupted.

    about: the result's entries other than rows.
    """
    from cute_attn.lab.benchmark.results import default_path, machine, write
    from cute_attn.lab.sensors import known_median

    result: dict[str, Any] = machine() | dict(about or {}) | {"rows": []}
    path = options.output or default_path(RESULTS, question, result)
    clocks: list[int | None] = []
    for rows, clock in run_tasks(work, tasks, options.patience):
        for row in rows:
            print_row(row)
        clocks.append(clock)
        result["rows"] += rows
        result["clock_mhz"] = known_median(clocks)
        write(result, path)
    show(result, options.picture or path.with_suffix(".png"))
    print(f"wrote {path}")


def print_row(row: dict[str, Any]) -> None:
    """Print one implementation's time, or its error."""
    numbers = (
        row.get("error")
        or f"{1e3 * row['ms']:11.2f} us {row['value']:7.1f} {row['unit']} {row.get('how', '')}"
    )
    print(f"{row['workload']:44} {row['impl']:24} {numbers}".rstrip(), flush=True)


# ---- workloads ----


def main(
    question: str,
    options: argparse.Namespace,
    workloads: Iterable[Workload],
    titles: Mapping[str, str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Time the workloads that are chosen by name or title, or show a stored result."""
    chosen = choose(options, {w.name: w for w in workloads}, cliffs.show, titles)
    need_gpu()
    names = {op: names_of(op, options.impl) for op in {w.op for w in chosen}}
    build_by_calls(functools.partial(first_calls, names=names), chosen, options.workers)
    tasks = [Task(w, names[w.op], read_clock=i % CLOCK_EVERY == 0) for i, w in enumerate(chosen)]
    work = functools.partial(time_tasks, milliseconds=options.milliseconds)
    measure(question, options, tasks, work, cliffs.show, about)


def implementations(op: str) -> dict[str, Any]:
    """All implementations of an operation by name, peers first: the first one's output is the expected one.

    The newest kernel that the GPU runs is called without naming it, so that on Hopper its keys may be split.
    """
    from cute_attn.compiler import default_target, registry
    from cute_attn.lab.benchmark.peers import PEERS, ours

    own = (arch for op_, arch, variant in registry.KERNELS if op_ == op and not variant)
    archs = sorted(arch for arch in own if default_target(arch) in registry.RUNS_ON[arch])
    kernels = {f"cute_attn/{op}-{arch}": ours(None if arch == archs[-1] else arch) for arch in archs}
    return PEERS | kernels | {"cute_attn/tf32": ours(None, precision="tf32")}


def names_of(op: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """The implementations that match; exits if none is this package's."""
    known = implementations(op)
    wanted = {NEWEST: cliffs.newest(known)}
    patterns = [wanted.get(pattern, pattern) for pattern in patterns]
    chosen = tuple(name for name in known if matches(name, patterns))
    own = [name for name in known if cliffs.is_own(name)]
    if not set(own) & set(chosen):
        sys.exit(
            f"--impl {' '.join(patterns)} matches none of {', '.join(own)}; accepted: patterns that match one"
        )
    return chosen


def first_calls(workload: Workload, names: Mapping[str, Sequence[str]]) -> str:
    """Call this package's implementations of a workload once; the last error or ""."""
    from cute_attn.lab.benchmark.results import first_line

    error = ""
    for name in filter(cliffs.is_own, names[workload.op]):
        try:
            implementations(workload.op)[name](workload, workload.inputs())()
        except Exception as reason:
            error = f"{workload.name}: {name}: {first_line(reason)}"
    return error


def time_tasks(tasks: Sequence[Task], send: Callable[[Message], None], *, milliseconds: float) -> None:
    """The work of the other process: :func:`time_workload` for every task."""
    from cute_attn.lab.benchmark.results import time_workload
    from cute_attn.lab.benchmark.timing import Clock

    clock = Clock()
    for task in tasks:
        known = implementations(task.workload.op)
        found = time_workload(
            task.workload,
            {name: known[name] for name in task.names},
            clock,
            milliseconds,
            round(_CALLS_PER_MS * milliseconds),
            read_clock=task.read_clock,
            stage=lambda names: send(("stage", names)),
        )
        send(("rows", found))
