"""Verdicts: numbers worked out by hand, tiles that do not fit, source lines, users' kernels, and the command."""

import dataclasses
import inspect
import warnings

import pytest
import torch
from cutlass._mlir_helpers import op
from cutlass.base_dsl import dsl

from cute_attn import SpillWarning, Traits, compiler, score_mod
from cute_attn.compiler import registry
from cute_attn.lab.copies import conflicts
from cute_attn.lab.verdict import lines_of, verdict
from tests import toy

AMPERE, HOPPER = "forward-sm80-bf16-d64-causal", "forward-sm90-bf16-d128-causal"
SMALL = "forward-sm80-fp16-d32"
"""No other test builds it: other builds have no source lines."""


# ---- kernels ----


def test_an_ampere_forward():
    """128 queries by 96 keys at head dim 64 on an A100: 192 mma.sync of 4,096 operations in each of four warps."""
    one = verdict(AMPERE, target="sm80")
    assert one.fits and (one.spills_in_step, one.spills_outside, one.warnings) == (0, 0, ())
    assert (one.registers, one.shared_memory_bytes) == (255, 2 * 64 * (128 + 2 * 2 * 96))
    assert (one.blocks, one.limited_by) == (2, "shared memory")
    step = one.step
    assert (step.mma, step.exp2, step.elements, step.scores) == (192, 100, 96, 128 * 96)
    assert step.clocks.tensor == 2 * 2 * 128 * 96 * 64 / 2048
    assert step.clocks.special == 100 * 4 * 32 / 16
    assert step.clocks.issue == step.instructions * 4 / 4
    # Q, K and V by ldmatrix, four wavefronts each; K and V by cp.async.
    ldmatrix, cp_async = (4 * one.steady.count(name) * 4 for name in ("LDSM", "LDGSTS"))
    assert ldmatrix == 4 * (128 * 64 + 4 * 96 * 64 + 4 * 96 * 64) * 2 // 512
    assert cp_async == 2 * 96 * 64 * 2 // 128
    assert step.clocks.shared == ldmatrix + cp_async
    assert step.clocks.warp > step.instructions
    assert step.clocks.bound == "tensor cores"
    assert len(one.copies) == 7 and all(copy.ways == 1 for copy in one.copies)
    assert 8 < step.instructions / step.elements < 11


def test_a_hopper_forward():
    """128 queries by 128 keys at head dim 128: Q in registers, K and V read by each of two warpgroups."""
    one = verdict(HOPPER)
    step = one.step
    assert (one.blocks, one.limited_by) == (1, "shared memory")
    assert (step.mma, step.exp2, step.scores) == (16, 64, 128 * 128)
    assert step.clocks.tensor == 2 * 2 * 128 * 128 * 128 / 4096
    assert step.clocks.special == 64 * 8 * 2
    assert step.clocks.issue == step.instructions * 8 / 4
    assert step.clocks.shared == (2 * (32768 + 32768) + 2 * 32768) / 128  # reads of K and V; TMA's writes
    assert 4 < step.instructions / step.elements < 6


def test_every_copy_of_every_kernel_is_read(fresh_cache):
    """Small tiles spread the compile time; layouts of all kernels are read without compiling."""
    counts = {"forward-sm80-bf16-d128": 7, "forward-sm90-bf16-d128": 2}
    counts |= {"backward-sm80-bf16-d64": 11, "backward-sm80-bf16-d128": 12}
    counts |= dict.fromkeys(("backward-sm90-bf16-d128", "backward-sm90-bf16-d256"), 3)
    counts |= dict.fromkeys(("backward_convert-sm80-bf16-d64", "backward_convert-sm90-bf16-d64"), 1)
    for name, count in (counts | {"backward_preprocess-sm80-bf16-d64": 0}).items():
        found = conflicts(
            registry.lookup(name, "q_in_regs=true" if name.startswith("forward-sm90") else None)
        )
        assert len(found) == count, name
        assert all(copy.wavefronts == copy.minimum > 0 and copy.ways == 1 for copy in found), name
    plain = conflicts(registry.lookup("forward-sm80-bf16-d64", "swizzle_bits=0"))
    ways = {copy.name: copy.ways for copy in plain if copy.opcode == "LDSM"}
    assert ways == dict.fromkeys(("Q by ldmatrix", "K by ldmatrix", "V by ldmatrix.trans"), 8)


@pytest.mark.parametrize(("head_dim", "in_bulk"), [(64, True), (128, False)])
def test_additions_to_dq_are_counted_from_registers_and_in_bulk(head_dim, in_bulk):
    """The kernels are ones that test_defaults.py builds too."""
    name = f"backward-sm90-bf16-d{head_dim}-causal"
    one, tile = verdict(name), registry.lookup(Traits.parse(name)).tile
    assert tile.dq_bulk == in_bulk and one.step.clocks.additions == 4 * tile.tile_m * head_dim / 32
    assert "clocks per step: additions" in str(one)


