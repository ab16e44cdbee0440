"""fp32 on the card, in fp32's precision and in tf32's, also in fp16 terms, with inputs for the fallback kernel."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cute_attn import attention, attention_varlen, reference
from cute_attn.host import split_fp32
from tests.checks import check
from tests.gpu import compare as common
from tests.gpu.compare import assert_equal, captured, compare, int32
from tests.problem import Case, Problem

randn = functools.partial(common.randn, dtype=torch.float32)

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

    PyTorch's tf32 products are no reference: cuBLAS computes in fp32 where its tf32 kernels are not faster.
    """
    q, k, v = ((x.view(torch.int32) + 2**12 & -(2**13)).view(torch.float32) for x in problem.tensors)
    return replace(problem, tensors=(q, k, v))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, matmul_precision):
    matmul_precision("fp32")
    compare(case.build("cuda"), precision="fp32")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_in_tf32(case, matmul_precision):
    problem = case.build("cuda")
    matmul_precision("fp32")
    exact, plain32 = problem.expected(torch.float64), problem.expected(torch.float32)
    plain, actual = in_tf32(problem).expected(torch.float32), problem.run(precision="tf32")
    check("out", actual["out"], exact["out"], plain["out"], roundings=8)
    # An operand's rounding is 2^-11.
    check("lse", actual["lse"], exact["lse"], plain32["lse"], roundings=2.0**14)


def test_precision_follows_pytorchs_products(matmul_precision):
    q, k, v = (randn(1, 256, 2, 64, seed=i) for i in range(3))
    named = {name: attention(q, k, v, precision=name) for name in ("fp32", "tf32")}
    assert not torch.equal(named["fp32"], named["tf32"])
    for name, expected in named.items():
        matmul_precision(name)
        assert torch.equal(attention(q, k, v), expected)


# ---- in fp16 terms ----

TERMS = "sm80:terms"
BY_NAME = {case.name: case for case in CASES}
# Poison in rows that no sequence owns makes the fallback kernel compute varlen and seqused cases.
IN_TERMS = [
    *(case for case in CASES if case.name not in ("bias-d64", "bias-half-d128", "dropout-d64")),
    Case("d256", dtype="fp32", seqlen_q=150, seqlen_k=200, head_dim=256),
    Case("d512", dtype="fp32", seqlen_q=70, seqlen_k=100, head_dim=512),
    Case("d59-causal", dtype="fp32", seqlen_q=200, seqlen_k=190, head_dim=59, causal=True),
    replace(BY_NAME["bias-d64"], name="bias-dropout-d128", head_dim=128, dropout_p=0.2),
]
TF32 = ("causal-d64", "d512", "d59-causal", "bias-dropout-d128", "varlen-d64")
TF32_FACTOR = 1.5
"""How many times the error of the kernel that multiplies in tf32 one of a single fp16 term may have."""


def needed_kernels(chosen, target):
    """Both kernels of a case, and the split; in tf32 also the kernel for the comparison."""
    case, single = chosen.get("terms_case"), chosen.get("tf32_case")
    if case is not None or single is not None:
        traits = case.traits("sm80") if case else replace(single.traits("sm80"), precision="tf32")
        yield traits.split_fp32("forward_split"), None, target
        for name in ("terms", "fallback", *(() if case else ("",))):
            yield replace(traits, variant=name), None, target


@pytest.mark.parametrize("terms_case", IN_TERMS, ids=lambda case: case.name)
def test_case_in_terms(terms_case, matmul_precision):
    matmul_precision("fp32")
    compare(terms_case.build("cuda"), precision="fp32", kernel=TERMS)


@pytest.mark.parametrize("tf32_case", [c for c in IN_TERMS if c.name in TF32], ids=lambda case: case.name)
def test_case_in_a_single_term(tf32_case):
    problem = tf32_case.build("cuda")
    exact = problem.expected(torch.float64)
    plain, actual = (problem.run(precision="tf32", kernel=kernel) for kernel in ("sm80", TERMS))
    for name in ("out", "lse"):
        check(name, actual[name], exact[name], plain[name], factor=TF32_FACTOR, roundings=32)


@pytest.fixture
def launch_only(monkeypatch):
    """For one test, launch only one of the two kernels; outputs that the other one would compute are NaN."""
    launch_both = split_fp32.launch_forward

    def choose(name):
        other = "fallback" if name == "terms" else "main"
        silent = SimpleNamespace(bind=lambda **arguments: (lambda: None,))

        def launch(plan, arguments):
            launch_both(plan._replace(functions={**plan.functions, other: silent}), arguments)

        monkeypatch.setattr(split_fp32, "launch_forward", launch)

    return choose


