"""Regenerate the tables and pictures of speeds in docs/speed.md and the README from files under bench/results.

    python -m bench.table bench/results/FILE.json ...           print all of it
    python -m bench.table --write bench/results/FILE.json ...   put rows into docs/speed.md and a few into the README

docs/speed.md names the files, forward and backward, from which docs/speed.png is drawn and the README's rows are
taken. A result of attention with a cache puts all its rows into docs/speed.md, and draws docs/decode.png.
"""

import argparse
import fnmatch
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import cliffs, decode_picture

ROOT = Path(__file__).parents[1]
PAGE, README = Path("docs/speed.md"), Path("README.md")
MARKS = {"forward": "speed table", "backward": "backward speed table", "decode": "decode table"}
"""Operation -> text of the comments around its table in docs/speed.md."""
SHORT_MARK = "short speed table"
PICTURE, DECODE_PICTURE = Path("docs/speed.png"), Path("docs/decode.png")
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


def table(result: Mapping[str, Any], patterns: tuple[str, ...] = ("*",)) -> str:
    """A Markdown table: TFLOP/s of our kernels and the peers that ran, a row per workload; a dash for a failure."""
    impls = list(dict.fromkeys(row["impl"] for row in result["rows"]))
    own = [name for name in impls if cliffs.is_own(name)]
    peers = [name for name in PEERS if name in impls]
    header = ["workload", *(f"**{name.removeprefix('cute_attn/')}**" for name in own)]
    header += [*(PEERS[name] for name in peers), "**sm80** / FA2", "best / best peer"]
    rows = []
    for workload, values in _numbers(result, "value").items():
        if any(fnmatch.fnmatch(workload, pattern) for pattern in patterns):
            ampere = next((values.get(name) for name in own if name.endswith("-sm80")), None)
            best, peer = _best(values, own), _best(values, peers)
            cells = [f"{values[name]:.0f}" if name in values else "-" for name in (*own, *peers)]
            cells += [_ratio(ampere, values.get("fa2")), _ratio(best, peer)]
            rows.append([workload.partition("-")[2], *cells])
    return _markdown(header, rows)


def decode_table(result: Mapping[str, Any]) -> str:
    """A Markdown table: microseconds of each implementation, a row per call; a dash if it cannot compute the call."""
    titles, found = decode_picture.NAMES, decode_picture.speeds(result)
    names = [name for name in titles if any(name in by_impl for by_impl in found.values())]
    header = ["call", *(f"**{titles[n]}**" if cliffs.is_own(n) else titles[n] for n in names)]
    rows = []
    for row, by_impl in found.items():
        cells = [f"{1e3 * by_impl[name]['ms']:.1f}" if name in by_impl else "-" for name in names]
        ours, theirs = decode_picture.fastest(by_impl)
        cells.append(f"{ours['value']:.0f}" if ours else "-")
        both = [line["ms"] if line else None for line in (theirs, ours)]
        rows.append([row, *cells, _ratio(*both)])
    return _markdown([*header, "GB/s", "best peer / best"], rows)


def _best(values: Mapping[str, float], names: Iterable[str]) -> float | None:
    return max((values[name] for name in names if name in values), default=None)


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one and other else "-"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def _numbers(result: Mapping[str, Any], key: str) -> dict[str, dict[str, float]]:
    """For every workload, a number of each implementation that has it."""
    return {
        workload: {name: row[key] for name, row in rows.items() if key in row}
        for workload, rows in cliffs.by_workload(result).items()
    }


def operation(result: Mapping[str, Any]) -> str:
    """ "forward", "backward" or "decode"."""
    if result["rows"][0]["workload"] == "read-only":
        return "decode"
    return "backward" if result["rows"][0]["workload"].startswith("bwd-") else "forward"


def section(result: Mapping[str, Any], source: str, patterns: tuple[str, ...] = ("*",)) -> str:
    """The table with its source."""
    machine = f"{result['gpu']}, {result['clock_mhz']} MHz under load, driver {result['driver']}"
    versions = [f"torch {result['torch']}, CUTLASS DSL {result['cutlass_dsl']}"]
    versions += [
        f"{PEERS[name]} {result['peers'][name]}" for name in ("fa3", "fa4") if name in result["peers"]
    ]
    op, unit, rows = operation(result), "TFLOP/s", table(result, patterns)
    if op == "decode":
        unit, rows = (
            "Microseconds of a call on a cache that is not in the L2, in a CUDA graph",
            decode_table(result),
        )
    caption = (
        f"{unit}, medians, all in one run on one {machine}; {', '.join(versions)} ([{source}](../{source}))."
    )
    if op == "decode":
        most = decode_picture.ceiling(result)
        caption += f" GB/s are of keys and values, the faster kernel's; reading alone reaches {most:.0f}."
    return _marked(MARKS[op], f"{caption}\n\n{rows}")


