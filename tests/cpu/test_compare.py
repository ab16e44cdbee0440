"""Differences of two kernels: opcodes, source lines, aligned steps, another revision, and the command."""

import subprocess

import pytest

from cute_attn import compiler
from cute_attn.lab import revision
from cute_attn.lab.compare import MOST_ROWS, Row, compare
from cute_attn.lab.sass import Loop, Step
from cute_attn.lab.verdict import Verdict, verdict
from cute_attn.traits import Traits
from tests import refusals, toy
from tests.listings import instructions

SMALL = "forward-sm80-bf16-d32-causal"


def step(*lines: str, line: int = 0) -> Step:
    """Instructions such as ``"FADD R1, R2"``, once each; all from one source line."""
    made = instructions(*lines, file=__file__, line=line)
    return Step(Loop(0, frozenset({0})), tuple((i, 1) for i in made), 1)


def of(steady: Step | None, name: str = "a kernel") -> Verdict:
    return Verdict(name, "sm80", "tile_n=64", steady=steady)


# ---- steps ----


def test_what_was_added_is_beside_nothing():
    a = step("MUFU.EX2 R1, R2", "FADD R3, R1", "BRA 0x0", line=3)
    b = step("MUFU.EX2 R5, R6", "FMNMX R4, R5", "FMNMX R4, R6", "FADD R3, R5", "BRA 0x0", line=5)
    found = compare(of(a), of(b))
    assert found.rows == (
        Row("MUFU.EX2 R1, R2", "MUFU.EX2 R5, R6", True),
        Row("", "FMNMX R4, R5", False),
        Row("", "FMNMX R4, R6", False),
        Row("FADD R3, R1", "FADD R3, R5", True),
        Row("BRA 0x0", "BRA 0x0", True),
    )
    assert [(one.what, one.change) for one in found.opcodes] == [("FMNMX", 2)]
    changes = {one.what.partition("  ")[2]: one.change for one in found.lines}
    assert changes == {"import subprocess": -3, "import pytest": 5}  # lines of this file
    assert found.as_dict()["rows"][1] == {"a": "", "b": "FMNMX R4, R5", "same": False}


@pytest.mark.slow
def test_two_tiles_of_a_kernel():
    """Half as many keys per step: half of the products and exponentials."""
    found = compare(verdict(SMALL, target="sm80"), verdict(SMALL, "tile_n=64", "sm80"))
    changes = {one.what: (one.a, one.b) for one in found.opcodes}
    assert changes["HMMA.16816.F32.BF16"] == (128, 64) and changes["MUFU.EX2"] == (132, 68)
    assert found.lines == () and len(found.rows) > 100
    assert "steady steps, registers' numbers ignored" in str(found)
    excerpt = shown_rows(found.shown(verbose=True))
    assert len(excerpt) > MOST_ROWS and shown_rows(found.shown()) == excerpt[:MOST_ROWS]
    left = f"{len(excerpt) - MOST_ROWS} more rows are left out; `cute-attn diff -v` shows all"
    assert left in " ".join(str(found).split())
    assert "<pre" in found._repr_html_() and "tile_n=64" in found._repr_html_() and len(repr(found)) < 400


def shown_rows(parts):
    """The rows of the last table, two cells each, as text."""
    *_, table = parts.renderables
    return list(zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True))


# ---- another revision ----

OLD_PACKAGE = {
    "__init__.py": """
import os
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from cute_attn.step import Kernel

FIELDS = "registers", "shared_memory_bytes", "spill_store_bytes", "spill_load_bytes", "local_bytes"
Used = make_dataclass("Used", FIELDS)

def compile(traits, tile, target):
    if tile == "values=0":
        raise ValueError("values is 0; accepted: 1 or more")
    assert os.environ["CUTE_DSL_LINEINFO"] == "1"
    return SimpleNamespace(
        name=traits.name, target=target, tile=tile, resources=Used(40, 512, 0, 0, 0), warnings=(),
        cubin=Path(__file__).with_name("old.cubin").read_bytes(), ptx=".reqntid 128, 1, 1",
    )

def lookup(traits, tile, target):
    return Kernel()
""",
    "traits.py": """
from types import SimpleNamespace

class Traits:
    parse = staticmethod(lambda name: SimpleNamespace(name=name))
""",
    "step.py": """
from dataclasses import make_dataclass

Content = make_dataclass("Content", ("mma", "exp2", "elements", "warps", "loops", "async_bytes"))

class Kernel:
    def step_content(self):
        return Content(7, 1, 8, 4, ((1, 2),), 0)
""",
    "lab/copies.py": """
from dataclasses import make_dataclass

FIELDS = "name", "opcode", "wavefronts", "minimum", "ways", "no_longer_there", "reason"

def conflicts(kernel):
    return (make_dataclass("Counted", FIELDS)("K by ldmatrix", "LDSM", 8, 2, 4, "", ""),)
""",
}


@pytest.fixture
def old_revision(fresh_cache, tmp_path, monkeypatch):
    """A git repository with another version of the package, as its revision HEAD."""
    package = tmp_path / "repository" / "cute_attn"
    (package / "lab").mkdir(parents=True)
    for name, text in OLD_PACKAGE.items():
        (package / name).write_text(text)
    (package / "old.cubin").write_bytes(compiler.compile(toy.NAME, target="sm80").cubin)
    git = ("git", "-C", str(package.parent), "-c", "user.name=n", "-c", "user.email=e")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "old")):
        subprocess.run((*git, *arguments), check=True)
    monkeypatch.setattr(revision, "ROOT", package.parent)


def test_a_revision_is_built_from_its_own_sources(old_revision):
    traits = Traits.parse("forward-sm80-bf16-d64")
    found = revision.verdict_at("HEAD", traits, "values=8", "sm80")
    assert (found.name, found.tile, found.registers, found.revision) == (traits.name, "values=8", 40, "HEAD")
    assert "no loop of forward-sm80-bf16-d64 has 7 matrix instructions and 1 MUFU.EX2" in found.no_step
    assert found.instructions > 20 and "values=8 at HEAD" in str(found)
    assert [(one.name, one.ways) for one in found.copies] == [("K by ldmatrix", 4)]


WRONG = """
old("forward-sm80-bf16-d64", "", "nonsense")
    -> ValueError: revision is 'nonsense'; accepted: a commit of the git repository
old("forward-sm80-bf16-d64", "", "--output=written") -> ValueError: revision is '--output=...'; accepted: a commit
old("forward-sm80-bf16-d64", "values=0", "HEAD")
    -> ValueError: could not be built at HEAD: values is 0; accepted: 1 or more
old(toy.NAME, "", "HEAD") -> ValueError: accepted with a revision: kernels without a variant
compare(toy.NAME, 3)
    -> TypeError: a is 'forward-sm80:toy-bf16-d64'; accepted: what cute_attn.lab.verdict.verdict returns
"""


def old(name, tile, at):
    return revision.verdict_at(at, name, tile, "sm80")


@refusals.each(WRONG)
def test_a_wrong_revision_is_one_sentence(old_revision, call, sentence):
    refusals.check(call, sentence, globals())
    assert not list(revision.ROOT.glob("written*"))  # a revision is no option of git
