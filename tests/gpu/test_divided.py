"""Attention of few queries with many keys divides them among CTAs: results and gradients as without."""

import pytest
import torch

from cute_attn import attention, attention_varlen
from cute_attn.host import plans
from tests.gpu.archs import runnable_archs

pytestmark = pytest.mark.skipif("sm90" not in runnable_archs(), reason="keys are divided on Hopper")

BATCHED = {
    "plain": ({}, (2, 40, 6000, 8, 2, 128)),
    "causal": ({"causal": True}, (1, 300, 9000, 4, 1, 64)),
    "window": ({"window": (4200, 3)}, (2, 70, 5000, 6, 2, 128)),
    "softcap": ({"softcap": 5.0, "causal": True}, (1, 3, 5000, 5, 1, 256)),
}


def tensors(*shapes):
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(*shape, generator=generator, device="cuda").bfloat16() for shape in shapes]


def launches(function):
    """Whether the call was divided."""
    plans.forget()
    result = function()
    assert {made.kernel.traits.op for made in plans._plans.values()} == {"kvcache"}
    return result


def check(found, expected):
    for one, whole, tolerance in zip(found, expected, (1e-2, 2e-3), strict=True):
        torch.testing.assert_close(one, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", BATCHED)
def test_batched(name):
    options, (batch, queries, keys, heads, heads_kv, dim) = BATCHED[name]
    q, k, v = tensors((batch, queries, heads, dim), *[(batch, keys, heads_kv, dim)] * 2)
    found = launches(lambda: attention(q, k, v, return_lse=True, **options))
    check(found, attention(q, k, v, return_lse=True, kernel="sm90", **options))
    used = torch.tensor([keys - 77, 100][:batch], dtype=torch.int32, device="cuda")
    k[0, keys - 77 :], v[0, keys - 77 :] = torch.nan, torch.nan
    found = launches(lambda: attention(q, k, v, seqused_k=used, return_lse=True, **options))
    check(found, attention(q, k, v, seqused_k=used, return_lse=True, kernel="sm90", **options))


FUNCTIONS = {
    "score": {"score_mod": lambda s, b, h, i, j: s - (h + 1) * 0.001 * (j - i).abs()},
    "mask": {"mask_mod": lambda b, h, i, j: (j < 4100) | ((j + i + h) % 5 == b)},
    "causal-both": {
        "score_mod": lambda s, b, h, i, j: torch.tanh(s / 5) * 5,
        "mask_mod": lambda b, h, i, j: (i + j) % 3 != 0,
        "causal": True,
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    """Indices count within the sequence, as where keys are not divided; gradients are the ordinary backward's."""
    options = FUNCTIONS[name]
    q, k, v = (x.requires_grad_() for x in tensors((2, 9, 8, 128), *[(2, 6001, 2, 128)] * 2))
    found = launches(lambda: attention(*(x.detach() for x in (q, k, v)), return_lse=True, **options))
    check(found, attention(q, k, v, return_lse=True, kernel="sm90", **options))
    grads = []
    for kernel in (None, "sm90"):
        out = attention(q, k, v, kernel=kernel, **options)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for one, whole in zip(*grads, strict=True):
        torch.testing.assert_close(one, whole, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal):
    """Also sequences without queries or keys; the rows of the others are no sequence's own."""
    queries, keys = (3, 0, 70, 9, 5), (5000, 200, 4097, 0, 6)
    q, k, v = tensors((sum(queries), 8, 128), *[(sum(keys), 2, 128)] * 2)
    k[5000:5200], v[5000:5200] = torch.nan, torch.nan  # of the sequence without queries
    starts = [
        torch.tensor([sum(n[:i]) for i in range(6)], dtype=torch.int32, device="cuda")
        for n in (queries, keys)
    ]
    arguments = (q, k, v, *starts, 70, 5000)
    options = {"causal": causal, "return_lse": True}
    found = launches(lambda: attention_varlen(*arguments, **options))
    check(found, attention_varlen(*arguments, kernel="sm90", **options))


def test_gradients():
    q, k, v = (x.requires_grad_() for x in tensors((1, 64, 4, 64), *[(1, 6000, 2, 64)] * 2))
    grads = []
    for kernel in (None, "sm90"):
        out = attention(q, k, v, causal=True, kernel=kernel)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for one, whole in zip(*grads, strict=True):
        torch.testing.assert_close(one, whole, rtol=3e-2, atol=3e-2)
