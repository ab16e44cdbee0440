"""Kernels exported for C++, and examples/cpp built on them; for tests with a GPU and without one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cute_attn.lab import bundles, exports
from tests import processes

NAMES = [
    "forward-sm90-bf16-d128-causal",
    "backward-sm90-bf16-d128-causal",
    "kvcache-sm90-bf16-d128-causal-seqused_k-paged",
]
EXAMPLE = processes.ROOT / "examples" / "cpp"


def export(folder: Path):
    """The kernels that the example calls."""
    return exports.export(bundles.named_requests(NAMES, "", ["sm90"]), folder)


def build_example(kernels: Path, build: Path) -> Path:
    """Build the example's program; skips without CMake, or without a CUDA toolkit that CMake finds."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    ffi = subprocess.run(
        [sys.executable, "-m", "tvm_ffi.config", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    settings = [f"-DKERNELS={kernels}", f"-Dtvm_ffi_ROOT={ffi}", f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run(["cmake", "-S", EXAMPLE, "-B", build, *settings], capture_output=True, text=True)
    if "Could NOT find CUDAToolkit" in done.stderr:
        pytest.skip("no CUDA toolkit")
    assert done.returncode == 0, done.stderr
    done = subprocess.run(["cmake", "--build", build], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return build / "example"
