"""python -m tests.fuzz --cases 1000 --seed 1: draw, judge, shrink what fails, and count outcomes."""

import argparse
import collections
import contextlib
import io
import os
import random
import re
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--cases", type=int, default=1000)
    add("--emulated", type=int, default=0, help="how many of their functions also run as device code")
    add("--seed", type=int, default=0)
    add("--door", action="append", help="only these doors")
    add("--fault", action="append", help="of grammar.FAULTS draw these alone")
    add("--case", help="judge one Case(...), as a failure prints it")
    add("--show", help="print cases whose outcome has this text")
    add("--gpu", action="store_true", help="the GPU's cases, on a GPU")
    add("--compile", metavar="PART/PARTS", help="with --gpu: build a share of their kernels, without a GPU")
    return parser.parse_args()


class Runner:
    """Judges cases, prints the failing ones, and counts."""

    def __init__(self, show: str | None) -> None:
        self.show = show
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.details: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()

    def fault(self, case: Any, by: Callable[[Any], Any], counted: str = "") -> str:
        """The fault of a case, or "". counted: the name under which the case is counted."""
        from tests.fuzz.judge import Fault

        try:
            with contextlib.redirect_stdout(io.StringIO()):
                outcome = by(case)
        except Fault as fault:
            return str(fault)
        if counted:
            self.counts[counted][outcome.kind] += 1
            self.details[f"{outcome.kind}: {outcome.detail}"[:150]] += 1
            if self.show and self.show in f"{outcome.kind}: {outcome.detail}":
                print(repr(case), outcome, flush=True)
        return ""

    def run(self, case: Any, by: Callable[[Any], Any], name: str, smallest: Any = None) -> None:
        """smallest: from a function that tells whether a case fails in the same way, finds the smallest such case."""
        fault = self.fault(case, by, name)
        if fault:
            kind = _kind(fault)
            self.faults[kind] += 1
            if self.faults[kind] <= 3:  # the same over and over tells nothing
                print(f"{fault}\n    {case!r}", flush=True)
                if smallest is not None:
                    found = smallest(lambda x: x.door == case.door and _kind(self.fault(x, by)) == kind)
                    print(f"    {found!r}\n    {self.fault(found, by)}", flush=True)

    def summary(self) -> int:
        for name, count in self.counts.items():
            print(f"{name:26}", dict(count))
        for detail, times in self.details.most_common(40):
            print(f"{times:6} {detail}")
        for kind, times in self.faults.items():
            print(f"{times:6} faults: {kind}")
        return min(self.faults.total(), 1)


def _kind(fault: str) -> str:
    return re.sub(r"[\d.e+-]+", "", fault)[:60]


def main() -> int:
    options = _options()
    from tests import quick_builds
    from tests.fuzz import emulated, gpu
    from tests.fuzz.case import Case, draw_case
    from tests.fuzz.doors import DOORS
    from tests.fuzz.grammar import DRAWN, Choices
    from tests.fuzz.judge import judge, shrunk

    runner = Runner(options.show)
    if options.compile:
        print(gpu.build(*map(int, options.compile.split("/"))), "kernels")
        return 0
    quick_builds.apply()
    if options.case:
        print(judge(eval(options.case, {"Case": Case}), "cuda" if options.gpu else "cpu"))
        return 0
    doors = {name: door for name, door in DOORS.items() if not options.door or name in options.door}
    with contextlib.suppress(KeyboardInterrupt):
        if options.gpu:
            for case in (one for calls in gpu.cases() for one in calls):
                runner.run(case, lambda case: judge(case, "cuda"), case.door)
            return runner.summary()
        for number in range(options.cases):
            data = random.Random(options.seed * 1_000_003 + number).randbytes(1200)

            def draw(data: bytes) -> Case:
                return draw_case(Choices(data), doors, options.fault or DRAWN)

            def smallest(fails: Any, data: bytes = data) -> Case:
                return draw(shrunk(data, draw, fails))

            case = draw(data)
            runner.run(case, judge, case.door, smallest)
            if options.emulated and (case.score or case.mask):
                options.emulated -= 1
                runner.run(case, emulated.judge, "emulated", smallest)
    return runner.summary()


if __name__ == "__main__":
    raise SystemExit(main())
