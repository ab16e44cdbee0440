"""FlashAttention-2's functions on the card: options that its callers use, against the definition in float64."""

import math

import pytest
import torch

from cute_attn import flash_attn, reference
from cute_attn.api.attention import resolve_mask
from cute_attn.epilogues.inputs import ScoreInputs
from tests.checks import check

CU_Q, CU_K = (0, 70, 70, 203), (0, 90, 131, 400)
OPTIONS = {
    "plain": {},
    "causal_window": {"causal": True, "window_size": (64, 5)},
    "softcap": {"softcap": 8.0, "causal": True},
    "dropout": {"dropout_p": 0.25},
    "deterministic": {"deterministic": True, "window_size": (40, 30)},
}


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("dim", [40, 59, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name, dim, varlen):
    options = OPTIONS[name]
    generator = torch.Generator("cuda").manual_seed(0)
    rows = ((203,), (400,)) if varlen else ((2, 130), (2, 150))
    shapes = ((*rows[0], 4, dim), *2 * ((*rows[1], 2, dim),))
    q, k, v = (
        torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for s in shapes
    )
    cu = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (CU_Q, CU_K)]
    if varlen:
        results = flash_attn.flash_attn_varlen_func(q, k, v, *cu, 133, 269, return_attn_probs=True, **options)
    else:
        results = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    grad = torch.randn(results[0].shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    actual = [*results[:2], *torch.autograd.grad(results[0], (q, k, v), grad)]

    kept = ~results[2].signbit() if options.get("dropout_p") else None
    exact, plain = (defined((q, k, v), cu if varlen else None, options, kept, grad, d) for d in DTYPES)
    for which, a, e, p in zip(("out", "lse", "dq", "dk", "dv"), actual, exact, plain, strict=True):
        factor = 3.0 if which.startswith("d") else 2.0
        check(which, a, e, p, factor=factor, roundings=32 if which == "lse" else 1, floor=1e-5)


DTYPES = (torch.float64, torch.bfloat16)


def defined(tensors, cu, options, kept, grad, dtype):
    """out, lse and gradients by the reference, where dropout's mask is what the function returned."""
    window = tuple(None if x < 0 else x for x in options.get("window_size", (-1, -1)))
    causal = options.get("causal", False)
    mask, left, right = resolve_mask(causal, (window[0], None if causal else window[1]))
    inputs = ScoreInputs(left, right, softcap=options.get("softcap", 0.0))
    lengths = reference.Lengths(*cu, max_seqlen_q=133, max_seqlen_k=269) if cu else reference.Lengths()
    p = options.get("dropout_p", 0.0)
    features = reference.Features(mask, "returned" if p else "")
    inputs = ScoreInputs(
        left, right, softcap=inputs.softcap, dropout_p=p, rng_state=torch.zeros(2, device="cuda")
    )

    def keep(coords, dropout_p, state):
        return kept[coords.batch, coords.head, coords.query, coords.key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reference.DROPOUT_KEEP, "returned", keep)
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        scale = tensors[0].shape[-1] ** -0.5
        out, lse, _ = reference.attention(*leaves, scale, features, inputs, lengths, compute_dtype=dtype)
        grads = torch.autograd.grad(out, leaves, grad.to(dtype))
    return [out.detach(), lse.detach().masked_fill(lse == -math.inf, math.inf), *grads]


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
