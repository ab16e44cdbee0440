"""A bundle on a GPU, in a process without nvidia-cutlass-dsl: training, decoding and a drop-in, with no build."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import checks, exported
from tests.gpu import bundled
from tests.gpu.archs import runnable_archs

ROOT = Path(__file__).parents[2]


def python(*arguments: object, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program's results with a compiler and without one, the list of its kernels, and the bundle of them."""
    folder = tmp_path_factory.mktemp("bundle")
    program = ("-m", "tests.gpu.bundled")
    python(
        *("-m", "cute_attn", "run", "--json", folder / "run.json", *program, folder / "compiled.pt"),
        CUTE_ATTN_BUNDLE="0",
    )
    python("-m", "cute_attn", "bundle", "--like", folder / "run.json", "-o", folder / "bundle")
    listed = python(
        *(*program, folder / "bundled.pt", "--without-compiler"),
        CUTE_ATTN_BUNDLE=str(folder / "bundle"),
        CUTE_ATTN_CACHE_DIR=str(folder / "no-cache"),
    )
    (folder / "bundled.txt").write_text(listed)
    return folder


@pytest.fixture(scope="module")
def exact() -> dict[str, torch.Tensor]:
    """Results by the definition, in float64."""
    return bundled.results("cpu", torch.float64)


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    """Results in plain torch, in bf16."""
    return bundled.results("cpu", torch.bfloat16)


NAMES = ["out", "dq", "dk", "dv", *(f"step {i}" for i in range(bundled.STEPS)), "latent", "sdpa"]


@pytest.mark.parametrize("name", NAMES)
def test_results_are_the_definitions(name, folder, exact, plain):
    found = torch.load(folder / "bundled.pt")
    factor = checks.GRADIENT if name.startswith("d") else checks.FORWARD
    checks.check(name, found[name], exact[name], plain[name], factor=factor)


def test_results_are_those_of_kernels_that_are_built(folder):
    built, found = (torch.load(folder / f"{name}.pt") for name in ("compiled", "bundled"))
    assert set(found) == {*NAMES, "cache"}
    for name, x in built.items():
        assert torch.equal(x, found[name]), name


def test_the_bundle_has_what_the_program_needed(folder):
    kernels = json.loads((folder / "run.json").read_text())["kernels"]
    needed = sorted(f"{one['name']} {one['tile']} {one['target']}" for one in kernels)
    assert (folder / "bundled.txt").read_text().split("\n")[:-1] == needed
    ops = {one["name"].partition("-")[0] for one in kernels}
    assert ops >= {"forward", "backward", "backward_preprocess", "backward_convert", "append", "kvcache"}
    assert not (folder / "no-cache").exists()


@pytest.mark.skipif("sm90" not in runnable_archs(), reason="the example's kernels are Hopper's")
def test_a_program_in_cpp(tmp_path):
    exported.export(tmp_path / "kernels")
    program = exported.build_example(tmp_path / "kernels", tmp_path / "build")
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
