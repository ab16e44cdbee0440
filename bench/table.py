"""Regenerate the tables and pictures of speeds in docs/speed.md and the README from files under bench/results.

    python -m bench.table bench/results/FILE.json ...           print all of it
    python -m bench.table --write bench/results/FILE.json ...   put rows into docs/speed.md and a few into the README

The picture, docs/speed.png, is of the files that docs/speed.md then names, forward and backward, and so are the rows of
the README. Of a result of attention with a cache docs/speed.md has every row, and docs/decode.png.
"""

import argparse
import fnmatch
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import decode_picture

ROOT = Path(__file__).parents[1]
PAGE, README = Path("docs/speed.md"), Path("README.md")
BEGIN = {
    "forward": "<!-- speed table -->",
    "backward": "<!-- backward speed table -->",
    "decode": "<!-- decode table -->",
}
PICTURE, DECODE_PICTURE = Path("docs/speed.png"), Path("docs/decode.png")
END = {
    "forward": "<!-- end of speed table -->",
    "backward": "<!-- end of backward speed table -->",
    "decode": "<!-- end of decode table -->",
}
PEERS = {
    "fa2": "FA2",
    "mem_efficient": "mem-eff.",
    "cudnn": "cuDNN",
    "fa3": "FA3",
    "fa4": "FA4",
    "ffpa": "ffpa",
}
ROWS = ("*-bf16-*-s2048-*", "*-bf16-*-s8192-*", "*-bf16-*varlen*")
"""The rows of docs/speed.md."""
SHORT_BEGIN, SHORT_END = "<!-- short speed table -->", "<!-- end of short speed table -->"
SHORT_ROWS = (
    "bf16-d64-b8-s2048-h32",
    "bf16-d64-b2-s8192-h32-causal",
    "bf16-d128-b8-s2048-h16",
    "bf16-d128-b8-s2048-h16-causal",
    "bf16-d128-b2-s8192-h16-causal",
    "bf16-d128-b1-s8192-h32x8-causal",
    "bf16-d128-varlen8x8192-h16-causal",
    "bf16-d128-b8-s2048-h16-causal-dropout",
    "bf16-d128-b8-s2048-h16-bias_bf16",
    "bf16-d256-b2-s8192-h8",
)
"""The rows of the README."""


def table(result: dict[str, Any], patterns: tuple[str, ...] = ("*",)) -> str:
    """A Markdown table: TFLOP/s of our kernels and the peers that ran, a row per workload; a dash for a failure."""
    speeds = {
        workload: values
        for workload, values in _by_workload(result, "value").items()
        if any(fnmatch.fnmatch(workload, pattern) for pattern in patterns)
    }
    impls = list(dict.fromkeys(row["impl"] for row in result["rows"]))
    own = [name for name in impls if _is_own(name)]
    peers = [name for name in PEERS if name in impls]
    header = [
        "workload",
        *(f"**{name.removeprefix('cute_attn/')}**" for name in own),
        *(PEERS[name] for name in peers),
        "**sm80** / FA2",
        "best / best peer",
    ]
    rows = []
    for workload, values in speeds.items():
        ampere, fa2 = (
            next((values.get(name) for name in own if name.endswith("-sm80")), None),
            values.get("fa2"),
        )
        ratio = f"{ampere / fa2:.2f}" if ampere and fa2 else "-"
        best = max((values[name] for name in own if name in values), default=None)
        peer = max((values[name] for name in peers if name in values), default=None)
        to_peer = f"{best / peer:.2f}" if best and peer else "-"
        cells = [f"{values[name]:.0f}" if name in values else "-" for name in (*own, *peers)]
        rows.append([workload.partition("-")[2], *cells, ratio, to_peer])
    return _markdown(header, rows)


