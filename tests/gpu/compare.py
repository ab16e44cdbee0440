"""Helpers of most files here: compare a problem with the definition, make tensors, differentiate a call, capture it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.checks import CANCELLATION, GRADIENT, Errors, check
from tests.problem import Problem, Start


def expectations(problem: Problem) -> list[dict[str, Tensor]]:
    """Results by definition: in float64, in the problem's dtype and in float32."""
    return [problem.expected(dtype) for dtype in (torch.float64, problem.tensors[0].dtype, torch.float32)]


def compare(problem: Problem, *, roundings: float = 8, **options: Any) -> dict[str, Tensor]:
    """Results of a problem's call, after a check of out and lse.

    roundings: of out in fp32, whose sums have another order than plain torch's.
    """
    exact, plain, plain32 = expectations(problem)
    found = problem.run(**options)
    own = roundings if problem.case.dtype == "fp32" else 1
    check("out", found["out"], exact["out"], plain["out"], roundings=own)
    check("lse", found["lse"], exact["lse"], plain32["lse"], roundings=32)
    return found


def compare_gradients(
    problem: Problem, start: Start, found: Mapping[str, Tensor], floor: float = CANCELLATION
) -> None:
    """Check gradients; of fp32, whose sums have another order, a larger error is allowed."""
    dtype = problem.tensors[0].dtype
    exact, plain = (problem.expected_gradients(start, of) for of in (torch.float64, dtype))
    factor, roundings = (2 * GRADIENT, 16) if dtype == torch.float32 else (GRADIENT, 1)
    for name, value in found.items():
        check(name, value, exact[name], plain[name], factor=factor, roundings=roundings, floor=floor)


def compare_errors(
    name: str,
    ours: Tensor,
    theirs: Tensor,
    exact: Tensor,
    rms: tuple[float, float],
    largest: tuple[float, float],
) -> None:
    """Assert that errors are at most the other computation's times the first number, plus the second number."""
    own, other = Errors.of(ours, exact), Errors.of(theirs, exact)
    print(f"{name}: error {own}, the other's {other}")
    assert own.rms <= rms[0] * other.rms + rms[1], f"{name}: rms {own}, the other's {other}"
    assert own.largest <= largest[0] * other.largest + largest[1], f"{name}: {own}, the other's {other}"


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit for bit, except for the sign of zeros."""
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=0, atol=0)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the GPU, from a seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def int32(*values: Any) -> Tensor:
    """An int32 tensor on the GPU."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def with_gradients(call: Callable[..., Any], tensors: Sequence[Tensor], grad_out: Tensor) -> list[Tensor]:
    """The output of a call, and the gradients of its tensors, which keep their strides."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call, and its results. It is called before as well, since no kernel can be built in a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, call()
