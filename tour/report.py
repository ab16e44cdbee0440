"""What a level costs by its machine code, whether it is right, and how fast it is."""

import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from cutlass import BFloat16

import layouts
from cute_attn import attention, attention_backward, reference
from cute_attn.compiler import compile, toolchain
from cute_attn.lab.check import Accuracy
from cute_attn.lab.verdict import verdict
from layouts.banks import bank_conflicts
from tour.levels import FORWARD_LEVELS, LEVELS, SHORT, Entry

COUNTED = (
    *("FFMA", "HMMA", "HGMMA", "MUFU", "SHFL", "LDG", "LDGSTS", "LDSM", "UTMALDG", "UTMASTG", "STG", "BAR"),
    *("USETMAXREG", "STS", "STSM", "RED", "REDG"),
)
"""Mnemonics of machine instructions that the levels differ in."""

SHAPES = (
    # batch, seqlen_q, seqlen_k, query heads, key heads
    *((2, n, n, 4, 2) for n in (1, 63, 64, 127, 128, 129, 333, 512)),
    (1, 100, 400, 3, 1),
    (1, 400, 100, 2, 2),  # causal: the first 300 queries see no key
    (1, 1, 777, 4, 4),
    (3, 257, 1, 2, 1),
)
TIMED: dict[str, Any] = {"batch": 4, "seqlen": 4096, "nheads": 16, "head_dim": 128}
CHECK_SECONDS = 300.0
"""A check that takes longer hangs."""


def facts(entry: Entry, head_dim: int = 128, causal: bool = True) -> dict[str, Any]:
    """Resources and instructions of a level's kernel for sm90, and its loop's entries in ``verdict``. Needs no GPU."""
    compiled = compile(entry.traits(head_dim, causal), None, "sm90")
    used, judged = compiled.resources, verdict(compiled)
    found: dict[str, Any] = {
        "kernel": compiled.name,
        "registers": used.registers,
        "shared_memory_bytes": used.shared_memory_bytes,
        "spilled_bytes": used.spill_store_bytes + used.spill_load_bytes,
        "ctas_per_multiprocessor": judged.blocks,
        "warnings": list(compiled.warnings),
        "instructions": {name: compiled.instructions.get(name, 0) for name in COUNTED},
    }
    if judged.step is not None:
        clocks = {name: round(value) for name, value in judged.step.clocks.pipes.items()}
        per_1000 = 1000 * max(judged.step.clocks.pipes.values()) / judged.step.scores
        found |= {"clocks_per_step": clocks, "clocks_per_1000_scores": round(per_1000)}
        found["instructions_per_score"] = round(judged.step.instructions / judged.step.elements, 2)
    return found


def bank_conflict_ways() -> dict[str, int]:
    """Bank conflicts of level 3's ldmatrix of a block of K, with its swizzle and without one."""

    def ways(bits: int | None) -> int:
        return bank_conflicts(
            lambda: layouts.ldmatrix_copy_b(layouts.tiled_mma_sm80(BFloat16, 4), BFloat16),
            lambda: layouts.smem_layout(64, 128, BFloat16, swizzle_bits=bits),
            BFloat16,
        ).ways

    return {"swizzled": ways(None), "plain": ways(0)}


def all_facts() -> dict[str, Any]:
    """Facts of all levels, causal at head dim 128, and the toolchain that built them."""
    levels = {str(n): facts(entry) for n, entry in LEVELS.items()}
    return {"toolchain": toolchain(), "bank_conflict_ways": bank_conflict_ways(), "levels": levels}


def check(entry: Entry) -> Iterator[tuple[str, Accuracy]]:
    """A level against the definition in float64 on the current GPU, for odd lengths and both head dims.

    Of a backward the gradients; the forward is then the shipped one.
    """
    cases = itertools.product(SHAPES, (64, 128), (False, True))
    for (batch, seqlen_q, seqlen_k, nheads, nheads_kv), head_dim, causal in cases:
        torch.manual_seed(0)
        sizes = (seqlen_q, nheads), (seqlen_k, nheads_kv), (seqlen_k, nheads_kv), (seqlen_q, nheads)
        q, k, v, grad = (
            torch.randn(batch, n, heads, head_dim, device="cuda", dtype=torch.bfloat16) for n, heads in sizes
        )
        name = f"b{batch} s{seqlen_q}x{seqlen_k} h{nheads}x{nheads_kv} d{head_dim}" + " causal" * causal
        if entry.op == "backward":
            out, lse = attention(q, k, v, causal=causal, return_lse=True)
            found = attention_backward(grad, q, k, v, out, lse, causal=causal, kernel=entry.name)
            expected = (
                definition_gradients((q, k, v), grad, causal, dtype)
                for dtype in (torch.float64, torch.bfloat16)
            )
            for which, *three in zip(("dq", "dk", "dv"), found, *expected, strict=True):
                yield f"{name} {which}", Accuracy.of(three[0], three[1], three[2])
            continue
        out = torch.full_like(q, float("nan"))
        _, lse = attention(q, k, v, causal=causal, return_lse=True, kernel=entry.name, out=out)
        features = reference.Features("causal" if causal else "")
        exact, plain = (
            reference.attention(q.to(dtype), k.to(dtype), v.to(dtype), head_dim**-0.5, features)
            for dtype in (torch.float64, torch.bfloat16)
        )
        yield f"{name} out", Accuracy.of(out, exact[0], plain[0])
        seen = exact[1].isfinite()
        same = torch.equal(lse.isfinite(), seen)
        error = float((lse.double() - exact[1])[seen].abs().max()) if seen.any() else 0.0
        yield f"{name} lse", Accuracy(error if same else float("inf"), 0.0, 1e-4)


