"""Attention of few queries with many keys divides them among CTAs: results and gradients as without."""

from itertools import accumulate

import pytest
import torch

from cute_attn import attention, attention_varlen
from cute_attn.host import plans
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import int32, randn, with_gradients

ON_HOPPER = pytest.mark.skipif("sm90" not in runnable_archs(), reason="keys are divided on Hopper")

BATCHED = {
    "plain": ({}, (2, 40, 6000, 8, 2, 128)),
    "causal": ({"causal": True}, (1, 300, 9000, 4, 1, 64)),
    "window": ({"window": (4200, 3)}, (2, 70, 5000, 6, 2, 128)),
    "softcap": ({"softcap": 5.0, "causal": True}, (1, 3, 5000, 5, 1, 256)),
}


def tensors(*shapes):
    return [randn(*shape, seed=i) for i, shape in enumerate(shapes)]


def check(call, *arguments, **options):
    """out and lse of a call that is divided, and of the same by the ordinary kernel."""
    plans.forget()
    found = call(*arguments, return_lse=True, **options)
    assert {made.kernel.traits.op for made in plans._plans.values()} == {"kvcache"}
    expected = call(*arguments, return_lse=True, kernel="sm90", **options)
    for one, whole, tolerance in zip(found, expected, (1e-2, 2e-3), strict=True):
        torch.testing.assert_close(one, whole, rtol=tolerance, atol=tolerance)


def check_gradients(tensors, **options):
    """Gradients equal the ordinary backward's."""
    out = attention(*tensors, **options)
    found, expected = (
        with_gradients(lambda *x, kernel=kernel: attention(*x, kernel=kernel, **options), tensors, 2 * out)
        for kernel in (None, "sm90")
    )
    torch.testing.assert_close(found[1:], expected[1:], rtol=3e-2, atol=3e-2)


@ON_HOPPER
@pytest.mark.parametrize("name", BATCHED)
def test_batched(name):
    options, (batch, queries, keys, heads, heads_kv, dim) = BATCHED[name]
    q, k, v = tensors((batch, queries, heads, dim), *[(batch, keys, heads_kv, dim)] * 2)
    check(attention, q, k, v, **options)
    k[0, keys - 77 :], v[0, keys - 77 :] = torch.nan, torch.nan
    check(attention, q, k, v, seqused_k=int32(*[keys - 77, 100][:batch]), **options)


@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool])
@pytest.mark.parametrize("bias", [(2, 1, 9, 6001), (1, 8, 1, 6001), (1, 1, 9, 1)], ids=str)
def test_biases(bias, dtype):
    """Also of one row for all queries, and of one number for all keys."""
    q, k, v = tensors((2, 9, 8, 128), *[(2, 6001, 2, 128)] * 2)
    rows = randn(*bias, seed=9)
    check(attention, q, k, v, bias=rows > -1 if dtype is torch.bool else rows.to(dtype))


FUNCTIONS = {
    "score": {"score_mod": lambda s, b, h, i, j: s - (h + 1) * 0.001 * (j - i).abs()},
    "mask": {"mask_mod": lambda b, h, i, j: (j < 4100) | ((j + i + h) % 5 == b)},
    "causal-both": {
        "score_mod": lambda s, b, h, i, j: torch.tanh(s / 5) * 5,
        "mask_mod": lambda b, h, i, j: (i + j) % 3 != 0,
        "causal": True,
    },
}


@ON_HOPPER
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    """Indices count within the sequence, as where keys are not divided; gradients are the ordinary backward's."""
    given = tensors((2, 9, 8, 128), *[(2, 6001, 2, 128)] * 2)
    check(attention, *given, **FUNCTIONS[name])
    check_gradients(given, **FUNCTIONS[name])


@ON_HOPPER
@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal):
    """Some sequences have no queries or no keys; rows between sequences belong to none."""
    queries, keys = (3, 0, 70, 9, 5), (5000, 200, 4097, 0, 6)
    q, k, v = tensors((sum(queries), 8, 128), *[(sum(keys), 2, 128)] * 2)
    k[5000:5200], v[5000:5200] = torch.nan, torch.nan  # the sequence without queries
    starts = (int32(0, *accumulate(n)) for n in (queries, keys))
    check(attention_varlen, q, k, v, *starts, 70, 5000, causal=causal)


@ON_HOPPER
def test_gradients():
    check_gradients(tensors((1, 64, 4, 64), *[(1, 6000, 2, 64)] * 2), causal=True)
