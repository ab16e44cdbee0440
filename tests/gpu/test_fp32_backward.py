"""The backward of fp32 tensors on the GPU, at fp32's precision and in tf32: against float64 and other kernels.

At fp32's precision, operands are two fp16 terms, or whole where the tensors do not fit two terms; in tf32 they are one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cute_attn import attention_backward, attention_varlen_backward
from cute_attn.compiler import registry
from cute_attn.host.backward import kernels_of
from cute_attn.traits import Traits
from tests.gpu.compare import compare_errors, randn
from tests.problem import Case, Problem, Start

MQA = {"nheads": 4, "nheads_kv": 1}
CASES = [
    Case("d64-causal", seqlen_q=203, seqlen_k=300, causal=True),
    Case("d128-causal", seqlen_q=200, seqlen_k=200, head_dim=128, causal=True, **MQA),
    Case("d256", seqlen_q=130, seqlen_k=70, head_dim=256),
    Case("d96x160", seqlen_q=65, seqlen_k=129, head_dim=96, head_dim_v=160, causal="top_left"),
    Case("d36", seqlen_q=40, seqlen_k=100, head_dim=36),
    Case("window-softcap", seqlen_q=150, seqlen_k=150, window=(40, 9), softcap=2.0),
    Case("alibi", seqlen_q=90, seqlen_k=110, alibi="heads", causal=True),
    Case("bias-dropout", seqlen_q=100, seqlen_k=90, bias="fp32", dropout_p=0.2, dropout_mask="mem_efficient"),
    Case("bias-broadcast", seqlen_q=70, seqlen_k=130, bias="fp32", bias_broadcast="bh", causal=True),
    Case("dropout", seqlen_q=120, seqlen_k=140, dropout_p=0.3, causal=True),
    Case("varlen", lengths_q=(50, 130, 1, 40), lengths_k=(60, 130, 70, 0), batch=4, causal=True),
    Case("seqused", lengths_q=(90, 70), lengths_k=(80, 150), seqused_q=(60, 70), seqused_k=(80, 100)),
]
BY_NAME = {case.name: replace(case, dtype="fp32") for case in CASES}
TERMS = "operands=terms"
WHOLE = "operands=whole,num_warps=4"
TILES = {
    "d64-causal": (
        WHOLE + ",p_in_regs=true,sdp_warps_m=1,dkv_warps_m=4,queries_at_once=16,dkv_unroll=1,dq_unroll=1",
        "tile_m=32,stages_q=2,stages_do=2,dq_vector=1,sdp_unroll=0,dq_unroll=1",
        "tile_n=128,num_warps=8,dkv_warps_m=4,dkv_unroll=1",
        "tile_m=32,p_in_regs=true,sdp_warps_m=1,dkv_warps_m=4",
    ),
    "d256": (
        WHOLE + ",tile_m=32,tile_n=32,sdp_warps_m=2,dkv_warps_m=2,dq_warps_m=2,dq_unroll=0",
        "tile_m=32,tile_n=32,num_warps=4,sdp_warps_m=2,dkv_warps_m=2,dq_warps_m=2,dq_passes=2",
    ),
}


def run(problem: Problem, start: Start, by: torch.dtype = torch.float32, **options: Any) -> dict[str, Tensor]:
    """Gradients from outputs by the definition in ``by``, so that only the backward's errors count."""
    case, lengths, inputs = problem.case, problem.lengths, problem.inputs
    if case.dtype == "fp32" and "precision" not in options and not options.get("tile"):
        options["tile"] = TERMS  # small calls have whole operands by default
    out, lse, _ = problem._define(by)
    wanted = ("q", "k", "v", "bias") if case.bias else ("q", "k", "v")
    options |= {"causal": case.causal, "window": case.window, "softcap": case.softcap, "wanted": wanted}
    options |= {"alibi_slopes": inputs.alibi_slopes, "bias": inputs.bias, "rng_state": inputs.rng_state}
    options |= {"dropout_p": case.dropout_p, "dropout_mask": case.dropout_mask}
    given = (start.out, *problem.tensors, out.to(problem.tensors[0].dtype), lse.float())
    if case.varlen:
        ends = (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.max_seqlen_q, lengths.max_seqlen_k)
        options |= {"seqused_q": lengths.seqused_q, "seqused_k": lengths.seqused_k}
        found = attention_varlen_backward(*given, *ends, **options)
    else:
        found = attention_backward(*given, **options)
    return dict(zip(("dq", "dk", "dv", "dbias"), found, strict=False))


