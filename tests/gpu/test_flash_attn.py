"""FlashAttention-2's functions on the card: options that its callers use, against ours and the CPU's."""

import math

import pytest
import torch

from cute_attn import attention, attention_varlen, flash_attn
from tests.checks import check

CU_Q, CU_K = (0, 70, 70, 203), (0, 90, 131, 400)
OPTIONS = {
    "plain": ({}, {}),
    "causal_window": ({"causal": True, "window_size": (64, 5)}, {"causal": True, "window": (64, 0)}),
    "softcap": ({"softcap": 8.0, "causal": True}, {"softcap": 8.0, "causal": True}),
    "dropout": ({"dropout_p": 0.25}, {"dropout_p": 0.25, "return_softmax": True}),
    "window": ({"window_size": (40, 30)}, {"window": (40, 30)}),
}
"""Options of the function, and the same for ours."""


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("dim", [40, 59, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name, dim, varlen):
    """Those of ``attention``, with an LSE of plus infinity for rows without keys."""
    given, meant = OPTIONS[name]
    generator = torch.Generator("cuda").manual_seed(0)
    rows = ((203,), (400,)) if varlen else ((2, 130), (2, 150))
    shapes = ((*rows[0], 4, dim), *2 * ((*rows[1], 2, dim),))
    q, k, v = (
        torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for s in shapes
    )
    cu = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (CU_Q, CU_K)]
    lengths = (*cu, 133, 269) if varlen else ()
    theirs = flash_attn.flash_attn_varlen_func if varlen else flash_attn.flash_attn_func
    ours = attention_varlen if varlen else attention
    torch.manual_seed(1)
    found = theirs(q, k, v, *lengths, return_attn_probs=True, deterministic=True, **given)
    torch.manual_seed(1)
    wanted = ours(q, k, v, *lengths, return_lse=True, deterministic=True, **meant)
    lse = wanted[1].masked_fill(wanted[1] == -math.inf, math.inf)
    grad = torch.randn(found[0].shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    grads = (torch.autograd.grad(out, (q, k, v), grad) for out in (found[0], wanted[0]))
    for own, other in zip((*found[:2], *next(grads)), (wanted[0], lse, *next(grads)), strict=True):
        torch.testing.assert_close(own, other)
    if "dropout_p" in given:
        assert torch.equal(found[2], wanted[2])


KVCACHE = {
    "decode": {"cache_seqlens": (300, 7)},
    "causal": {"cache_seqlens": (300, 7), "causal": True, "new": 5, "queries": 5},
    "rotary": {"cache_seqlens": (300, 7), "causal": True, "new": 1, "rotary": True},
    "window": {"cache_seqlens": (300, 7), "window_size": (50, 0), "queries": 3, "softcap": 9.0},
    "splits": {"cache_seqlens": (300, 7), "num_splits": 3},
    "entries": {"cache_seqlens": (300, 7), "cache_batch_idx": (3, 1), "new": 2},
    "leftpad": {"cache_seqlens": (300, 70), "cache_leftpad": (5, 64)},
    "pages": {"cache_seqlens": (300, 7), "page": 256, "causal": True, "new": 1},
    "any_dim": {"cache_seqlens": (300, 7), "new": 2, "dim": 59, "causal": True},
    "any_dim_pages": {"cache_seqlens": (300, 7), "new": 2, "dim": 59, "page": 256},
}


@pytest.mark.parametrize("name", KVCACHE)
def test_with_kvcache(name):
    options = dict(KVCACHE[name])
    rows, new, page = options.pop("queries", 1), options.pop("new", 0), options.pop("page", 0)
    dim = options.pop("dim", 128)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    q, caches = randn(2, rows, 8, dim), [randn(4, 512, 2, dim) for _ in "kv"]
    given = {
        n: torch.tensor(options.pop(n), dtype=torch.int32) for n in list(options) if n.startswith("cache_")
    }
    if not {"cache_batch_idx"} & set(given):
        caches = [x[:2].clone() for x in caches]
    if page:
        given["block_table"] = torch.randperm(4, generator=generator).view(2, 2).int()
        caches = [x.view(4, page, 2, dim)[given["block_table"].flatten().argsort()] for x in caches]
    if new:
        given |= {"k": randn(2, new, 2, dim), "v": randn(2, new, 2, dim)}
    if options.pop("rotary", False):
        angles = torch.rand(512, 32, generator=generator) * 6
        given |= {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64), ("cpu", torch.bfloat16)):

        def moved(x, device=device, dtype=dtype):
            return x.to(device, dtype if x.is_floating_point() else x.dtype, copy=True)

        own = [moved(x) for x in caches]
        arguments = {n: moved(x) for n, x in given.items()} | options
        if device == "cpu":
            arguments.pop("num_splits", None)  # changes no result
        out, lse = flash_attn.flash_attn_with_kvcache(moved(q), *own, **arguments, return_softmax_lse=True)
        found.append([x.cpu() for x in (out, lse, *own)])
    for which, actual, exact, plain in zip(("out", "lse", "k", "v"), *found, strict=True):
        check(which, actual, exact, plain, roundings=32 if which == "lse" else 1, floor=1e-5)


@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_embedding(inplace):
    x = torch.randn(2, 33, 4, 64, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(60, 16, device="cuda", dtype=torch.float64) * 6
    offsets = torch.tensor([3, 20], dtype=torch.int32, device="cuda")
    arguments = (angles.cos().float(), angles.sin().float())
    wanted = flash_attn.rotary.apply_rotary_emb(
        x.double().cpu(), *(y.double().cpu() for y in arguments), seqlen_offsets=offsets.cpu()
    )
    found = flash_attn.rotary.apply_rotary_emb(x, *arguments, inplace=inplace, seqlen_offsets=offsets)
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=2**-8, atol=1e-6)
    assert (found is x) == inplace
