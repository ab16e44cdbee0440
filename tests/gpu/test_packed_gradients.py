"""Gradients of q, k and v that are parts of one tensor, and gradients into given tensors, on the GPU."""

import pytest
import torch

from cute_attn import attention, attention_backward, attention_varlen, attention_varlen_backward
from cute_attn.flash_attn import flash_attn_qkvpacked_func
from cute_attn.host import fused_qkv
from tests.gpu.compare import assert_equal, int32, randn

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def outputs(q, k, v, **options):
    out, lse = attention(q, k, v, return_lse=True, **options)
    return randn(*out.shape, seed=1), q, k, v, out, lse


@pytest.mark.parametrize(("kind", "kernel"), [("qkv", None), ("qkv", "sm80"), ("kv", None)])
def test_gradients_of_packed_tensors(kind, kernel):
    """Those of q, k and v are parts of one tensor as well."""
    if kind == "qkv":
        tensors = torch.randn(2, 130, 3, 4, 64, **BF16).unbind(-3)
    else:
        tensors = torch.randn(2, 130, 8, 64, **BF16), *torch.randn(2, 90, 2, 4, 64, **BF16).unbind(-3)
    causal = kind == "qkv"
    found, wanted = (
        attention_backward(*outputs(*given, causal=causal), causal=causal, kernel=kernel, deterministic=True)
        for given in (tensors, [x.contiguous() for x in tensors])
    )
    assert kind == "kv" or fused_qkv.are_adjacent(found)
    assert_equal(found, wanted)


def test_the_gradient_of_qkv_is_not_copied(monkeypatch):
    qkv = torch.randn(2, 130, 3, 4, 64, requires_grad=True, **BF16)
    grads = []
    for unbind in (lambda x: x.unbind(-3), fused_qkv.unbind):
        out = attention(*unbind(qkv), deterministic=True)
        grads += torch.autograd.grad(out.float().square().sum(), qkv)

    def refuse(*_):
        raise AssertionError("the parts were copied into another tensor")

    monkeypatch.setattr(torch, "stack", refuse)
    out = flash_attn_qkvpacked_func(qkv, deterministic=True)
    grads += torch.autograd.grad(out.float().square().sum(), qkv)
    for own in grads[1:]:
        assert own.is_contiguous() and torch.equal(own, grads[0])


def test_gradients_go_into_given_tensors():
    q, kv = torch.randn(2, 130, 8, 64, **BF16), torch.randn(2, 90, 2, 2, 64, **BF16)
    bias = torch.randn(2, 8, 130, 90, **BF16)
    wanted = ("q", "k", "v", "bias")
    given = outputs(q, *kv.unbind(-3), bias=bias)
    options = {"bias": bias, "wanted": wanted, "deterministic": True}
    expected = attention_backward(*given, **options)
    together = torch.full((2, 130, 8 * 64 + 8), float("nan"), **BF16)
    dq = together[..., :512].unflatten(-1, (8, 64))
    dkv, dbias = torch.full_like(kv, float("nan")), torch.full_like(bias, float("nan"))
    into = (dq, *dkv.unbind(-3), dbias)
    found = attention_backward(*given, **options, into=into)
    assert [x.data_ptr() for x in found] == [x.data_ptr() for x in into]
    assert_equal(into, expected)
    assert together[..., 512:].isnan().all()


def test_packed_sequences_into_given_tensors():
    qkv = torch.randn(300, 3, 4, 64, **BF16)
    ends = int32(0, 100, 290)
    q, k, v = qkv.unbind(-3)
    out, lse = attention_varlen(q, k, v, ends, ends, 190, 190, return_lse=True)
    dqkv = torch.full_like(qkv, float("nan"))
    lengths = (ends, ends, 190, 190)
    attention_varlen_backward(
        torch.randn_like(out), q, k, v, out.nan_to_num(), lse.nan_to_num(), *lengths, into=dqkv.unbind(-3)
    )
    assert not dqkv.isnan().any() and (dqkv[290:] == 0).all()
