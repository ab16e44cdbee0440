"""Head dims above 256 on the card, equal or not, and PyTorch's memory-efficient kernel's error."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_attn import attention
from tests.checks import Errors, check
from tests.problem import Case

LARGE = [
    Case("causal-d320", seqlen_q=203, seqlen_k=333, head_dim=320, causal=True),
    Case("full-d512", seqlen_q=130, seqlen_k=530, head_dim=512, dtype="fp16"),
    Case("window-d576x512", lengths_q=(70, 0, 133), lengths_k=(90, 41, 269), head_dim=576, head_dim_v=512),
    Case("bias-dropout-d264", seqlen_q=130, seqlen_k=200, head_dim=264, bias="fp32", dropout_p=0.2),
    Case("d64x512", seqlen_q=100, seqlen_k=300, head_dim=64, head_dim_v=512, causal="top_left"),
    Case("large-scores-d512", seqlen_q=128, seqlen_k=500, head_dim=512, logits=20.0, alibi="heads"),
    Case("fp32-d256", seqlen_q=203, seqlen_k=333, head_dim=256, causal=True, dtype="fp32"),
    Case("fp32-d512", seqlen_q=100, seqlen_k=300, head_dim=512, dtype="fp32", dropout_p=0.1),
]
LARGE[2] = replace(LARGE[2], window=(70, 9))


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_large_head_dims(case):
    problem = case.build("cuda")
    exact, plain, plain32 = (
        problem.expected(dtype) for dtype in (torch.float64, problem.tensors[0].dtype, torch.float32)
    )
    actual = problem.run()
    check("out", actual["out"], exact["out"], plain["out"], roundings=8 if case.dtype == "fp32" else 1)
    check("lse", actual["lse"], exact["lse"], plain32["lse"], roundings=32)


@pytest.mark.parametrize("head_dim", [320, 512])
def test_error_is_at_most_that_of_the_memory_efficient_kernel(head_dim):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, 1024, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), is_causal=True
        )
    ours = attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    own, other = Errors.of(ours, exact), Errors.of(theirs, exact)
    print(f"ours {own}, memory-efficient {other}")
    assert own.rms <= 1.5 * other.rms and own.largest <= 1.5 * other.largest
