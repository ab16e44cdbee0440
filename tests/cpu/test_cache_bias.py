"""A bias in attention with a cache: on score tiles of packed heads and after left padding, against the definition."""

from dataclasses import replace

import pytest
import torch
from cutlass import Int32

from cute_attn import reference
from cute_attn.device.seqlen import SeqlenInfo
from cute_attn.reference import emulate
from cute_attn.reference import kvcache as ref
from cute_attn.reference.tilings import SMALL, TILINGS, Scores
from tests.problem import DTYPES
from tests.tensors import int32

NO_LENGTHS = ref.Lengths()


def padded(first: int) -> type:
    """A class in place of ``SeqlenInfo`` whose sequences start at row ``first`` of their entries."""

    class Padded:
        @staticmethod
        def read(seqlens, batch):
            return replace(SeqlenInfo.read(seqlens, batch), first_key=Int32(first))

    return Padded


@pytest.mark.parametrize(
    ("name", "heads", "features", "dtype"),
    [
        *((SMALL, 1, "", "bf16"), (SMALL, 4, "causal-", "fp32"), ("warps2x2-64x64", 2, "softcap-", "fp16")),
        *(("wgmma1-64x80", 8, "", "bf16"), ("warps2x4-32x128", 1, "alibi-", "fp32")),
    ],
)
@pytest.mark.parametrize("first", [0, 37])
def test_tiles_have_the_scores_of_the_definition(name, heads, features, dtype, first, monkeypatch):
    """Rows at even and odd elements, blocks across the first key, more columns than keys; packs of several heads."""
    tiling = TILINGS[name].of(f"{features}bias_{dtype}", op="kvcache")
    tiling = replace(tiling, tile=replace(tiling.tile, pack_heads=heads))
    if first:
        monkeypatch.setattr(emulate, "SeqlenInfo", padded(first))
        emulate._compiled.cache_clear()
    for seqlen_q, seqlen_k, more in ((1, 100, 0), (33, 259, 3), (70, 64, 64)):
        check_tiles(tiling, heads, features, DTYPES[dtype], first, seqlen_q, seqlen_k, more)
    emulate._compiled.cache_clear()


def check_tiles(tiling, heads, features, dtype, first, seqlen_q, seqlen_k, more):
    generator = torch.Generator().manual_seed(seqlen_q)
    nheads, columns = 2 * heads, seqlen_k - first + more
    bias = torch.randn(2, nheads, seqlen_q, columns, generator=generator)
    bias[0, 0, 0, : columns // 2], bias[1, -1, -1] = -torch.inf, torch.finfo(torch.float16).min
    bias = bias.to(dtype)
    own = {"softcap": 2.5} if features == "softcap-" else {}
    own |= {"alibi_slopes": torch.rand(2, nheads)} if features == "alibi-" else {}
    problem = Scores.random(2, nheads, seqlen_q, seqlen_k, bias=bias, **own)
    check_cached(tiling, problem, ref.Lengths(leftpad=int32(first, first)))


def check_cached(tiling, problem, lengths=NO_LENGTHS):
    """Outputs of a kvcache kernel's score tiles are the definition's, where a pack of heads has the keys of one."""
    heads = tiling.tile.pack_heads
    k, v = (x[:, :, ::heads].repeat_interleave(heads, 2) for x in (problem.k, problem.v))
    problem = replace(problem, k=k, v=v)
    got = problem.emulate(tiling)
    q, *cached = (x.double() for x in (problem.q, k, v))
    mask = reference.Features("causal" if "causal" in tiling.traits.mask else "")
    out, lse = ref.attention(q, ref.Cache(*cached), problem.scale, lengths, mask, problem.inputs)
    torch.testing.assert_close(got.lse, lse.float(), atol=1e-5, rtol=1e-6)
    bound = float(v.abs().max()) * 2**-10
    torch.testing.assert_close(got.out, out.transpose(1, 2).float(), atol=bound, rtol=0.0)
