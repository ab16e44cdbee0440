"""The laboratory on the card: an A/B, a study and their commands, with few kernels."""

import pytest
import torch

from cute_attn.lab import report
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.lab.race import ab
from cute_attn.lab.tune import tune
from tests.gpu.archs import runnable_archs

ARCH = runnable_archs()[0]
NAME = f"forward-{ARCH}-bf16-d128-causal"
WORKLOAD = Workload(2, 2048, 16, 128, causal=True)

# Timing repeats a call thousands of times, and guards would keep all outputs.
pytestmark = pytest.mark.unguarded


def test_a_kernel_against_itself_is_not_faster():
    found = ab(NAME, NAME, [WORKLOAD], budget_s=10)
    (one,) = found.measured
    assert found.outcome in ("same", "undecided"), found.sentence
    assert one.low <= 1.005 and one.high >= 0.995 and one.rounds >= 21
    assert found.gpu == torch.cuda.get_device_name()
    assert found.driver != "unknown" and one.state.watts > 50 and 20 < one.state.celsius < 120
    assert one.state.clock_mhz > 300, "the state is read under load"


def test_a_backward_is_compared_with_the_reference_and_timed():
    name = NAME.replace("forward", "backward")
    (one,) = ab(name, "fa2", [Workload(2, 1024, 8, 128, causal=True, op="backward")], budget_s=5).measured
    assert one.rounds >= 21 and one.ms_a > 0


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
