"""``make demo`` fits on a screen, and reports the step that failed."""

import pytest
import torch

from cute_attn import lab
from cute_attn.cli import demo
from cute_attn.lab.benchmark import results
from cute_attn.lab.check import Accuracy
from tests import processes


@pytest.mark.slow
def test_it_prints_at_most_fifty_lines_of_eighty_columns():
    done = processes.run("-m", "cute_attn.cli.demo", environment={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) < 50 and "All agree." in done.stdout and "There is no GPU" in done.stdout


@pytest.mark.parametrize("error", [0.5, 2.0])
def test_with_a_gpu_it_names_what_is_wrong(monkeypatch, capsys, error):
    rows = [
        {"impl": "sm90", "value": 668.4},
        {"impl": "FA3", "value": 611.0},
        {"impl": "FA4", "error": "absent"},
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(
        lab.check, "check_workloads", lambda *_: iter([(None, Accuracy(error, 0.0, 1.0))] * 4)
    )
    monkeypatch.setattr(results, "time_workloads", lambda *_: {"rows": rows})
    assert list(demo.on_the_gpu()) == ([] if error < 1 else [*demo.LARGE])
    printed = capsys.readouterr().out
    assert f"{4 if error < 1 else 0} of 4 right; TFLOP/s: sm90 668, FA3 611\n" in printed
    assert sum("TFLOP/s" in line for line in printed.splitlines()) == len(demo.LARGE)
