"""Large and odd head dims on the card, and rows that start anywhere."""

from dataclasses import replace

import pytest
import torch

from cute_attn import attention
from tests.checks import check_forward
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import compare, expectations, randn
from tests.problem import Case

ARCHS = runnable_archs()
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
FEATURES = [
    Case("few-queries-d512", seqlen_q=3, seqlen_k=700, head_dim=512, nheads=8, nheads_kv=1, causal=True),
    Case("no-visible-keys-d320", seqlen_q=300, seqlen_k=100, head_dim=320, causal=True),
    Case("sinks-softcap-d512", seqlen_q=150, seqlen_k=330, head_dim=512, sinks="bf16", softcap=15.0),
    Case("used-d288", seqlen_q=90, seqlen_k=200, seqused_q=(90, 17), seqused_k=(200, 0), head_dim=288),
    Case("hiding-bias-d448", seqlen_q=130, seqlen_k=200, head_dim=448, bias="bf16", bias_hides=True),
    Case("frozen-maxima-d512", seqlen_q=128, seqlen_k=2000, head_dim=512, logits="negative"),
    Case("mem-efficient-dropout-d384x288", seqlen_q=100, seqlen_k=260, head_dim=384, head_dim_v=288, causal=True,
        dropout_p=0.3, dropout_mask="mem_efficient"),
    Case("few-keys-d512x8", lengths_q=(70, 0, 3, 64), lengths_k=(1, 40, 65, 0), nheads=8, nheads_kv=1, head_dim=512,
        head_dim_v=8, causal=True),
    Case("one-key-d512x24", seqlen_q=5, seqlen_k=1, head_dim=512, head_dim_v=24, sinks="bf16"),
    Case("d512x40", seqlen_q=200, seqlen_k=200, head_dim=512, head_dim_v=40, window=(30, 30)),
]  # fmt: skip


@pytest.mark.parametrize(
    "case, arch",
    [
        pytest.param(case, arch, id=f"{case.name}-{arch}")
        for case in (*LARGE, *FEATURES)
        for arch in ARCHS
        if arch == "sm80" or case.dtype != "fp32"
    ],
)
def test_large_head_dims(case, arch):
    compare(case.build("cuda"), kernel=arch)


@pytest.mark.parametrize(
    "tile", ["tile_n=32,num_stages=1", "tile_n=32,num_stages=3", "tile_n=96,num_stages=1"]
)
@pytest.mark.parametrize("case", [LARGE[0], FEATURES[3], FEATURES[6]], ids=lambda case: case.name)
def test_tiles_of_large_head_dims(case, tile):
    if "sm90" not in ARCHS:
        pytest.skip("the tiles are Hopper's")
    compare(case.build("cuda"), kernel="sm90", tile=tile)


def test_large_head_dims_in_many_work_tiles():
    """More work tiles than CTAs, and the same result each time."""
    q, k, v = (randn(3, 1500, 16, 512, seed=i) for i in range(3))
    first = attention(q, k, v, causal=True)
    for _ in range(20):
        assert torch.equal(attention(q, k, v, causal=True), first)
    other = attention(q, k, v, causal=True, kernel="sm80").float()
    assert (first.float() - other).abs().max() <= 2**-6 * other.abs().max()


ODD = [
    Case("d59-causal", seqlen_q=203, seqlen_k=333, head_dim=59, causal=True),
    Case("d1", seqlen_q=70, seqlen_k=130, head_dim=1, dtype="fp16"),
    Case("d7x5-varlen", lengths_q=(70, 0, 133), lengths_k=(90, 41, 269), head_dim=7, head_dim_v=5),
    Case("d129-dropout", seqlen_q=130, seqlen_k=200, head_dim=129, dropout_p=0.2, bias="bf16"),
    Case("d250-window", seqlen_q=200, seqlen_k=300, head_dim=250, window=(70, 9)),
    Case("fp32-d59", seqlen_q=203, seqlen_k=333, head_dim=59, causal=True, dtype="fp32"),
    Case("fp32-d3", seqlen_q=100, seqlen_k=200, head_dim=3, dtype="fp32"),
    Case("fp32-d300x36", seqlen_q=256, seqlen_k=128, head_dim=300, head_dim_v=36, dtype="fp32"),
]


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_any_head_dim(case):
    compare(case.build("cuda"))


