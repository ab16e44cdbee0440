"""The result of a run: one file with the machine, versions and date, and a row for every implementation."""

import json
import math
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cute_attn.compiler import toolchain
from cute_attn.lab.benchmark.peers import Declined, Implementation, Run, versions
from cute_attn.lab.benchmark.timing import Clock, clock_under_load, sensor
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.lab.sensors import known_median

TOLERANCE = 0.05
"""Maximum difference of two outputs relative to the largest element; a larger one is an error."""


def time_workloads(
    workloads: Iterable[Workload],
    implementations: Mapping[str, Implementation],
    milliseconds: float = 100.0,
) -> dict[str, Any]:
    """Time every workload with every implementation, and describe the machine.

    A row has ``"error"`` in place of numbers if the implementation failed, or if its output or a gradient differs from
    the first implementation's. A lost GPU context raises RuntimeError.
    """
    clock, clocks, rows = Clock(), [], list[dict[str, Any]]()
    for workload in workloads:
        new, mhz = time_workload(workload, implementations, clock, milliseconds)
        rows += new
        clocks.append(mhz)
    return machine() | {"clock_mhz": known_median(clocks), "rows": rows}


def time_workload(
    workload: Workload,
    implementations: Mapping[str, Implementation],
    clock: Clock,
    milliseconds: float,
    most: int = 1000,
    *,
    read_clock: bool = True,
    stage: Callable[[tuple[str, ...]], None] = lambda names: None,
) -> tuple[list[dict[str, Any]], int | None]:
    """Time one workload. Returns a row for every implementation, and the SM clock in MHz under load or None.

    For ``milliseconds`` and ``most`` see :meth:`Clock.medians`. ``stage`` is called before each step that may fail,
    with the names of the implementations involved.
    """
    torch.manual_seed(0)
    stage(tuple(implementations))
    runs, errors = ready(workload, workload.inputs(), implementations, stage)
    stage(tuple(runs))
    times = clock.medians(runs, milliseconds, most=most)
    rows = []
    for name in implementations:
        found: dict[str, Any] = {"error": errors[name]} if name in errors else {"ms": round(times[name], 4)}
        if name in times:
            value = workload.flops / times[name] / 1e9  # decode has a few TFLOP/s: four digits
            found |= {"value": round(value, 1) if value >= 100 else float(f"{value:.4g}"), "unit": "TFLOP/s"}
        rows.append({"workload": workload.name, "impl": name} | found)
    mhz, first = None, next(iter(runs), None)
    if first is not None and read_clock:
        mhz = clock_under_load(runs[first], times[first])
    del runs
    torch.cuda.empty_cache()
    return rows, mhz


def ready(
    workload: Any,
    inputs: Any,
    implementations: Mapping[str, Callable[[Any, Any], Run]],
    stage: Callable[[tuple[str, ...]], None],
) -> tuple[dict[str, Run], dict[str, str]]:
    """Functions of the implementations that run and agree, and the errors of the other implementations."""
    runs: dict[str, Run] = {}
    errors: dict[str, str] = {}
    expected: tuple[str, tuple[Tensor, ...]] | None = None
    for name, implementation in implementations.items():
        stage((name,))
        try:
            run = implementation(workload, inputs)
            result = run()
            torch.cuda.synchronize()
        except Exception as error:  # a row of the table
            errors[name] = reason(error)
            torch.cuda.synchronize()  # raises again if the GPU's context is lost
            continue
        results = result if isinstance(result, tuple) else (result,)
        if expected is None:
            expected = (name, results)
        apart = max(map(difference, results, expected[1]))
        if not workload.dropout and not apart <= TOLERANCE:
            errors[name] = f"its output differs from {expected[0]}'s by {apart:.2g} of the largest element"
            continue
        runs[name] = run
    return runs, errors


def reason(error: Exception) -> str:
    """Why an implementation has no time, for a row of a table."""
    return str(error) if isinstance(error, Declined) else first_line(error)


def first_line(error: BaseException) -> str:
    """An error's type and first line, for a row of a table."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def difference(out: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, relative to the largest expected element; infinite for unequal shapes."""
    if out.shape != expected.shape:
        return math.inf
    largest = expected.abs().max().float()
    return float((out - expected).abs().max().float() / largest)


def machine() -> dict[str, Any]:
    """The GPU, versions, commit and date that a result states."""
    return {
        "gpu": torch.cuda.get_device_name(), "driver": sensor().driver, "clock_mhz": None,
        "torch": torch.__version__, "cutlass_dsl": toolchain()["cutlass_dsl"], "peers": versions(),
        "commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def commit() -> str:
    """The running commit: ``COMMIT`` in the environment, or git's, with "-dirty" if files differ from it."""
    given = os.environ.get("COMMIT")
    if given:
        return given
    here = Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(result: dict[str, Any], path: Path) -> Path:
    """Write a result as JSON, one row per line."""
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    head = json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head[:-2] + ',\n "rows": [\n' + rows + "\n ]\n}\n")
    return path


def default_path(folder: Path, question: str, result: dict[str, Any]) -> Path:
    """``FOLDER/DATE-GPU-QUESTION.json``."""
    gpu = result["gpu"].lower().replace("nvidia", "").strip().replace(" ", "-")
    return folder / f"{result['date'][:10]}-{gpu}-{question}.json"
