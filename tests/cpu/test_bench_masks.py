"""The rows of bench.masks: their masks, their functions, and the table of a result."""

import pytest
import torch

from bench import masks


@pytest.fixture
def short(monkeypatch):
    """Sequences of few blocks, in which each mask hides something."""
    for name, value in {
        "SEQLEN": 384,
        "HEADS": 2,
        "GRID": 32,
        "RADIUS": 4,
        "DOCUMENT": 150,
        "PREFIX": 160,
        "WINDOW": 100,
        "FIRST": 20,
        "REACH": 200,
    }.items():
        monkeypatch.setattr(masks, name, value)
    monkeypatch.setitem(masks.OPTIONS, "window", {"causal": True, "window": (99, 0)})


@pytest.mark.parametrize("kind", [*masks.OPTIONS, "alibi", "softcap"])
def test_what_is_built_in_is_the_same(short, kind):
    row = masks.prepared(masks.Row(kind, 64), "cpu")
    torch.testing.assert_close(masks.cute(row)(), masks.built_in(row)(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", masks.MASKS)
def test_each_mask_hides_scores_and_leaves_some_for_each_query(short, kind):
    q, kv = torch.arange(masks.SEQLEN)[:, None], torch.arange(masks.SEQLEN)
    seen = masks.MASKS[kind](0, 0, q, kv)
    assert 0 < seen.sum() < seen.numel() and seen.any(1).all()


def test_a_table_without_wrong_results():
    own = {"workload": "d64-causal", "op": "forward"}
    results = [
        own | {"impl": "cute", "ms": 1.0},
        own | {"impl": "fa4", "ms": 1.5},
        own | {"impl": "flex", "ms": 0.1, "error": "its output differs by 1"},
    ]
    lines = masks.table(results).splitlines()
    assert lines[1].split() == ["d64-causal", "forward", "1.000", "1.500", "-"]
    assert lines[2:] == ["forward: fa4 takes 1.50 of the time over 1 rows, least 1.50"]
