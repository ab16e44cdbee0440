"""compute-sanitizer on small problems: no access out of bounds, no race on shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.archs import runnable_archs
from tests.gpu.sanitized import CACHED, ENDS, NAMES

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "tests.gpu.sanitized")


ENDS_ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Without its cache, torch's allocator does not round sizes, so any read past unaligned rows is detected."""
RUNS = [("memcheck", (), {}), ("racecheck", (), {}), ("memcheck", ("ends",), ENDS_ALONE)]


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer on the path")
@pytest.mark.parametrize(("tool", "which", "variables"), RUNS, ids=["memcheck", "racecheck", "ends"])
def test_small_problems_are_clean(tool, which, variables):
    command, options = (*COMMAND, *which), {"cwd": ROOT, "env": os.environ | variables}
    subprocess.run(
        command, check=True, timeout=300, **options
    )  # builds the kernels, which a tool makes slower
    done = subprocess.run(
        ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command),
        capture_output=True,
        text=True,
        timeout=600,
        **options,
    )
    report = [line[:200] for line in done.stdout.splitlines() if line.startswith("=====")]
    assert done.returncode == 0, "\n".join([*report[:30], "...", *report[-10:], done.stderr[-1000:]])
    cached, large = len(CACHED) * len(runnable_archs("kvcache")), len(runnable_archs())
    all_of_them = len(NAMES) * len(runnable_archs("backward")) + cached + large
    assert done.stdout.count("ran ") == (len(ENDS) if which else all_of_them)