def decode_table(result: dict[str, Any]) -> str:
    """A Markdown table: microseconds of each implementation, a row per call; a dash where it cannot compute it."""
    titles = decode_picture.NAMES
    found = decode_picture.speeds(result)
    names = [name for name in titles if any(name in by_impl for by_impl in found.values())]
    own = [name for name in names if _is_own(name)]
    header = [
        "call",
        *(f"**{titles[n]}**" if n in own else titles[n] for n in names),
        "GB/s",
        "best peer / best",
    ]
    rows = []
    for row, by_impl in found.items():
        cells = [f"{1e3 * by_impl[name]['ms']:.1f}" if name in by_impl else "-" for name in names]
        ours = min(
            (by_impl[name] for name in own if name in by_impl), key=lambda line: line["ms"], default=None
        )
        theirs = [by_impl[name]["ms"] for name in names if name in by_impl and name not in own]
        cells.append(f"{ours['value']:.0f}" if ours else "-")
        cells.append(f"{min(theirs) / ours['ms']:.2f}" if ours and theirs else "-")
        rows.append([row, *cells])
    return _markdown(header, rows)


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def _by_workload(result: dict[str, Any], key: str) -> dict[str, dict[str, float]]:
    """A number of each implementation, for every workload."""
    found: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        numbers = found.setdefault(row["workload"], {})
        if key in row:
            numbers[row["impl"]] = row[key]
    return found


def _is_own(impl: str) -> bool:
    return impl.startswith("cute_attn/")


def operation(result: dict[str, Any]) -> str:
    """ "forward", "backward" or "decode"."""
    if result["rows"][0]["workload"] == "read-only":
        return "decode"
    return "backward" if result["rows"][0]["workload"].startswith("bwd-") else "forward"


def section(result: dict[str, Any], source: str, patterns: tuple[str, ...] = ("*",)) -> str:
    """The table with its source."""
    machine = f"{result['gpu']}, {result['clock_mhz']} MHz under load, driver {result['driver']}"
    peers = {name: PEERS[name] for name in ("fa3", "fa4") if name in result["peers"]}
    versions = ", ".join(
        [
            f"torch {result['torch']}, CUTLASS DSL {result['cutlass_dsl']}",
            *(f"{title} {result['peers'][name]}" for name, title in peers.items()),
        ]
    )
    op = operation(result)
    unit = (
        "TFLOP/s"
        if op != "decode"
        else "Microseconds of a call on a cache that is not in the L2, in a CUDA graph"
    )
    caption = f"{unit}, medians, all in one run on one {machine}; {versions} ([{source}](../{source}))."
    if op == "decode":
        most = decode_picture.ceiling(result)
        caption += f" GB/s are of keys and values, the faster kernel's; reading alone reaches {most:.0f}."
    rows = decode_table(result) if op == "decode" else table(result, patterns)
    return f"{BEGIN[op]}\n{caption}\n\n{rows}\n{END[op]}"


def plot(forward: dict[str, Any] | None, backward: dict[str, Any] | None, path: Path) -> Path:
    """Draw our best kernel's time against the fastest peer's, a dot a row that both computed.

    Args:
        forward, backward: results, or None.
        path: the picture to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    bounds: list[float] = []
    for title, result, colour in (("forward", forward, "tab:blue"), ("backward", backward, "tab:orange")):
        pairs = times(result) if result else []
        if result and pairs:
            theirs, ours = zip(*pairs, strict=True)
            faster = sum(x > y for x, y in pairs)
            label = (
                f"{title}: {faster} of {len(pairs)} below the line ({result['gpu']}, {result['date'][:10]})"
            )
            axes.scatter(theirs, ours, s=22, color=colour, alpha=0.7, label=label)
            bounds += [*theirs, *ours]
    axes.set(xscale="log", yscale="log", xlabel="fastest peer, ms", ylabel="cute_attn, ms", aspect="equal")
    if bounds:
        ends = (min(bounds) / 1.2, max(bounds) * 1.2)
        axes.plot(ends, ends, color="gray", linewidth=0.8)
        axes.set(xlim=ends, ylim=ends)
        axes.legend(loc="upper left", fontsize=8)
    axes.set_title("Milliseconds of a call: cute_attn is faster below the line", fontsize=10)
    _plain_ticks(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def times(result: dict[str, Any]) -> list[tuple[float, float]]:
    """The fastest peer's milliseconds and our best, of each workload that has both."""
    pairs = []
    for times in _by_workload(result, "ms").values():
        ours = [ms for name, ms in times.items() if _is_own(name)]
        theirs = [ms for name, ms in times.items() if name in PEERS]
        if ours and theirs:
            pairs.append((min(theirs), min(ours)))
    return pairs


