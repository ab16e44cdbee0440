"""The lists of cases that tiles decline in GPU tests."""

from importlib import import_module

import pytest

from tests.gpu.tile_cases import tile_cases, wrongly_listed


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_declined_cases_are_listed(op):
    tiles = import_module(f"tests.gpu.test_{op}").TILES
    assert wrongly_listed(op, tiles) == []


def test_an_unlisted_declined_case_fails():
    tiles = {"sm90": {"tile_m=192,tile_n=32,speculative=false": ("causal-d96",)}}
    declines, takes = sorted(wrongly_listed("forward", tiles))
    assert "declines causal-d256: forward-sm90 declined" in declines and "takes causal-d96: None" in takes
    assert {param.values[2].name for param in tile_cases("forward", tiles)} >= {"causal-d256", "causal-d128"}
