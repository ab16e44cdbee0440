"""The tolerance rule and the cases it is applied to: right results pass, wrong ones fail."""

import math

import pytest
import torch

from tests.cases import BACKWARD_CASES, CASES, FOR_EVERY_TILE
from tests.checks import check, check_backward, check_forward

HUGE = {"far", "beyond-2-31"}  # more memory than a test machine may have
# Plain torch has no grid and no Philox call whose limits they could reach.
FOR_LAUNCHES = {"batch-70000", "heads-66000", "bias-beyond-65536", "dropout-beyond-65536"} | {
    "mem_efficient-beyond-65536"
}


def results(n=4096):
    exact = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return exact, exact.bfloat16()


def test_rounding_alone_passes():
    exact, plain = results()
    check("x", plain, exact, exact)


@pytest.mark.parametrize(("index", "value"), [(7, math.nan), (7, math.inf), (7, -math.inf), (7, 1.0)])
def test_one_bad_element_fails(index, value, capsys):
    exact, plain = results()
    bad = plain.clone()
    bad[index] += value
    with pytest.raises(AssertionError):
        check("x", bad, exact, plain)
    assert "plain torch's" in capsys.readouterr().out, "both errors are printed"


def test_many_slightly_bad_elements_fail():
    exact, _ = results()
    plain = exact.bfloat16()
    bad = exact.float() + 0.9 * (plain.float() - exact.float()).abs().max()
    assert (bad - exact).abs().max() < 2 * (plain - exact).abs().max()
    with pytest.raises(AssertionError, match="rms error"):
        check("x", bad, exact, plain)


def test_nan_in_plain_torch_fails():
    exact, plain = results()
    plain[3] = math.nan
    with pytest.raises(AssertionError):
        check("x", exact.float(), exact, plain)


def test_infinities_have_to_match():
    exact, plain = results()
    exact[5] = -math.inf
    good = plain.clone()
    good[5] = -math.inf
    check("x", good, exact, good)
    for wrong in (math.inf, 0.0):
        bad = good.clone()
        bad[5] = wrong
        with pytest.raises(AssertionError):
            check("x", bad, exact, good)


def test_a_wrong_dropout_mask_fails():
    exact = {
        "out": torch.zeros(1),
        "lse": torch.zeros(1),
        "softmax": torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64),
    }
    actual = {name: value.float() for name, value in exact.items()}
    check_forward(actual, exact, actual, actual)
    actual = actual | {"softmax": torch.tensor([0.5, 0.5, 0.0])}
    with pytest.raises(AssertionError, match="another dropout mask"):
        check_forward(actual, exact, actual, actual)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name not in HUGE | FOR_LAUNCHES][::4], ids=lambda c: c.name
)
def test_the_reference_passes_its_cases(case):
    problem = case.build("cpu").compared()
    dtype = problem.tensors[0].dtype
    exact, plain32 = problem.expected(torch.float64), problem.expected(torch.float32)
    check_forward(problem.run(), exact, problem.expected(dtype), plain32)


BY_NAMES = [
    c
    for c in BACKWARD_CASES
    if c.name in ("causal-203x113", "varlen-seqused", "bias-hides", "seqused_k-causal")
]


@pytest.mark.parametrize("case", BY_NAMES, ids=lambda c: c.name)
def test_the_references_gradients_pass(case):
    problem = case.build("cpu")
    start = problem.start(lse=True)
    exact, plain = (problem.expected_gradients(start, d) for d in (torch.float64, problem.tensors[0].dtype))
    actual = problem.gradients(start)
    check_backward(actual, exact, plain)
    assert all(x.isfinite().all() for x in actual.values())
    if case.seqused_q:
        first = int(problem.lengths.cu_seqlens_q[0])
        assert not actual["dq"][:first].any() and not actual["dq"][first + case.seqused_q[0]].any()


def test_few_kernels_serve_the_cases():
    traits = {case.traits("sm80") for case in CASES if case.launches}
    assert len(traits) <= 83 and {case.traits("sm80") for case in FOR_EVERY_TILE} <= traits
