"""The levels of the tour: what they compile to and decline, and the page about them."""

import json

import pytest

from cute_attn.compiler import compile, registry, toolchain
from cute_attn.compiler.smem_layouts import reasons
from cute_attn.lab.copies import conflicts
from cute_attn.lab.verdict import verdict
from tests import notebook
from tour import notebooks, page, report
from tour.common import with_epilogue
from tour.levels import LEVELS

OWN = range(1, 8)  # the eighth is the package's


def kernel_of(number, causal=True, head_dim=64, score_mod=None):
    traits = LEVELS[number].traits(head_dim, causal)
    cls = LEVELS[number].kernel
    if score_mod is not None:
        cls = with_epilogue(cls, score_mod)
    return cls(traits, cls.TILE)


# ---- files and kernels ----


NEW = {1: "SHFL", 2: "HMMA", 3: "LDSM", 4: "LDGSTS", 5: "HGMMA", 6: "USETMAXREG", 7: "BAR"}
"""An instruction that the level before has none of; the seventh has named barriers."""


@pytest.mark.parametrize("number", OWN)
def test_a_level_builds_without_spills_and_with_its_own_instructions(number):
    compiled = compile(LEVELS[number].traits(128, True), None, "sm90")
    used, count = compiled.resources, compiled.instructions
    assert (used.spill_store_bytes, used.spill_load_bytes, used.local_bytes) == (0, 0, 0)
    assert compiled.warnings == ()
    assert count[NEW[number]] > 0
    assert bool(count.get("HMMA")) == (number in (2, 3, 4)) and bool(count.get("HGMMA")) == (number > 4)
    assert bool(count.get("UTMALDG")) == (number > 4) and bool(count.get("LDSM")) == (number in (3, 4))
    tile = LEVELS[number].kernel.TILE
    assert used.shared_memory_bytes <= tile.smem_bytes(compiled.traits)


def test_a_level_declines_in_one_sentence_what_it_does_not_compute():
    for name, message in (
        ("forward-sm80:tour3-fp16-d128", "bf16, head dims 64 and 128"),
        ("forward-sm90:tour5-bf16-d96", "bf16, head dims 64 and 128"),
        ("forward-sm90:tour7-bf16-d128-window", "full or causal, nothing else"),
        ("forward-sm90:tour6-bf16-d128-varlen", "nothing else"),
    ):
        with pytest.raises(registry.Unsupported, match=message):
            registry.lookup(registry.Traits.parse(name))
    for number, tile, message in (
        (4, "num_stages=1", "num_stages is 1; accepted: 2 or more"),
        (3, "num_stages=2", "num_stages is 2; accepted: 1 alone"),
        (7, "tile_m=64", "tile_m is 64 with 8 warps; accepted: 128 with 8"),
        (2, "tile_n=24", "tile_n is 24; accepted: multiples of 16"),
        (6, "num_stages=4", "bytes of shared memory"),
    ):
        with pytest.raises(registry.Unsupported, match=message):
            registry.lookup(LEVELS[number].traits(), tile, "sm90")


def test_the_laboratory_takes_the_levels():
    """Each clock bound is below that of the level before, down to the tensor cores' own."""
    judged = {
        number: verdict(compile(LEVELS[number].traits(128, True), None, "sm90")) for number in range(2, 8)
    }
    per_score = [max(one.step.clocks.pipes.values()) / one.step.scores for one in judged.values()]
    assert per_score == sorted(per_score, reverse=True) and len(set(per_score)) == 5
    assert judged[7].step.clocks.bound == "tensor cores" == judged[6].step.clocks.bound
    assert str(judged[7].proxies) == "none needed: no thread accesses what TMA fills"


@pytest.mark.parametrize("number", OWN)
def test_copies_are_counted_and_layouts_are_right(number):
    kernel = kernel_of(number, head_dim=128)
    assert not list(reasons(kernel))
    found = conflicts(kernel)
    assert len(found) == (5 if number in (3, 4) else 0) and {copy.ways for copy in found} <= {1}


# ---- the page ----


def test_the_page_is_of_todays_texts_and_numbers():
    facts = json.loads((page.ROOT / page.FACTS).read_text())
    assert (page.ROOT / page.PAGE).read_text() == page.page(facts, page.newest_result()), "make tour"
    assert facts["bank_conflict_ways"] == report.bank_conflict_ways() == {"swizzled": 1, "plain": 8}
    if facts["toolchain"] == toolchain():
        assert facts["levels"]["7"] == report.facts(LEVELS[7]), "make tour"


@pytest.mark.parametrize("entry", LEVELS.values(), ids=lambda entry: str(entry.number))
def test_a_levels_notebook_has_its_file_as_a_cell_and_its_outputs(entry):
    """That its outputs are today's is a slow test of the examples."""
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
