"""Proxy fences in machine code: the check misses none that is taken out. ``test_defaults.py`` checks all defaults."""

from dataclasses import replace

import pytest

from cute_attn.compiler import compile
from cute_attn.lab.proxies import TmaPipeline, proxy_order
from cute_attn.lab.sass import BYTES, Code, Instruction
from tests.listings import instructions

FORWARD, BACKWARD = "forward-sm90-bf16-d64-causal", "backward-sm90-bf16-d64-causal-dropout"
"""Kernels that test_defaults.py builds too."""


def code_of(name: str) -> Code:
    return Code.of(compile(name, None, "sm90").cubin, name)


def without_fences(code: Code) -> Code:
    """The same code without its proxy fences."""

    def changed(i: Instruction) -> Instruction:
        return replace(i, opcode="NOP", modifiers=()) if i.name.startswith("FENCE.VIEW.ASYNC") else i

    return Code(tuple(map(changed, code.instructions)))


@pytest.mark.slow
def test_stored_tiles_without_fences_are_found():
    """O and dK are written by threads and stored by TMA, dQ is added by another warp's bulk reduction."""
    found = {i.opcode for i in unordered(without_fences(code_of(BACKWARD)))}
    assert {"UTMASTG", "SYNCS"} <= found
    assert "UTMASTG" in {i.opcode for i in unordered(without_fences(code_of(FORWARD)))}


FULL, EMPTY, OTHER = "[UR4+0x10]", "[UR4+0x18]", "[UR4+0x40]"
START = [f"SYNCS.EXCH.64 URZ,{barrier},UR6" for barrier in (FULL, EMPTY, OTHER)]
PRODUCER = [
    f"SYNCS.PHASECHK.TRANS64.TRYWAIT P0,{EMPTY},R2",
    f"SYNCS.ARRIVE.TRANS64 RZ,{FULL},R3",
    "UTMALDG.4D [UR8],[UR10],desc[URZ]",
]
WAIT = f"SYNCS.PHASECHK.TRANS64.TRYWAIT P0,{FULL},R2"
RELEASE = f"SYNCS.ARRIVE.TRANS64.A1T0 RZ,{EMPTY},RZ"
ARRIVE_AT_OTHER = f"SYNCS.ARRIVE.TRANS64.A1T0 RZ,{OTHER},RZ"
FENCE, READ = "FENCE.VIEW.ASYNC.S", "LDSM.16.M88.4 R80,[R76]"


def code(*lines: str) -> Code:
    """Instructions after a producer's of one pipeline."""
    return Code(instructions(*START, *PRODUCER, *lines, "EXIT"))


def address(n: int) -> str:
    """Address of the n-th line given to :func:`code`."""
    return f"{BYTES * (len(START) + len(PRODUCER) + n):#x}"


def unordered(code: Code) -> list[Instruction]:
    return [one.instruction for one in proxy_order(code).unordered]


def test_pipelines_are_found_by_their_producer():
    order = proxy_order(code(WAIT, RELEASE))
    assert order.pipelines == (TmaPipeline(0x10, 0x18),)
    assert (order.releases, order.by_threads, order.unordered) == (1, 0, ())


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((WAIT, READ, FENCE, RELEASE), []),
        ((WAIT, READ, RELEASE), [2]),
        ((WAIT, FENCE, READ, RELEASE), [3]),  # a fence before the read
        ((WAIT, READ, f"@P1 {FENCE}", RELEASE), [3]),  # one that some lanes may skip
        ((READ, WAIT, RELEASE), []),  # memory of something else
        ((WAIT, READ, ARRIVE_AT_OTHER, FENCE, RELEASE), []),
        ((WAIT, "STS [R4],R5", RELEASE), [2]),
        # On the path that skips the fence.
        ((WAIT, READ, f"@P1 BRA {BYTES * 11:#x}", FENCE, "NOP", RELEASE), [5]),
        # In a loop: the read of the first iteration, and the release of the second.
        ((WAIT, FENCE, RELEASE, WAIT, READ, f"@P1 BRA {BYTES * 8:#x}", FENCE, RELEASE), [2]),
    ],
)
def test_releases(lines, found):
    made = code(*lines)
    assert [f"{i.address:#x}" for i in unordered(made)] == [address(n) for n in found]
