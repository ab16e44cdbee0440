"""cute_attn.flex on the GPU: block masks' lists within a graph, and PyTorch's function served in its place.

Kernels are built here, one after the other: the processes that build for other tests know no traced functions.
"""

from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as pytorch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from cute_attn import flex
from cute_attn.flex import overrides
from cute_attn.host.block_masks import _made_of
from tests.gpu.compare import captured, randn
from tests.gpu.test_functions import tensors

BATCH, NHEADS, SEQLEN = 2, 4, 300
DOCUMENT = tensors("cuda")["document"] if torch.cuda.is_available() else torch.zeros(BATCH, SEQLEN)
SLOPES = tensors("cuda")["slopes"] if torch.cuda.is_available() else torch.zeros(NHEADS)


def document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (DOCUMENT[b, q] == DOCUMENT[b, k]) & (q >= k)


def inputs() -> list[Tensor]:
    heads = (NHEADS, NHEADS // 2, NHEADS // 2)
    return [randn(BATCH, n, SEQLEN, 64, seed=i) for i, n in enumerate(heads)]


def test_lists_are_made_without_waiting_and_again_within_a_graph() -> None:
    mask = create_block_mask(document, BATCH, None, SEQLEN, SEQLEN, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = _made_of(mask).kinds
        assert _made_of(mask).kinds is first
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert _made_of(mask).kinds is not first
    x = inputs()
    eager = flex.flex_attention(*x, block_mask=mask, enable_gqa=True)
    graph, out = captured(lambda: flex.flex_attention(*x, block_mask=mask, enable_gqa=True))
    graph.replay()
    assert torch.equal(out, eager)  # type: ignore[arg-type]
    for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks):
        counts[..., 1] = 0  # type: ignore[index]
    graph.replay()
    assert not out[:, :, 128:256].any() and torch.equal(out[:, :, :128], eager[:, :, :128])  # type: ignore[union-attr,index,call-overload]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_pytorchs_function_is_served(compiled: bool) -> None:
    """Its own result is the eager definition's."""
    mask = create_block_mask(document, BATCH, None, SEQLEN, SEQLEN, device="cuda")
    leaves = [x.requires_grad_() for x in inputs()]

    def layer(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        steeper = slopes * 2
        options: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        return pytorch.flex_attention(
            q * 0.5, k, v, lambda s, b, h, i, j: s - steeper[h] * (i - j).abs(), mask, **options
        )

    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    flex.served.clear()
    with flex.active(strict=True):
        out, aux = function(*leaves, SLOPES)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert flex.served[overrides.NAME, ""] == 1
    theirs, their_aux = layer(*leaves, SLOPES)
    assert flex.served.total() == 1
    torch.testing.assert_close(out, theirs, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(aux.lse, their_aux.lse, atol=2e-2, rtol=2e-2)
    for ours, one in zip(grads, torch.autograd.grad(theirs, leaves, torch.ones_like(out)), strict=True):
        torch.testing.assert_close(ours.float(), one.float(), atol=1e-1, rtol=5e-2)
