"""The lists of cases that tiles decline in GPU tests."""

from importlib import import_module

import pytest

from tests.gpu.tile_cases import wrongly_listed


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_declined_cases_are_listed(op):
    tiles = import_module(f"tests.gpu.test_{op}").TILES
    assert wrongly_listed(op, tiles) == []