def _plain_ticks(axes: Any) -> None:
    """Milliseconds as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def short_table(forward: dict[str, Any], backward: dict[str, Any]) -> str:
    """A Markdown table of ten rows: TFLOP/s of our best kernel and of the fastest peer, both ways."""
    header = ["workload", "forward", "fastest peer", "", "backward", "fastest peer", ""]
    speeds = [_by_workload(result, "value") for result in (forward, backward)]
    rows = []
    for name in SHORT_ROWS:
        cells = []
        for op, of in zip(("fwd", "bwd"), speeds, strict=True):
            values = of.get(f"{op}-{name}", {})
            own = max((x for impl, x in values.items() if _is_own(impl)), default=None)
            peer = max(((x, PEERS[impl]) for impl, x in values.items() if impl in PEERS), default=None)
            cells += [f"**{own:.0f}**" if own else "-", f"{peer[0]:.0f} ({peer[1]})" if peer else "-"]
            cells.append(f"{own / peer[0]:.2f}" if own and peer else "-")
        rows.append([name, *cells])
    return f"{SHORT_BEGIN}\n{_markdown(header, rows)}\n{SHORT_END}"


def named_results(page: str) -> Mapping[str, Path]:
    """The existing result that each of the page's tables names, by operation."""
    found = {}
    for op in BEGIN:
        table = page.partition(BEGIN[op])[2].partition(END[op])[0]
        named = re.search(r"\]\(([^)]+\.json)\)", table)
        if named and (ROOT / PAGE.parent / named[1]).exists():
            found[op] = ROOT / PAGE.parent / named[1]
    return found


def write(paths: list[Path]) -> None:
    """Put the results' tables into docs/speed.md, a few rows into the README, and redraw the pictures."""
    page = (ROOT / PAGE).read_text()
    for path in paths:
        result = json.loads(path.read_text())
        op = operation(result)
        page = _replaced(page, BEGIN[op], END[op], section(result, _source(path), ROWS), PAGE)
    (ROOT / PAGE).write_text(page)
    results = {op: json.loads(path.read_text()) for op, path in named_results(page).items()}
    plot(results.get("forward"), results.get("backward"), ROOT / PICTURE)
    if "decode" in results:
        decode_picture.plot(results["decode"], ROOT / DECODE_PICTURE)
    if "forward" in results and "backward" in results:
        readme = (ROOT / README).read_text()
        short = short_table(results["forward"], results["backward"])
        (ROOT / README).write_text(_replaced(readme, SHORT_BEGIN, SHORT_END, short, README))


def _replaced(text: str, begin: str, end: str, new: str, page: Path) -> str:
    """A page with what lies between two marks, and the marks, replaced."""
    if begin not in text or end not in text:
        sys.exit(f"{page} has no {begin} ... {end}")
    before, rest = text.split(begin, 1)
    return before + new + rest.split(end, 1)[1]


def _source(path: Path) -> str:
    """A result's path in the repository."""
    return path.resolve().relative_to(ROOT).as_posix()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="replace the tables and pictures")
    options = parser.parse_args()
    for path in options.results:
        if not path.is_file():
            parser.error(
                f"{path} is no file; accepted: results of bench.forward, bench.backward and bench.decode"
            )
    if options.write:
        write(options.results)
        return
    for path in options.results:
        print(section(json.loads(path.read_text()), _source(path)))


if __name__ == "__main__":
    main()
