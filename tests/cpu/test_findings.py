"""The sentences in which verdicts are summarized."""

from dataclasses import replace

import pytest

from cute_attn import lab  # noqa: F401  # in wrong calls
from cute_attn.lab.findings import cost_of_functions, findings
from cute_attn.lab.rank import NOISE, estimates, relative
from cute_attn.lab.verdict import Clocks, StepCost, Verdict
from tests import refusals

NAME = "forward-sm80-bf16-d64"


def made(tensor=1000.0, shared=500.0, warp=100.0):
    """A verdict with these clocks for a step of 128 queries and 96 keys."""
    step = StepCost(0, 900, 200, 100, 96, 128 * 96, Clocks(tensor, 100.0, 300.0, shared, warp))
    tile = "tile_m=128,tile_n=96,num_warps=4,num_stages=2,qk_unroll=0"
    return Verdict(NAME, "sm90", tile, blocks=1, registers=255, step=step)


def test_a_difference_below_noise_means_nothing():
    tiles = made(), made(tensor=1008.0)
    tiles = tiles[0], replace(tiles[1], tile=tiles[1].tile.replace("qk_unroll=0", "qk_unroll=4"))
    assert 1 < relative(estimates(tiles[1]), estimates(tiles[0])) < 1 + NOISE
    first, *rest = findings(*tiles)
    assert (
        first.startswith("By their code the tiles are equal: qk_unroll=4 is 0.") and "means nothing" in first
    )
    assert rest == [
        "Its steady step is bound by tensor cores, the best bound that a kernel can have: what is left to gain is "
        "exposed latency."
    ]


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (1000.0, "By their code the revisions are equal: today's costs the same."),
        (2000.0, "By its code the one at HEAD~3 is the best: today's is 76.8% slower."),
    ],
)
def test_a_revision_is_named_and_no_race_is_proposed(tensor, said):
    old = replace(made(), revision="HEAD~3")
    assert findings(old, made(tensor=tensor))[0] == said


def test_what_bounds_each_of_several_kernels_is_said():
    first = made()
    same, other = (
        replace(first, name=f"forward-sm80{rest}") for rest in (":own-bf16-d64", "-bf16-d64-causal")
    )
    two = replace(first, tile=first.tile.replace("tile_n=96", "tile_n=64"))
    best, *rest = findings(first, two, same)
    assert best.startswith(
        f"By its code {NAME} with {first.brief()} is the best: {NAME} with {two.brief()} is 4"
    )
    subjects = [said.partition(" is bound")[0].removeprefix("The steady step of ") for said in rest]
    assert subjects == [f"{NAME} with {first.brief()}", f"{NAME} with {two.brief()}", same.name]
    assert len(findings(first, same, other)) == 3  # kernels that compute different things have no order


@pytest.mark.parametrize(
    ("tensor", "rest"),
    [(2000.0, "takes 44% less time."), (1000.0, "takes as long."), (900.0, "takes 8% more time.")],
)
def test_what_functions_cost_is_said_against_the_kernel_without_them(tensor, rest):
    plain, one = made(), replace(made(tensor=tensor), name=f"{NAME}-scaled")
    one = replace(one, step=replace(one.step, instructions=1092))
    said = cost_of_functions(one, plain)
    assert said.startswith(
        "scaled costs 2.00 of the 11.38 instructions per element. By its code the same tile"
    )
    assert said.endswith(rest), said
    unknown = replace(plain, step=None, reason="tile_n is 96")
    assert cost_of_functions(one, unknown) == "What scaled costs is not known: without, tile_n is 96."


WRONG = """
[] -> ValueError: accepted: on kernels that compute the same on one target
[Verdict(NAME, "sm90", "tile_n=512", "it needs more")] -> ValueError: accepted: on kernels that compute the same on
[made(), replace(made(), target="sm80")] -> ValueError: accepted: on kernels that compute the same on one target
[made(), replace(made(), name="forward-sm80-bf16-d64-causal")] -> ValueError: accepted: on kernels that compute the
3 -> TypeError: verdicts is 3; accepted: a list
"""


@refusals.each(WRONG)
def test_the_best_of_what_cannot_be_compared_is_refused(call, sentence):
    refusals.check(f"lab.best({call})", sentence, globals())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "is bound by tensor cores, the best"),
        ({"shared": 950.0}, "is bound by tensor cores (shared memory nearly as much)"),
        ({"shared": 1500.0}, "is bound by shared memory, where operands are read more than once"),
        ({"warp": 5000.0}, "waits: a warp stalls for 5,000 clocks, and the pipes"),
    ],
)
def test_what_bounds_a_step_and_what_to_try(changes, said):
    (sentence,) = findings(made(**changes))
    assert sentence.startswith(f"The steady step {said}")
    assert ("try " in sentence) == ("tensor cores" not in sentence)
