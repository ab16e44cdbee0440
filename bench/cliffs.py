"""Each workload's speed over its fastest peer's, worst first, as a table and as a picture."""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLIFF = 0.8
"""A ratio below which a shape is named in the picture."""
MOST_NAMED = 12
COLOURS = {"forward": "tab:blue", "backward": "tab:orange"}


@dataclass(frozen=True)
class Comparison:
    """One workload: our newest kernel against the fastest peer of the same run.

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
        return operation(self.workload)

    @property
    def ratio(self) -> float | None:
        """Our speed over the fastest peer's, None if either is missing."""
        return self.peer_ms / self.ms if self.ms and self.peer_ms else None


def operation(workload: str) -> str:
    """ "forward" or "backward", by a workload's name."""
    return "backward" if workload.startswith("bwd-") else "forward"


def compare(result: dict[str, Any]) -> list[Comparison]:
    """Every workload, worst first: our failures, then by rising ratio, then those that no peer computes."""
    by_workload: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        by_workload.setdefault(row["workload"], {})[row["impl"]] = row
    found = [_comparison(name, rows) for name, rows in by_workload.items()]
    return sorted(found, key=lambda c: (not c.error, c.ratio or math.inf, c.workload))


def _comparison(workload: str, rows: dict[str, dict[str, Any]]) -> Comparison:
    ours = rows[newest(rows)]
    times = {name: row["ms"] for name, row in rows.items() if "ms" in row and not _is_own(name)}
    peer = min(times, key=lambda name: times[name], default="")
    timed = next((row for row in rows.values() if "ms" in row), None)
    flops = timed["ms"] * timed["value"] * 1e9 if timed else 0.0
    return Comparison(workload, ours.get("ms", 0.0), ours.get("error", ""), peer, times.get(peer, 0.0), flops)


def newest(impls: Iterable[str]) -> str:
    """This package's newest kernel among them, such as "cute_attn/forward-sm90": a call's default.

    Raises:
        ValueError: there is none.
    """
    return max(filter(_is_own, impls), key=lambda impl: int(impl.rpartition("-sm")[2]))


def _is_own(impl: str) -> bool:
    return impl.startswith("cute_attn/")


def worst_first(result: dict[str, Any]) -> dict[str, Any]:
    """The result with its rows in the order of :func:`compare`."""
    ranks = {comparison.workload: i for i, comparison in enumerate(compare(result))}
    return result | {"rows": sorted(result["rows"], key=lambda row: ranks[row["workload"]])}


def table(result: dict[str, Any]) -> str:
    """A line per workload, worst first: the ratio, the work, all speeds, its model where it has one, and our error."""
    comparisons = compare(result)
    names = list(dict.fromkeys(row["impl"] for row in result["rows"]))
    own = list(dict.fromkeys(name.rpartition("-")[2] for name in names if _is_own(name)))
    columns = own + [name for name in names if not _is_own(name)]
    speeds: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        column = row["impl"].rpartition("-")[2] if _is_own(row["impl"]) else row["impl"]
        if "value" in row:
            speeds.setdefault(row["workload"], {})[column] = row["value"]
    width = max((len(c.workload) for c in comparisons), default=0)
    lines = [f"{'ratio':>6} {'TFLOP':>8}  {'TFLOP/s':{width}}" + "".join(f"{name:>14}" for name in columns)]
    for c in comparisons:
        ratio = f"{c.ratio:.2f}" if c.ratio else "-"
        cells = (speeds.get(c.workload, {}).get(name) for name in columns)
        numbers = "".join(f"{cell:14.1f}" if cell is not None else f"{'-':>14}" for cell in cells)
        model = result.get("models", {}).get(c.workload, "")
        lines.append(f"{ratio:>6} {c.flops / 1e12:8.4f}  {c.workload:{width}}{numbers}  {model}".rstrip())
        if c.error:
            lines.append(f"{'':>17}ours: {c.error}")
    return "\n".join([*lines, *_summary(comparisons)])


def _summary(comparisons: list[Comparison]) -> Iterator[str]:
    """A line an operation."""
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


def plot(result: dict[str, Any], path: Path) -> Path:
    """Draw each workload's ratio against its work, a dot each; the cliffs are numbered and named below."""
    from matplotlib.figure import Figure

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
    _plain_ticks(axes)
    axes.set_title(f"{result['gpu']}, commit {result['commit'][:12]}, {result['date'][:10]}", fontsize=9)
    if drawn:
        axes.legend(loc="upper left", fontsize=8)
    if lines:
        figure.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=7, family="monospace")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _plain_ticks(axes: Any) -> None:
    """Ratios as plain numbers; a logarithmic axis of less than a decade has no labels otherwise."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 10, 20, 50]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(alpha=0.3)
