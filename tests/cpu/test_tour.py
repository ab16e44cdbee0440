"""The levels of the tour: how they compile, what they decline, how calls launch them, and the page about them."""

import json

import pytest
import torch

from cute_attn.compiler import compile, registry, toolchain
from cute_attn.compiler.smem_layouts import reasons
from cute_attn.host import backward
from cute_attn.host.call import Call
from cute_attn.lab.copies import conflicts
from cute_attn.lab.verdict import verdict
from tests import machine, notebook, refusals
from tour import notebooks, page, report
from tour.levels import LEVELS

OWN = {number: entry for number, entry in LEVELS.items() if number != 8}  # the eighth is the package's
BACKWARD = (9, 10)

# ---- files and kernels ----


NEW = {
    1: {"SHFL"},
    2: {"HMMA"},
    3: {"HMMA", "LDSM"},
    4: {"HMMA", "LDSM", "LDGSTS"},
    5: {"HGMMA", "UTMALDG"},
    6: {"HGMMA", "UTMALDG", "USETMAXREG"},
    7: {"HGMMA", "UTMALDG", "BAR"},
    9: {"HMMA", "LDSM", "LDGSTS", "RED"},
    10: {"HGMMA", "UTMALDG", "STSM", "REDG"},
}
"""A level's instructions; the seventh has named barriers."""
BUILT = [(number, 128, True) for number in OWN] + [(number, 64, False) for number in BACKWARD]


@pytest.mark.parametrize(("number", "head_dim", "causal"), BUILT)
def test_a_level_builds_without_spills_and_with_its_own_instructions(number, head_dim, causal):
    entry = OWN[number]
    compiled = compile(entry.traits(head_dim, causal), None, entry.arch if number > 8 else "sm90")
    used, count = compiled.resources, compiled.instructions
    assert (used.spill_store_bytes, used.spill_load_bytes, used.local_bytes) == (0, 0, 0)
    assert compiled.warnings == () and all(count.get(name) for name in NEW[number])
    assert used.shared_memory_bytes <= compiled.tile.smem_bytes(compiled.traits)
    if number < 8:
        others = {"HMMA", "HGMMA", "UTMALDG", "LDSM"} - NEW[number]
        assert not any(count.get(name) for name in others)
    else:
        assert verdict(compiled).step is not None


@pytest.mark.parametrize(("number", "head_dim", "causal"), BUILT)
def test_copies_are_counted_and_layouts_are_right(number, head_dim, causal):
    entry = OWN[number]
    kernel = entry.kernel(entry.traits(head_dim, causal), entry.kernel.TILE)
    assert not list(reasons(kernel))
    found = conflicts(kernel)
    assert {copy.ways for copy in found} <= {1}
    assert number > 8 or len(found) == (5 if number in (3, 4) else 0)


DECLINED = """
lookup("forward-sm80:tour3-fp16-d128") -> Unsupported: bf16, head dims 64 and 128
lookup("forward-sm90:tour5-bf16-d96") -> Unsupported: bf16, head dims 64 and 128
lookup("forward-sm90:tour7-bf16-d128-window") -> Unsupported: full or causal, nothing else
lookup("forward-sm90:tour6-bf16-d128-varlen") -> Unsupported: nothing else
lookup("backward-sm80:tour9-fp16-d128")
    -> Unsupported: bf16, head dims 64 and 128, full or causal, nothing else
lookup("backward-sm90:tour10-bf16-d128-causal-dropout")
    -> Unsupported: bf16, head dims 64 and 128, full or causal, nothing else
lookup(LEVELS[4].traits(), "num_stages=1", "sm90") -> Unsupported: num_stages is 1; accepted: 2 or more
lookup(LEVELS[3].traits(), "num_stages=2", "sm90") -> Unsupported: num_stages is 2; accepted: 1 alone
lookup(LEVELS[7].traits(), "tile_m=64", "sm90") -> Unsupported: tile_m is 64 with 8 warps; accepted: 128 with 8
lookup(LEVELS[2].traits(), "tile_n=24", "sm90") -> Unsupported: tile_n is 24; accepted: multiples of 16
lookup(LEVELS[6].traits(), "num_stages=4", "sm90") -> Unsupported: bytes of shared memory
lookup("backward-sm80:tour9-bf16-d64", "dq_vector=4", "sm90")
    -> Unsupported: accepted by this level: tile_m=64,tile_n=... alone
lookup("backward-sm90:tour10-bf16-d64", "tile_n=64", "sm90")
    -> Unsupported: accepted by this level: tile_m=64,tile_n=... alone
"""


