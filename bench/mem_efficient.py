"""How fast are fp32, tf32 and head dims beyond 256 against PyTorch's memory-efficient kernels, in one run?

    python -m bench.mem_efficient                     every row; writes bench/results/DATE-GPU-mem_efficient.json
    python -m bench.mem_efficient 'bwd-fp32*'         the rows whose name matches
    python -m bench.mem_efficient --list              their names

Needs a GPU. Of a backward, one call of autograd is timed, for the gradients of q, k and v. fp32 rows are timed twice:
at fp32's precision, as PyTorch's kernel computes, and in tf32; bf16 rows of small head dims on the Ampere kernels too.
Kernels are built beforehand, by processes that make each row's first call.
"""

import argparse
import itertools
from collections.abc import Iterator

from bench.run import RESULTS, build_by_calls, matches, need_gpu, print_row
from cute_attn.lab.benchmark.workload import Workload

PEER = "mem_efficient"
OURS: dict[str, tuple[str | None, str | None, str | None]] = {
    "cute_attn": (None, None, None),
    "cute_attn/tf32": (None, None, "tf32"),
    "cute_attn/sm80": ("sm80", None, None),
}
"""Kernel, tile and precision of this package's implementations."""


def workloads() -> Iterator[Workload]:
    """Causal and not: fp32 at common head dims, bf16 and fp32 at large ones, and rows that are not aligned (head dim
    59) beside such that are."""
    for op in ("forward", "backward"):
        for causal in (True, False):
            for head_dim, seqlen in ((64, 2048), (64, 8192), (128, 2048), (128, 8192), (256, 4096)):
                yield Workload(8192 // seqlen, seqlen, 16, head_dim, dtype="fp32", causal=causal, op=op)
            shape = {"seqlen": 4096, "causal": causal, "op": op}
            for head_dim, head_dim_v in ((320, 320), (512, 512), (576, 512)):
                for dtype in ("bf16", "fp32"):
                    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype}
                    yield Workload(batch=2, nheads=4, **dims, **shape)  # type: ignore[arg-type]
        for head_dim in (59, 64, 123, 128):
            yield Workload(batch=2, seqlen=4096, nheads=16, head_dim=head_dim, causal=True, op=op)
        yield Workload(batch=2, seqlen=4096, nheads=16, head_dim=64, dtype="fp32", bias="fp32", op=op)
        yield Workload(
            batch=2, seqlen=4096, nheads=16, head_dim=64, dtype="fp32", causal=True, dropout=PEER, op=op
        )


def names_of(workload: Workload) -> tuple[str, ...]:
    """The implementations of a row."""
    if workload.dtype == "fp32":
        return ("cute_attn", "cute_attn/tf32", PEER)
    return ("cute_attn", "cute_attn/sm80", PEER) if workload.head_dim <= 128 else ("cute_attn", PEER)


def first_calls(workload: Workload) -> str:
    """Call this package's implementations of a row once; the error or ""."""
    from cute_attn.lab.benchmark.peers import ours
    from cute_attn.lab.benchmark.results import first_line

    try:
        for name in names_of(workload)[:-1]:
            ours(*OURS[name])(workload, workload.inputs())()
    except Exception as error:
        return f"{workload.name}: {first_line(error)}"
    return ""


def print_ratios(rows: list[dict]) -> None:
    """Each of this package's rows over the peer's of the same workload."""
    peers = {row["workload"]: row["ms"] for row in rows if row["impl"] == PEER and "ms" in row}
    for row in rows:
        if row["impl"] != PEER and "ms" in row and row["workload"] in peers:
            print(f"{row['workload']:44} {row['impl']:24} {peers[row['workload']] / row['ms']:6.2f}x {PEER}")


def main() -> None:
    """Time the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", default=["*"], help="which workloads, by shell patterns")
    parser.add_argument("--list", action="store_true", help="print the workloads' names and stop")
    parser.add_argument("--milliseconds", type=float, default=100, help="how long each is timed a workload")
    parser.add_argument("--workers", type=int, default=8, help="processes that build kernels")
    options = parser.parse_args()
    chosen = [w for w in workloads() if matches(w.name, options.patterns)]
    if options.list or not chosen:
        print("\n".join(w.name for w in chosen) or f"no workload matches {options.patterns}")
        return

    need_gpu()
    from cute_attn.lab.benchmark.peers import PEERS, ours
    from cute_attn.lab.benchmark.results import default_path, time_workloads, write

    build_by_calls(first_calls, chosen, options.workers)
    rows: list[dict] = []
    for names, some in itertools.groupby(sorted(chosen, key=names_of, reverse=True), names_of):
        rivals = {name: PEERS[PEER] if name == PEER else ours(*OURS[name]) for name in names}
        result = time_workloads(some, rivals, print_row, options.milliseconds)
        rows += result["rows"]
    result["rows"] = rows
    print_ratios(rows)
    print(f"wrote {write(result, default_path(RESULTS, 'mem_efficient', result))}")


if __name__ == "__main__":
    main()
