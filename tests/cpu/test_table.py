"""The dispatch table; it covers every call that PyTorch's memory-efficient backward serves."""

import json

import pytest
from typer.testing import CliRunner

from cute_attn.cli.main import app
from cute_attn.compiler import registry
from cute_attn.lab.dispatch_table import Entry, entries, mem_efficient, row
from cute_attn.tiles import TARGETS
from cute_attn.traits import Traits

OURS = [entry for entry in entries() if entry.arch == "sm80"]


def test_the_facts_are_those_of_pytorchs_table():
    assert len(OURS) == 46
    assert {entry.dtype for entry in OURS} == {"fp16", "bf16", "fp32"}
    assert {entry.max_head_dim for entry in OURS} == {32, 64, 96, 128, 65536}
    assert len(set(entries())) == len(entries()) == 162
    assert Entry("sm80", "bf16", True, False, 128, 64, 96, False, ("sm86", "sm89")) in OURS


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("entry", OURS, ids=lambda entry: entry.name)
def test_a_kernel_serves_each_entry(entry, target):
    if entry.only_on and target not in entry.only_on:
        return
    found = entry.row(target)
    assert found.reason is None
    kernel = registry.lookup(entry.traits(), None, target)
    assert kernel.tile == found.tile and kernel.traits.dtype == entry.dtype
    assert found.blocks >= 1


def test_older_generations_are_declined_with_the_reason():
    for entry in entries():
        if entry.arch != "sm80":
            reason = entry.row("sm90").reason
            assert reason is not None and f"{entry.arch} is older than sm80" in reason


def test_a_row_has_the_reason_of_a_decline():
    found = row(Traits("backward", "sm90", "fp32", 64), "sm90")
    assert found.tile is None and found.reason is not None and "fp32" in found.reason


def run(*arguments):
    return CliRunner().invoke(app, ["table", *arguments], catch_exceptions=False)


def test_the_command_prints_both_tables(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # names fold in a narrow terminal
    rows = json.loads(run("--like", "mem_efficient", "--json").stdout)
    assert len(rows) == len(mem_efficient(None)) == 162
    rows = json.loads(run("--arch", "sm80", "--target", "sm86", "--json").stdout)
    assert {one["target"] for one in rows} == {"sm86"} and len(rows) == 3 * 8 * 2 * 2
    assert "fp32_aligned_64x64_k32_sm80" in run("--like", "mem_efficient").stdout