@refusals.each(DECLINED)
def test_a_level_declines_in_one_sentence_what_it_does_not_compute(call, sentence):
    refusals.check(call, sentence, {"lookup": registry.lookup, "LEVELS": LEVELS})


def test_the_laboratory_takes_the_levels():
    """Each level's bound in clocks is below the previous level's, down to the bound by tensor cores."""
    judged = {
        number: verdict(compile(LEVELS[number].traits(128, True), None, "sm90")) for number in range(2, 8)
    }
    per_score = [max(one.step.clocks.pipes.values()) / one.step.scores for one in judged.values()]
    assert per_score == sorted(per_score, reverse=True) and len(set(per_score)) == 5
    assert judged[7].step.clocks.bound == "tensor cores" == judged[6].step.clocks.bound
    assert str(judged[7].proxies) == "none needed: no thread accesses what TMA fills"


@pytest.mark.parametrize("number", BACKWARD)
def test_a_call_that_names_a_level_launches_it_between_the_packages_kernels(number, monkeypatch):
    launched = []
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: launched.append(kernel))
    q, grad, k, v = (torch.zeros(2, 100, heads, 64, dtype=torch.bfloat16) for heads in (4, 4, 2, 2))
    call = Call(q, k, v, max_seqlen_q=100, max_seqlen_k=100, mask="causal", kernel=LEVELS[number].name)
    given = ((grad, None, q, torch.zeros(2, 4, 100)), (True, True, True, False, False))
    backward.gradients(call, *given)
    ops = ["backward_preprocess", "backward", "backward_convert"]
    assert [kernel.traits.op for kernel in launched] == ops
    assert type(launched[1]) is LEVELS[number].kernel
    assert launched[1].tile.mma_threads == launched[2].tile.mma_threads == 256
    with pytest.raises(
        ValueError, match=r"deterministic is True; accepted by \w+, whose gradients' bits vary: False"
    ):
        backward.gradients(call._replace(deterministic=True), *given)


# ---- the page ----


def test_the_page_is_of_todays_texts_and_numbers():
    facts = json.loads((page.ROOT / page.FACTS).read_text())
    assert (page.ROOT / page.PAGE).read_text() == page.page(facts, page.newest_result()), "make tour"
    assert facts["bank_conflict_ways"] == report.bank_conflict_ways() == {"swizzled": 1, "plain": 8}
    if facts["toolchain"] == toolchain():
        assert facts["levels"]["7"] == report.facts(LEVELS[7]), "make tour"


@pytest.mark.parametrize("entry", LEVELS.values(), ids=lambda entry: str(entry.number))
def test_a_levels_notebook_has_its_file_as_a_cell_and_its_outputs(entry):
    """A slow test of the examples checks that the outputs are current."""
    text = notebooks.path_of(entry).read_text()
    stored = json.loads(text)
    shown = [output for cell in notebook.cells(stored) for output in cell["outputs"]]
    sentences = ("clocks for 1,000 scores", "has no method step_content")
    assert any(sentence in str(one) for one in shown for sentence in sentences)
    assert str(page.ROOT) not in text and "<cell" not in text and len(text) < 130_000
    for cell in notebook.cells(stored):
        cell |= {"execution_count": None, "outputs": []}
    assert stored == notebooks.made(entry), "make tour"
    assert notebooks.source_of(entry) in "".join(notebook.cells(stored)[1]["source"])
