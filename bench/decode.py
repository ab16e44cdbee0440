"""How fast is attention with a cache against its peers, and against reading alone? In one run.

    python -m bench.decode                         every row; writes bench/results/DATE-GPU-decode.json
    python -m bench.decode --rows 'b1-*' '*page*'  the rows whose name matches
    python -m bench.decode --list                  their names
    python -m bench.decode --result FILE           table and picture of an existing result; needs no GPU

Needs a GPU. Each implementation's calls are captured in one CUDA graph, one after the other, each on a cache of its own
so that none finds its keys in the L2; a time is that of a replay over its calls. Numbers are microseconds and GB/s of
the keys and values that are read. The first row is how fast a kernel that only reads does so: the ceiling. A peer is
called in several ways, the fastest counts. One that hangs or ends the process costs its row: see :mod:`bench.isolated`.
Our kernels and FA4's are built in parallel beforehand, FA4's into the cache that it keeps on disk.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import run
from bench.decode_picture import plot, table
from bench.decode_rows import Inputs, Row, make_inputs, rows
from bench.isolated import Message, Task, run_tasks

READ_BYTES = 2**31
"""What the ceiling's kernel reads: many times the L2."""
_WARM_UP = 3
_ROUNDS = 5
_TOLERANCE = 0.05
_CLOCK_EVERY = 10


@dataclass(frozen=True)
class Ceiling:
    """The row of kernels that only read."""

    name: str = "read-only"


CEILING = Ceiling()
CEILING_NAMES = ("cute_attn/read_only", "torch.sum")


# ---- timing ----


def captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """Replays the calls, one after the other, as one CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def microseconds(
    replays: Mapping[str, tuple[Callable[[], None], int]], milliseconds: float
) -> dict[str, float]:
    """The median time of a call in each graph, in rounds over all graphs; values: replay, and its calls."""
    import torch

    def once(replay: Callable[[], None], count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            replay()
            event.record()
        torch.cuda.synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    times: dict[str, list[float]] = {name: [] for name in replays}
    counts = {}
    for name, (replay, _) in replays.items():
        guess = statistics.median(once(replay, _WARM_UP))
        counts[name] = max(3, round(1e3 * milliseconds / _ROUNDS / guess))
    for _ in range(_ROUNDS):
        for name, (replay, _) in replays.items():
            once(replay, 1)  # the first after another one
            times[name] += once(replay, counts[name])
    return {name: statistics.median(found) / replays[name][1] for name, found in times.items()}


def ready(
    row: Row, names: Sequence[str], inputs: Sequence[Inputs], stage: Callable[[tuple[str, ...]], None]
) -> tuple[dict[tuple[str, str], Callable[[Inputs], Any]], dict[str, str]]:
    """Calls that run and agree, by implementation and way, and the errors of implementations without any."""
    import torch

    from bench.decode_impls import IMPLEMENTATIONS
    from cute_attn.lab.benchmark.peers import Declined
    from cute_attn.lab.benchmark.results import first_line

    calls: dict[tuple[str, str], Callable[[Inputs], Any]] = {}
    errors: dict[str, str] = {}
    expected = None
    for name in names:
        stage((name,))
        try:
            ways = IMPLEMENTATIONS[name](row, inputs[0])
        except Exception as error:
            errors[name] = str(error) if isinstance(error, Declined) else first_line(error)
            continue
        for how, call in ways.items():
            try:
                out = call(inputs[0]).float()
                torch.cuda.synchronize()
            except Exception as error:  # a row of the table
                errors[name] = first_line(error)
                torch.cuda.synchronize()  # raises again if the GPU's context is lost
                continue
            expected = (name, out) if expected is None else expected
            difference = float((out - expected[1]).abs().max() / expected[1].abs().max())
            if out.shape != expected[1].shape or not difference <= _TOLERANCE:
                errors[name] = (
                    f"its output differs from {expected[0]}'s by {difference:.2g} of the largest element"
                )
                continue
            calls[name, how] = call
    return calls, {name: error for name, error in errors.items() if all(name != own for own, _ in calls)}


def time_row(
    row: Row, names: Sequence[str], milliseconds: float, stage: Callable[[tuple[str, ...]], None]
) -> tuple[list[dict[str, Any]], Callable[[], None] | None]:
    """A line for every implementation, and the last one's replay, which loads the GPU."""
    stage(tuple(names))
    inputs = make_inputs(row)
    calls, errors = ready(row, names, inputs, stage)
    replays = {}
    for (name, how), call in calls.items():
        stage((name,))
        try:
            own = captured([functools.partial(call, x) for x in inputs])
        except Exception as error:
            errors.setdefault(
                name, f"in a CUDA graph: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            )
            continue
        replays[name, how] = own
    stage(tuple({name: None for name, _ in replays}))
    keys = {f"{name}\n{how}": (replay, row.copies) for (name, how), replay in replays.items()}
    times = microseconds(keys, milliseconds) if keys else {}
    lines = []
    for name in names:
        own_times = {key.split("\n")[1]: us for key, us in times.items() if key.split("\n")[0] == name}
        line: dict[str, Any] = {"workload": row.name, "impl": name}
        if own_times:
            how = min(own_times, key=own_times.__getitem__)
            us = own_times[how]
            line |= {"ms": round(us / 1e3, 6), "value": round(row.read_bytes / us / 1e3, 1), "unit": "GB/s"}
            line |= {"tflops": float(f"{row.flops / us / 1e6:.4g}"), "how": how}
        else:
            line["error"] = errors.get(name, "no time")
        lines.append(line)
    return lines, next(reversed(replays.values()), None)


def time_ceiling(
    milliseconds: float, stage: Callable[[tuple[str, ...]], None]
) -> tuple[list[dict[str, Any]], None]:
    """A line for each kernel that only reads."""
    import torch

    from bench.read_only import ReadOnly, readers

    stage(CEILING_NAMES)
    count = READ_BYTES // 4 // ReadOnly().tile * ReadOnly().tile
    data = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device="cuda")
    reads = readers(data)
    (sums, whole) = (read() for read in reads.values())
    if (int(sums.sum()) - int(whole)) % 2**32:
        raise ValueError("the kernel that only reads adds up something else than torch.sum")
    times = microseconds({name: (captured([read]), 1) for name, read in reads.items()}, milliseconds)
    lines = [
        {
            "workload": CEILING.name,
            "impl": name,
            "ms": round(us / 1e3, 6),
            "value": round(4 * count / us / 1e3, 1),
            "unit": "GB/s",
        }
        for name, us in times.items()
    ]
    return lines, None


def time_tasks(tasks: Sequence[Task], send: Callable[[Message], None], *, milliseconds: float) -> None:
    """The work of the other process: every row, the ceiling first."""
    import torch

    from cute_attn.lab.benchmark.timing import query_gpu

    for task in tasks:

        def stage(names: tuple[str, ...]) -> None:
            send(("stage", names))

        mhz = None
        if isinstance(task.workload, Ceiling):
            lines, replay = time_ceiling(milliseconds, stage)
        else:
            lines, replay = time_row(task.workload, task.names, milliseconds, stage)  # type: ignore[arg-type]
        if task.read_clock and replay is not None:
            for _ in range(20):
                replay()
            clock = query_gpu("clocks.sm")
            torch.cuda.synchronize()
            mhz = int(float(clock)) if clock else None
        del replay
        torch.cuda.empty_cache()
        send(("rows", (lines, mhz)))


# ---- building ahead ----