def test_a_tile_that_does_not_fit_says_why():
    one = verdict("forward-sm80-bf16-d64", "tile_n=512", "sm80", refuse=False)
    assert not one.fits and one.step is None and one.reason.endswith("sm80 has 166912")
    assert "fits" in str(one) and "no: tile tile_m=128,tile_n=512" in " ".join(str(one).split())


def test_a_users_kernel_without_a_step_says_so(fresh_cache):
    compiled = compiler.compile(toy.NAME, target="sm80")
    one = verdict(compiled)
    assert one.step is None and one.no_step == "not known: Toy has no method step_content"
    assert one.instructions == sum(compiled.instructions.values()) and one.copies == ()
    assert one.blocks == 16 and one.limited_by == "warps"
    with pytest.raises(
        ValueError, match=r"tile is 'values=8' and target None; accepted with a compiled kernel"
    ):
        verdict(compiled, "values=8")


def test_a_verdict_counts_spills_and_does_not_warn_of_them(fresh_cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpillWarning)
        assert verdict(toy.NAME, "values=256", "sm80").spills_outside > 10


# ---- source lines ----


@pytest.fixture
def source_locations(quick_builds, monkeypatch):
    """Builds with the source line of each operation, as outside the tests."""
    monkeypatch.setattr(dsl, "_set_enable_frame_filtering", op._set_enable_frame_filtering)
    yield
    op._set_enable_frame_filtering(False)


@pytest.mark.slow
def test_source_lines_and_the_same_machine_code(source_locations):
    plain, lined = verdict(SMALL, target="sm80"), verdict(SMALL, target="sm80", lines=True)
    code = [dataclasses.replace(i, file="", line=0) for i in lined.code.instructions]
    assert code == list(plain.code.instructions)
    assert plain.lines == () and dataclasses.replace(lined, lines=()) == plain
    assert len(lined.lines) > 5
    assert all(line.source and line.instructions > 0 for line in lined.lines)
    listed = [line.instructions for line in lined.lines]
    assert listed == sorted(listed, reverse=True) and sum(listed) <= lined.step.instructions
    (exp2,) = (line for line in lined.lines if line.source == "return cute.math.exp2(x, fastmath=True)")
    assert exp2.place.startswith("device/math.py:") and exp2.instructions >= lined.step.exp2
    assert {line.place.partition(":")[0] for line in lined.lines} >= {"device/gemm.py", "device/copy.py"}
    assert verdict(compiler.compile(SMALL, target="sm80"), lines=True).lines == lined.lines


@score_mod("capped_in_lines", example=lambda batch, nheads, *_: (torch.ones(nheads),))
def capped_in_lines(score, b, h, q, k, slopes):
    capped = torch.tanh(score * 0.25)
    return torch.where(
        (q ^ k) % 3 == 0,
        capped + slopes[h] * (q - k),
        score,
    )


def test_instructions_of_a_function_have_the_lines_of_its_source(source_locations):
    name = f"{SMALL}-capped_in_lines"
    plain, lined = verdict(name, target="sm80"), verdict(name, target="sm80", lines=True)
    assert dataclasses.replace(lined, lines=()) == plain
    lines = lines_of(lined.steady)
    others = [line for line in lines if line.place.startswith("epilogues/functions/")]
    # Positions, which all lines of the function share.
    assert all("tile.row0" in line.source or "tile.col0" in line.source for line in others)
    own = {line.source: line.instructions for line in lines if line.place.startswith("test_verdict.py:")}
    assert {*own} == {
        "capped = torch.tanh(score * 0.25)",
        "return torch.where(",
        "(q ^ k) % 3 == 0,",
        "capped + slopes[h] * (q - k),",
    }
    assert sum(own.values()) > 4 * lined.step.elements
    tanh = {(i.file, i.line) for i, _ in lined.steady.instructions if i.name == "MUFU.RCP"}
    assert tanh == {(__file__, inspect.getsourcelines(capped_in_lines)[1] + 2)}


def test_the_place_of_a_function_is_part_of_a_key_only_with_lines():
    def keys(text):
        written = {"__name__": __name__}
        exec(compile(text, "written.py", "exec"), written)
        score_mod("written_twice")(written["plus"])
        kernel = registry.lookup(Traits.parse(f"{SMALL}-written_twice"), None, "sm80")
        return [compiler.key_of(kernel, "sm80", lines=lines) for lines in (False, True)]

    text = "def plus(score, b, h, q, k):\n    return score + q\n"
    (key, lined), (same, moved) = keys(text), keys(f"\n{text}")
    assert key == same and lined != moved and keys(text) == [key, lined]
