"""Calls of no sequence, no query, no key or no head, at every door, as the definition has them."""

import pytest
import torch
from torch.nn import functional as F

from cute_attn import sdpa
from tests.doors import DOORS, EMPTY, given, leaves, results


def call_of(door, sizes, device):
    """Results and gradients, on the CPU."""
    torch.manual_seed(0)
    inputs = given(door.inputs(sizes), device, torch.bfloat16)
    found = results(door.call(**inputs))
    torch.manual_seed(1)
    learnt = [x for x in found if x.requires_grad]
    cotangents = [torch.randn(x.shape).to(x.device, x.dtype) for x in learnt]
    own = list(leaves(inputs).values())
    grads = torch.autograd.grad(learnt, own, cotangents) if own else ()
    return [x.detach().cpu() for x in (*found, *grads)]


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("what", EMPTY)
def test_nothing_gives_zeros(what, name):
    door, sizes = DOORS[name], EMPTY[what]
    if what in door.declines:
        with pytest.raises(ValueError, match="none of them 0"):
            call_of(door, sizes, "cuda")
        return
    wanted = call_of(door, sizes, "cpu")
    for _ in range(4):  # planned, known, recorded, repeated
        torch.testing.assert_close(call_of(door, sizes, "cuda"), wanted)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}], ids=str)
@pytest.mark.parametrize("what", EMPTY)
def test_scaled_dot_product_attention_of_nothing(what, options):
    """PyTorch's cuDNN attention returns None where there is no sequence."""
    sizes = EMPTY[what]
    shapes = [
        (sizes.batch, sizes.nheads, rows, sizes.head_dim) for rows in (sizes.seqlen_q, *[sizes.seqlen_k] * 2)
    ]
    for mask in (None, torch.zeros(sizes.seqlen_q, sizes.seqlen_k, device="cuda", dtype=torch.bfloat16)):
        if mask is not None and options.get("is_causal"):
            continue
        for learns in (False, True):
            with sdpa.active():
                for _ in range(4):
                    inputs = [
                        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=learns)
                        for shape in shapes
                    ]
                    out = F.scaled_dot_product_attention(*inputs, mask, **options)
                    assert out.shape == inputs[0].shape and not out.any()
                    if learns:
                        grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
                        assert all(
                            x.shape == y.shape and not y.any() for x, y in zip(inputs, grads, strict=True)
                        )
