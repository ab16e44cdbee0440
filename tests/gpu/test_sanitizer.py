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


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer on the path")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_small_problems_are_clean(tool):
    subprocess.run(
        COMMAND, check=True, timeout=300, cwd=ROOT
    )  # builds the kernels, which takes longer under a tool
    done = subprocess.run(
        ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *COMMAND),
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    report = [line[:200] for line in done.stdout.splitlines() if line.startswith("=====")]
    assert done.returncode == 0, "\n".join([*report[:30], "...", *report[-10:], done.stderr[-1000:]])
    cached, large = len(CACHED) * len(runnable_archs("kvcache")), len(runnable_archs())
    assert done.stdout.count("ran ") == len(NAMES) * len(runnable_archs("backward")) + cached + large


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer on the path")
def test_nothing_is_read_beyond_an_allocation():
    """Of unaligned rows; without its cache torch's allocator does not round sizes."""
    command, env = (*COMMAND, "ends"), os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    subprocess.run(command, check=True, timeout=300, cwd=ROOT, env=env)
    done = subprocess.run(
        ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *command),
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=env,
    )
    report = [line[:200] for line in done.stdout.splitlines() if line.startswith("=====")]
    assert done.returncode == 0, "\n".join([*report[:30], "...", *report[-10:], done.stderr[-1000:]])
    assert done.stdout.count("ran ") == len(ENDS)
