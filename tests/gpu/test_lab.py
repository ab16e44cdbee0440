"""The laboratory on the card: an A/B, a study and their commands, with few kernels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_attn.lab import report
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.lab.card import Contender, Gpu
from cute_attn.lab.race import ab, fastest
from cute_attn.lab.tune import tune
from tests.gpu.archs import runnable_archs

ARCH = runnable_archs()[0]
NAME = f"forward-{ARCH}-bf16-d128-causal"
SLOW = {"sm80": "tile_m=64,tile_n=16", "sm90": "tile_m=64,tile_n=32,num_stages=1"}[ARCH]
WORKLOAD = Workload(2, 2048, 16, 128, causal=True)
ROOT = Path(__file__).parents[2]

# What is timed is one call, and guards would keep the outputs of thousands.
pytestmark = pytest.mark.unguarded


def test_a_kernel_against_itself_is_not_faster():
    found = ab(NAME, NAME, [WORKLOAD], budget_s=10)
    (one,) = found.measured
    assert found.outcome in ("same", "undecided"), found.sentence
    assert one.low <= 1.005 and one.high >= 0.995 and one.rounds >= 21
    assert found.gpu == torch.cuda.get_device_name()
    assert one.state.clock_mhz is None or one.state.clock_mhz > 300, "the state is read under load"


def test_a_plainly_slower_tile_is_slower():
    found = ab((NAME, SLOW), NAME, [WORKLOAD], budget_s=10)
    assert found.outcome == "slower" and found.measured[0].high < 0.95, found.sentence


def test_a_backward_is_compared_with_the_reference_and_timed():
    name = NAME.replace("forward", "backward")
    (one,) = ab(name, "fa2", [Workload(2, 1024, 8, 128, causal=True, op="backward")], budget_s=5).measured
    assert one.rounds >= 21 and one.ms_a > 0


def test_a_race_does_not_choose_the_slow_tile():
    assert fastest([Contender(NAME, SLOW), Contender(NAME)], [WORKLOAD], Gpu(), 5) == Contender(NAME)


def test_a_study_of_a_few_tiles_ends_with_a_checked_winner(tmp_path):
    timings = tmp_path / "timings.jsonl"
    fields = {"sm80": "tile_n=32|48,num_stages=1|2", "sm90": "tile_n=64|96,num_stages=1|2"}[ARCH]
    study = tune(NAME, fields, workloads=[WORKLOAD], budget_s=60, resume=timings)
    assert study.gpu and {one.status for one in study.candidates} == {"timed"}, study.candidates
    assert all(0.1 < one.gain < 3 for one in study.candidates)
    assert (study.best != "") == (study.verdict is not None and study.verdict.outcome == "faster")
    if study.verdict is not None:  # the fastest in the race
        assert study.verdict.measured[0].high > 0.99
    assert all(one.estimate is not None for one in study.candidates), study.notes
    again = tune(NAME, fields, workloads=[WORKLOAD], budget_s=60, resume=timings)
    assert all(one.kept for one in again.candidates) and again.seconds < study.seconds + 5
    page = tmp_path / "study.html"
    report.of_study(study, page)
    assert page.stat().st_size < 2_000_000


def test_the_command_ab(tmp_path):
    result = tmp_path / "ab.json"
    arguments = ("--workload", "b2-s2048-h16", "--budget", "5", "-o", str(result))
    command = (sys.executable, "-m", "cute_attn", "ab", NAME, "--tile", SLOW, *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "% slower than its default tile" in " ".join(done.stdout.split())
    assert json.loads(result.read_text())["kind"] == "comparison"
