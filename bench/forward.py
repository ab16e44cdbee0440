"""How fast is the forward, against everyone else's, in one run?

    python -m bench.forward                       every row; writes bench/results/DATE-GPU-forward.json
    python -m bench.forward '*d128*causal*'       the rows whose name matches
    python -m bench.forward --list                their names

Needs a GPU. Prints a row as it comes, and last a table with this package's speed over each peer's.
"""

import argparse
import fnmatch
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cute_attn.benchmark.workload import DROPOUT_P, Workload, mixed_lengths, standard

RESULTS = Path(__file__).parent / "results"


def workloads() -> Iterator[Workload]:
    """Head dims and lengths, full and causal; then one feature at a time."""
    for head_dim in (64, 128, 256):
        for seqlen in (512, 2048, 8192, 16384):
            for causal in (False, True):
                yield standard(head_dim, seqlen, causal=causal)
    for head_dim in (64, 128):
        yield standard(head_dim, 2048, causal=True, dropout="flash")
        yield standard(head_dim, 2048, causal=True, dropout="mem_efficient")
        yield standard(head_dim, 2048, bias="bf16")
    yield Workload(16, 512, 16, 32, bias="bf16")
    yield Workload(2, 8192, 16, 128, nheads_kv=2, causal=True)
    yield Workload(1, 8192, 32, 128, nheads_kv=8, causal=True)  # Llama-3-8B
    yield standard(128, 8192, causal=True, window=1024)
    yield standard(128, 8192, causal=True, alibi=True)
    yield Workload(1, 1, 16, 128, causal=True, lengths=mixed_lengths(16384, 8192))
    yield standard(64, 2048, causal=True, dtype="fp16")
    yield standard(128, 8192, causal=True, dtype="fp16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", default=["*"], help="which workloads, by shell patterns")
    parser.add_argument("--list", action="store_true", help="print the workloads' names and stop")
    parser.add_argument("--impl", nargs="*", default=["*"], help="which rivals, by shell patterns")
    parser.add_argument("--output", type=Path, help="the file to write")
    parser.add_argument(
        "--milliseconds", type=float, default=100, help="how long each rival is timed a workload"
    )
    options = parser.parse_args()
    chosen = [w for w in workloads() if any(fnmatch.fnmatch(w.name, p) for p in options.patterns)]
    if options.list:
        print("\n".join(w.name for w in chosen))
        return
    if not chosen:
        sys.exit(f"no workload matches {options.patterns}; --list names them")

    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU: a benchmark needs one")
    from cute_attn.benchmark.peers import PEERS, own_kernels
    from cute_attn.benchmark.results import default_path, time_forwards, write

    rivals = own_kernels() | PEERS
    rivals = {
        name: run for name, run in rivals.items() if any(fnmatch.fnmatch(name, p) for p in options.impl)
    }
    _build(chosen, rivals)
    result = time_forwards(chosen, rivals, _print_row, options.milliseconds)
    path = write(result, options.output or default_path(RESULTS, "forward", result))
    print_table(result)
    print(f"{result['gpu']}, {result['clock_mhz']} MHz under load, dropout {DROPOUT_P}; wrote {path}")


def _build(workloads: list[Workload], rivals: Iterable[str]) -> None:
    """This package's kernels, many at a time; what cannot be built says so when its row comes."""
    from cute_attn.compiler import prebuild

    archs = [name.removeprefix("cute_attn/forward-") for name in rivals if name.startswith("cute_attn/")]
    for _ in prebuild((w.traits(arch), None, None) for w in workloads for arch in archs):
        pass


def _print_row(row: dict[str, Any]) -> None:
    numbers = row["error"] if "error" in row else f"{row['ms']:9.3f} ms {row['value']:7.1f} {row['unit']}"
    print(f"{row['workload']:44} {row['impl']:24} {numbers}", flush=True)


def print_table(result: dict[str, Any]) -> None:
    """A line a workload: each kernel's speed, and how many times each peer's that is."""
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


if __name__ == "__main__":
    main()
