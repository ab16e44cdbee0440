"""The cases of PyTorch's and xformers' tests of memory-efficient attention, both ways, as seeded samples.

PyTorch's grids: dtype, batch, lengths, head dim, causal, dropout, and masks with a gradient. xformers': head
dims from 1 to 512, unequal ones, any lengths, numbers of heads and strides. Errors are measured against float64, and
against PyTorch's kernel where it takes the call.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn.compiler import registry
from cute_attn.host.backward import kernels_of
from cute_attn.traits import Traits
from tests.checks import FORWARD, check
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import compare_errors, compare_gradients
from tests.problem import Case, Problem, Start

LENGTHS = (4, 8, 64, 128, 256, 512, 1024, 2048)


def pytorch_cases() -> Iterator[Case]:
    """Six kernels with five shapes each: PyTorch's grid has thousands of shapes and few kernels."""
    choice = random.Random(0)
    kernels = [
        {"dtype": "fp16", "head_dim": 8, "causal": "top_left"},
        {"dtype": "bf16", "head_dim": 72, "dropout_p": 0.22},
        {"dtype": "fp32", "head_dim": 64, "causal": "top_left", "dropout_p": 0.22},
        {"dtype": "fp32", "head_dim": 96},
        {"dtype": "fp16", "head_dim": 128, "bias": "fp16"},
        {"dtype": "fp32", "head_dim": 32, "bias": "fp32", "dropout_p": 0.22},
    ]
    for kernel in kernels:
        for _ in range(5):
            batch, seqlen_q, seqlen_k = choice.choice((1, 8)), choice.choice(LENGTHS), choice.choice(LENGTHS)
            broadcast = choice.choice(("", "b", "h", "bh", "q", "bhq")) if "bias" in kernel else ""
            name = "-".join(map(str, (*kernel.values(), batch, seqlen_q, seqlen_k, broadcast)))
            shape = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "bias_broadcast": broadcast}
            yield Case(name, nheads=4, nheads_kv=4, dropout_mask="mem_efficient", **shape, **kernel)  # type: ignore[arg-type]


def xformers_cases() -> Iterator[Case]:
    """Odd lengths, head dims and numbers of heads; a seeded choice of the rest."""
    choice = random.Random(1)

    def case(dtype: str, batch: int, seqlen_q: int, seqlen_k: int, heads: int, dim: int, dim_v: int) -> Case:
        causal = choice.choice((False, "top_left", True))
        name = "-".join(map(str, (dtype, batch, seqlen_q, seqlen_k, heads, f"{dim}x{dim_v}", causal)))
        shape = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "causal": causal}
        return Case(name, nheads=heads, nheads_kv=heads, head_dim=dim, head_dim_v=dim_v, dtype=dtype, **shape)

    dims = [(1, 1), (2, 3), (31, 31), (36, 40), (80, 160), (264, 264), (512, 512), (32, 264)]
    for dim, dim_v in dims:
        yield case(choice.choice(("fp16", "bf16", "fp32")), 1, 256, 128, 1, dim, dim_v)
    yield case("fp32", 1, 256, 128, 1, 300, 36)
    for length in (2, 3, 15, 31, 34, 72, 90, 132, 136):
        yield case("bf16", 1, *choice.choice(((length, 128), (256, length))), 1, 32, 32)
    for heads in (3, 5, 12):
        yield case("fp32", 300 // heads, 256, 128, heads, 32, 32)
    for _ in range(6):
        yield case("fp16", choice.randint(1, 40), choice.randint(1, 500), choice.randint(1, 500), 3, 128, 64)
    for dtype, dim, length in (
        *(("bf16", dim, 1024) for dim in (320, 512)),
        *(("fp32", dim, 256) for dim in (320, 512)),
    ):
        yield case(dtype, 2, length, length, 2, dim, dim)
    for dim in (64, 128):  # large enough for terms
        yield case("fp32", 2, 2048, 2048, 4, dim, dim)


CASES = [*pytorch_cases(), *xformers_cases()]


MASK_TYPES = {False: 0, "top_left": 1, True: 2}
"""PyTorch's custom_mask_type."""
FULL = 2**14
"""Elements from which on a largest error is no accident."""


def pytorchs(problem: Problem, start: Start) -> dict[str, Tensor]:
    """Results of PyTorch's memory-efficient kernels; empty if they decline the call or would draw a mask."""
    case, (q, k, v), bias = problem.case, problem.tensors, problem.inputs.bias
    if case.dropout_p or case.varlen:
        return {}
    if bias is not None:
        bias = bias.expand(case.batch, case.nheads, case.seqlen_q, case.seqlen_k)
    mask, scale = MASK_TYPES[case.causal], case.head_dim**-0.5
    aten = torch.ops.aten
    try:
        out, lse, seed, offset, _, _ = aten._efficient_attention_forward(
            q, k, v, bias, None, None, None, None, 0.0, mask, True, scale=scale
        )
        lengths = (None, None, case.seqlen_q, case.seqlen_k)
        grads = aten._efficient_attention_backward(
            *(start.out, q, k, v, bias, out, *lengths, lse, 0.0, seed, offset, mask, False), scale=scale
        )
    except RuntimeError as declined:
        print(f"PyTorch declines: {declined}")
        return {}
    return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=False))


