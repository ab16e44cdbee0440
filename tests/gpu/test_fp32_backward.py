"""The backward of fp32 tensors on the GPU, at fp32's precision and in tf32: against float64 and PyTorch's kernel.

At fp32's precision, operands are two fp16 terms, or whole where the tensors do not fit two terms.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
from tests.checks import Errors
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
CASES = [Case(**{**vars(case), "dtype": "fp32", "name": f"fp32-{case.name}"}) for case in CASES]
BY_NAME = {case.name.removeprefix("fp32-"): case for case in CASES}
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


def run(problem: Problem, start: Start, **options: Any) -> dict[str, Tensor]:
    """Gradients from the definition's outputs, so that only the backward's errors count."""
    case, lengths, inputs = problem.case, problem.lengths, problem.inputs
    if case.dtype == "fp32" and "precision" not in options and not options.get("tile"):
        options["tile"] = TERMS  # small calls have whole operands by default
    out, lse, _ = problem._define(torch.float32)
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


def compare(
    case: Case, factor: float, floor: float, change: Callable[[Tensor], Tensor] | None = None, **options: Any
) -> None:
    """The largest and the rms error are at most ``factor`` times plain torch's, and ``floor`` of the largest value.

    change: of q, k, v and the gradient of out, which have NaN in rows that no sequence owns.
    """
    problem = case.build("cuda")
    start = problem.start()
    if change is not None:
        tensors = tuple(change(x) for x in problem.tensors)
        problem = dataclasses.replace(problem, tensors=tensors)
        assert start.out is not None
        start = Start(change(start.out), None)
    exact, plain = (problem.expected_gradients(start, dtype) for dtype in (torch.float64, torch.float32))
    for name, value in run(problem, start, **options).items():
        assert value.dtype == torch.float32 and not value.isnan().any(), name
        own, torch_ = Errors.of(value, exact[name]), Errors.of(plain[name], exact[name])
        print(f"{name}: error {own}, plain torch's {torch_}")
        size = exact[name].abs().max().item()
        assert own.rms <= factor * torch_.rms + floor * size, f"{name}: rms {own}, plain torch's {torch_}"
        assert own.largest <= factor * torch_.largest + 4 * floor * size, (
            f"{name}: {own}, plain torch's {torch_}"
        )


@pytest.mark.parametrize("name", BY_NAME)
def test_gradients_have_the_precision_of_fp32(name: str) -> None:
    compare(BY_NAME[name], 3.0, 16 * 2.0**-24)


@pytest.mark.parametrize("name", ["varlen", "seqused"])
def test_rows_that_no_sequence_owns(name: str) -> None:
    """Finite ones, so that the tensors fit two terms; with NaN in them, the test above has whole operands."""
    compare(BY_NAME[name], 3.0, 16 * 2.0**-24, lambda x: x.nan_to_num(2.5, -2.5, 2.5))


@pytest.mark.parametrize("small", ["q", "k", "v", "grad_out", "all", "all but the last of v and grad_out"])
def test_small_rows_keep_their_digits(small: str) -> None:
    """A row 1e-8 of the others: not in two terms. And all of a tensor may be small.

    Score gradients are as small as rows of v and of grad_out together; no query but the last sees the last key.
    """
    problem = BY_NAME["d64-causal"].build("cuda")
    start = problem.start()
    assert start.out is not None
    changed = dict(zip(("q", "k", "v", "grad_out"), (*problem.tensors, start.out), strict=True))
    for name, x in changed.items():
        if small == "all":
            x *= 1e-6
        elif small == name:
            x[1, 7] *= 1e-8
        elif small.endswith(name) or (small.startswith("all but") and name == "v"):
            x[:, -1] *= 2.0**13
    exact = problem.expected_gradients(start, torch.float64)
    for name, value in run(problem, start).items():
        right = exact[name]
        largest = right.abs().amax(-1, keepdim=True)
        assert (value - right).abs().le(3e-5 * largest).all(), name


def small_problem() -> tuple[Tensor, ...]:
    """grad_out, q, k, v, out and lse of one head, causal."""
    problem = Case("", batch=1, nheads=2, dtype="fp32", causal=True).build("cuda")
    out, lse, _ = problem._define(torch.float32)
    grad_out = problem.start().out
    assert grad_out is not None
    return grad_out, *problem.tensors, out, lse.float()


def assert_alike(
    found: Sequence[Tensor | None],
    whole: Sequence[Tensor | None],
    tolerance: float,
    *,
    all_finite: bool = True,
) -> None:
    """Gradients of q, k and v are alike, and not finite in the same places, if anywhere."""
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
"""What operands in terms are compared with: whole ones in fp32, and products in tf32."""


@PRECISIONS
@pytest.mark.parametrize("factor", [1e-3, 1e6])
def test_any_score_gradients_have_a_scale(
    factor: float, precision: str, whole: str | None, tolerance: float
) -> None:
    """An out and a LSE of more keys than these, as of a context that is divided, whose D exceeds what dO and V say."""
    grad_out, q, k, v, out, lse = small_problem()
    given = (grad_out, q, k, v, factor * out, lse + 3.0)
    both = (attention_backward(*given, causal=True, precision=precision, tile=x) for x in (TERMS, whole))
    assert_alike(*both, tolerance)


@PRECISIONS
def test_infinity_stays_in_its_rows(precision: str, whole: str | None, tolerance: float) -> None:
    """Of out, which is not split: dS has inf, which decides no scale."""
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
    compare(BY_NAME[name], 3.0, 16 * 2.0**-24, tile=tile)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_error_is_at_most_one_and_a_half_of_pytorchs(head_dim: int, with_bias: bool) -> None:
    """The memory-efficient kernel, which also multiplies by three tf32 products."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, 512, 2, head_dim)
    q, k, v, grad = (torch.randn(shape, generator=generator, device="cuda") for _ in range(4))
    bias = torch.randn((2, 2, 512, 512), generator=generator, device="cuda") if with_bias else None
    leaves = [q, k, v] if bias is None else [q, k, v, bias]

    def gradients(dtype: torch.dtype, *backends: SDPBackend) -> tuple[Tensor, ...]:
        own = [x.to(dtype).detach().requires_grad_() for x in leaves]
        heads_first = [x.transpose(1, 2) for x in own[:3]]
        mask = own[3] if with_bias else None
        with sdpa_kernel(list(backends)):
            out = scaled_dot_product_attention(*heads_first, attn_mask=mask, is_causal=not with_bias)
        return torch.autograd.grad(out.transpose(1, 2), own, grad.to(dtype))

    exact = gradients(torch.float64, SDPBackend.MATH)
    theirs = gradients(torch.float32, SDPBackend.EFFICIENT_ATTENTION)
    case = Case(
        "", seqlen_q=512, seqlen_k=512, nheads=2, head_dim=head_dim, dtype="fp32", causal=not with_bias
    )
    problem = case.build("cuda")
    inputs = (
        problem.inputs if bias is None else type(problem.inputs)(**{**vars(problem.inputs), "bias": bias})
    )
    problem = Problem(case, (q, k, v), problem.lengths, inputs, problem.owned)
    out, lse, _ = problem._define(torch.float64)
    wanted = ("q", "k", "v", "bias")[: len(leaves)]
    causal = {"causal": not with_bias, "bias": bias, "wanted": wanted, "tile": TERMS}
    ours = attention_backward(grad, q, k, v, out.float(), lse.float(), **causal)  # type: ignore[arg-type]
    for name, own, other, wanted_ in zip(wanted, ours, theirs, exact, strict=True):
        errors = Errors.of(own, wanted_), Errors.of(other, wanted_)
        print(f"d{name}: error {errors[0]}, PyTorch's {errors[1]}")
        assert errors[0].rms <= 1.5 * errors[1].rms, f"d{name}: {errors[0]}, PyTorch's {errors[1]}"
        assert errors[0].largest <= 1.5 * errors[1].largest, f"d{name}: {errors[0]}, PyTorch's {errors[1]}"


