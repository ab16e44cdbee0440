"""Biases of finfo.min, which masks are often made of: both ways."""

from typing import Any

import pytest
import torch

from tests.checks import check
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import compare_gradients
from tests.problem import Case, Problem

ODD: dict[str, Any] = {"seqlen_q": 130, "seqlen_k": 200}
CASES = [
    Case("bf16-d64", bias="bf16", **ODD),
    Case("bf16-d64-causal-over-h", bias="bf16", bias_broadcast="h", causal=True, **ODD),
    Case("bf16-d128-window", bias="bf16", head_dim=128, window=(90, 40), **ODD),
    Case("bf16-d64-softcap", bias="bf16", softcap=5.0, **ODD),
    Case("fp32-d64", bias="fp32", dtype="fp32", **ODD),
    Case("bf16-d320", bias="bf16", head_dim=320, **ODD),
]
SMALLEST, UNDER_ANOTHER, HALF_HIDDEN, HIDDEN = (3, 70, 128), 71, 72, 73
"""Rows: all keys have the smallest number; some; all that are not hidden; all hidden."""


def masked(case: Case) -> Problem:
    """The case with rows of the bias's smallest number."""
    problem = case.build("cuda")
    bias = problem.inputs.bias
    assert bias is not None
    smallest = torch.finfo(bias.dtype).min
    for row in SMALLEST:
        bias[:, :, row] = smallest
    bias[:, :, UNDER_ANOTHER, 30:], bias[:, :, UNDER_ANOTHER + 20, :60] = smallest, smallest
    bias[:, :, HALF_HIDDEN, ::2], bias[:, :, HALF_HIDDEN, 1::2] = smallest, -torch.inf
    bias[:, :, HIDDEN] = -torch.inf
    return problem


def combinations(cases: list[Case]) -> list[Any]:
    """Every case with every arch that computes it."""
    return [
        pytest.param(case, arch, id=f"{case.name}-{arch}")
        for case in cases
        for arch in runnable_archs()
        if arch == "sm80" or (case.dtype != "fp32" and case.head_dim <= 256)
    ]


@pytest.mark.parametrize("op", ["backward"])
@pytest.mark.parametrize(("case", "arch"), combinations(CASES))
def test_rows_of_the_smallest_number(case: Case, arch: str, op: str) -> None:
    """Averages of all keys that the mask shows, a finite LSE, and the gradients of both."""
    problem = masked(case)
    start = problem.start()
    exact, plain = problem.expected(torch.float64), problem.expected(problem.tensors[0].dtype)
    found = problem.run(kernel=arch)
    roundings = 16 if case.dtype == "fp32" else 1
    check("out", found["out"], exact["out"], plain["out"], roundings=roundings)
    smallest = torch.finfo(problem.inputs.bias.dtype).min  # type: ignore[union-attr]
    assert all((found["lse"][:, :, row] == smallest).all() for row in SMALLEST)
    assert (found["lse"][:, :, HIDDEN] == -torch.inf).all() and not found["out"][:, HIDDEN].any()
    compare_gradients(problem, start, problem.gradients(start, kernel=arch))
