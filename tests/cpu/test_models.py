"""The rows of ``bench.models``: distinct, of sizes that fit, and served by kernels of both directions."""

import json
import sys

import pytest

from bench import models, shapes
from cute_attn import lookup

ROWS = models.rows("both")


def test_rows_are_distinct_and_fit_a_gpu():
    assert len({model for model, _ in ROWS}) >= 60
    assert len({w.name for _, w in ROWS}) == len(ROWS)
    for model, workload in ROWS:
        assert shapes.nbytes(workload) <= shapes.MAX_BYTES, model
        assert shapes.estimate(workload) <= 400, model


def test_what_is_served_has_no_backward():
    served = {model for model, _ in models.served()}
    assert served and not served & {model for model, w in ROWS if w.op == "backward"}
    assert len(models.rows("backward")) == len([*models.trained()])


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_kernels_compute_every_row(arch):
    """Of the generation, or for large head dims and their backwards of the older one."""
    for model, workload in ROWS:
        older = arch == "sm90" and workload.op == "backward" and workload.head_dim > 256
        for op in {"forward", workload.op}:
            traits = workload.traits("sm80" if older else arch, op)
            assert lookup(traits).traits == traits, model


def test_a_bias_has_a_gradient_in_a_backward_alone():
    assert {w.op for _, w in ROWS if w.bias_grad} == {"backward"}


def test_the_command_lists_and_shows(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["models", "*falcon*", "--list"])
    models.main()
    assert capsys.readouterr().out.count("falcon-7B") == 3
    row = {"workload": "fwd-bf16-d64-b8-s2048-h71x1-causal", "ms": 1.0, "value": 100.0, "unit": "TFLOP/s"}
    result = {
        "gpu": "NVIDIA H200",
        "clock_mhz": 1500,
        "commit": "abc",
        "date": "2026-11-22T08:00:00+00:00",
        "rows": [row | {"impl": "fa3", "ms": 2.0}, row | {"impl": "cute_attn/forward-sm90"}],
        "models": {row["workload"]: "falcon-7B 71 on 1"},
    }
    path = tmp_path / "x.json"
    path.write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["models", "--result", str(path)])
    models.main()
    assert "falcon-7B 71 on 1" in capsys.readouterr().out and path.with_suffix(".png").exists()
    monkeypatch.setattr(sys, "argv", ["models", "no such model"])
    with pytest.raises(SystemExit, match="--list names them"):
        models.main()