def by_definition(q, k, v):
    """(out, lse) in the dtype of q."""
    return reference.attention(q, k, v, q.shape[-1] ** -0.5)[:2]


def falling(powers):
    """Rows of K and of V become smaller, down to a power of two, K's from the first row and V's from the last."""

    def change(q, k, v):
        factors = 2.0 ** -torch.arange(powers, device="cuda").repeat(300 // powers)[None, :, None, None]
        k.div_(k.abs().amax(-1, keepdim=True)).mul_(factors)
        v.mul_(factors.flip(1))

    return change


INPUTS = {
    "plain": ("terms", lambda q, k, v: None),
    "scaled": ("terms", lambda q, k, v: (q.mul_(1e-3), k.mul_(1e3), v.mul_(1e-8))),
    "rows of zeros": ("terms", lambda q, k, v: (k[:, 5:90].zero_(), v[0, 7].zero_())),
    "zeros": ("terms", lambda q, k, v: k.zero_()),
    "rows down to 2^-12": ("either", falling(12)),
    "rows down to 2^-20": ("terms", falling(20)),  # one term keeps tf32's digits, two do not keep fp32's
    "a small row": ("fallback", lambda q, k, v: q[1, 299, 1].mul_(1e-8)),
    "small rows of v": ("fallback", lambda q, k, v: v[:, ::2].mul_(1e-8)),
    "a huge key": ("fallback", lambda q, k, v: k[0, 100, 0, 3].fill_(1e30)),
    "inf": ("fallback", lambda q, k, v: v[0, 100, 0, 3].fill_(math.inf)),
    "tiny": ("fallback", lambda q, k, v: (q.mul_(1e-20), k.mul_(1e20), v.mul_(1e-30))),
}
"""Changes of q, k and v, each with the kernel that then has to compute."""


def inputs(what):
    """q, k and v with a property, and which kernel has to compute."""
    tensors = tuple(randn(2, 300, 2, 64, seed=i) for i in range(3))
    which, change = INPUTS[what]
    change(*tensors)
    return tensors, which


def check_which(tensors, precision, which, found, launch_only):
    """Check that the right one of the two kernels computed every result, and the other one none."""
    if which != "either":
        launch_only(which)
        again = attention(*tensors, precision=precision, kernel=TERMS)
        assert torch.equal(again.nan_to_num(), found.nan_to_num())
        launch_only("fallback" if which == "terms" else "terms")
        assert attention(*tensors, precision=precision, kernel=TERMS).isnan().all()


@pytest.mark.parametrize("what", [what for what in INPUTS if what != "rows down to 2^-20"])
def test_the_kernel_that_has_to_computes(what, launch_only, matmul_precision):
    (q, k, v), which = inputs(what)
    matmul_precision("fp32")
    exact, exact_lse = by_definition(q.double(), k.double(), v.double())
    plain, plain_lse = by_definition(q, k, v)
    found, lse = attention(q, k, v, precision="fp32", kernel=TERMS, return_lse=True)
    out = found.clone()
    if what == "inf":  # and nothing outside its column
        column = (0, slice(None), 0, 3)
        assert not out[column].isfinite().any()
        out[column] = exact[column] = plain[column] = 0.0
    check("out", out, exact, plain, roundings=8)
    check("lse", lse, exact_lse, plain_lse, roundings=32)
    check_which((q, k, v), "fp32", which, found, launch_only)


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
    check_which((q, k, v), "tf32", which, found[0], launch_only)


def test_garbage_in_rows_that_no_sequence_owns(matmul_precision):
    matmul_precision("fp32")
    q, k, v = (randn(400, 2, 64, seed=i) for i in range(3))
    starts = int32(10, 150, 390)
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
    graph, out = captured(lambda: attention(q, k, v, precision="fp32", kernel=TERMS))
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
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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
        assert_equal(found, expected)


@pytest.mark.parametrize("dims", [slice(0, 36), slice(1, 60)], ids=["aligned", "unaligned"])
def test_rows_of_q_of_any_strides(dims, launch_only, matmul_precision):
    """Each CTA splits the rows of Q that it loads."""
    matmul_precision("fp32")
    q, k, v = (randn(2, 3, 150, 64, seed=i).transpose(1, 2)[..., dims] for i in range(3))
    launch_only("terms")
    found, expected = (attention(x, k, v, precision="fp32", kernel=TERMS) for x in (q, q.contiguous()))
    assert torch.equal(found, expected)
