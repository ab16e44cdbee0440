"""fp32 on the card, at its own precision and at tf32's: named cases, what PyTorch's products say, and refusals."""

from dataclasses import replace

import pytest
import torch

from cute_attn import Unsupported, attention
from tests.checks import check
from tests.problem import Case, Problem

CASES = [
    Case("causal-d64", seqlen_q=203, seqlen_k=333, causal=True),
    Case("full-d128", seqlen_q=130, seqlen_k=1030, head_dim=128),
    Case("window-d36", seqlen_q=200, seqlen_k=300, head_dim=36, window=(70, 9)),
    Case("softcap-d96", seqlen_q=130, seqlen_k=200, head_dim=96, softcap=7.0),
    Case("top-left-d192x64", seqlen_q=300, seqlen_k=200, head_dim=192, head_dim_v=64, causal="top_left"),
    Case("alibi-softcap-d64", seqlen_q=200, seqlen_k=200, causal=True, alibi="heads", softcap=7.0),
    Case("bias-d64", seqlen_q=130, seqlen_k=129, bias="fp32", bias_hides=True),
    Case("bias-half-d128", seqlen_q=130, seqlen_k=130, bias="bf16", bias_broadcast="bh", head_dim=128),
    Case("dropout-d64", seqlen_q=160, seqlen_k=200, dropout_p=0.2),
    Case(
        "dropout-mem-efficient-d128", seqlen_q=160, seqlen_k=202, dropout_p=0.2, dropout_mask="mem_efficient"
    ),
    Case("varlen-d64", lengths_q=(70, 0, 133), lengths_k=(90, 41, 269), causal=True, seqused_k=(80, 41, 200)),
    Case("large-scores-d64", seqlen_q=128, seqlen_k=500, logits=20.0),
]
CASES = [replace(case, dtype="fp32") for case in CASES]


def in_tf32(problem: Problem) -> Problem:
    """The problem with q, k and v rounded to tf32, 11 significant bits, half-way cases away from 0.

    PyTorch's own products in tf32 are no measure: cuBLAS keeps fp32 for sizes of which its tf32 kernels are not faster.
    """
    q, k, v = ((x.view(torch.int32) + 2**12 & -(2**13)).view(torch.float32) for x in problem.tensors)
    return replace(problem, tensors=(q, k, v))


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, precision, matmul_precision):
    problem = case.build("cuda")
    matmul_precision("fp32")
    exact, plain32 = problem.expected(torch.float64), problem.expected(torch.float32)
    plain = plain32 if precision == "fp32" else in_tf32(problem).expected(torch.float32)
    actual = problem.run(precision=precision)
    roundings = 32 if precision == "fp32" else 2.0**14  # an operand's rounding of 2^-11
    check("out", actual["out"], exact["out"], plain["out"], roundings=8)
    check("lse", actual["lse"], exact["lse"], plain32["lse"], roundings=roundings)


def randn(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda")


def test_precision_follows_pytorchs_products(matmul_precision):
    q, k, v = (randn(1, 256, 2, 64, seed=i) for i in range(3))
    named = {name: attention(q, k, v, precision=name) for name in ("fp32", "tf32")}
    assert not torch.equal(named["fp32"], named["tf32"])
    for name, expected in named.items():
        matmul_precision(name)
        assert torch.equal(attention(q, k, v), expected)


def test_the_hopper_kernel_declines_fp32():
    q = randn(1, 64, 2, 64)
    with pytest.raises(Unsupported, match="dtype is fp32; accepted: fp16, bf16"):
        attention(q, q, q, kernel="sm90")
