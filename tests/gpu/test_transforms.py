"""torch.func's transforms on the GPU: each sample's gradients equal those of a call of its own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from cute_attn import attention
from cute_attn.traits import Traits
from tests.gpu.archs import runnable_archs
from tests.gpu.conftest import backward_requests
from tests.problem import Case

CASES = [
    Case("bf16-d64-causal-bias", causal=True, bias="bf16", seqlen_q=90, seqlen_k=120),
    Case("fp32-d64-causal-bias", causal=True, bias="fp32", dtype="fp32", seqlen_q=90, seqlen_k=120),
]


@pytest.mark.parametrize("of", CASES, ids=lambda case: case.name)
def test_gradients_of_each_sample(of: Case) -> None:
    problems = [of.build("cuda", seed=i) for i in range(3)]
    names = ("q", "k", "v", "bias")
    inputs = [dict(zip(names, (*x.tensors, x.inputs.bias), strict=True)) for x in problems]
    shared = inputs[0]["bias"]

    def loss(q: Tensor, bias: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, bias=bias, deterministic=True).float().square().sum()  # type: ignore[union-attr]

    q, k, v = (torch.stack([x[name] for x in inputs]) for name in "qkv")  # type: ignore[misc]
    found = vmap(grad(loss, argnums=(0, 1)), (0, None, 0, 0))(q, shared, k, v)
    for i, own in enumerate(inputs):
        leaves = [x.detach().requires_grad_() for x in (own["q"], shared)]  # type: ignore[union-attr]
        expected = torch.autograd.grad(loss(*leaves, own["k"], own["v"]), leaves)  # type: ignore[arg-type]
        for name, one, right in zip(("dq", "dbias"), (found[0][i], found[1][i]), expected, strict=True):
            torch.testing.assert_close(one, right, rtol=2e-2, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}")


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Traits, Any, str]]:
    """The forward and the backward of the newest arch that computes it."""
    of = params["of"]
    arch = "sm80" if of.dtype == "fp32" else runnable_archs()[-1]
    yield from backward_requests(of, arch, None, target)
