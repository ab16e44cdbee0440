"""A/Bs and races on a simulated card; the checks against the reference on the CPU, where kernels are the reference."""

import math
from functools import partialmethod

import pytest
import torch

from cute_attn.lab.benchmark import peers
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.lab.card import Checks, Contender, Wrong
from cute_attn.lab.race import ab, fastest
from cute_attn.lab.sensors import State, named, parse_nvidia_smi, summary
from cute_attn.lab.workloads import default_workloads, parse
from cute_attn.traits import Traits
from tests.simulated_card import SimulatedCard

NAME = "forward-sm90-bf16-d128"
DEFAULT, NARROW = Contender(NAME), Contender(NAME, "tile_n=112")


def card(**speeds):
    """A card on which contenders take 1 ms, over their speeds: of the narrow tile, of fa4."""
    options = speeds.pop("options", {})

    def milliseconds(contender, workload):
        name = contender.peer or ("narrow" if contender == NARROW else "default")
        return 1.0 / speeds.get(name, 1.0)

    return SimulatedCard(milliseconds, **options)


# ---- A/B ----


@pytest.mark.parametrize("speed, outcome", [(1.02, "faster"), (0.98, "slower"), (1.0, "same")])
def test_an_ab_says_what_is_so(speed, outcome):
    simulated = card(narrow=speed, options={"drift": 0.01})
    found = ab((NAME, "tile_n=112"), NAME, ["b2-s8192-h16"], card=simulated)
    (one,) = found.measured
    assert found.outcome == one.outcome == outcome
    assert one.low <= speed <= one.high and abs(one.ratio - speed) < 0.005
    assert (one.state.clock_mhz, one.state.reasons, one.void) == (1755, ("power",), 0)
    assert (found.gpu, found.driver) == ("simulated", "1.0")


def test_rounds_are_void_while_the_gpu_is_slowed_by_heat():
    states = [State(1200, 500, 88, ("heat",))] * 5 + [State(1755, 690, 61, ("power",))]
    (one,) = ab(NARROW, DEFAULT, ["s8192"], card=card(options={"states": states})).measured
    assert (one.rounds, one.void, one.state.celsius) == (21, 5, 88)
    with pytest.raises(ValueError, match=r"all 1000 rounds on fwd-.* are void: the GPU is slowed by heat"):
        ab(NARROW, DEFAULT, ["s8192"], card=card(options={"states": states[:1]}), budget_s=1e9)


def test_the_sentence_of_one_and_of_many_workloads():
    one = ab(NARROW, DEFAULT, ["b2-s8192-h16"], card=card(narrow=0.97, options={"noise": 0.001}))
    assert one.sentence.startswith(
        f"{NAME} tile_n=112 is 3.0% slower than its default tile on fwd-bf16-d128-"
    )
    assert one.sentence.endswith("21 rounds; 1755 MHz, held down by power)")
    peer = ab(NARROW, "fa4", ["b2-s8192-h16"], card=card(narrow=1.1))
    assert "tile_n=112 is 10" in peer.sentence and "% faster than fa4 on" in peer.sentence
    assert "<pre" in peer._repr_html_() and "fa4" in peer._repr_html_()
    assert "is as fast as" in ab(NAME, NAME, ["s8192"], card=card()).sentence

    mixed = SimulatedCard(lambda c, w: 1.0 + 0.1 * (c == NARROW and w.seqlen == 2048))
    found = ab(NARROW, DEFAULT, card=mixed)
    assert found.outcome == "slower" and [one.outcome for one in found.measured] == ["slower", "same"]
    assert "slower on fwd-bf16-d128-b8-s2048-h16 (" in found.sentence and "; same on " in found.sentence
    assert "\n" not in found.sentence


def test_a_wrong_kernel_is_not_timed():
    simulated = card(options={"wrong": [NARROW]})
    with pytest.raises(Wrong, match="tile_n=112 is wrong on fwd-"):
        ab(NARROW, DEFAULT, card=simulated)
    assert not simulated.sampled