_FA4_KEEPS_KERNELS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def first_calls(row: Row, impl: Sequence[str], target: str) -> str:
    """Call those implementations of a row once that compile; the first error or ""."""
    from bench.decode_impls import IMPLEMENTATIONS, OURS, names_of
    from cute_attn.lab.benchmark.peers import Declined
    from cute_attn.lab.benchmark.results import first_line

    try:
        inputs = make_inputs(row, copies=1)
        for name in reversed(names_of(row, target)):
            if name in (*OURS, "fa4") and run.matches(name, impl):
                IMPLEMENTATIONS[name](row, inputs[0])[""](inputs[0])
    except Declined:
        return ""
    except Exception as error:
        return f"{row.name}: {first_line(error)}"
    return ""


# ---- the command ----


def parser() -> argparse.ArgumentParser:
    """Of the command's arguments."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--rows", nargs="*", default=["*"], help="which rows, by shell patterns")
    made.add_argument("--impl", nargs="*", default=["*"], help="which implementations, by shell patterns")
    made.add_argument("--list", action="store_true", help="print the rows' names and stop")
    made.add_argument("--milliseconds", type=float, default=20, help="how long each is timed a row")
    made.add_argument("--workers", type=int, default=8, help="processes that build kernels")
    made.add_argument(
        "--patience", type=float, default=90, help="after how many seconds an implementation counts as hung"
    )
    made.add_argument("--output", type=Path, help="the file to write")
    made.add_argument("--picture", type=Path, help="the picture to write; default: beside the file")
    made.add_argument("--result", type=Path, help="show this result instead of measuring one")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.result:
        show(json.loads(options.result.read_text()), options.picture or options.result.with_suffix(".png"))
        return
    chosen = [row for row in rows() if run.matches(row.name, options.rows)]
    if options.list:
        print("\n".join(row.name for row in chosen))
        return
    if not chosen:
        sys.exit(f"no row matches {options.rows}; --list names them")

    run.need_gpu()
    measure(chosen, options)


def measure(chosen: Sequence[Row], options: argparse.Namespace) -> None:
    """Time the rows; the result is written after each, in case the run is cut."""
    from bench.decode_impls import names_of
    from cute_attn.compiler import default_target
    from cute_attn.lab.benchmark.results import default_path, machine, write
    from cute_attn.lab.sensors import known_median

    target = default_target("sm80")
    os.environ.setdefault(_FA4_KEEPS_KERNELS, "1")
    first = functools.partial(first_calls, impl=options.impl, target=target)
    run.build_by_calls(first, chosen, options.workers)
    tasks = [Task(CEILING, CEILING_NAMES)]  # type: ignore[arg-type]
    for i, row in enumerate(chosen):
        names = tuple(name for name in names_of(row, target) if run.matches(name, options.impl))
        if names:
            tasks.append(Task(row, names, read_clock=i % _CLOCK_EVERY == 0))  # type: ignore[arg-type]
    result: dict[str, Any] = machine() | {"rows": []}
    path = options.output or default_path(run.RESULTS, "decode", result)
    clocks: list[int | None] = []
    work = functools.partial(time_tasks, milliseconds=options.milliseconds)
    for lines, clock in run_tasks(work, tasks, options.patience):
        for line in lines:
            print_line(line)
        clocks.append(clock)
        result["rows"] += lines
        write(result | {"clock_mhz": known_median(clocks)}, path)
    show(result | {"clock_mhz": known_median(clocks)}, options.picture or path.with_suffix(".png"))
    print(f"wrote {path}")


def print_line(line: dict[str, Any]) -> None:
    """One implementation's time."""
    numbers = (
        line.get("error") or f"{1e3 * line['ms']:9.2f} us {line['value']:7.0f} GB/s  {line.get('how', '')}"
    )
    print(f"{line['workload']:32} {line['impl']:20} {numbers}", flush=True)


def show(result: dict[str, Any], picture: Path) -> None:
    """Print the table and draw the picture."""
    print("\n" + table(result))
    print(f"{result['gpu']}, {result['clock_mhz']} MHz under load; wrote {plot(result, picture)}")


if __name__ == "__main__":
    main()
