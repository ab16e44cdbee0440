"""Time workloads in another process: an implementation that ends it, hangs or loses the GPU costs only its rows.

The process sends the names of each step before it runs. When no message follows, their rows get an error, and a new
process continues without them.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

Rows = list[dict[str, Any]]
Message = tuple[str, Any]
Work = Callable[[Sequence["Task"], Callable[[Message], None]], None]
"""Sends ``("stage", names)`` before each step, ``("rows", (rows, clock))`` after each task, in order."""


@dataclass(frozen=True)
class Task:
    """A workload, which has a name; the names of its implementations; and whether to read the GPU's clock after it."""

    workload: Any
    names: tuple[str, ...]
    read_clock: bool = False


def run_tasks(
    work: Work, tasks: Sequence[Task], patience: float = 90.0, context: str = "spawn"
) -> Iterator[tuple[Rows, int | None]]:
    """The results that ``work`` sends for each task, in order: its rows and the clock in MHz.

    Args:
        work: runs in the other process.
        patience: seconds without a message after which the process counts as hung and is killed.
        context: how processes are started, as of :mod:`multiprocessing`.

    Raises:
        RuntimeError: a process ended before its first step.
    """
    position, lost = 0, dict[str, str]()
    while position < len(tasks):
        task = tasks[position]
        left = tuple(name for name in task.names if name not in lost)
        if not left:
            yield _all_rows(task, [], lost), None
            position, lost = position + 1, {}
            continue
        stage: tuple[str, ...] = ()
        started = False
        remaining = [replace(task, names=left), *tasks[position + 1 :]]
        for kind, value in _messages(work, remaining, patience, context):
            if kind == "stage":
                stage, started = value, True
            elif kind == "rows":
                rows, clock = value
                yield _all_rows(tasks[position], rows, lost), clock
                position, lost, stage = position + 1, {}, ()
            elif not started:
                raise RuntimeError(f"the process that times ended before its first step: {value}")
            else:
                lost |= {name: str(value) for name in stage}


def _all_rows(task: Task, rows: Rows, lost: Mapping[str, str]) -> Rows:
    """A row for every implementation of a task, lost ones included."""
    given = {row["impl"]: row for row in rows}
    return [
        given.get(name) or {"workload": task.workload.name, "impl": name, "error": lost[name]}
        for name in task.names
    ]


def _messages(work: Work, tasks: Sequence[Task], patience: float, context: str) -> Iterator[Message]:
    """A new process's messages until it is done, or lost: then ``("lost", why)`` is the last."""
    start = multiprocessing.get_context(context)
    receiver, sender = start.Pipe(duplex=False)
    process: BaseProcess = start.Process(target=_main, args=(work, tasks, sender), daemon=True)  # type: ignore[attr-defined]
    process.start()
    sender.close()  # so that the end of the process is the end of the pipe
    try:
        while True:
            message: Message = ("lost", f"it did not return within {patience:g} s")
            try:
                if receiver.poll(patience):
                    message = receiver.recv()
            except EOFError:
                process.join()
                message = ("lost", f"it ended the process (exit code {process.exitcode})")
            if message[0] == "done":
                return
            yield message
            if message[0] == "lost":
                return
    finally:
        process.kill()
        process.join()
        receiver.close()


def _main(work: Work, tasks: Sequence[Task], sender: Connection) -> None:
    from cute_attn.lab.benchmark.results import first_line

    try:
        work(tasks, sender.send)
    except Exception as error:  # the error of the step's rows
        sender.send(("lost", first_line(error)))
    else:
        sender.send(("done", None))
