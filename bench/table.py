"""Regenerate the README's tables of speeds from a file under bench/results.

python -m bench.table bench/results/FILE.json            print all of it
python -m bench.table --write bench/results/FILE.json    put the README's rows into the README
"""

import argparse
import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
BEGIN = {"forward": "<!-- speed table -->", "backward": "<!-- backward speed table -->"}
END = {"forward": "<!-- end of speed table -->", "backward": "<!-- end of backward speed table -->"}
PEERS = {"fa2": "FA2", "mem_efficient": "mem-eff.", "cudnn": "cuDNN", "fa4": "FA4"}
README_ROWS = ("*-bf16-*-s2048-*", "*-bf16-*-s8192-*", "*-bf16-*varlen*")
"""What the README has room for."""


def table(result: dict[str, Any], patterns: tuple[str, ...] = ("*",)) -> str:
    """A Markdown table: TFLOP/s of our kernels and their peers, a row a workload; a dash where one failed."""
    speeds: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        if not any(fnmatch.fnmatch(row["workload"], pattern) for pattern in patterns):
            continue
        speeds.setdefault(row["workload"], {})
        if "value" in row:
            speeds[row["workload"]][row["impl"]] = row["value"]
    own = list(dict.fromkeys(r["impl"] for r in result["rows"] if r["impl"].startswith("cute_attn/")))
    header = [
        "workload",
        *(f"**{name.removeprefix('cute_attn/')}**" for name in own),
        *PEERS.values(),
        "**sm80** / FA2",
        "best / best peer",
    ]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for workload, values in speeds.items():
        ampere, fa2 = (
            next((values.get(name) for name in own if name.endswith("-sm80")), None),
            values.get("fa2"),
        )
        ratio = f"{ampere / fa2:.2f}" if ampere and fa2 else "-"
        best = max((values[name] for name in own if name in values), default=None)
        peer = max((values[name] for name in PEERS if name in values), default=None)
        to_peer = f"{best / peer:.2f}" if best and peer else "-"
        cells = [f"{values[name]:.0f}" if name in values else "-" for name in (*own, *PEERS)]
        lines.append("| " + " | ".join([workload.partition("-")[2], *cells, ratio, to_peer]) + " |")
    return "\n".join(lines)


def operation(result: dict[str, Any]) -> str:
    """ "forward" or "backward"."""
    return "backward" if result["rows"][0]["workload"].startswith("bwd-") else "forward"


def section(result: dict[str, Any], source: str, patterns: tuple[str, ...] = ("*",)) -> str:
    """The table with where it comes from."""
    machine = f"{result['gpu']}, {result['clock_mhz']} MHz under load, driver {result['driver']}"
    versions = f"torch {result['torch']}, CUTLASS DSL {result['cutlass_dsl']}, FA4 {result['peers']['fa4']}"
    caption = f"TFLOP/s, medians, all in one run on one {machine}; {versions} ([{source}]({source}))."
    op = operation(result)
    return f"{BEGIN[op]}\n{caption}\n\n{table(result, patterns)}\n{END[op]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the table in the README")
    options = parser.parse_args()
    source = options.result.resolve().relative_to(README.parent).as_posix()
    result = json.loads(options.result.read_text())
    text = section(result, source, README_ROWS if options.write else ("*",))
    if not options.write:
        print(text)
        return
    readme = README.read_text()
    begin, end = BEGIN[operation(result)], END[operation(result)]
    if begin not in readme or end not in readme:
        sys.exit(f"{README} has no {begin} ... {end}")
    before, rest = readme.split(begin, 1)
    README.write_text(before + text + rest.split(end, 1)[1])


if __name__ == "__main__":
    main()
