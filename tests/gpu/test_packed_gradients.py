"""Gradients of q, k and v that are parts of one tensor, and gradients into given tensors, on the GPU."""

import pytest
import torch

from cute_attn import attention, attention_backward, attention_varlen, attention_varlen_backward
from cute_attn.flash_attn import flash_attn_qkvpacked_func
from cute_attn.host import fused_qkv

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def outputs(q, k, v, **options):
    out, lse = attention(q, k, v, return_lse=True, **options)
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(out.shape, generator=generator, **BF16), q, k, v, out, lse


@pytest.mark.parametrize("kernel", [None, "sm80"])
def test_gradients_of_packed_tensors_are_parts_of_one(kernel):
    qkv = torch.randn(2, 130, 3, 4, 64, **BF16)
    apart = [x.contiguous() for x in qkv.unbind(-3)]
    options = {"causal": True, "kernel": kernel, "deterministic": True}
    found = attention_backward(*outputs(*qkv.unbind(-3), causal=True), **options)
    wanted = attention_backward(*outputs(*apart, causal=True), **options)
    assert fused_qkv.are_adjacent(found)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


def test_gradients_of_packed_keys_and_values():
    q, kv = torch.randn(2, 130, 8, 64, **BF16), torch.randn(2, 90, 2, 4, 64, **BF16)
    found = attention_backward(*outputs(q, *kv.unbind(-3)), deterministic=True)
    wanted = attention_backward(*outputs(q, *(x.contiguous() for x in kv.unbind(-3))), deterministic=True)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


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
        assert own.is_contiguous()
        torch.testing.assert_close(own, grads[0], rtol=0, atol=0)


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
    for own, other, result in zip(into, expected, found, strict=True):
        assert result.data_ptr() == own.data_ptr()
        torch.testing.assert_close(own, other, rtol=0, atol=0)
    assert together[..., 512:].isnan().all()


def test_packed_sequences_into_given_tensors():
    qkv = torch.randn(300, 3, 4, 64, **BF16)
    ends = torch.tensor([0, 100, 290], dtype=torch.int32, device="cuda")
    q, k, v = qkv.unbind(-3)
    out, lse = attention_varlen(q, k, v, ends, ends, 190, 190, return_lse=True)
    dqkv = torch.full_like(qkv, float("nan"))
    lengths = (ends, ends, 190, 190)
    attention_varlen_backward(
        torch.randn_like(out), q, k, v, out.nan_to_num(), lse.nan_to_num(), *lengths, into=dqkv.unbind(-3)
    )
    assert not dqkv.isnan().any() and (dqkv[290:] == 0).all()
