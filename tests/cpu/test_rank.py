"""The static rank: its terms by hand, and pairs of tiles whose winner bench/notes.md states."""

from dataclasses import replace

import pytest

from cute_attn.lab.benchmark.workload import Workload, standard, visible_pairs  # noqa: F401
from cute_attn.lab.rank import LATENCY, estimate, makespan, work_tiles
from cute_attn.lab.verdict import Clocks, StepCost, Verdict, verdict
from tests import refusals
from tests.measured_pairs import PAIRS, Pair


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--every-default", default=False)
        metafunc.parametrize("pair", [p for p in PAIRS if whole or p.quick], ids=lambda pair: pair.what)


def test_the_winner_of_a_pair(pair: Pair):
    faster, slower = (verdict(pair.name, tile, "sm90") for tile in pair.tiles)
    assert faster.tile != slower.tile
    assert (estimate(faster, pair.load) < estimate(slower, pair.load)) == pair.right


CLOCKS = Clocks(tensor=300.0, special=0.0, issue=400.0, shared=0.0, warp=100.0)
STEP = StepCost(0, 100, 16, 64, 32, 8192, CLOCKS)
PLAIN = Verdict("forward-sm90-bf16-d64", "sm90", "tile_m=128,tile_n=64,pack_heads=1", blocks=2, step=STEP)
LOAD = Workload(1, 256, 4, 64)


def test_a_launch():
    """2 work tiles of 4 heads, 4 steps each, on fewer than all multiprocessors: one round of blocks."""
    assert estimate(PLAIN, LOAD) == 4 * 2 * 500 + 500 / 2 + LATENCY


@pytest.mark.parametrize(("blocks", "clocks"), [(1, 1100), (2, 550), (4, 500)])
def test_the_table_of_a_verdict_has_the_estimate_that_tiles_are_compared_by(blocks, clocks):
    """One warp's stalls, here of 1,100 clocks, may take longer than all resident blocks on the pipes, of 500 each."""
    one = replace(PLAIN, blocks=blocks, step=replace(STEP, scores=1000, clocks=replace(CLOCKS, warp=1100.0)))
    assert estimate(one) == clocks and f"at least 400, estimated {clocks:,} " in str(one)


@pytest.mark.parametrize("seqlen_k", [0, 100, 1000])
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window": 100, "causal": True}])
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_work_tiles_cover_what_is_visible(op, features, seqlen_k):
    """With blocks of one query and one key, steps are the pairs that see each other."""
    load = Workload(2, 300, 3, 64, op=op, seqlen_k=seqlen_k, **features)
    tiles = work_tiles(load, {"tile_m": 1, "tile_n": 1})
    pairs = visible_pairs(300, seqlen_k or 300, *load.band)
    assert sum(steps * count for steps, count in tiles.items()) == 2 * 3 * pairs


def test_list_scheduling():
    assert makespan({3.0: 3, 2.0: 2}, 2) == 7  # 3 + 3 and 3 + 2 + 2
    assert makespan({5.0: 4}, 4) == 5 and makespan({5.0: 5}, 4) == 10
    many = 60_000
    assert makespan({2.0: many}, 100) == pytest.approx(2 * many / 100, rel=0.01)


WRONG = """
estimate(replace(PLAIN, reason="it is too large")) -> ValueError: nothing to estimate: it is too large
estimate(replace(PLAIN, step=None, no_step="it has no loop")) -> ValueError: nothing to estimate: it has no loop
estimate(replace(PLAIN, tile="values=3"), LOAD) -> ValueError: tile is 'values=3'; accepted for an estimate
estimate(PLAIN, standard(64, 512, op="backward"))
    -> ValueError: accepted: one of forward, which forward-sm90-bf16-d64 computes
estimate(3) -> TypeError: verdict is 3; accepted: what cute_attn
"""


@refusals.each(WRONG)
def test_a_wrong_call_is_one_sentence(call, sentence):
    refusals.check(call, sentence, globals())