def test_wrong_calls():
    with pytest.raises(ValueError, match="a and b are peers; accepted: at least one kernel"):
        ab("fa4", "fa3", card=card())
    with pytest.raises(
        ValueError, match=r"name is 'fa5'; accepted: .*; or a peer: fa2, mem_efficient, cudnn"
    ):
        ab(NAME, "fa5", card=card())
    declines = card(options={"failing": {Contender(peer="fa4"): peers.Declined("FA4 has no bias")}})
    with pytest.raises(ValueError, match=r"fa4 does not run fwd-.*: FA4 has no bias"):
        ab(NAME, "fa4", card=declines)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="there is no GPU"):
            ab(NAME, NAME)


# ---- races ----


def test_a_race_finds_the_fastest_within_its_budget():
    tiles = [Contender(NAME, f"tile_n={n}") for n in range(32, 257, 16)]
    speed = {tile: 1.0 + 0.01 * i for i, tile in enumerate(tiles)}
    shapes = [parse("s8192", Traits.parse(NAME))]
    for budget_s in (60.0, 0.1):  # the first round is always run
        simulated = SimulatedCard(lambda c, w: speed[c], seed=3, check_s=0.0)
        assert fastest(tiles[::-1], shapes, simulated, budget_s) == tiles[0]
    assert len(set(simulated.sampled.values())) == 1, "one round of all"


# ---- the GPU's state ----


def test_reasons_and_states():
    assert named(0x4) == ("power",) and named(0) == () and named(0x24) == ("power", "heat")
    assert not State(reasons=("power", "idle", "clock setting")).slowed
    assert all(State(reasons=named(bit)).slowed for bit in (0x8, 0x20, 0x40, 0x80))
    state = parse_nvidia_smi("1755, 689.61, 61, 0x0000000000000004\n")
    assert state == State(1755, 690, 61, ("power",))
    assert parse_nvidia_smi("1755, [N/A], 61, [Not Supported]") == State(1755, None, 61, ())
    assert parse_nvidia_smi(None) is None
    found = summary([State(1700, 600, 60, ("power",)), None, State(1800, 700, 65, ("idle", "heat"))])
    assert found == State(1750, 650, 65, ("power", "heat"))
    assert summary([None]) == State()


# ---- workloads by text ----


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


@pytest.mark.parametrize("text", ["", "b2-s8192-causal", "x3", "fwd-bf16-d64-b2-s8192-h16", "s12y"])
def test_wrong_workloads(text):
    with pytest.raises(ValueError, match=r"workload has .*; accepted: bBATCH, sSEQLEN\[xSEQLEN_K\]"):
        parse(text, Traits.parse(NAME))


# ---- against the reference ----


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(Workload, "inputs", partialmethod(Workload.inputs, device="cpu"))


def test_contenders_are_compared_with_the_first_one(on_the_cpu, monkeypatch):
    workload = Workload(1, 64, 4, 64, causal=True)
    name = "forward-sm80-bf16-d64-causal"
    checks = Checks()
    assert checks.checked(Contender(name), workload)().shape == (1, 64, 4, 64)
    scale = {"by": 1.04}

    def peer(workload, x):
        run = peers.ours("sm80")(workload, x)
        return lambda: run() * scale["by"]

    monkeypatch.setitem(peers.PEERS, "fa4", peer)
    checks.checked(Contender(peer="fa4"), workload)
    for scale["by"] in (1.06, math.nan):
        with pytest.raises(Wrong, match=r"fa4 is wrong on fwd-.*: it differs from .* \(default tile\) by"):
            checks.checked(Contender(peer="fa4"), workload)
    with pytest.raises(ValueError, match="accepted: workloads of forward-sm80-bf16-d64-causal"):
        checks.checked(Contender(name), Workload(1, 64, 4, 64))


def test_a_kernel_that_is_wrong_at_a_small_size_is_not_run_at_a_large_one(on_the_cpu, monkeypatch):
    from cute_attn.api import attention as interface

    attention = interface.attention

    def broken(q, *args, **options):
        return attention(q, *args, **options) * (1.5 if q.shape[1] == 127 else 1.0)

    monkeypatch.setattr(interface, "attention", broken)
    with pytest.raises(Wrong, match="is wrong on fwd-bf16-d64-b2-s127-h4x2-causal"):
        Checks().checked(Contender("forward-sm80-bf16-d64-causal"), Workload(1, 64, 4, 64, causal=True))
