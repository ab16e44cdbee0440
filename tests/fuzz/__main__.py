"""python -m tests.fuzz --cases 1000 --seed 1: draw, judge, shrink what fails, and count outcomes."""

import argparse
import collections
import contextlib
import io
import os
import random
import re
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


def _kind(fault: str) -> str:
    return re.sub(r"[\d.e+-]+", "", fault)[:60]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument(
        "--emulated", type=int, default=0, help="how many of their functions also run as device code"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--door", action="append", help="only these doors")
    parser.add_argument("--known", action="append", default=[], help="also draw rules of this known fault")
    parser.add_argument("--case", help="judge one Case(...), as a failure prints it")
    parser.add_argument("--show", help="print cases whose detail has this text")
    parser.add_argument("--floor", type=float, help="another absolute error of fp64 that is allowed")
    options = parser.parse_args()
    from tests import quick_builds
    from tests.fuzz import emulated
    from tests.fuzz.case import Case, draw_case
    from tests.fuzz.doors import DOORS
    from tests.fuzz.grammar import Choices
    from tests.fuzz.judge import FLOOR, Fault, judge, shrunk

    if options.floor:
        FLOOR["fp64"] = options.floor

    quick_builds.apply()
    if options.case:
        print(judge(eval(options.case, {"Case": Case})))
        return 0
    doors = {name: door for name, door in DOORS.items() if not options.door or name in options.door}
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in doors}
    details: collections.Counter[str] = collections.Counter()
    faults: collections.Counter[str] = collections.Counter()

    def draw(data: bytes) -> Case:
        return draw_case(Choices(data), doors, options.known)

    def fault_of(case: Case, by: Any, counted: bool = False) -> str:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                outcome = by(case)
        except Fault as fault:
            return str(fault)
        if counted:
            who = case.door if by is judge else "emulated"
            counts.setdefault(who, collections.Counter())[outcome.kind] += 1
            details[f"{outcome.kind}: {outcome.detail}"[:150]] += 1
            if options.show and options.show in outcome.detail:
                print(repr(case), outcome, flush=True)
        return ""

    def report(number: int, data: bytes, by: Any) -> None:
        """Print a fault, and the smallest case of the same kind."""
        fault = fault_of(draw(data), by, True)
        if fault:
            kind, door = _kind(fault), draw(data).door
            faults[kind] += 1
            if faults[kind] > 3:
                return
            found = draw(shrunk(data, draw, lambda x: x.door == door and _kind(fault_of(x, by)) == kind))
            print(f"{options.seed}/{number}: {fault}\n    {found!r}\n    {fault_of(found, by)}", flush=True)

    emulations = options.emulated
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(options.cases):
            data = random.Random(options.seed * 1_000_003 + number).randbytes(1200)
            report(number, data, judge)
            if emulations and (draw(data).score or draw(data).mask):
                emulations -= 1
                report(number, data, emulated.judge)
    for kind, times in faults.items():
        print(f"{times:6} faults: {kind}")
    for name, count in counts.items():
        print(f"{name:26}", dict(count))
    for detail, count in details.most_common(60):
        print(f"{count:6} {detail}")
    return faults.total()


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
