"""Arguments of the public functions on the GPU: outputs, gradients, and memory around tensors."""

import math

import pytest
import torch

from cute_attn import (
    attention,
    attention_backward,
    attention_varlen,
    attention_with_kvcache,
    reference,
)
from cute_attn.host.split_kv import BOX_ROWS
from cute_attn.reference import kvcache as definition
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import assert_equal, int32, randn

# ---- what is written ----


def test_rows_of_no_sequence_keep_what_out_has():
    """The first call and those after it, and where out is copied to."""
    starts, q, k, cache = int32(3, 10, 10, 30), randn(40, 4, 64), randn(90, 2, 64), randn(3, 128, 2, 64)
    cached = {"cache_seqlens": int32(100, 3, 37), "cu_seqlens_q": starts, "max_seqlen_q": 20}
    lengths = (starts, int32(0, 30, 60, 90), 20, 30)
    calls = [
        lambda out: attention_with_kvcache(q, cache, cache.clone(), **cached, out=out),
        lambda out: attention_varlen(q, k, k, *lengths, out=out),
        lambda out: attention_varlen(q, k, k, *lengths, seqused_q=int32(5, 0, 20), out=out),
    ]
    for call in calls:
        expected = call(None)
        for width in (64, 65):
            for _ in range(3):
                out = torch.full((40, 4, width), 7.0, dtype=q.dtype, device="cuda")[..., -64:]
                if width == 65 and call is not calls[0]:
                    continue  # attention declines it
                assert call(out) is out and (out[:3] == 7).all() and (out[30:] == 7).all()
                assert out[3:30].equal(expected[3:30])


# ---- around the cache and the table ----

ENTRIES, CAPACITY, HEADS, DIM = 3, 192, 2, 64
LENGTHS = {
    "around-the-end": (CAPACITY - 1, CAPACITY + 7, CAPACITY),
    "absurd": (2**30, -5, 40),
    "none": (0, -(2**31), 2**31 - 9),
}


def surrounded(x, fill, guard):
    """A copy of ``x`` in the middle of memory of ``fill``, and that memory."""
    storage = torch.full((x.numel() + 2 * guard,), fill, dtype=x.dtype, device="cuda")
    return storage[guard : guard + x.numel()].view(x.shape).copy_(x), storage


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("page", [0, 16, 64, 12])
@pytest.mark.parametrize("arch", runnable_archs("kvcache"))
def test_nothing_beyond_the_cache_or_the_table_is_touched(arch, page, name, splits):
    """Lengths and unused table entries may be anything; the NaN rows around the cache in memory stay NaN."""
    if arch != "sm80" and page % BOX_ROWS:
        pytest.skip("TMA loads no such pages")
    lengths, rows = LENGTHS[name], page or CAPACITY
    pages = ENTRIES * CAPACITY // rows
    guard = rows * HEADS * DIM  # a page, so that page -1 and the one behind the last are NaN
    k, v = (surrounded(randn(pages, rows, HEADS, DIM, seed=i), math.nan, guard) for i in range(2))
    table = None
    if page:
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int().view(ENTRIES, -1)
        for entry, length in enumerate(lengths):
            used = -(-min(max(length + 2, 0), CAPACITY) // page)
            order[entry, used:] = torch.tensor([2**31 - 1, -(2**31), pages, -1]).repeat(48)[
                : CAPACITY // page - used
            ]
        table, around = surrounded(order, pages, 64)
    q, new = randn(ENTRIES, 2, 4, DIM, seed=3), randn(ENTRIES, 2, HEADS, DIM, seed=4)
    expected = [x.cpu().clone() for x, _ in (k, v)]
    options = {"causal": True, "return_lse": True}
    out, lse = attention_with_kvcache(
        q, k[0], v[0], k=new, v=new, cache_seqlens=int32(*lengths), page_table=table, kernel=arch,
        num_splits=splits, **options,
    )  # fmt: skip
    # On the CPU, where the functions see lengths, they refuse these.
    seqlens, cache = (
        int32(*lengths).cpu(),
        definition.Cache(*expected, None if table is None else table.cpu()),
    )
    definition.append(cache, new.cpu(), new.cpu(), seqlens)
    whole, whole_lse = definition.attention(
        q.cpu(), cache, DIM**-0.5, definition.Lengths(seqlens + 2), reference.Features("causal")
    )
    torch.testing.assert_close(out.cpu(), whole, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu(), whole_lse, rtol=1e-3, atol=1e-3)
    for (cache, storage), right in zip((k, v), expected, strict=True):
        assert cache.cpu().equal(right), "new rows go where the definition has them, and nowhere else"
        assert storage[:guard].isnan().all() and storage[-guard:].isnan().all()
    if table is not None:
        assert table.cpu().equal(order) and (around[:64] == pages).all() and (around[-64:] == pages).all()


# ---- gradients into given tensors ----

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def outputs(q, k, v, **options):
    out, lse = attention(q, k, v, return_lse=True, **options)
    return randn(*out.shape, seed=1), q, k, v, out, lse


@pytest.mark.parametrize("dim", [64, 59])
def test_gradients_go_into_given_tensors(dim):
    q, kv = torch.randn(2, 130, 8, dim, **BF16), torch.randn(2, 90, 2, 2, dim, **BF16)
    bias = torch.randn(2, 8, 130, 90, **BF16)
    wanted = ("q", "k", "v", "bias")
    given = outputs(q, *kv.unbind(-3), bias=bias)
    options = {"bias": bias, "wanted": wanted, "deterministic": True}
    expected = attention_backward(*given, **options)
    together = torch.full((2, 130, 8 * dim + 8), float("nan"), **BF16)
    dq = together[..., : 8 * dim].unflatten(-1, (8, dim))
    dkv, dbias = torch.full_like(kv, float("nan")), torch.full_like(bias, float("nan"))
    into = (dq, *dkv.unbind(-3), dbias)
    found = attention_backward(*given, **options, into=into)
    assert [x.data_ptr() for x in found] == [x.data_ptr() for x in into]
    assert_equal(into, expected)
    assert together[..., 8 * dim :].isnan().all()
