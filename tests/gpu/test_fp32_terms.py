"""fp32 in fp16 terms on the GPU: named cases, and inputs that the fallback kernel has to compute."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cute_attn import attention, attention_varlen, reference
from cute_attn.host import split_fp32
from tests.checks import check
from tests.gpu.test_fp32 import CASES as SMALL
from tests.problem import Case

TERMS = "sm80:terms"
BY_NAME = {case.name: case for case in SMALL}
# Poison in rows that no sequence owns makes the fallback kernel compute varlen and seqused cases.
CASES = [
    *(case for case in SMALL if case.name not in ("bias-d64", "bias-half-d128", "dropout-d64")),
    Case("d256", dtype="fp32", seqlen_q=150, seqlen_k=200, head_dim=256),
    Case("d512", dtype="fp32", seqlen_q=70, seqlen_k=100, head_dim=512),
    Case("d59-causal", dtype="fp32", seqlen_q=200, seqlen_k=190, head_dim=59, causal=True),
    replace(BY_NAME["bias-d64"], name="bias-dropout-d128", head_dim=128, dropout_p=0.2),
]
TF32 = ("causal-d64", "d512", "d59-causal", "bias-dropout-d128", "varlen-d64")
TF32_FACTOR = 1.5
"""How many times the error of the kernel that multiplies in tf32 one of a single fp16 term may have."""


def needed_kernels(chosen, target):
    """Both kernels of a case, and the split; in tf32 also the kernel they are compared with."""
    case, single = chosen.get("parts_case"), chosen.get("tf32_case")
    if case is not None or single is not None:
        traits = case.traits("sm80") if case else replace(single.traits("sm80"), precision="tf32")
        yield traits.split_fp32("forward_split"), None, target
        for name in ("terms", "fallback", *(() if case else ("",))):
            yield replace(traits, variant=name), None, target


@pytest.mark.parametrize("parts_case", CASES, ids=lambda case: case.name)
def test_case(parts_case, matmul_precision):
    problem = parts_case.build("cuda")
    matmul_precision("fp32")
    exact, plain = problem.expected(torch.float64), problem.expected(torch.float32)
    actual = problem.run(precision="fp32", kernel=TERMS)
    check("out", actual["out"], exact["out"], plain["out"], roundings=8)
    check("lse", actual["lse"], exact["lse"], plain["lse"], roundings=32)


@pytest.mark.parametrize("tf32_case", [c for c in CASES if c.name in TF32], ids=lambda case: case.name)
def test_case_in_tf32(tf32_case):
    problem = tf32_case.build("cuda")
    exact = problem.expected(torch.float64)
    plain, actual = (problem.run(precision="tf32", kernel=kernel) for kernel in ("sm80", TERMS))
    for name in ("out", "lse"):
        check(name, actual[name], exact[name], plain[name], factor=TF32_FACTOR, roundings=32)


@pytest.fixture
def launch_only(monkeypatch):
    """Launches one of both kernels, for one test: outputs are NaN where it leaves the call to the other."""
    launch_both = split_fp32.launch_forward

    def choose(name):
        other = "fallback" if name == "terms" else "main"
        silent = SimpleNamespace(bind=lambda **arguments: (lambda: None,))

        def launch(plan, arguments):
            launch_both(plan._replace(functions={**plan.functions, other: silent}), arguments)

        monkeypatch.setattr(split_fp32, "launch_forward", launch)

    return choose


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def by_definition(q, k, v):
    """(out, lse) in the dtype of q."""
    return reference.attention(q, k, v, q.shape[-1] ** -0.5)[:2]


def inputs(what):
    """q, k and v with a property, and which kernel has to compute."""
    q, k, v = (randn(2, 300, 2, 64, seed=i) for i in range(3))
    if what == "plain":
        return (q, k, v), "terms"
    if what == "scaled":
        return (1e-3 * q, 1e3 * k, 1e-8 * v), "terms"
    if what == "rows of zeros":
        k[:, 5:90] = 0.0
        v[0, 7] = 0.0
        return (q, k, v), "terms"
    if what == "zeros":
        return (q, torch.zeros_like(k), v), "terms"
    if what == "rows down to 2^-12":
        factors = 2.0 ** -torch.arange(12, device="cuda").repeat(25)[None, :, None, None]
        return (q, k / k.abs().amax(-1, keepdim=True) * factors, v * factors.flip(1)), "either"
    if what == "rows down to 2^-20":  # one term keeps tf32's digits, two do not keep fp32's
        factors = 2.0 ** -torch.arange(20, device="cuda").repeat(15)[None, :, None, None]
        return (q, k / k.abs().amax(-1, keepdim=True) * factors, v * factors.flip(1)), "terms"
    if what == "a small row":
        q[1, 299, 1] *= 1e-8
    elif what == "small rows of v":
        v[:, ::2] *= 1e-8
    elif what == "a huge key":
        k[0, 100, 0, 3] = 1e30
    elif what == "inf":
        v[0, 100, 0, 3] = math.inf
    elif what == "tiny":
        q, k, v = 1e-20 * q, 1e20 * k, 1e-30 * v
    return (q, k, v), "fallback"


@pytest.mark.parametrize(
    "what",
    [
        *("plain", "scaled", "rows of zeros", "zeros", "rows down to 2^-12"),
        *("a small row", "small rows of v", "a huge key", "inf", "tiny"),
    ],
)
def test_the_kernel_that_has_to_computes(what, launch_only, matmul_precision):
    (q, k, v), which = inputs(what)
    matmul_precision("fp32")
    exact, exact_lse = by_definition(q.double(), k.double(), v.double())
    plain, plain_lse = by_definition(q, k, v)
    found, lse = attention(q, k, v, precision="fp32", kernel=TERMS, return_lse=True)
    out = found.clone()
    if what == "inf":  # and nothing beside its column
        column = (0, slice(None), 0, 3)
        assert not out[column].isfinite().any()
        out[column] = exact[column] = plain[column] = 0.0
    check("out", out, exact, plain, roundings=8)
    check("lse", lse, exact_lse, plain_lse, roundings=32)
    if which != "either":
        launch_only(which)
        again = attention(q, k, v, precision="fp32", kernel=TERMS)
        assert torch.equal(again.nan_to_num(), found.nan_to_num())
        launch_only("fallback" if which == "terms" else "terms")
        assert attention(q, k, v, precision="fp32", kernel=TERMS).isnan().all()


@pytest.mark.parametrize(
    "what",
    ["plain", "scaled", "zeros", "rows down to 2^-20", "a small row", "small rows of v", "inf", "tiny"],
)
def test_the_kernel_that_has_to_computes_in_tf32(what, launch_only):
    (q, k, v), which = inputs(what)
    exact, exact_lse = by_definition(q.double(), k.double(), v.double())
    found = attention(q, k, v, precision="tf32", kernel=TERMS, return_lse=True)
    plain = attention(q, k, v, precision="tf32", kernel="sm80", return_lse=True)
    if which == "fallback":
        for own, other in zip(found, plain, strict=True):
            assert torch.equal(own.nan_to_num(), other.nan_to_num())
    else:
        check("out", found[0], exact, plain[0], factor=TF32_FACTOR, roundings=8)
        check("lse", found[1], exact_lse, plain[1], factor=TF32_FACTOR, roundings=32)
    launch_only(which)
    again = attention(q, k, v, precision="tf32", kernel=TERMS)
    assert torch.equal(again.nan_to_num(), found[0].nan_to_num())
    launch_only("fallback" if which == "terms" else "terms")
    assert attention(q, k, v, precision="tf32", kernel=TERMS).isnan().all()


def test_garbage_in_rows_that_no_sequence_owns(matmul_precision):
    matmul_precision("fp32")
    q, k, v = (randn(400, 2, 64, seed=i) for i in range(3))
    starts = torch.tensor([10, 150, 390], dtype=torch.int32, device="cuda")
    lengths = (starts, starts, 240, 240)
    clean = attention_varlen(q, k, v, *lengths, precision="fp32", kernel=TERMS)
    k[:10], v[395:] = 1e30, math.nan
    dirty = attention_varlen(q, k, v, *lengths, precision="fp32", kernel=TERMS)
    for begin, end in ((10, 150), (150, 390)):
        rows = [x[None, begin:end] for x in (q, k, v)]
        exact, _ = by_definition(*(x.double() for x in rows))
        plain, _ = by_definition(*rows)
        for found in (clean, dirty):
            check("out", found[None, begin:end], exact, plain, roundings=8)


def test_a_graph_takes_the_kernel_of_each_replay(matmul_precision):
    matmul_precision("fp32")
    q, k, v = (randn(2, 300, 2, 64, seed=i) for i in range(3))
    attention(q, k, v, precision="fp32", kernel=TERMS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, precision="fp32", kernel=TERMS)
    for factor in (1.0, 1e-8, 1.0):
        k[0, 3] = factor * randn(2, 64, seed=9)
        graph.replay()
        exact, _ = by_definition(q.double(), k.double(), v.double())
        check("out", out, exact, by_definition(q, k, v)[0], roundings=8)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_large_calls_take_it_by_themselves(precision, launch_only):
    q, k, v = (randn(2, 1024, 16, 64, seed=i) for i in range(3))
    expected = attention(q, k, v, precision=precision, kernel=TERMS)
    launch_only("terms")
    assert torch.equal(attention(q, k, v, precision=precision), expected)


def test_sections_of_heads_under_a_causal_mask(launch_only, matmul_precision):
    """Several sections: four on a GPU of 132 multiprocessors."""
    matmul_precision("fp32")
    q, k, v = (randn(4, 2048, 32, 64, seed=i) for i in range(3))
    expected = attention(q, k, v, precision="fp32", kernel="sm80", causal=True, return_lse=True)
    launch_only("terms")
    found = attention(q, k, v, precision="fp32", kernel=TERMS, causal=True, return_lse=True)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_ctas_of_the_exact_kernel_claim_work_tiles(causal, launch_only, matmul_precision):
    """More work tiles than four per multiprocessor; twice, since the first launch resets the counter of claims."""
    matmul_precision("fp32")
    q, k, v = (randn(8, 600, 32, 64, seed=i) for i in range(3))
    k[0, 3, 0] *= 1e-8
    expected = attention(q, k, v, precision="fp32", kernel="sm80", causal=causal, return_lse=True)
    launch_only("fallback")
    for _ in range(2):
        found = attention(q, k, v, precision="fp32", kernel=TERMS, causal=causal, return_lse=True)
        for own, other in zip(found, expected, strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize("dims", [slice(0, 36), slice(1, 60)], ids=["aligned", "unaligned"])
def test_rows_of_q_of_any_strides(dims, launch_only, matmul_precision):
    """Which each CTA splits itself."""
    matmul_precision("fp32")
    q, k, v = (randn(2, 3, 150, 64, seed=i).transpose(1, 2)[..., dims] for i in range(3))
    launch_only("terms")
    found, expected = (attention(x, k, v, precision="fp32", kernel=TERMS) for x in (q, q.contiguous()))
    assert torch.equal(found, expected)
