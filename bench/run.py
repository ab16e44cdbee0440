"""Shared by the benchmarks: choosing workloads and implementations, building kernels, printing rows and a table."""

import argparse
import fnmatch
import importlib.util
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cute_attn.lab.benchmark.workload import DROPOUT_P, Workload

RESULTS = Path(__file__).parent / "results"


def main(question: str, description: str, workloads: Iterable[Workload]) -> None:
    """Time this package's kernels for an operation, ``question``, and their peers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("patterns", nargs="*", default=["*"], help="which workloads, by shell patterns")
    parser.add_argument("--list", action="store_true", help="print the workloads' names and stop")
    parser.add_argument("--impl", nargs="*", default=["*"], help="which implementations, by shell patterns")
    parser.add_argument("--output", type=Path, help="the file to write")
    parser.add_argument("--milliseconds", type=float, default=100, help="how long each is timed a workload")
    options = parser.parse_args()
    chosen = [w for w in workloads if matches(w.name, options.patterns)]
    if options.list:
        print("\n".join(w.name for w in chosen))
        return
    if not chosen:
        sys.exit(f"no workload matches {options.patterns}; --list names them")

    need_gpu()
    from cute_attn.lab.benchmark.peers import PEERS, own_kernels
    from cute_attn.lab.benchmark.results import default_path, time_workloads, write

    rivals = own_kernels(question) | PEERS
    rivals = {name: run for name, run in rivals.items() if matches(name, options.impl)}
    build(chosen, rivals)
    result = time_workloads(chosen, rivals, print_row, options.milliseconds)
    path = write(result, options.output or default_path(RESULTS, question, result))
    print_table(result)
    print(f"{result['gpu']}, {result['clock_mhz']} MHz under load, dropout {DROPOUT_P}; wrote {path}")


def need_gpu() -> None:
    """Exit with a sentence where there is none."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU: a benchmark needs one")


def machine_of_tests() -> Any:
    """``tests.machine``, which plans calls where there is no GPU; exits with a sentence where pytest is missing."""
    if importlib.util.find_spec("pytest") is None:
        sys.exit("error: planning calls without a GPU needs pytest; pip install pytest")
    return importlib.import_module("tests.machine")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if any of the shell patterns matches."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def build(workloads: list[Workload], rivals: Iterable[str]) -> None:
    """Build this package's kernels in parallel; one that cannot be built is an error in its row."""
    from cute_attn.compiler import default_target, prebuild, registry
    from cute_attn.host.backward import kernels_of

    target = default_target("sm80")
    requests: list[tuple[Any, Any, str | None]] = []
    for name in rivals:
        if not name.startswith("cute_attn/"):
            continue
        arch = name.rpartition("-")[2]
        for workload in workloads:
            try:
                forward = registry.lookup(workload.traits(arch, "forward"), None, target)
                forward = forward.for_lengths(
                    *workload.tile_lengths, target, workload.pairs, workload.seen_by_window
                )
                requests.append((forward.traits, forward.tile, target))
                if workload.op == "backward":
                    kernel = registry.lookup(workload.traits(arch), None, target)
                    kernel = kernel.for_lengths(
                        *workload.tile_lengths, target, workload.pairs, workload.seen_by_window
                    )
                    requests += [(*one, target) for one in kernels_of(kernel)]
            except registry.Unsupported:
                continue
    for _ in prebuild(requests):
        pass


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


def print_row(row: dict[str, Any]) -> None:
    """One line."""
    numbers = row["error"] if "error" in row else f"{row['ms']:9.3f} ms {row['value']:7.1f} {row['unit']}"
    print(f"{row['workload']:44} {row['impl']:24} {numbers}", flush=True)


def print_table(result: dict[str, Any]) -> None:
    """A line per workload: each kernel's speed, and the best one's ratio to each peer's."""
    names = list(dict.fromkeys(row["impl"] for row in result["rows"]))
    own = [name for name in names if name.startswith("cute_attn/")]
    peers = [name for name in names if name not in own]
    speeds: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        speeds.setdefault(row["workload"], {})
        if "value" in row:
            speeds[row["workload"]][row["impl"]] = row["value"]
    print(
        f"\n{'TFLOP/s, and our best over each peer':44}"
        + "".join(f"{n.split('/')[-1]:>15}" for n in own + peers)
    )
    for workload, values in speeds.items():
        best = max((values[name] for name in own if name in values), default=None)
        line = f"{workload:44}"
        for name in own + peers:
            speed = f"{values[name]:.0f}" if name in values else "-"
            ratio = f"{best / values[name]:.2f}x" if best and name in values and name in peers else ""
            line += f"{speed:>9}{ratio:>6}" if name in peers else f"{speed:>15}"
        print(line)
    for name in own:
        ratios = [
            values[name] / max(values[peer] for peer in peers if peer in values)
            for values in speeds.values()
            if name in values and any(peer in values for peer in peers)
        ]
        if ratios:
            mean, least = statistics.geometric_mean(ratios), min(ratios)
            print(f"{name} over the fastest peer of each row: geometric mean {mean:.3f}, least {least:.3f}")
