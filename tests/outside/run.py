"""Run the suites that others wrote for attention on the kernels of this package.

    python -m tests.outside.run SUITES                         every suite whose files are in the folder SUITES
    python -m tests.outside.run SUITES flash-attention --limit 300 --workers 8
    python -m tests.outside.run SUITES pytorch-sdpa --stock    the same tests without this package
    python -m tests.outside.run SUITES flash-attention --ids FILE      these tests, by the names that --json has

Fetches nothing. A seeded sample of each suite's tests runs in parallel processes (pytest-xdist); each suite ends at its
time limit; what was not reached is counted. Prints what passed, failed, passed without a kernel (fell through), and was
skipped, with reasons; --json keeps it all. A test in which a process dies has failed, and another process goes on.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .suites import SUITES, Suite

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    """What became of a suite.

    Attributes:
        skipped: why it did not run, or "".
        tests: (outcome, reason) by test.
        calls: of each test, how many operators were served, and reasons why others were not.
        collected: how many tests.
        left_out: how many tests of which names, with reasons.
        sample: all that were to be run.
        seconds: how long it took.
        tail: the end of pytest's output, where it could not start.
    """

    skipped: str = ""
    tests: dict[str, tuple[str, str]] = field(default_factory=dict)
    calls: dict[str, tuple[int, dict[str, int]]] = field(default_factory=dict)
    collected: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    sample: set[str] = field(default_factory=set)
    seconds: float = 0.0
    tail: str = ""

    def counts(self) -> Counter[str]:
        """Number of tests by outcome; "fell through" passed without a kernel of the package."""
        found: Counter[str] = Counter()
        for test, (outcome, _) in self.tests.items():
            served, others = self.calls.get(test, (0, {}))
            found["fell through" if outcome == "passed" and others and not served else outcome] += 1
        found["not reached"] = len(self.sample - set(self.tests))
        return found

    def reasons(self, outcome: str) -> list[tuple[str, int, str]]:
        """(reason, how many, the first test) of an outcome, the most frequent first."""
        found: dict[str, list[str]] = {}
        for test, (what, reason) in self.tests.items():
            if what == outcome:
                found.setdefault(" ".join(reason.split())[:300], []).append(test)
        return sorted(((r, len(t), min(t)) for r, t in found.items()), key=lambda x: (-x[1], x[0]))

    def fallen(self) -> Counter[str]:
        """Calls that fell through, by reason."""
        total: Counter[str] = Counter()
        for _, others in self.calls.values():
            total.update(others)
        return total


def run_suite(suite: Suite, suites: Path, options: argparse.Namespace) -> Outcome:
    """Run a suite in parallel processes until it is done or its time is over."""
    folder = (suites / suite.folder).resolve()
    missing = [path for path in suite.paths if not (folder / path).exists()]
    if missing:
        return Outcome(skipped=f"{folder / missing[0]} is missing")
    absent = [module for module in suite.needs if importlib.util.find_spec(module) is None]
    if absent:
        return Outcome(skipped=f"not installed: {', '.join(absent)}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        results, log = Path(scratch) / "results.jsonl", Path(scratch) / "log"
        results.touch()
        order = {
            "suite": asdict(suite),
            "adapter": "stock" if options.stock else suite.adapter,
            "folder": str(folder),
            "seed": options.seed,
            "scale": options.scale,
            "results": str(results),
            "ids": _lines(options.ids),
        }
        path = [str(ROOT), str(ROOT / "tests"), str(folder), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(path), "OUTSIDE": json.dumps(order)}
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(options.workers), "--dist", "worksteal"]
        command += [
            "-p",
            "outside.plugin",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            "-c",
            os.devnull,
        ]
        command += [*suite.arguments, *suite.paths]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=folder, env=os.environ | suite.environment | own, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(options.limit)
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        outcome = gather([json.loads(line) for line in results.read_text().splitlines()])
        if not outcome.sample:
            outcome.tail = "\n".join(log.read_text().splitlines()[-15:])
    outcome.seconds = time.monotonic() - start
    return outcome


def _lines(path: Path | None) -> list[str]:
    """The tests that a file names, each once."""
    lines = [] if path is None else path.read_text().splitlines()
    return list(dict.fromkeys(filter(None, map(str.strip, lines))))


def gather(lines: list[dict[str, Any]]) -> Outcome:
    """Collect the plugin's lines."""
    outcome = Outcome()
    for line in lines:
        if "collected" in line:
            outcome.collected, outcome.left_out = line["collected"], line["left_out"]
            outcome.sample = set(line["sample"])
        elif "calls" in line:
            outcome.calls[line["calls"]] = (line["served"], line["fell_through"])
        elif outcome.tests.get(line["test"], ("passed",))[0] != "failed":
            outcome.tests[line["test"]] = (line["outcome"], line["reason"])
    return outcome


def report(name: str, outcome: Outcome) -> None:
    """Print a suite's outcome."""
    if outcome.skipped:
        print(f"{name}: not run, {outcome.skipped}")
        return
    counts = outcome.counts()
    words = ", ".join(f"{counts[what]} {what}" for what in WHAT if counts[what])
    print(
        f"{name}: {words or 'nothing ran'}; {len(outcome.sample)} of {outcome.collected} in {outcome.seconds:.0f} s"
    )
    if outcome.tail:
        print(outcome.tail)
    for what in ("failed", "skipped"):
        for reason, count, first in outcome.reasons(what)[:12]:
            print(f"  {what} {count}: {reason}\n    {first}")
    for reason, count in outcome.fallen().most_common(12):
        print(f"  fell through {count} calls: {reason}")
    for test, count in outcome.left_out.items():
        print(f"  left out {count}: {test}")


WHAT = ("passed", "failed", "fell through", "skipped", "not reached")


def parser() -> argparse.ArgumentParser:
    """The command line's parser; --help lists the files that each suite needs."""
    files = "".join(
        f"\n  {name}: SUITES/{suite.folder}\n    {suite.source}"
        + (f"\n    modules: {', '.join(suite.needs)}" if suite.needs else "")
        for name, suite in SUITES.items()
    )
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"files, each below its repository's folder in SUITES:{files}",
    )
    parser.add_argument("folder", metavar="SUITES", type=Path, help="the folder with the suites' files")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the samples' sizes")
    parser.add_argument("--workers", type=int, default=4, help="processes")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each suite")
    parser.add_argument("--stock", action="store_true", help="run on what the suite was written for")
    parser.add_argument(
        "--ids", type=Path, metavar="FILE", help="instead of a sample: tests of one suite, a line each"
    )
    parser.add_argument("--json", type=Path, help="write everything into this file")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run and print; returns 1 if a test failed."""
    options = parser().parse_args(arguments)
    unknown = [name for name in options.names if name not in SUITES]
    if unknown:
        print(f"error: NAME is {unknown[0]!r}; accepted: {', '.join(SUITES)}", file=sys.stderr)
        return 2
    if options.ids is not None and (len(options.names) != 1 or not options.ids.is_file()):
        print(f"error: --ids is {str(options.ids)!r}; accepted: a file, with one NAME", file=sys.stderr)
        return 2
    found, failed = {}, False
    for name in options.names or SUITES:
        outcome = run_suite(SUITES[name], options.folder, options)
        report(name, outcome)
        sys.stdout.flush()
        failed |= outcome.counts()["failed"] > 0 or bool(outcome.tail)
        found[name] = {
            "counts": outcome.counts(),
            "skipped": outcome.skipped,
            "seconds": outcome.seconds,
            "tests": outcome.tests,
            "fell_through": outcome.fallen(),
            "left_out": outcome.left_out,
        }
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
