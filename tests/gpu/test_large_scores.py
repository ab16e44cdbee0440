"""Biases of finfo.min and -1e12, which masks are often made of, and unaligned rows of large head dims: both ways."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_attn.compiler import registry
from cute_attn.host.backward import kernels_of
from cute_attn.traits import Traits
from tests.checks import check
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import compare, compare_gradients
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


@pytest.mark.parametrize("op", ["backward"])
@pytest.mark.parametrize(("case", "arch"), combinations(CASES[:1]))
def test_large_negative_biases_hide_no_row(case: Case, arch: str, op: str) -> None:
    """Biases of -1e12, which absorbs the scores, or of finfo.min and -inf: results are means, with finite gradients."""
    problem = masked(case)
    bias = problem.inputs.bias
    assert bias is not None
    bias[:, :, 5], bias[:, :, HALF_HIDDEN, ::2] = -1e12, torch.finfo(bias.dtype).min
    bias[:, :, HALF_HIDDEN, 1::2] = -torch.inf
    v = problem.tensors[2].double().repeat_interleave(case.group, 2)
    out = problem.run(kernel=arch)["out"].double()
    torch.testing.assert_close(out[:, 5], v.mean(1), atol=4e-3, rtol=1e-2)
    torch.testing.assert_close(out[:, HALF_HIDDEN], v[:, ::2].mean(1), atol=4e-3, rtol=1e-2)
    for name, gradient in problem.gradients(problem.start(), kernel=arch).items():
        assert gradient.isfinite().all(), name


LARGE = [
    Case("bf16-d300", head_dim=300, causal=True, **ODD),
    Case("fp16-d513x4", head_dim=513, head_dim_v=4, dtype="fp16", **ODD),
    Case("fp32-d301x299", head_dim=301, head_dim_v=299, dtype="fp32", lengths_q=(70, 0, 33), lengths_k=(90, 41, 69)),
    Case("bf16-d320-odd-strides", head_dim=320, **ODD),
]  # fmt: skip


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("of", LARGE, ids=lambda case: case.name)
def test_unaligned_rows_of_large_head_dims(of: Case, given: bool) -> None:
    """Kernels compute on padded copies; the results have the caller's layout, and so do gradients."""
    problem = of.build("cuda")
    if of.name.endswith("odd-strides"):
        apart = [torch.empty((*x.shape[:-1], 323), device="cuda", dtype=x.dtype) for x in problem.tensors]
        q, k, v = (wide[..., :320].copy_(x) for wide, x in zip(apart, problem.tensors, strict=True))
        problem = replace(problem, tensors=(q, k, v))
    q, start = problem.tensors[0], problem.start()
    out = q.new_full((*q.shape[:-1], of.size_v), torch.nan) if given else None
    found = compare(problem, roundings=16, out=out)
    if out is not None:
        assert torch.equal(out[problem.owned], found["out"])
    else:
        compare_gradients(problem, start, problem.gradients(start))


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Traits, Any, str]]:
    """The forward and the backward of padded copies."""
    of = params.get("of")
    if of is None:
        return
    yield of.traits("sm80"), None, target
    main = registry.lookup(of.traits("sm80", "backward"), None, target)
    yield from ((traits, tile, target) for traits, tile in kernels_of(main))