@pytest.mark.parametrize("unroll", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [32, 80, 96, 160, 224])
def test_unrolled_steps(head_dim, unroll):
    """Head dims of several swizzle atoms, of 32 or 64 columns."""
    case = Case("", seqlen_q=130, seqlen_k=200, head_dim=head_dim, head_dim_v=128, causal=True)
    tile = f"tile_m=64,tile_n=32,num_warps=4,qk_unroll={unroll}"
    compare(case.build("cuda"), kernel="sm80", tile=tile)


def poisoned(x, shift, gap, last_stride=1):
    """x in memory that is NaN otherwise: from element ``shift`` on, rows ``gap`` elements apart."""
    *outer, dim = x.shape
    wide = torch.full((*outer, dim + gap, last_stride), torch.nan, dtype=x.dtype, device="cuda")
    memory = torch.full((wide.numel() + shift,), torch.nan, dtype=x.dtype, device="cuda")
    return memory.as_strided(wide.shape, wide.stride(), shift)[..., :dim, 0].copy_(x)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shift, last_stride", [(1, 1), (0, 1), (3, 2)])
def test_rows_that_start_anywhere(dtype, shift, last_stride):
    problem = Case("d64", seqlen_q=150, seqlen_k=270, causal=True, dtype=dtype).build("cuda")
    compare(replace(problem, tensors=tuple(poisoned(x, shift, 5, last_stride) for x in problem.tensors)))


@pytest.mark.parametrize("head_dim", [59, 60, 62])
def test_rows_at_multiples_of_2_4_and_8_bytes(head_dim):
    """One kernel serves rows at any distance; NaN lies between rows."""
    problem = Case("", seqlen_q=150, seqlen_k=270, head_dim=head_dim, causal=True).build("cuda")
    for shift, gap in ((0, 0), (0, 4), (4, 4), (2, 2), (1, 1), (1, 0), (0, 5), (3, 4)):
        compare(replace(problem, tensors=tuple(poisoned(x, shift, gap) for x in problem.tensors)))


BETWEEN_HEADS = [
    Case("d59-causal", seqlen_q=203, seqlen_k=333, nheads_kv=4, head_dim=59, causal=True),
    Case("d61x57-groups", seqlen_q=130, seqlen_k=192, nheads=8, nheads_kv=4, head_dim=61, head_dim_v=57),
    Case("d93-one-stage", seqlen_q=70, seqlen_k=256, nheads_kv=4, head_dim=93, dtype="fp16"),
    Case("d123-varlen", lengths_q=(70, 0, 133), lengths_k=(90, 41, 256), nheads_kv=4, head_dim=123),
    Case("d3", seqlen_q=70, seqlen_k=130, nheads_kv=4, head_dim=3, dtype="fp16"),
]
"""4 heads of K and V, which start at all four remainders by 8 bytes."""


@pytest.mark.parametrize("case", BETWEEN_HEADS, ids=lambda case: case.name)
def test_rows_among_infinities(case):
    """Neighbouring heads and the elements between rows are infinite; nothing of them is read."""
    problem = case.build("cuda")
    expected = expectations(problem)
    for heads in ((0, 0, 0), (1, 1, 1), (3, 2, 1), (0, 1, 5), (2, 5, 3)):
        tensors = tuple(among_infinities(x, n) for x, n in zip(problem.tensors, heads, strict=True))
        check_forward(replace(problem, tensors=tensors).run(), *expected)


def among_infinities(x, before, left=0, right=0):
    """x, whose memory has infinities in heads ``before`` its heads, and in as many more as make 4 in all; 5: in one;
    and in elements ``left`` and ``right`` of each row."""
    *outer, heads, dim = x.shape
    others, before = (1, 1) if before == 5 else (4, before)
    shape = (*outer, heads + others, left + dim + right)
    whole = torch.full(shape, float("inf"), dtype=x.dtype, device=x.device)
    return whole[..., before : before + heads, left : left + dim].copy_(x)


@pytest.mark.parametrize("head_dim", [59, 64, 128])
def test_a_given_output(head_dim):
    q, k, v = (randn(2, 100, 4, head_dim, seed=i) for i in range(3))
    whole = torch.full((2, 100, 8, head_dim), float("nan"), device="cuda", dtype=torch.bfloat16)
    out = whole[:, :, ::2]
    assert attention(q, k, v, causal=True, out=out) is out
    assert torch.equal(out, attention(q, k, v, causal=True)) and whole[:, :, 1::2].isnan().all()