def compare_with_pytorchs(name: str, ours: Tensor, theirs: Tensor | None, exact: Tensor) -> None:
    """Errors are at most 1.5 of PyTorch's, where that has any number to show and there are elements enough.

    The largest one in fp32 is at most 2: bench/notes.md says why.
    """
    if theirs is None or exact.numel() < FULL or not theirs.isfinite().all():
        return
    rounding = torch.finfo(ours.dtype).eps / 2 * exact.abs().max().item()
    # In fp32 one element of dS decides the largest error of dK, whose ratio varies from 0.4 to 2 times that of the rms.
    factor = 2.0 if ours.dtype == torch.float32 else 1.5
    compare_errors(name, ours, theirs, exact, (1.5, 0.0), (factor, rounding))


def check_both(of: Case) -> None:
    """Check out and all gradients by the tolerance rule; sums in another order in fp32 get a few more roundings."""
    problem = of.build("cuda")
    start = problem.start()
    dtype = problem.tensors[0].dtype
    exact, plain = problem.expected(torch.float64)["out"], problem.expected(dtype)["out"]
    out, theirs = problem.run()["out"], pytorchs(problem, start)
    compare_with_pytorchs("out", out, theirs.get("out"), exact)
    factor, roundings = (2, 16) if dtype == torch.float32 else (1, 1)
    check("out", out, exact, plain, factor=factor * FORWARD, roundings=roundings)

    def compare(name: str, value: Tensor, right: Tensor) -> None:
        compare_with_pytorchs(name, value, theirs.get(name), right)

    compare_gradients(problem, start, problem.gradients(start), theirs=compare)


@pytest.mark.parametrize("of", CASES, ids=lambda case: case.name)
def test_case(of: Case) -> None:
    check_both(of)


@pytest.mark.parametrize("layout", ["padded", "heads_first", "fused", "expanded"])
@pytest.mark.parametrize("dim", [64, 60])
def test_strides(layout: str, dim: int) -> None:
    dtype = "fp32" if dim == 64 else "fp16"
    check_both(
        Case(layout, seqlen_q=100, seqlen_k=100, head_dim=dim, dtype=dtype, layout=layout, causal=True)
    )


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Traits, Any, str]]:
    """The forward and the backward of the newest generation that serves each."""
    of = params.get("of")
    for op in ("forward", "backward") if of else ():
        for arch in sorted(runnable_archs(op), reverse=True):
            try:
                kernel = registry.lookup(of.traits(arch, op), None, target)
            except (registry.Unsupported, ValueError):
                continue
            kernel = kernel.for_lengths(*of.longest, of.group, target, of.pairs)
            both = [(kernel.traits, kernel.tile)] if op == "forward" else kernels_of(kernel)
            yield from ((traits, tile, target) for traits, tile in both)
            break
