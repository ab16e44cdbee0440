"""The speed of each workload relative to its fastest peer, worst first, as a table and as a picture."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLIFF = 0.8
"""A ratio below which a shape is named in the picture."""
MOST_NAMED = 12
COLOURS = {"forward": "tab:blue", "backward": "tab:orange"}


def is_own(impl: str) -> bool:
    """True for this package's implementations."""
    return impl.startswith("cute_attn/")


def by_workload(result: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of a result, by workload and implementation."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(row["workload"], {})[row["impl"]] = row
    return found


@dataclass(frozen=True)
class Comparison:
    """One workload: the package's newest kernel against the fastest peer of the same run.

    Attributes:
        workload: its name.
        ms: our time, 0 where our call failed.
        error: why it failed, or "".
        peer: the fastest peer's name, or "".
        peer_ms: its time, 0 for none.
        flops: useful floating-point operations, 0 without any time.
    """

    workload: str
    ms: float
    error: str
    peer: str
    peer_ms: float
    flops: float

    @property
    def op(self) -> str:
        """ "forward" or "backward"."""
        return "backward" if self.workload.startswith("bwd-") else "forward"

    @property
    def ratio(self) -> float | None:
        """Our speed over the fastest peer's, None if either is missing."""
        return self.peer_ms / self.ms if self.ms and self.peer_ms else None


def compare(result: Mapping[str, Any]) -> list[Comparison]:
    """Every workload, worst first: failed ones, then in ascending order of the ratio, then the ones without a peer."""
    found = [_comparison(name, rows) for name, rows in by_workload(result).items()]
    return sorted(found, key=lambda c: (not c.error, c.ratio or math.inf, c.workload))


def _comparison(workload: str, rows: dict[str, dict[str, Any]]) -> Comparison:
    ours = rows[newest(rows)]
    times = {name: row["ms"] for name, row in rows.items() if "ms" in row and not is_own(name)}
    peer = min(times, key=lambda name: times[name], default="")
    timed = next((row for row in rows.values() if "ms" in row), None)
    flops = timed["ms"] * timed["value"] * 1e9 if timed else 0.0
    return Comparison(workload, ours.get("ms", 0.0), ours.get("error", ""), peer, times.get(peer, 0.0), flops)


def newest(impls: Iterable[str]) -> str:
    """The package's newest kernel among them, such as "cute_attn/forward-sm90", which calls use by default.

    Without a kernel it is another implementation of this package's, such as "cute_attn/tf32".

    Raises:
        ValueError: there is none.
    """
    return max(filter(is_own, impls), key=lambda impl: int(impl.rpartition("-sm")[2]) if "-sm" in impl else 0)


def table(result: Mapping[str, Any]) -> str:
    """A line per workload, worst first: the ratio, the work, all speeds, the model if there is one, and the error."""
    comparisons, found = compare(result), by_workload(result)
    columns: dict[str, list[str]] = {}  # kernels of both ways are in one
    for name in sorted({row["impl"]: None for row in result["rows"]}, key=lambda name: not is_own(name)):
        columns.setdefault(name.rpartition("-")[2] if is_own(name) else name, []).append(name)
    width = max((len(c.workload) for c in comparisons), default=0)
    lines = [f"{'ratio':>6} {'TFLOP':>8}  {'TFLOP/s':{width}}" + "".join(f"{name:>14}" for name in columns)]
    for c in comparisons:
        rows = found[c.workload]
        cells = (
            next((rows[n]["value"] for n in names if "value" in rows.get(n, {})), None)
            for names in columns.values()
        )
        numbers = "".join(f"{cell:14.1f}" if cell is not None else f"{'-':>14}" for cell in cells)
        ratio = f"{c.ratio:.2f}" if c.ratio else "-"
        model = result.get("models", {}).get(c.workload, "")
        lines.append(f"{ratio:>6} {c.flops / 1e12:8.4f}  {c.workload:{width}}{numbers}  {model}".rstrip())
        if c.error:
            lines.append(f"{'':>17}ours: {c.error}")
    return "\n".join([*lines, *_summary(comparisons)])


def _summary(comparisons: list[Comparison]) -> Iterator[str]:
    for op in COLOURS:
        mine = [c for c in comparisons if c.op == op]
        if not mine:
            continue
        ratios = [c.ratio for c in mine if c.ratio]
        failed = sum(bool(c.error) for c in mine)
        line = f"{op}: {len(mine)} shapes, {failed} failed, {len(ratios)} with a peer"
        if ratios:
            low = sum(ratio < CLIFF for ratio in ratios)
            mean = statistics.geometric_mean(ratios)
            line += f"; geometric mean {mean:.3f}, least {min(ratios):.3f}, {low} below {CLIFF}"
        yield line


def plot(result: Mapping[str, Any], path: Path) -> Path:
    """Draw each workload's ratio against its work, a dot each; the cliffs are numbered and named below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator

    drawn = [(c, c.ratio) for c in compare(result) if c.ratio]
    cliffs = [(c, ratio) for c, ratio in drawn if ratio < CLIFF]
    named = [f"{i:2}  {ratio:.2f}  {c.workload}" for i, (c, ratio) in enumerate(cliffs[:MOST_NAMED], 1)]
    if len(cliffs) > len(named):
        named.append(f"and {len(cliffs) - len(named)} more below {CLIFF}")
    failed = [f"failed  {c.workload}" for c in compare(result) if c.error]
    lines = [*named, *failed[:MOST_NAMED]]
    below = 0.16 * len(lines) + 0.1
    figure = Figure(figsize=(8, 5 + below), layout="constrained")
    axes = figure.subplots()
    for op, colour in COLOURS.items():
        flops = [c.flops for c, _ in drawn if c.op == op]
        ratios = [ratio for c, ratio in drawn if c.op == op]
        if ratios:
            axes.scatter(flops, ratios, s=18, color=colour, alpha=0.7, label=f"{op}, {len(ratios)} shapes")
    for i, (c, ratio) in enumerate(cliffs[:MOST_NAMED], 1):
        axes.annotate(str(i), (c.flops, ratio), xytext=(4, -3), textcoords="offset points", fontsize=8)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="useful FLOP", ylabel="our speed / fastest peer's")
    ratios = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 10, 20, 50]
    plain_ticks(axes.yaxis, FixedLocator(ratios))
    axes.grid(alpha=0.3)
    axes.set_title(f"{result['gpu']}, commit {result['commit'][:12]}, {result['date'][:10]}", fontsize=9)
    if drawn:
        axes.legend(loc="upper left", fontsize=8)
    if lines:
        figure.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=7, family="monospace")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def plain_ticks(axis: Any, ticks: Any) -> None:
    """Labels of a logarithmic axis at ``ticks``, a locator, as plain numbers: less than a decade has none otherwise."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_major_locator(ticks)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def show(result: Mapping[str, Any], picture: Path) -> None:
    """Print a result's table and draw its picture."""
    print("\n" + table(result))
    print(f"{result['gpu']}, {result['clock_mhz']} MHz under load; wrote {plot(result, picture)}")
