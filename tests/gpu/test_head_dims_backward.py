"""The backward of head dims beyond 256 on the GPU, resident and streamed, and of rows that start anywhere."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cute_attn import attention, attention_backward
from cute_attn.compiler import registry
from cute_attn.host.backward import kernels_of
from cute_attn.traits import Traits
from tests.checks import CANCELLATION, assert_same
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import assert_equal, compare_gradients, randn
from tests.gpu.test_fp32_backward import run
from tests.gpu.test_head_dims import among_infinities, poisoned
from tests.problem import Case, Start

ARCHS = runnable_archs("backward")
ODD = {"seqlen_q": 130, "seqlen_k": 200}
CASES = [
    Case("bf16-d512-causal", head_dim=512, causal=True, **ODD),
    Case("fp16-d320", head_dim=320, dtype="fp16", seqlen_q=70, seqlen_k=100),
    Case("bf16-d576x512-causal", head_dim=576, head_dim_v=512, causal=True, nheads_kv=1, **ODD),
    Case("bf16-d128x448", head_dim=128, head_dim_v=448, causal="top_left", **ODD),
    Case("bf16-d352-bias", head_dim=352, bias="bf16", **ODD),
    Case("bf16-d512-varlen", head_dim=512, lengths_q=(60, 1, 130), lengths_k=(80, 60, 1), batch=3, causal=True),
    Case("fp32-d384", head_dim=384, dtype="fp32", seqlen_q=70, seqlen_k=100),
    Case("fp32-d512-causal", head_dim=512, dtype="fp32", causal=True, **ODD),
    Case("fp32-d576x512", head_dim=576, head_dim_v=512, dtype="fp32", **ODD),
    Case("fp32-d512-bias-dropout", head_dim=512, dtype="fp32", bias="fp32", bias_broadcast="b", dropout_p=0.2,
        dropout_mask="mem_efficient", **ODD),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
STREAMED = (
    "tile_m=64,tile_n=64,num_warps=8,sdp_warps_m=4,dkv_warps_m=4,dq_warps_m=4,p_in_regs=false,queries_at_once=0,"
    "columns="
)
TILES = [
    ("bf16-d512-causal", STREAMED + "256,dq_passes=8"),
    ("bf16-d512-causal", STREAMED + "128,dq_passes=8,dq_vector=1"),
    ("bf16-d512-causal", "dq_passes=4,stages_q=1"),
    ("bf16-d352-bias", STREAMED + "64,dq_passes=6"),
    ("fp32-d384", STREAMED + "128,dq_passes=12,dkv_unroll=0,operands=whole"),
    ("fp32-d384", STREAMED + "128,dq_passes=6,sdp_unroll=2"),
]


CLUSTER = [
    Case("d512", head_dim=512, **ODD),
    Case("d512-causal", head_dim=512, causal=True, seqlen_q=200, seqlen_k=333, nheads_kv=1),
    Case("fp16-d384-top_left", head_dim=384, dtype="fp16", causal="top_left", seqlen_q=333, seqlen_k=200),
    Case("d320-window", head_dim=320, window=(70, 33), seqlen_q=300, seqlen_k=300),
    Case("d576x512-causal", head_dim=576, head_dim_v=512, causal=True, nheads_kv=1, **ODD),
    Case("d128x448", head_dim=128, head_dim_v=448, **ODD),
    Case("d312x504", head_dim=312, head_dim_v=504, lengths_q=(60, 1, 130), lengths_k=(80, 60, 1), batch=3),
    Case("d512-varlen", head_dim=512, lengths_q=(60, 0, 130), lengths_k=(80, 60, 190), batch=3, causal=True),
    Case("d512-used", head_dim=512, lengths_q=(60, 90, 130), lengths_k=(80, 60, 190), seqused_q=(33, 90, 0),
        seqused_k=(80, 1, 100), batch=3),
    Case("d512-softcap-alibi", head_dim=512, softcap=15.0, alibi="heads", causal=True, **ODD),
    Case("d448-dropout", head_dim=448, dropout_p=0.2, **ODD),
    Case("d512-dropout", head_dim=512, dropout_p=0.2, dropout_mask="mem_efficient", causal=True, **ODD),
    Case("d384-bias", head_dim=384, bias="bf16", **ODD),
    Case("d512-bias-of-heads", head_dim=512, bias="fp32", bias_broadcast="b", causal=True, **ODD),
    Case("d512-bias-of-keys", head_dim=512, bias="fp32", bias_broadcast="bhq", bias_hides=True, **ODD),
    Case("one-key", head_dim=512, seqlen_q=70, seqlen_k=1),
    Case("one-query", head_dim=512, seqlen_q=1, seqlen_k=500),
    Case("large-scores", head_dim=512, logits=20.0, alibi="heads", seqlen_q=128, seqlen_k=500),
]  # fmt: skip
CLUSTER_TILES = [
    (CLUSTER[3], "num_stages_do=1,num_stages_q=3"),
    (CLUSTER[2], "num_stages_ds=2"),
    (CLUSTER[3], "staggered=false"),
    (Case("d256", head_dim=256, causal=True, seqlen_q=333, seqlen_k=500), "cluster=2,scores_ahead=true"),
]
UNALIGNED = [
    Case("bf16-d1", head_dim=1, seqlen_q=70, seqlen_k=100),
    Case("fp16-d7-causal", head_dim=7, dtype="fp16", causal=True, **ODD),
    Case("bf16-d59x36-bias", head_dim=59, head_dim_v=36, bias="bf16", causal=True, **ODD),
    Case("bf16-d300", head_dim=300, seqlen_q=70, seqlen_k=100),
    Case("fp32-d300x36", head_dim=300, head_dim_v=36, dtype="fp32", causal="top_left", **ODD),
    Case("fp32-d5x3", head_dim=5, head_dim_v=3, dtype="fp32", causal=True, **ODD),
    Case("fp32-d59-varlen", head_dim=59, dtype="fp32", lengths_q=(60, 1, 130), lengths_k=(80, 60, 1), batch=3),
    Case("fp32-d515", head_dim=515, head_dim_v=2, dtype="fp32", seqlen_q=70, seqlen_k=100),
]  # fmt: skip


def rows() -> list[Any]:
    """(case, arch, tile); on Hopper by clusters."""
    found: list[tuple[Case, str, str | None]] = [(case, "sm80", None) for case in (*CASES, *UNALIGNED)]
    found += [(BY_NAME[name], "sm80", tile) for name, tile in TILES]
    if "sm90" in ARCHS:
        found += [(case, "sm90", None) for case in CLUSTER]
        found += [(case, "sm90", tile) for case, tile in CLUSTER_TILES]
    return [pytest.param(*row, id="-".join((row[0].name, *filter(None, row[1:])))) for row in found]


@pytest.mark.parametrize(("of", "arch", "tile"), rows())
def test_case(of: Case, arch: str, tile: str | None) -> None:
    compare_case(of, kernel=arch, tile=tile)


def compare_case(case: Case, **options: Any) -> None:
    problem = case.build("cuda")
    start = problem.start()
    # Where a query sees one key, dS = dP - D is 0, and so is the error of plain torch, which computes D from dP.
    floor = 4 * CANCELLATION if 1 in (*case.lengths_k, case.seqlen_k) else 0.0  # sums of many columns
    compare_gradients(problem, start, run(problem, start, **options), floor)


@pytest.mark.skipif("sm90" not in ARCHS, reason="clusters are Hopper's")
def test_many_work_tiles_of_clusters() -> None:
    """More than there are clusters, 100 times: dK and dV have equal bits, and dQ with ``deterministic``."""
    q, k, v, grad = (randn(2, 1000, 8, 512, seed=i) for i in range(4))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    expected = attention_backward(grad, q, k, v, out, lse, causal=True, kernel="sm80")
    first = attention_backward(grad, q, k, v, out, lse, causal=True, kernel="sm90", deterministic=True)
    for name, own, other in zip("qkv", first, expected, strict=True):
        torch.testing.assert_close(
            own, other, atol=2**-6 * float(other.abs().max()), rtol=2**-6, msg=f"d{name}"
        )
    for _ in range(100):
        again = attention_backward(grad, q, k, v, out, lse, causal=True, kernel="sm90", deterministic=True)
        assert_equal(again, first)


@pytest.mark.parametrize("tile", [None, STREAMED + "256,dq_passes=8"])
def test_deterministic_gradients_repeat(tile: str | None) -> None:
    problem = BY_NAME["bf16-d512-causal"].build("cuda")
    first, second = (
        run(problem, problem.start(), kernel="sm80", tile=tile, deterministic=True) for _ in range(2)
    )
    assert_same(first, second)


@pytest.mark.parametrize("columns", ["64,dq_passes=16,operands=whole", "256,dq_passes=8"])
def test_the_bias_gradient_is_added_once(columns: str) -> None:
    """A bias that is broadcast adds its gradient up; each of the CTAs of a key block has the same scores."""
    q, k, v, grad = (randn(2, 96, 2, 512, seed=i, dtype=torch.float32) for i in range(4))
    bias = randn(1, 2, 1, 96, seed=4, dtype=torch.float32)
    heads_first = [x.double().transpose(1, 2) for x in (q, k, v)]
    own = bias.double().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*heads_first, attn_mask=own.expand(2, 2, 96, 96))
    (expected,) = torch.autograd.grad(out.transpose(1, 2), own, grad.double())
    scores = heads_first[0] @ heads_first[1].transpose(-1, -2) * 512**-0.5 + own.detach()
    given = (grad, q, k, v, out.detach().transpose(1, 2).float(), scores.logsumexp(-1).float())
    (found,) = attention_backward(*given, bias=bias, wanted=("bias",), tile=STREAMED + columns)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


BETWEEN_HEADS = [
    Case("bf16-d59-causal", nheads_kv=4, head_dim=59, causal=True, **ODD),
    Case("bf16-d57x61", nheads_kv=4, head_dim=57, head_dim_v=61, seqlen_q=128, seqlen_k=128),
    Case("fp16-d123", nheads_kv=4, head_dim=123, dtype="fp16", **ODD),
    Case("bf16-d93-varlen", nheads_kv=4, head_dim=93, lengths_q=(60, 1, 128), lengths_k=(80, 60, 1), batch=3),
    Case("bf16-d59-groups", nheads=8, nheads_kv=4, head_dim=59, **ODD),
]
"""4 or 8 heads, which start at all four remainders by 8 bytes."""


@pytest.mark.parametrize("of", BETWEEN_HEADS, ids=lambda case: case.name)
def test_rows_among_infinities(of: Case) -> None:
    """Elements between rows are infinite, and none is read."""
    problem = of.build("cuda")
    start = problem.start()
    floor = CANCELLATION if 1 in of.lengths_k else 0.0
    assert start.out is not None
    for heads, whole in (
        *(((0, 0, 0, 0), 0), ((1, 3, 2, 1), 0), ((3, 1, 5, 2), 0), ((2, 5, 1, 5), 0), ((1, 2, 3, 0), 4)),
    ):
        moved = []
        for i, (x, before) in enumerate(zip((*problem.tensors, start.out), heads, strict=True)):
            left = i if whole else 0
            right = -(left + x.shape[-1]) % whole if whole else 0
            moved.append(among_infinities(x, before, left, right))
        own = replace(problem, tensors=tuple(moved[:3]))
        compare_gradients(problem, start, run(own, Start(moved[3], None), kernel="sm80"), floor)


@pytest.mark.parametrize(
    ("shift", "gap", "last_stride"),
    [(1, 0, 3), (0, 3, 1), (1, 0, 1)],
    ids=["last-stride", "odd-rows", "odd-address"],
)
@pytest.mark.parametrize("head_dim", [64, 59, 62])
def test_elements_may_lie_anywhere(head_dim: int, shift: int, gap: int, last_stride: int) -> None:
    """Strides and addresses that vector loads cannot read give the same gradients as contiguous tensors."""
    problem = Case("strided", head_dim=head_dim, causal=True, nheads_kv=4, **ODD).build("cuda")
    start = problem.start()
    *moved, grad = (poisoned(x, shift, gap, last_stride) for x in (*problem.tensors, start.out))
    found = run(replace(problem, tensors=tuple(moved)), Start(grad, None), deterministic=True)
    wanted = run(problem, start, kernel="sm80", deterministic=True)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Traits, Any, str]]:
    """Kernels of the Ampere backward; no forward."""
    if params.get("of") in CASES and params.get("arch") == "sm80":
        main = registry.lookup(params["of"].traits("sm80", "backward"), params["tile"], target)
        yield from ((traits, own, target) for traits, own in kernels_of(main))