def _marked(mark: str, text: str) -> str:
    return f"<!-- {mark} -->\n{text}\n<!-- end of {mark} -->"


def plot(forward: dict[str, Any] | None, backward: dict[str, Any] | None, path: Path) -> Path:
    """Draw our best kernel's time against the fastest peer's, a dot a row that both computed.

    Args:
        forward, backward: results, or None.
        path: the picture to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

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
    for axis in (axes.xaxis, axes.yaxis):
        cliffs.plain_ticks(axis, LogLocator(subs=(1, 2, 5)))
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def times(result: Mapping[str, Any]) -> list[tuple[float, float]]:
    """The fastest peer's milliseconds and our best, of each workload that has both."""
    pairs = []
    for times in _numbers(result, "ms").values():
        ours = [ms for name, ms in times.items() if cliffs.is_own(name)]
        theirs = [ms for name, ms in times.items() if name in PEERS]
        if ours and theirs:
            pairs.append((min(theirs), min(ours)))
    return pairs


def short_table(forward: Mapping[str, Any], backward: Mapping[str, Any]) -> str:
    """A Markdown table of ten rows: TFLOP/s of the package's best kernel and of the fastest peer, both ways."""
    header = ["workload", "forward", "fastest peer", "", "backward", "fastest peer", ""]
    speeds = {"fwd": _numbers(forward, "value"), "bwd": _numbers(backward, "value")}
    rows = []
    for name in SHORT_ROWS:
        cells = []
        for op, of in speeds.items():
            values = of.get(f"{op}-{name}", {})
            own, best = _best(values, filter(cliffs.is_own, values)), _best(values, PEERS)
            peer = max(((x, PEERS[impl]) for impl, x in values.items() if impl in PEERS), default=None)
            cells += [f"**{own:.0f}**" if own else "-", f"{peer[0]:.0f} ({peer[1]})" if peer else "-"]
            cells.append(_ratio(own, best))
        rows.append([name, *cells])
    return _marked(SHORT_MARK, _markdown(header, rows))


def named_results(page: str) -> Mapping[str, Path]:
    """The existing result that each of the page's tables names, by operation."""
    found = {}
    for op, mark in MARKS.items():
        table = page.partition(f"<!-- {mark} -->")[2].partition(f"<!-- end of {mark} -->")[0]
        named = re.search(r"\]\(([^)]+\.json)\)", table)
        if named and (ROOT / PAGE.parent / named[1]).exists():
            found[op] = ROOT / PAGE.parent / named[1]
    return found


def write(paths: list[Path]) -> None:
    """Put the results' tables into docs/speed.md, a few rows into the README, and redraw the pictures."""
    page = (ROOT / PAGE).read_text()
    for path in paths:
        result = json.loads(path.read_text())
        page = _replaced(page, MARKS[operation(result)], section(result, _source(path), ROWS), PAGE)
    (ROOT / PAGE).write_text(page)
    results = {op: json.loads(path.read_text()) for op, path in named_results(page).items()}
    plot(results.get("forward"), results.get("backward"), ROOT / PICTURE)
    if "decode" in results:
        decode_picture.plot(results["decode"], ROOT / DECODE_PICTURE)
    if "forward" in results and "backward" in results:
        readme = (ROOT / README).read_text()
        short = short_table(results["forward"], results["backward"])
        (ROOT / README).write_text(_replaced(readme, SHORT_MARK, short, README))


def _replaced(text: str, mark: str, new: str, page: Path) -> str:
    """A page with the text between two marks, and the marks, replaced."""
    before, begin, rest = text.partition(f"<!-- {mark} -->")
    _, end, after = rest.partition(f"<!-- end of {mark} -->")
    if not (begin and end):
        sys.exit(f"{page} has no comments {mark!r} and 'end of {mark}'")
    return before + new + after


def _source(path: Path) -> str:
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
