"""The parser of machine code: instructions, control bits, source lines, loops, and the steady step of every default."""

import pytest

from cute_attn.compiler import compile, cubin
from cute_attn.kernels.base import StepContent
from cute_attn.lab.sass import BYTES, Code, Loop, StepNotFound
from tests import toy
from tests.listings import instructions


def test_instructions_are_those_of_the_text(fresh_cache):
    compiled = compile(toy.NAME, target="sm80")
    code = Code.of(compiled.cubin)
    counts: dict[str, int] = {}
    for i in code.instructions:
        counts[i.opcode] = counts.get(i.opcode, 0) + 1
    assert counts == compiled.instructions
    assert [i.address for i in code.instructions] == list(range(0, BYTES * len(code.instructions), BYTES))
    assert not any(i.file or i.line for i in code.instructions)  # built without line info
    names = {i.name for i in code.instructions}
    assert "LDG.E" in names and all(1 <= i.stall <= 15 for i in code.instructions if i.opcode == "FFMA")


def at(n: int) -> str:
    return hex(BYTES * n)


NESTED = Code(
    instructions(
        "MOV R0, RZ",
        "LDSM.16.M88.4 R4, [R2]",  # 1: outer loop
        "HMMA.16816.F32 R8, R4, R6, R8",  # 2: inner loop
        f"@P1 BRA {at(2)}",
        "MUFU.EX2 R8, R8",
        f"@P2 BRA {at(8)}",
        "LDGSTS.E.BYPASS.128 [R2], [R4]",  # 6: the next load, if there is one
        "IADD3 R1, R1, 1",
        f"@P3 BRA {at(12)}",  # 8: no mask
        "FSEL R8, R8, P0",
        "FSEL R9, R9, P0",
        "NOP",
        "MUFU.EX2 R9, R9",  # 12
        f"@P0 BRA {at(1)}",
        "EXIT",
    ),
    "a listing",
)


def test_loops_nest():
    inner, outer = Loop(32, frozenset({32})), Loop(16, frozenset({16, 32, 64, 96, 128, 144, 192}))
    assert NESTED.loops == (outer, inner)


def test_a_steady_step_repeats_products_starts_loads_and_skips_masks():
    step = NESTED.step(StepContent(mma=4, exp2=2, elements=8, warps=4, loops=((1, 4),)))
    counts = {name: step.count(name) for name in ("HMMA", "MUFU.EX2", "LDGSTS", "FSEL", "LDSM")}
    assert counts == {"HMMA": 4, "MUFU.EX2": 2, "LDGSTS": 1, "FSEL": 0, "LDSM": 1}
    assert step.count() == step.stalls == 1 + 2 * 4 + 2 + 2 + 1 + 2
    assert step.steps == 1


def test_a_step_that_is_not_there_is_one_sentence():
    with pytest.raises(StepNotFound) as error:
        NESTED.step(StepContent(mma=16, exp2=64, elements=64, warps=8))
    assert str(error.value) == (
        "the step was not found: no loop of a listing has 16 matrix instructions and 64 MUFU.EX2 a step, which its "
        "step_content states"
    )


@pytest.mark.parametrize(
    ("disassembled", "message"),
    [([{}], "nvdisasm's JSON has an unknown form"), ([{}, [{}, {}]], "has 2 kernels; accepted: one")],
)
def test_what_is_not_the_code_of_one_kernel_is_refused(monkeypatch, disassembled, message):
    monkeypatch.setattr(cubin, "disassemble_json", lambda cubin: disassembled)
    monkeypatch.setattr(cubin, "sections", lambda cubin: [])
    with pytest.raises(ValueError, match=message):
        Code.of(b"")
