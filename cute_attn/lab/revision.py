"""The verdict on a kernel as another git revision of this package builds it."""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

from cute_attn.compiler import registry
from cute_attn.compiler.cubin import Resources
from cute_attn.kernels.base import StepContent
from cute_attn.lab.copies import Conflicts
from cute_attn.lab.sass import Code
from cute_attn.lab.verdict import Verdict, content_of, judge
from cute_attn.traits import Traits

ROOT = Path(__file__).resolve().parents[2]
BUILD_AT = Path(__file__).with_name("build_at.py")


def verdict_at(revision: str, kernel: Traits | str, tile: str = "", target: str | None = None) -> Verdict:
    """The verdict on a revision's kernel, with its source lines. Bank conflicts of old revisions are not counted.

    The revision, from this package's git repository, is checked out into a temporary folder. A process builds the
    kernel there. ``tile`` changes fields of the revision's default tile.

    Raises:
        ValueError: there is no such revision, it cannot build the kernel, or the kernel is a variant or has users'
            epilogues.
    """
    traits = Traits.of(kernel)
    if traits.variant or traits.epilogues:
        raise ValueError(
            f"{traits} is not the package's own; accepted with a revision: kernels without a variant or an epilogue of "
            "yours, whose versions under two names `diff NAME OTHER_NAME` compares"
        )
    with tempfile.TemporaryDirectory(prefix="cute_attn-") as folder:
        sources, result = Path(folder) / "sources", Path(folder) / "result"
        result.mkdir()
        _check_out(revision, sources)
        command = [sys.executable, "-P", str(BUILD_AT), traits.name, tile, target or "", str(result)]
        environment = os.environ | {"PYTHONPATH": str(sources), "CUTE_DSL_LINEINFO": "1"}
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
            raise ValueError(f"{traits} could not be built at {revision}: {last}")
        facts = json.loads((result / "kernel.json").read_text())
        stated, used = facts.pop("content"), Resources(**facts.pop("resources"))
        names = {one.name for one in fields(Conflicts)}
        copies = [{name: one[name] for name in names & one.keys()} for one in facts.pop("copies")]
        built = SimpleNamespace(**facts, ptx=(result / "kernel.ptx").read_text(), resources=used)
        code = Code.of((result / "kernel.cubin").read_bytes(), traits.name, sources)
        if stated is None:  # an old one; today's kernel with that tile does
            content = content_of(registry.lookup(traits, built.tile, built.target))
        else:
            content = StepContent(**stated | {"loops": tuple(map(tuple, stated["loops"]))})
        found = judge(built, code, content, tuple(Conflicts(**one) for one in copies))
        return replace(found, revision=revision)


def _check_out(revision: str, folder: Path) -> None:
    commit = _git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    if not commit:
        raise ValueError(f"revision is {revision!r}; accepted: a commit of the git repository of {ROOT}")
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit))) as archive:
        archive.extractall(folder, filter="data")


def _git(*arguments: str) -> bytes:
    """The output of git, empty if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else b""