def definition_gradients(
    given: Sequence[torch.Tensor], grad: torch.Tensor, causal: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Gradients by the definition, in plain torch."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in given)
    features = reference.Features("causal" if causal else "")
    out = reference.attention(q, k, v, q.shape[-1] ** -0.5, features)[0]
    return torch.autograd.grad(out, (q, k, v), grad.to(dtype))


def check_apart(entry: Entry) -> str:
    """Run :func:`check` in a separate process, which may crash or hang; returns "" or the error."""
    command = [sys.executable, "-m", "tour", str(entry.number), "--check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        return f"its check took more than {CHECK_SECONDS:.0f} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1][:200] if lines else f"exit status {done.returncode}")


def measure(report: Any = print, milliseconds: float = 100.0) -> dict[str, Any]:
    """Check every level, and time the right ones in one run with the shipped kernel.

    Returns:
        a result as of ``bench/results``; ``checks``: level -> "" or the error.
    """
    from cute_attn.lab.benchmark.peers import Declined, ours
    from cute_attn.lab.benchmark.results import time_workloads
    from cute_attn.lab.benchmark.workload import Workload

    checks = {}
    with ThreadPoolExecutor() as pool:  # of processes, which mostly compile
        for number, error in zip(FORWARD_LEVELS, pool.map(check_apart, FORWARD_LEVELS.values()), strict=True):
            checks[str(number)] = error
            report(f"level {number}: {error or 'right'}")

    def run(entry: Entry) -> Any:
        def implementation(workload: Any, x: Any) -> Any:
            if checks[str(entry.number)]:
                raise Declined(checks[str(entry.number)])
            return ours(entry.name)(workload, x)

        return implementation

    # The shipped kernel comes first: the others' outputs are compared with its.
    order = sorted(FORWARD_LEVELS.values(), key=lambda entry: entry.number != 8)
    workloads = [Workload(**TIMED, causal=causal) for causal in (False, True)]
    rows = {f"level {entry.number}": run(entry) for entry in order}
    result = time_workloads(workloads, rows, milliseconds=milliseconds)
    return {key: value for key, value in result.items() if key != "rows"} | {
        "checks": checks,
        "rows": sorted(result["rows"], key=lambda row: (row["workload"], row["impl"])),
    }


def time_one(entry: Entry, head_dim: int, causal: bool) -> str:
    """The speed of one level on the current GPU."""
    from cute_attn.lab.benchmark.peers import ours
    from cute_attn.lab.benchmark.results import time_workloads
    from cute_attn.lab.benchmark.workload import Workload

    workload = Workload(**TIMED | {"head_dim": head_dim}, causal=causal)
    (row,) = time_workloads([workload], {entry.name: ours(entry.name)})["rows"]
    return f"{workload.name}: " + (
        row["error"] if "error" in row else f"{row['ms']} ms, {row['value']} TFLOP/s"
    )


def speeds(result: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Level -> "full" and "causal" -> its row of the result."""
    found: dict[int, dict[str, Any]] = {number: {} for number in FORWARD_LEVELS}
    for row in result["rows"]:
        which = "causal" if row["workload"].endswith("causal") else "full"
        found[int(row["impl"].split()[-1])][which] = row
    return found


def table(result: Mapping[str, Any]) -> str:
    """A line for each level: TFLOP/s, and the fraction of the shipped kernel's."""
    found = speeds(result)
    lines = [f"{'TFLOP/s, of the shipped kernel':46}{'full':>14}{'causal':>14}"]
    for number, entry in FORWARD_LEVELS.items():
        line = f"{number} {entry.title}"[:45].ljust(46)
        for which in ("full", "causal"):
            row, best = found[number].get(which, {}), found[8].get(which, {}).get("value")
            part = f"{row['value'] / best:.0%}" if best and "value" in row else ""
            line += f"{row['value']:9.1f}{part:>5}" if "value" in row else f"{'-':>14}"
        lines.append(line)
    return "\n".join(lines)


def plot(result: Mapping[str, Any], path: Path) -> Path:
    """The climb: TFLOP/s of each level, full and causal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = speeds(result)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for which, colour, above in (("full", "tab:blue", 7), ("causal", "tab:orange", -14)):
        points = [(n, rows[which]["value"]) for n, rows in found.items() if "value" in rows.get(which, {})]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=which)
        for number, value in points:
            axes.annotate(
                f"{value:.3g}",
                (number, value),
                (0, above),
                textcoords="offset points",
                fontsize=9,
                ha="center",
            )
    axes.set_yscale("log")
    axes.margins(y=0.1)
    axes.set_xticks(list(FORWARD_LEVELS), [f"{n}\n{SHORT[n - 1]}" for n in FORWARD_LEVELS], fontsize=9)
    axes.set_ylabel("TFLOP/s")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    sizes = f"{TIMED['batch']} x {TIMED['seqlen']}, {TIMED['nheads']} heads, head dim {TIMED['head_dim']}"
    figure.suptitle(f"{result['gpu']}: eight levels of one forward, {sizes}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
