"""Heads that start anywhere within aligned rows, which Hopper's forward loads by TMA; what lies between them is NaN."""

from dataclasses import replace

import pytest
import torch

from cute_attn import Unsupported, attention
from tests.checks import check
from tests.gpu.archs import runnable_archs
from tests.problem import Case

pytestmark = pytest.mark.skipif("sm90" not in runnable_archs(), reason="the kernels are Hopper's")

EIGHT = {"nheads": 8, "nheads_kv": 8}
CASES = [
    Case("causal-d59", seqlen_q=203, seqlen_k=1333, head_dim=59, causal=True, **EIGHT),
    Case("full-d100", seqlen_q=150, seqlen_k=700, head_dim=100, dtype="fp16", **EIGHT),
    Case(
        "varlen-d59x61", lengths_q=(70, 0, 133), lengths_k=(90, 41, 669), head_dim=59, head_dim_v=61, **EIGHT
    ),
    Case("window-d123", seqlen_q=300, seqlen_k=300, head_dim=123, window=(70, 9), **EIGHT),
    Case("groups-d20", seqlen_q=130, seqlen_k=500, head_dim=20, nheads=16, nheads_kv=8, causal=True),
    Case("dropout-bias-d50", seqlen_q=130, seqlen_k=200, head_dim=50, dropout_p=0.2, bias="bf16", **EIGHT),
    Case("d1x3", seqlen_q=70, seqlen_k=400, head_dim=1, head_dim_v=3, **EIGHT),
    Case("used-d250", seqlen_q=90, seqlen_k=200, seqused_k=(200, 17), head_dim=250, **EIGHT),
    Case("d64", seqlen_q=200, seqlen_k=600, head_dim=64, causal=True, **EIGHT),
    Case("large-d401x300", seqlen_q=100, seqlen_k=300, head_dim=401, head_dim_v=300, causal=True, **EIGHT),
    Case("few-queries-d59", seqlen_q=1, seqlen_k=900, head_dim=59, nheads=16, nheads_kv=8),
]


def apart(x, shift, gap):
    """x in memory that is NaN otherwise: from element ``shift`` on, each head of a row followed by ``gap`` elements."""
    *outer, heads, dim = x.shape
    rows = x.numel() // (heads * dim)
    memory = torch.full((rows * heads * (dim + gap) + shift,), float("nan"), dtype=x.dtype, device=x.device)
    return memory[shift:].view(*outer, heads, dim + gap)[..., :dim].copy_(x)


def run(case, shift, gap):
    problem = case.build("cuda")
    tensors = tuple(apart(x, shift, gap) for x in problem.tensors)
    exact, plain, plain32 = (
        problem.expected(dtype) for dtype in (torch.float64, problem.tensors[0].dtype, torch.float32)
    )
    actual = replace(problem, tensors=tensors).run(kernel="sm90")
    check("out", actual["out"], exact["out"], plain["out"])
    check("lse", actual["lse"], exact["lse"], plain32["lse"], roundings=32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_heads_beside_each_other(case):
    """Columns that a box loads beside a head are the next head's: numbers."""
    run(case, 0, 0)


@pytest.mark.parametrize("shift, gap", [(0, 5), (3, 1), (7, 3)])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[5], CASES[9]], ids=lambda case: case.name)
def test_nan_between_heads(case, shift, gap):
    """They are NaN: work tiles that met one are replayed."""
    run(case, shift, gap)


def test_the_next_head_does_not_matter():
    q, k, v = (torch.randn(2, 1000, 8, 59, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    first = attention(q, k, v, kernel="sm90")
    for x in (q, k, v):
        x[:, :, 1::2] = torch.inf
    second = attention(q, k, v, kernel="sm90")
    # Its work tiles were replayed with running maxima, so roundings differ.
    difference = (first[:, :, ::2].float() - second[:, :, ::2].float()).abs().max()
    assert difference <= 2**-7 * first.abs().max()
    assert second[:, :, 1::2].isnan().all()


def test_rows_that_tma_cannot_load_have_ampere_kernels():
    """Rows of 59 elements for each of 3 heads are no multiples of 16 bytes."""
    q, k, v = (torch.randn(1, 100, 3, 59, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, there = attention(q, k, v), torch.empty_like(q)
    assert attention(q, k, v, kernel="sm80", out=there) is there and torch.equal(out, there)
    with pytest.raises(Unsupported, match="heads within rows"):
        attention(q, k, v, kernel="sm90")