def test_nan_reaches_the_gradients() -> None:
    """Whatever the bits of the NaN, or inf: rounding to tf32 must not make a number of it."""
    case = BY_NAME["d64-causal"]
    for precision in ("fp32", "tf32"):
        for bits in (0x7FC00000, 0x7FFFFFFF, -1, 0x7F800000):
            problem = case.build("cuda")
            start = problem.start()
            expected_out, expected_lse, _ = problem._define(torch.float32)
            q, k, v = problem.tensors
            k.view(torch.int32)[1, 5, 1, 7] = bits
            assert start.out is not None
            dq, dk, dv = attention_backward(
                start.out,
                *(q, k, v, expected_out, expected_lse),
                causal=True,
                precision=precision,
                tile=TERMS if precision == "fp32" else None,
            )
            for reached in (dq[1, :, 2:], dk[1, 5, 1], dv[1, 5, 1]):
                assert not reached.isfinite().all()
            assert not dq[0].isnan().any() and not dk[0].isnan().any() and not dv[0].isnan().any()


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Traits, Any, str]]:
    """The backward's kernels; no forward."""
    if "name" in params:
        traits = BY_NAME[params["name"]].traits("sm80", "backward")
        main = registry.lookup(traits, params.get("tile"), target)
        yield from ((traits, own, target) for traits, own in kernels_of(main))