def problem_of(case: Case) -> tuple[Problem, dict[str, Tensor]]:
    """A problem, and the tensors of its call, which may be changed in place."""
    problem = case.build("cuda")
    start = problem.start()
    assert start.out is not None
    return problem, dict(zip(("q", "k", "v", "grad_out"), (*problem.tensors, start.out), strict=True))


def compare(
    case: Case,
    factor: float = 3.0,
    floor: float = 16 * 2.0**-24,
    change: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> None:
    """The largest and the rms error are at most ``factor`` times plain torch's, and ``floor`` of the largest value.

    change: of q, k, v and the gradient of out, which have NaN in rows that no sequence owns.
    """
    problem, tensors = problem_of(case)
    if change is not None:
        for x in tensors.values():
            x.copy_(change(x))
    start = Start(tensors["grad_out"], None)
    exact, plain = (problem.expected_gradients(start, dtype) for dtype in (torch.float64, torch.float32))
    for name, value in run(problem, start, **options).items():
        assert value.dtype == torch.float32 and not value.isnan().any(), name
        allowed = floor * exact[name].abs().max().item()
        compare_errors(name, value, plain[name], exact[name], (factor, allowed), (factor, 4 * allowed))


def finite(x: Tensor) -> Tensor:
    """Make rows that no sequence owns finite, so that tensors fit terms; NaN there would select the fallback kernel."""
    return x.nan_to_num(2.5, -2.5, 2.5)


@pytest.mark.parametrize("name", BY_NAME)
def test_gradients_have_the_precision_of_fp32(name: str) -> None:
    compare(BY_NAME[name])


@pytest.mark.parametrize("name", ["varlen", "seqused"])
def test_rows_that_no_sequence_owns(name: str) -> None:
    compare(BY_NAME[name], change=finite)


@pytest.mark.parametrize("small", ["q", "k", "v", "grad_out", "all", "all but the last of v and grad_out"])
def test_small_rows_keep_their_digits(small: str) -> None:
    """A row 1e-8 of the others: not in two terms. And all of a tensor may be small.

    Score gradients are as small as rows of v and of grad_out together; no query but the last sees the last key.
    """
    problem, changed = problem_of(BY_NAME["d64-causal"])
    for name, x in changed.items():
        if small == "all":
            x *= 1e-6
        elif small == name:
            x[1, 7] *= 1e-8
        elif small.endswith(name) or (small.startswith("all but") and name == "v"):
            x[:, -1] *= 2.0**13
    start = Start(changed["grad_out"], None)
    exact = problem.expected_gradients(start, torch.float64)
    for name, value in run(problem, start).items():
        right = exact[name]
        largest = right.abs().amax(-1, keepdim=True)
        assert (value - right).abs().le(3e-5 * largest).all(), name


def small_problem() -> tuple[Tensor, ...]:
    """grad_out, q, k, v, out and lse of one head, causal."""
    problem, tensors = problem_of(Case("", batch=1, nheads=2, dtype="fp32", causal=True))
    out, lse, _ = problem._define(torch.float32)
    return tensors["grad_out"], *problem.tensors, out, lse.float()


def assert_alike(
    found: Sequence[Tensor | None],
    whole: Sequence[Tensor | None],
    tolerance: float,
    *,
    all_finite: bool = True,
) -> None:
    """Assert that gradients of q, k and v agree, and are non-finite in the same places, if any."""
    for name, own, other in zip(("dq", "dk", "dv"), found, whole, strict=True):
        assert own is not None and other is not None
        finite = other.isfinite()
        assert torch.equal(own.isfinite(), finite) and finite.any(), name
        assert finite.all() or not all_finite, name
        size = other[finite].abs().max().item()
        torch.testing.assert_close(
            own[finite], other[finite], rtol=tolerance, atol=tolerance * size, msg=name
        )


PRECISIONS = pytest.mark.parametrize(
    ("precision", "whole", "tolerance"), [("fp32", WHOLE, 1e-5), ("tf32", None, 4e-3)]
)
"""References for operands in terms: whole operands in fp32, and products in tf32."""


@PRECISIONS
@pytest.mark.parametrize("factor", [1e-3, 1e6])
def test_any_score_gradients_have_a_scale(
    factor: float, precision: str, whole: str | None, tolerance: float
) -> None:
    """With out and LSE from more keys than these, as in a divided context, D exceeds the bound from dO and V."""
    grad_out, q, k, v, out, lse = small_problem()
    given = (grad_out, q, k, v, factor * out, lse + 3.0)
    both = (attention_backward(*given, causal=True, precision=precision, tile=x) for x in (TERMS, whole))
    assert_alike(*both, tolerance)


@PRECISIONS
def test_infinity_stays_in_its_rows(precision: str, whole: str | None, tolerance: float) -> None:
    """out is not split. Infinity in dS does not affect the scale."""
    given = small_problem()
    given[4][0, 70, 1, 3] = torch.inf
    both = (attention_backward(*given, causal=True, precision=precision, tile=x) for x in (TERMS, whole))
    assert_alike(*both, tolerance, all_finite=False)


@pytest.mark.parametrize("name", ["d64-causal", "d128-causal", "d256"])
def test_gradients_in_tf32(name: str) -> None:
    """An operand rounded to tf32 errs by 2^-12 on average; four products follow each other."""
    compare(BY_NAME[name], 0.0, 2.0**-10, precision="tf32")


@pytest.mark.parametrize(("name", "tile"), [(name, tile) for name, tiles in TILES.items() for tile in tiles])
def test_any_tile_equals_any_tile(name: str, tile: str) -> None:
    compare(BY_NAME[name], tile=tile)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_error_is_at_most_one_and_a_half_of_pytorchs(head_dim: int, with_bias: bool) -> None:
    """The memory-efficient kernel, which also multiplies by three tf32 products."""
    sizes = {"seqlen_q": 512, "seqlen_k": 512, "nheads": 2, "head_dim": head_dim, "dtype": "fp32"}
    problem, tensors = problem_of(Case("", bias="fp32" * with_bias, causal=not with_bias, **sizes))
    start, bias = Start(tensors["grad_out"], None), problem.inputs.bias
    leaves = [x.detach().requires_grad_() for x in (*problem.tensors, bias) if x is not None]
    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, leaves[3] if with_bias else None, is_causal=not with_bias)
    theirs = torch.autograd.grad(out.transpose(1, 2), leaves, start.out)
    exact, ours = problem.expected_gradients(start, torch.float64), run(problem, start, torch.float64)
    for (name, own), other in zip(ours.items(), theirs, strict=True):
        compare_errors(name, own, other, exact[name], (1.5, 0.0), (1.5, 0.0))


