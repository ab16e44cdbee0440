"""A decode result as a table, and as a picture: GB/s over the context's length, against reading alone."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.cliffs import by_workload, is_own

NAMES = {
    "cute_attn/sm90": "cute_attn",
    "cute_attn/sm80": "cute_attn, Ampere kernel",
    "fa3": "FA3",
    "fa2": "FA2",
    "fa4": "FA4",
    "cudnn": "cuDNN",
    "flashmla": "FlashMLA",
}
COLOURS = dict(
    zip(
        NAMES,
        ("tab:blue", "tab:cyan", "tab:orange", "tab:red", "tab:green", "tab:purple", "tab:brown"),
        strict=True,
    )
)
_ONE_SEQUENCE = re.compile(r"b1-k(\d+)")


def speeds(result: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """The lines with a time, by row and implementation, without the ceiling's."""
    return {
        name: {impl: line for impl, line in lines.items() if "ms" in line}
        for name, lines in by_workload(result).items()
        if name != "read-only"
    }


def fastest(lines: Mapping[str, dict[str, Any]]) -> list[dict[str, Any] | None]:
    """Our fastest line of a row, and the fastest peer's; None for none."""
    sides = ([line for name, line in lines.items() if is_own(name) == own] for own in (True, False))
    return [min(side, key=lambda line: line["ms"], default=None) for side in sides]


def ceiling(result: Mapping[str, Any]) -> float:
    """GB/s of the fastest kernel that only reads, 0 where none was timed."""
    lines = (line for line in result["rows"] if line["workload"] == "read-only")
    return max((line.get("value", 0.0) for line in lines), default=0.0)


def table(result: Mapping[str, Any]) -> str:
    """A line per row: the package's time, GB/s and fraction of the ceiling, each peer's time, and the speed ratio."""
    found, most = speeds(result), ceiling(result)
    impls = dict.fromkeys(line["impl"] for line in result["rows"] if line["workload"] != "read-only")
    own, peers = ([name for name in impls if is_own(name) == ours] for ours in (True, False))
    header = f"{'us; read-only ' + format(most, '.0f') + ' GB/s':32}"
    for name in own:
        header += f"{name.split('/')[-1]:>10}{'GB/s':>7}{'of it':>7}"
    lines = [header + "".join(f"{name:>10}" for name in peers) + f"{'x best':>8}"]
    for row, by_impl in found.items():
        line = f"{row:32}"
        for name in own:
            if name in by_impl:
                ms, value = by_impl[name]["ms"], by_impl[name]["value"]
                line += f"{1e3 * ms:10.1f}{value:7.0f}{value / most if most else 0:7.2f}"
            else:
                line += f"{'-':>10}{'':14}"
        line += "".join(f"{1e3 * by_impl[n]['ms']:10.1f}" if n in by_impl else f"{'-':>10}" for n in peers)
        ours, theirs = fastest(by_impl)
        lines.append(line + (f"{theirs['ms'] / ours['ms']:8.2f}" if ours and theirs else f"{'-':>8}"))
    return "\n".join(lines)


def plot(result: Mapping[str, Any], path: Path) -> Path:
    """Left: one sequence over its length. Right: every row. A line is the speed of reading alone."""
    from matplotlib.figure import Figure

    found, most = speeds(result), ceiling(result)
    figure = Figure(figsize=(14, max(5.0, 0.28 * len(found) + 1.5)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    points: dict[str, list[tuple[int, float]]] = {}
    for row, by_impl in found.items():
        match = _ONE_SEQUENCE.fullmatch(row)
        for name, line in by_impl.items() if match else ():
            points.setdefault(name, []).append((int(match[1]), line["value"]))  # type: ignore[index]
    for name, own in points.items():
        left.plot(*zip(*sorted(own), strict=True), "o-", color=COLOURS.get(name), label=NAMES.get(name, name))
    left.set_xscale("log", base=2)
    left.set_xlabel("keys of one sequence; 32 query heads on 8, head dim 128")
    order = list(reversed(found))
    for name in dict.fromkeys(n for by_impl in found.values() for n in by_impl):
        own_rows = [(found[row][name]["value"], i) for i, row in enumerate(order) if name in found[row]]
        right.plot(
            *zip(*own_rows, strict=True), "o", color=COLOURS.get(name), label=NAMES.get(name, name), alpha=0.8
        )
    right.set_yticks(range(len(order)), order, fontsize=8)
    right.grid(axis="x", alpha=0.3)
    right.set_xlabel("GB/s of keys and values")
    left.set_ylabel("GB/s of keys and values")
    left.grid(alpha=0.3)
    if most:
        left.axhline(most, color="black", linestyle="--", label="reading alone")
        right.axvline(most, color="black", linestyle="--")
    left.set_ylim(bottom=0)
    right.set_xlim(left=0)
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(f"{result['gpu']}: attention with a cache, cold L2, in a CUDA graph")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def show(result: Mapping[str, Any], picture: Path) -> None:
    """Print the table and draw the picture."""
    print("\n" + table(result))
    print(f"{result['gpu']}, {result['clock_mhz']} MHz under load; wrote {plot(result, picture)}")
