"""Second derivatives on the GPU, against torch's derivatives of the definition in float64."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn import attention
from cute_attn.compiler import registry
from cute_attn.traits import Traits
from tests.cases import BY_NAME
from tests.checks import CANCELLATION, GRADIENT, check
from tests.gpu.compare import randn
from tests.problem import Case, Problem, Start

NAMES = (
    "causal-203x113", "window-113x203", "full-d256", "fp16-causal-d64", "everything-causal-dropout",
    "everything-window-mem_efficient", "varlen-causal", "varlen-everything", "varlen-seqused", "sinks-no-keys",
    "few-mqa-fp16",
)  # fmt: skip
CASES = [*map(BY_NAME.__getitem__, NAMES), replace(BY_NAME["causal-203x113"], name="fp32", dtype="fp32")]


def seconds(
    problem: Problem, run: Callable[[Problem], Any], start: Start, tangents: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Derivatives of the gradients' products with tangents, by every tensor and by the gradients of out and lse."""
    problem, leaves = problem._with_leaves()
    outputs = run(problem)[:2]
    outer = [x.to(y.dtype).requires_grad_() for x, y in zip((start.out, start.lse), outputs, strict=True)]  # type: ignore[union-attr]
    wanted = list(leaves.values())
    firsts = torch.autograd.grad(outputs, wanted, outer, create_graph=True, materialize_grads=True)
    dots = [tangents[name].to(x.dtype) for name, x in leaves.items()]
    found = torch.autograd.grad(firsts, [*wanted, *outer], dots, materialize_grads=True)
    return dict(zip((*leaves, "out_dot", "lse_dot"), found, strict=True))


@pytest.mark.parametrize("of", CASES, ids=lambda case: case.name)
def test_case(of: Case) -> None:
    problem = of.build("cuda")
    start, (_, leaves) = problem.start(lse=True), problem._with_leaves()
    tangents = {name: torch.randn_like(x) for name, x in leaves.items()}
    found = seconds(problem, lambda own: own._run(), start, tangents)
    exact, plain = (
        seconds(problem._widened(dtype), lambda own, dtype=dtype: own._define(dtype), start, tangents)
        for dtype in (torch.float64, torch.float32)
    )
    for name, x in found.items():
        assert x.is_contiguous()
        check(name, x, exact[name], plain[name], factor=GRADIENT, roundings=16, floor=CANCELLATION)


def by_definition(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    i, j = (torch.arange(x.shape[1], device="cuda") for x in (q, k))
    scores = torch.tanh(scores) * table[:, None, None] + (i[:, None] - j) * 0.01
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(j > i[:, None], -torch.inf).softmax(-1), v)


def test_functions_and_what_they_capture() -> None:
    shapes = ((2, 150, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64))
    tensors = (*(randn(*shape, seed=i) for i, shape in enumerate(shapes)), torch.rand(4, device="cuda"))
    seed, results = randn(2, 150, 4, 64, seed=9), []

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return attention(
            q, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(s) * table[h] + (i - j) * 0.01, causal=True
        )  # type: ignore[return-value]

    for call, dtype in ((run, None), (by_definition, torch.float64), (by_definition, torch.float32)):
        own = [x.to(dtype or x.dtype).requires_grad_() for x in tensors]
        firsts = torch.autograd.grad(call(*own), own, seed.to(own[0].dtype), create_graph=True)
        results.append(torch.autograd.grad(sum(x.double().square().sum() for x in firsts), own))
    for name, x, right, plain in zip(("q", "k", "v", "table"), *results, strict=True):
        # The tangents are first derivatives of kernels, with errors of 16-bit products.
        check(name, x, right, plain.bfloat16(), factor=8.0, floor=CANCELLATION)


def test_memory_of_long_sequences() -> None:
    """It does not grow with the square of the length."""
    tensors = [randn(1, 8192, 16, 64, seed=i).requires_grad_() for i in range(3)]
    firsts = torch.autograd.grad(attention(*tensors, causal=True).sum(), tensors, create_graph=True)  # type: ignore[union-attr]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = torch.autograd.grad(firsts, tensors, [torch.ones_like(x) for x in tensors])
    assert all(x.isfinite().all() for x in found)
    assert torch.cuda.max_memory_allocated() - before < 2 * 2**30


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Traits, Any, str]]:
    of = params.get("of")
    if of is None or not of.launches:
        return
    for op in ("forward", "backward"):
        kernels = (of.traits(arch, op) for arch in registry.generations(target))
        found = next((x for x in kernels if registry.known_class(x).supports(x) is None), None)
        if found is not None:
            yield found, None, target