def test_nan_reaches_the_gradients() -> None:
    """Rounding to tf32 must not turn NaN, whatever its bits, into a number or inf."""
    for precision, tile in (("fp32", TERMS), ("tf32", None)):
        for bits in (0x7FC00000, 0x7FFFFFFF, -1, 0x7F800000):
            problem, tensors = problem_of(BY_NAME["d64-causal"])
            out, lse, _ = problem._define(torch.float32)
            q, k, v, grad_out = tensors.values()
            k.view(torch.int32)[1, 5, 1, 7] = bits
            given = (grad_out, q, k, v, out, lse)
            dq, dk, dv = attention_backward(*given, causal=True, precision=precision, tile=tile)
            for reached in (dq[1, :, 2:], dk[1, 5, 1], dv[1, 5, 1]):
                assert not reached.isfinite().all()
            assert not dq[0].isnan().any() and not dk[0].isnan().any() and not dv[0].isnan().any()


# ---- one term, precision tf32, against the kernels that multiply in tf32 ----

IN_TF32 = {
    name: BY_NAME[name] for name in ("d64-causal", "d128-causal", "d256", "alibi", "bias-dropout", "varlen")
}
IN_TF32 |= {
    "d96": Case("d96", seqlen_q=100, seqlen_k=90, head_dim=96, dtype="fp32", causal=True),
    "d96-bias": Case("d96-bias", seqlen_q=70, seqlen_k=130, head_dim=96, dtype="fp32", bias="fp32"),
    "d96-softcap": Case("d96-softcap", seqlen_q=90, seqlen_k=110, head_dim=96, dtype="fp32", softcap=5.0),
    "d192x96": Case("d192x96", seqlen_q=90, seqlen_k=110, head_dim=192, head_dim_v=96, dtype="fp32"),
    "d128x160": Case("d128x160", seqlen_q=90, seqlen_k=110, head_dim=128, head_dim_v=160, dtype="fp32"),
    "d512": Case("d512", seqlen_q=70, seqlen_k=100, head_dim=512, dtype="fp32"),
}
RATIO = 1.5
"""How many times the error of products in tf32 one of fp16 terms may have."""


