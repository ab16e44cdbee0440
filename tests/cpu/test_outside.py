"""The driver of others' suites, on a suite of its own."""

import argparse

import pytest

from tests.outside import run
from tests.outside.suites import Suite

TESTS = """if True:
    import os
    import pytest

    @pytest.mark.parametrize("a", range(50))
    @pytest.mark.parametrize("b, c", [(i, -i) for i in range(40)])
    def test_many(a, b, c):
        assert b == -c

    @pytest.mark.parametrize("a", [1, 2, 3])
    def test_some(a):
        assert a != 2, "two is wrong"

    def test_skips():
        pytest.skip("for a reason")

    def test_dies():
        os._exit(9)

    def test_loud():
        raise AssertionError("left out")

    def test_falls_through():
        import torch
        from cute_attn import sdpa
        q = torch.zeros(1, 2, 8, 20, dtype=torch.bfloat16)
        activation = sdpa.Activation(sdpa.Options(), "CPU")
        try:
            torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.5)
        except ValueError:
            pass
        activation.remove()

    def test_served():
        import torch
        from cute_attn import sdpa
        q = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
        activation = sdpa.Activation(sdpa.Options(), "CPU")
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)
        activation.remove()

    def test_other():
        raise AssertionError("never asked for")
"""
pytestmark = pytest.mark.slow
SUITE = Suite(
    source="here",
    folder="own",
    paths=("test_them.py",),
    adapter="stock",
    tests={"test_many": 12, "test_some": 9, "test_skips": 1, "test_dies": 1, "test_loud": 1}
    | {"test_falls": 1, "test_served": 1},
    deselected={"test_loud": "it is loud"},
)


def options(**changes):
    given = {"workers": 2, "seed": 0, "scale": 1.0, "limit": 120, "stock": False, "ids": None}
    return argparse.Namespace(**given | changes)


@pytest.fixture
def suites(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "test_them.py").write_text(TESTS)
    return tmp_path


def test_a_sample_runs_and_is_reported(suites, capsys):
    outcome = run.run_suite(SUITE, suites, options(workers=1))
    counts = outcome.counts()
    assert counts == {"passed": 12 + 2 + 1, "failed": 2, "skipped": 1, "fell through": 1, "not reached": 0}, (
        outcome
    )
    assert outcome.sampled == 12 + 3 + 1 + 1 + 1 + 1
    failed = outcome.reasons("failed")
    assert {reason for reason, _, _ in failed} == {
        "AssertionError: two is wrong assert 2 != 2",
        "the process ended with status 9",
    }
    assert outcome.left_out == {"test_loud: it is loud": 1}
    run.report("own", outcome)
    printed = capsys.readouterr().out
    assert "own: 15 passed, 2 failed, 1 fell through, 1 skipped; 19 of " in printed
    assert "skipped 1: Skipped: for a reason" in printed and "q has head_dim 20; accepted" in printed
