"""The doors of tests/fuzz on CUDA tensors: right, or refused in one sentence.

Kernels are built before, in processes that trace the same functions.
"""

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import gpu
from tests.fuzz.judge import Fault, judge

ROOT = Path(__file__).parents[2]
PARTS = 30
CASES = gpu.cases()


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Build the kernels, one group per core; to these processes the machine has no GPU."""
    jobs = os.cpu_count() or 1
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.fuzz", "--gpu", "--compile"]
    builds = [subprocess.Popen([*command, f"{i}/{jobs}"], cwd=ROOT, env=environment) for i in range(jobs)]
    assert [build.wait() for build in builds] == [0] * jobs


@pytest.mark.once
@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(part: int) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    faults = []
    for case in (one for calls in CASES[part::PARTS] for one in calls):
        try:
            outcomes[judge(case, "cuda").kind] += 1
        except Fault as fault:
            faults.append(f"{fault}\n{case!r}")
    assert not faults, f"{len(faults)} of {sum(outcomes.values())}\n" + "\n".join(faults[:5])
    assert outcomes["right"] > sum(outcomes.values()) / 3, outcomes
