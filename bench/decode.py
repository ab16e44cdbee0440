"""How fast is attention with a cache against its peers, and against reading alone? In one run.

    python -m bench.decode                         every row; writes bench/results/DATE-GPU-decode.json
    python -m bench.decode 'b1-*' '*page*'         the rows whose name matches
    python -m bench.decode --list                  their names
    python -m bench.decode --result FILE           table and picture of an existing result; needs no GPU

Needs a GPU. Each implementation's calls are captured in one CUDA graph, one after the other, each on a separate cache
so that none finds its keys in the L2; a time is that of a replay over its calls. Numbers are microseconds and GB/s of
the keys and values that are read. The first row is how fast a kernel that only reads does so: the ceiling. A peer is
called in several ways, the fastest counts. One that hangs or ends the process costs its row: see :mod:`bench.isolated`.
Our kernels and FA4's are built in parallel beforehand, FA4's into the cache that it keeps on disk.
"""

import functools
import itertools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import decode_picture, run
from bench.decode_rows import Inputs, Row, make_inputs, rows
from bench.isolated import Message, Task

READ_BYTES = 2**31
"""Bytes that the ceiling's kernel reads: many times the size of L2."""
_WARM_UP = 3
_ROUNDS = 5


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


def time_row(
    row: Row, names: Sequence[str], milliseconds: float, stage: Callable[[tuple[str, ...]], None]
) -> tuple[list[dict[str, Any]], Callable[[], None] | None]:
    """Time every implementation; returns a line for each, and the last one's replay, which keeps the GPU busy."""
    from bench.decode_impls import IMPLEMENTATIONS
    from cute_attn.lab.benchmark.results import first_line, ready, reason

    stage(tuple(names))
    inputs = make_inputs(row)
    ways: dict[str, Callable[[Inputs], Any]] = {}
    called: dict[str, tuple[str, str]] = {}  # a way's implementation, and how it is called
    errors: dict[str, str] = {}
    for name in names:
        stage((name,))
        try:
            found = IMPLEMENTATIONS[name](row, inputs[0])
        except Exception as error:
            errors[name] = reason(error)
            continue
        for how, way in found.items():
            key = f"{name}, {how}" if how else name  # as errors of other ways name it
            ways[key], called[key] = way, (name, how)

    def stage_of(keys: Sequence[str]) -> None:
        stage(tuple(dict.fromkeys(called[key][0] for key in keys)))

    def made(way: Callable[[Inputs], Any]) -> Callable[[Any, Inputs], Callable[[], Any]]:
        return lambda row, x: functools.partial(way, x)

    runs, wrong = ready(row, inputs[0], {key: made(way) for key, way in ways.items()}, stage_of)
    replays = {}
    for key in runs:
        stage_of((key,))
        try:
            replays[key] = captured([functools.partial(ways[key], x) for x in inputs])
        except Exception as error:
            wrong[key] = f"in a CUDA graph: {first_line(error)}"
    errors |= {called[key][0]: error for key, error in wrong.items()}
    stage_of(tuple(replays))
    times = microseconds({key: (replay, row.copies) for key, replay in replays.items()}, milliseconds)
    lines = []
    for name in names:
        own_times = {called[key][1]: us for key, us in times.items() if called[key][0] == name}
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


def time_ceiling(milliseconds: float, stage: Callable[[tuple[str, ...]], None]) -> list[dict[str, Any]]:
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
    of = {"workload": CEILING.name, "unit": "GB/s"}
    return [
        of | {"impl": name, "ms": round(us / 1e3, 6), "value": round(4 * count / us / 1e3, 1)}
        for name, us in times.items()
    ]


def time_tasks(tasks: Sequence[Task], send: Callable[[Message], None], *, milliseconds: float) -> None:
    """The work of the other process: every row, the ceiling first."""
    import torch

    from cute_attn.lab.benchmark.timing import clock_under_load

    def stage(names: tuple[str, ...]) -> None:
        send(("stage", names))

    for task in tasks:
        mhz, replay = None, None
        if task.workload == CEILING:
            lines = time_ceiling(milliseconds, stage)
        else:
            lines, replay = time_row(task.workload, task.names, milliseconds, stage)
        if task.read_clock and replay is not None:
            mhz = clock_under_load(replay, lines[-1].get("ms", 1.0) * task.workload.copies)
        del replay
        torch.cuda.empty_cache()
        send(("rows", (lines, mhz)))


# ---- the command ----


_FA4_KEEPS_KERNELS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def names_of(row: Row, impl: Sequence[str], target: str) -> tuple[str, ...]:
    """The implementations of a row that match."""
    from bench import decode_impls

    return tuple(name for name in decode_impls.names_of(row, target) if run.matches(name, impl))


def first_calls(row: Row, impl: Sequence[str], target: str) -> str:
    """Call those implementations of a row once that compile; the first error or ""."""
    from bench.decode_impls import IMPLEMENTATIONS, OURS
    from cute_attn.lab.benchmark.peers import Declined
    from cute_attn.lab.benchmark.results import first_line

    try:
        inputs = make_inputs(row, copies=1)
        for name in reversed(names_of(row, impl, target)):
            if name in (*OURS, "fa4"):
                IMPLEMENTATIONS[name](row, inputs[0])[""](inputs[0])
    except Declined:
        return ""
    except Exception as error:
        return f"{row.name}: {first_line(error)}"
    return ""


def main() -> None:
    options = run.timing_parser(__doc__, ["*"]).parse_args()
    chosen = run.choose(options, {row.name: row for row in rows()}, decode_picture.show)
    run.need_gpu()
    from cute_attn.compiler import default_target

    os.environ.setdefault(_FA4_KEEPS_KERNELS, "1")
    of = {"impl": options.impl, "target": default_target("sm80")}
    run.build_by_calls(functools.partial(first_calls, **of), chosen, options.workers)
    tasks = [Task(CEILING, CEILING_NAMES)]
    tasks += [Task(row, names_of(row, **of), i % run.CLOCK_EVERY == 0) for i, row in enumerate(chosen)]
    work = functools.partial(time_tasks, milliseconds=options.milliseconds)
    run.measure("decode", options, [task for task in tasks if task.names], work, decode_picture.show)


if __name__ == "__main__":
    main()
