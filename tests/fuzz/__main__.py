"""python -m tests.fuzz --cases 1000 --seed 1: draw, judge, shrink what fails, and count outcomes."""

import argparse
import collections
import contextlib
import io
import os
import random
import re

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--door", action="append", help="only these doors")
    parser.add_argument("--known", action="append", default=[], help="also draw rules of this known fault")
    parser.add_argument("--case", help="judge one Case(...), as a failure prints it")
    options = parser.parse_args()
    from tests.fuzz.case import Case, draw_case
    from tests.fuzz.doors import DOORS
    from tests.fuzz.grammar import Choices
    from tests.fuzz.judge import Fault, judge, shrunk

    if options.case:
        print(judge(eval(options.case, {"Case": Case})))
        return 0
    doors = {name: door for name, door in DOORS.items() if not options.door or name in options.door}
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in doors}
    details: collections.Counter[str] = collections.Counter()
    failures = 0

    def draw(data: bytes) -> Case:
        return draw_case(Choices(data), doors, options.known)

    def fault_of(case: Case) -> str:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                outcome = judge(case)
        except Fault as fault:
            return str(fault)
        counts[case.door][outcome.kind] += 1
        details[f"{outcome.kind}: {outcome.detail}"[:150]] += 1
        return ""

    for number in range(options.cases):
        data = random.Random(options.seed * 1_000_003 + number).randbytes(600)
        fault = fault_of(draw(data))
        if fault:
            failures += 1
            kind = re.sub(r"[\d.e+-]+", "", fault)[:60]
            own = draw(data).door
            found = draw(shrunk(data, draw, lambda x: x.door == own and re.sub(r"[\d.e+-]+", "", fault_of(x))[:60] == kind))
            print(f"{options.seed}/{number}: {fault}\n    {found!r}\n    {fault_of(found)}", flush=True)
    for name, count in counts.items():
        print(f"{name:26}", dict(count))
    for detail, count in details.most_common(60):
        print(f"{count:6} {detail}")
    return failures


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
