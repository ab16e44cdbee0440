"""Views of one tensor, and their gradients as one tensor, on the CPU."""

import pytest
import torch

from cute_attn import attention
from cute_attn.flash_attn.conventions import tensors_of
from cute_attn.host import fused_qkv


@pytest.mark.parametrize("parts", [2, 3])
def test_unbind_returns_the_tensor_that_gradients_are_parts_of(parts):
    x = torch.randn(2, 5, parts, 3, 8, requires_grad=True)
    together = torch.randn(2, 5, parts, 3, 8)
    views = fused_qkv.unbind(x)
    grads = [
        together.as_strided((2, 5, 3, 8), fused_qkv.packed_strides((2, 5, 3, 8), parts), i * 24)
        for i in range(parts)
    ]
    (found,) = torch.autograd.grad(views, x, grads)
    assert found.data_ptr() == together.data_ptr()
    torch.testing.assert_close(found, together, rtol=0, atol=0)


@pytest.mark.parametrize("change", ["copied", "swapped", "padded"])
def test_other_gradients_are_stacked(change):
    x = torch.randn(5, 3, 2, 8, requires_grad=True)
    together = torch.randn(5, 3, 2, 9 if change == "padded" else 8)[..., :8]
    grads = list(together.unbind(-3))
    if change == "copied":
        grads = [grad.clone() for grad in grads]
    if change == "swapped":
        grads = [grads[1], grads[0], grads[2]]
    (found,) = torch.autograd.grad(fused_qkv.unbind(x), x, grads)
    torch.testing.assert_close(found, torch.stack(grads, -3), rtol=0, atol=0)


def test_unbind_differentiates_as_torchs():
    x = torch.randn(2, 6, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(attention(*part(x)).square().sum(), x)[0] for part in (fused_qkv.unbind, _unbind)
    ]
    torch.testing.assert_close(*grads)
    (node,) = {x.grad_fn for x in tensors_of({"qkv": x})}
    assert "_Unbind" in node.name(), "FlashAttention's functions use it"


def _unbind(x):
    return x.unbind(-3)


def test_parts_are_found_by_strides_and_addresses():
    qkv = torch.randn(2, 5, 3, 4, 8)
    q, k, v = qkv.unbind(-3)
    assert fused_qkv.number_packed((q, k, v)) == 3 and fused_qkv.are_adjacent((q, k, v))
    assert not fused_qkv.are_adjacent((q, v, k))
    kv = torch.randn(2, 5, 2, 4, 8)
    assert fused_qkv.number_packed((q, *kv.unbind(-3))) == 2
    assert fused_qkv.number_packed((q.contiguous(), k.contiguous(), v.contiguous())) == 0
    assert fused_qkv.number_packed((q, k, v[..., :6])) == 0