def compare_in_tf32(problem: Problem, grad_out: Tensor) -> None:
    """Errors of gradients in terms are at most RATIO of those by the other kernels, as a whole and of most rows."""
    start = Start(grad_out, None)
    exact = problem.expected_gradients(start, torch.float64)
    own, tf32 = (run(problem, start, precision="tf32", tile=tile) for tile in (TERMS, None))
    for name, value in own.items():
        right, other = exact[name], tf32[name]
        assert not value.isnan().any(), name
        allowed = 2.0**-22 * right.abs().max().item()
        compare_errors(name, value, other, right, (RATIO, allowed), (2 * RATIO, allowed))
        rows = [(x.double() - right).square().mean(-1).sqrt().flatten() for x in (value, other)]
        used = rows[1] > 0
        if used.any():
            assert (rows[0][used] / rows[1][used]).median() <= RATIO, name


@pytest.mark.parametrize("single", IN_TF32)
def test_gradients_are_as_exact_as_in_tf32(single: str) -> None:
    problem, tensors = problem_of(IN_TF32[single])
    compare_in_tf32(problem, tensors["grad_out"])


@pytest.mark.parametrize("single", ["varlen"])
def test_rows_that_no_sequence_owns_in_tf32(single: str) -> None:
    problem, tensors = problem_of(IN_TF32[single])
    for x in tensors.values():
        x.copy_(finite(x))
    compare_in_tf32(problem, tensors["grad_out"])


SMALL_ROWS = [("d64-causal", small) for small in ("q", "k", "v", "grad_out")]
SMALL_ROWS += [("d128-causal", "grad_out"), ("d512", "grad_out")]


@pytest.mark.parametrize(("single", "small"), SMALL_ROWS)
def test_a_row_that_is_too_small_for_one_term(single: str, small: str) -> None:
    """The fallback kernel computes, with half the keys of a CTA; of head dim 512 it streams its operands, and adds to
    dQ in the same order."""
    problem, tensors = problem_of(IN_TF32[single])
    tensors[small][1, 7] *= 1e-9
    compare_in_tf32(problem, tensors["grad_out"])


@pytest.mark.parametrize("single", ["d64-causal", "d512"])
@pytest.mark.parametrize("first", [0.0, -20.0])
def test_the_scale_of_score_gradients_changes(single: str, first: float) -> None:
    """Scale changes from query block to query block, up or down."""
    problem, tensors = problem_of(IN_TF32[single])
    grad_out = tensors["grad_out"]
    steps = torch.linspace(first, -20.0 - first, grad_out.shape[1], device="cuda").exp2()
    compare_in_tf32(problem, grad_out.mul_(steps[None, :, None, None]))


@pytest.mark.parametrize("small_row", [False, True])
def test_large_calls_take_it_by_themselves_and_repeat_bit_for_bit(small_row: bool) -> None:
    grad_out, q, k, v = (randn(2, 1024, 8, 64, seed=i, dtype=torch.float32) for i in range(4))
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


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Traits, Any, str]]:
    """The backward's kernels, no forward; in tf32 those in one term, and those they are compared with."""
    if "name" in params:
        traits = BY_NAME[params["name"]].traits("sm80", "backward")
        mains = [registry.lookup(traits, params.get("tile"), target)]
    elif "single" in params:
        traits = replace(IN_TF32[params["single"]].traits("sm80", "backward"), precision="tf32")
        main = registry.lookup(traits, None, target)
        mains = [main, main.of_whole_operands(target)]
    else:
        return
    yield from ((own, tile, target) for main in mains for own, tile in kernels_of(main))
