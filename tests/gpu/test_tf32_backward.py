"""The backward of fp32 tensors in one fp16 term, precision tf32, against the kernels that multiply in tf32."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn import attention_backward
from cute_attn.compiler import registry
from cute_attn.host.backward import kernels_of
from cute_attn.traits import Traits
from tests.checks import Errors
from tests.gpu.test_fp32_backward import BY_NAME, TERMS, run
from tests.problem import Case, Problem, Start

CASES = {
    **{
        name: BY_NAME[name]
        for name in ("d64-causal", "d128-causal", "d256", "alibi", "bias-dropout", "varlen")
    },
    "d96": Case("d96", seqlen_q=100, seqlen_k=90, head_dim=96, dtype="fp32", causal=True),
    "d96-bias": Case("d96-bias", seqlen_q=70, seqlen_k=130, head_dim=96, dtype="fp32", bias="fp32"),
    "d96-softcap": Case("d96-softcap", seqlen_q=90, seqlen_k=110, head_dim=96, dtype="fp32", softcap=5.0),
    "d192x96": Case("d192x96", seqlen_q=90, seqlen_k=110, head_dim=192, head_dim_v=96, dtype="fp32"),
    "d128x160": Case("d128x160", seqlen_q=90, seqlen_k=110, head_dim=128, head_dim_v=160, dtype="fp32"),
    "d512": Case("d512", seqlen_q=70, seqlen_k=100, head_dim=512, dtype="fp32"),
}
RATIO = 1.5
"""How many times the error of products in tf32 one of fp16 terms may have."""


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Traits, Any, str]]:
    """The backward's kernels in one term, and those they are compared with."""
    if "name" in params:
        traits = dataclasses.replace(CASES[params["name"]].traits("sm80", "backward"), precision="tf32")
        main = registry.lookup(traits, None, target)
        for kernel in (main, main.of_whole_operands(target)):
            yield from ((own_traits, own, target) for own_traits, own in kernels_of(kernel))


def compare(problem: Problem, start: Start) -> None:
    """Errors of gradients in terms are at most RATIO of those by the other kernels, as a whole and of most rows."""
    exact = problem.expected_gradients(start, torch.float64)
    own, tf32 = (run(problem, start, precision="tf32", tile=tile) for tile in (TERMS, None))
    for name, value in own.items():
        right = exact[name]
        assert not value.isnan().any(), name
        errors = Errors.of(value, right), Errors.of(tf32[name], right)
        print(f"{name}: error {errors[0]}, of tf32 {errors[1]}")
        size = right.abs().max().item()
        assert errors[0].rms <= RATIO * errors[1].rms + 2.0**-22 * size, name
        assert errors[0].largest <= 2 * RATIO * errors[1].largest + 2.0**-22 * size, name
        rows = [(x.double() - right).square().mean(-1).sqrt().flatten() for x in (value, tf32[name])]
        used = rows[1] > 0
        if used.any():
            assert (rows[0][used] / rows[1][used]).median() <= RATIO, name


def problem_of(name: str) -> tuple[Problem, Start]:
    problem = CASES[name].build("cuda")
    start = problem.start()
    assert start.out is not None
    return problem, start


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_exact_as_in_tf32(name: str) -> None:
    """With NaN in rows that no sequence owns, the fallback kernel computes the varlen case."""
    compare(*problem_of(name))


@pytest.mark.parametrize("name", ["varlen"])
def test_rows_that_no_sequence_owns(name: str) -> None:
    problem, start = problem_of(name)
    tensors = tuple(x.nan_to_num(2.5, -2.5, 2.5) for x in problem.tensors)
    assert start.out is not None
    start = Start(start.out.nan_to_num(2.5, -2.5, 2.5), None)
    compare(dataclasses.replace(problem, tensors=tensors), start)


@pytest.mark.parametrize("small", ["q", "k", "v", "grad_out"])
@pytest.mark.parametrize("name", ["d64-causal"])
def test_a_row_that_is_too_small_for_one_term(name: str, small: str) -> None:
    """The fallback kernel computes, with half the keys of a CTA."""
    problem, start = problem_of(name)
    changed = dict(zip(("q", "k", "v", "grad_out"), (*problem.tensors, start.out), strict=True))
    changed[small][1, 7] *= 1e-9
    compare(problem, start)


@pytest.mark.parametrize("name", ["d128-causal", "d512"])
def test_a_row_that_is_too_small_at_other_head_dims(name: str) -> None:
    """Of head dim 512 the fallback kernel streams its operands, and adds to dQ in the same order."""
    problem, start = problem_of(name)
    assert start.out is not None
    start.out[1, 7] *= 1e-9
    compare(problem, start)


@pytest.mark.parametrize("name", ["d64-causal", "d512"])
@pytest.mark.parametrize("first", [0.0, -20.0])
def test_the_scale_of_score_gradients_changes(name: str, first: float) -> None:
    """From queries to queries upwards, or downwards."""
    problem, start = problem_of(name)
    assert start.out is not None
    steps = torch.linspace(first, -20.0 - first, start.out.shape[1], device="cuda").exp2()
    start.out.mul_(steps[None, :, None, None])
    compare(problem, start)


@pytest.mark.parametrize("small_row", [False, True])
def test_large_calls_take_it_by_themselves_and_repeat_bit_for_bit(small_row: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    grad_out, q, k, v = (torch.randn(2, 1024, 8, 64, generator=generator, device="cuda") for _ in range(4))
    if small_row:
        k[0, 1000, 3] *= 1e-9
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).contiguous()
    options = {"precision": "tf32", "deterministic": True}
    found = [
        attention_backward(grad_out, q, k, v, out, lse, tile=tile, **options)  # type: ignore[arg-type]
        for tile in (None, None, TERMS)
    ]
    for first, *others in zip(*found, strict=True):
        assert first is not None and first.isfinite().all()
        assert all(torch.equal(first, other) for other in others)
