"""The tolerance rule and its cases: right results pass, wrong ones fail, and which cases tiles decline."""

import math
from importlib import import_module

import pytest
import torch

from tests.cases import CASES
from tests.checks import check, check_forward
from tests.gpu.tile_cases import wrongly_listed

HUGE = {"far", "beyond-2-31"}  # more memory than a test machine may have
# Plain torch has no grid and no Philox call whose limits they could reach.
FOR_LAUNCHES = {"batch-70000", "heads-66000", "bias-beyond-65536", "dropout-beyond-65536"} | {
    "mem_efficient-beyond-65536"
}


def results(n=4096):
    exact = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return exact, exact.bfloat16()


def test_rounding_alone_passes_and_one_bad_element_fails(capsys):
    exact, plain = results()
    check("x", plain, exact, exact)
    for value in (math.nan, math.inf, -math.inf, 1.0):
        bad = plain.clone()
        bad[7] += value
        with pytest.raises(AssertionError):
            check("x", bad, exact, plain)
        assert "plain torch's" in capsys.readouterr().out, "both errors are printed"
    exact[5] = plain[5] = -math.inf
    check("x", plain, exact, plain)
    for wrong in (math.inf, 0.0):
        bad = plain.clone()
        bad[5] = wrong
        with pytest.raises(AssertionError):
            check("x", bad, exact, plain)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name not in HUGE | FOR_LAUNCHES][::4], ids=lambda c: c.name
)
def test_the_reference_passes_its_cases(case):
    problem = case.build("cpu").compared()
    dtype = problem.tensors[0].dtype
    exact, plain32 = problem.expected(torch.float64), problem.expected(torch.float32)
    check_forward(problem.run(), exact, problem.expected(dtype), plain32)


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_declined_cases_are_listed(op):
    tiles = import_module(f"tests.gpu.test_{op}").TILES
    assert wrongly_listed(op, tiles) == []
