"""A/Bs and races on a simulated card; the checks against the reference on the CPU, where kernels are the reference."""

import pytest

from cute_attn.lab.benchmark import peers
from cute_attn.lab.card import Contender, Wrong
from cute_attn.lab.race import ab, fastest
from cute_attn.lab.workloads import default_workloads, parse
from cute_attn.traits import Traits
from tests import refusals
from tests.simulated_card import SimulatedCard

NAME = "forward-sm90-bf16-d128"
TRAITS = Traits.parse(NAME)
DEFAULT, NARROW = Contender(NAME), Contender(NAME, "tile_n=112")


def card(**speeds):
    """A simulated card. A contender takes 1 ms divided by its speed, which is given for the narrow tile and fa4."""
    options = speeds.pop("options", {})

    def milliseconds(contender, workload):
        name = contender.peer or ("narrow" if contender == NARROW else "default")
        return 1.0 / speeds.get(name, 1.0)

    return SimulatedCard(milliseconds, **options)


@pytest.mark.parametrize("speed, outcome", [(1.02, "faster"), (0.98, "slower"), (1.0, "same")])
def test_an_ab_says_what_is_so(speed, outcome):
    simulated = card(narrow=speed, options={"drift": 0.01})
    found = ab((NAME, "tile_n=112"), NAME, ["b2-s8192-h16"], card=simulated)
    (one,) = found.measured
    assert found.outcome == one.outcome == outcome
    assert one.low <= speed <= one.high and abs(one.ratio - speed) < 0.005
    assert (one.state.clock_mhz, one.state.reasons, one.void) == (1755, ("power",), 0)
    assert (found.gpu, found.driver) == ("simulated", "1.0")


def test_a_wrong_kernel_is_not_timed():
    simulated = card(options={"wrong": [NARROW]})
    with pytest.raises(Wrong, match="tile_n=112 is wrong on fwd-"):
        ab(NARROW, DEFAULT, card=simulated)
    assert not simulated.sampled


DECLINING = {"failing": {Contender(peer="fa4"): peers.Declined("FA4 has no bias")}}
WRONG = """
ab("fa4", "fa3", card=card()) -> ValueError: a and b are peers; accepted: at least one kernel
ab(NAME, "fa5", card=card()) -> ValueError: the kernel or peer is 'fa5'; accepted: a peer (fa2, mem_efficient, cudnn
ab(NAME, "fa4", card=card(options=DECLINING)) -> ValueError: fa4 does not run fwd-...: FA4 has no bias
parse("", TRAITS) -> ValueError: workload has ...; accepted: bBATCH, sSEQLEN[xSEQLEN_K]
parse("b2-s8192-causal", TRAITS) -> ValueError: workload has ...; accepted: bBATCH, sSEQLEN[xSEQLEN_K]
parse("s12y", TRAITS) -> ValueError: workload has ...; accepted: bBATCH, sSEQLEN[xSEQLEN_K]
"""


@refusals.each(WRONG)
def test_wrong_calls(call, sentence):
    refusals.check(call, sentence, globals())


def test_a_race_finds_the_fastest_within_its_budget():
    tiles = [Contender(NAME, f"tile_n={n}") for n in range(32, 257, 16)]
    speed = {tile: 1.0 + 0.01 * i for i, tile in enumerate(tiles)}
    shapes = [parse("s8192", Traits.parse(NAME))]
    for budget_s in (60.0, 0.1):  # the first round is always run
        simulated = SimulatedCard(lambda c, w: speed[c], seed=3, check_s=0.0)
        assert fastest(tiles[::-1], shapes, simulated, budget_s) == tiles[0]
    assert len(set(simulated.sampled.values())) == 1, "one round of all"


@pytest.mark.parametrize(
    "name, text, expected",
    [
        (NAME, "b2-s8192-h16", "fwd-bf16-d128-b2-s8192-h16"),
        (NAME + "-causal", "s512x8192-h16x2-b3", "fwd-bf16-d128-b3-s512x8192-h16x2-causal"),
        (NAME, "s4096", "fwd-bf16-d128-b4-s4096-h16"),
        ("backward-sm90-bf16-d192x128-causal", "h64-s4096-b1", "bwd-bf16-d192x128-b1-s4096-h64-causal"),
        (NAME + "-window", "window49_48-s64-b4096-h8", "fwd-bf16-d128-b4096-s64-h8-window49_48"),
        (NAME + "-window", "window512", "fwd-bf16-d128-b2-s8192-h16-causal-window512"),
        (NAME + "-varlen", "b2-s1024-h4", "fwd-bf16-d128-varlen5x1024-h4"),
    ],
)
def test_workloads_by_text(name, text, expected):
    traits = Traits.parse(name)
    workload = parse(text, traits)
    assert workload.name == expected and workload.traits(traits.arch) == traits
    if not traits.varlen:
        assert parse(expected, traits) == workload
    for default in default_workloads(traits):
        assert default.traits(traits.arch) == traits
