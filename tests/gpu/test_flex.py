"""cute_attn.flex on the GPU: block masks against dense torch in float64, and PyTorch's function served in its place.

Kernels are built here, one after the other: the processes that build for other tests know no traced functions.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as pytorch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from cute_attn import flex
from cute_attn.flex import overrides
from cute_attn.host import doors
from cute_attn.host.block_masks import _made_of
from tests.gpu.compare import captured
from tests.gpu.test_functions import check_captured, tensors

BATCH, NHEADS, SEQLEN, HEAD_DIM = 2, 4, 300, 64
DOCUMENT = tensors("cuda")["document"] if torch.cuda.is_available() else torch.zeros(BATCH, SEQLEN)
SLOPES = tensors("cuda")["slopes"] if torch.cuda.is_available() else torch.zeros(NHEADS)


def document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (DOCUMENT[b, q] == DOCUMENT[b, k]) & (q >= k)


def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - SLOPES[h] * (q - k).abs()


@pytest.fixture
def activated() -> Iterator[None]:
    flex.served.clear()
    with flex.active(strict=True):
        yield


def inputs(
    batch: int = BATCH, heads_kv: int = 2, dtype: torch.dtype = torch.bfloat16, *, grad: bool = True
) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(BATCH, NHEADS, SEQLEN, HEAD_DIM), *[(batch, heads_kv, SEQLEN, HEAD_DIM)] * 2]
    return [
        torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_(grad)
        for shape in shapes
    ]


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
    x = inputs(grad=False)
    eager = flex.flex_attention(*x, block_mask=mask, enable_gqa=True)
    graph, out = captured(lambda: flex.flex_attention(*x, block_mask=mask, enable_gqa=True))
    graph.replay()
    assert torch.equal(out, eager)  # type: ignore[arg-type]
    for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks):
        counts[..., 1] = 0  # type: ignore[index]
    graph.replay()
    assert not out[:, :, 128:256].any() and torch.equal(out[:, :, :128], eager[:, :, :128])  # type: ignore[union-attr,index,call-overload]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_pytorchs_function_is_served(activated: None, compiled: bool) -> None:
    """Its own result is the eager definition's."""
    mask = create_block_mask(document, BATCH, None, SEQLEN, SEQLEN, device="cuda")
    leaves = inputs()

    def layer(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        steeper = slopes * 2
        options: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        return pytorch.flex_attention(
            q * 0.5, k, v, lambda s, b, h, i, j: s - steeper[h] * (i - j).abs(), mask, **options
        )

    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    out, aux = function(*leaves, SLOPES)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert flex.served[overrides.NAME, ""] == 1
    flex.restore()
    theirs, their_aux = layer(*leaves, SLOPES)
    assert flex.served.total() == 1
    torch.testing.assert_close(out, theirs, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(aux.lse, their_aux.lse, atol=2e-2, rtol=2e-2)
    for ours, one in zip(grads, torch.autograd.grad(theirs, leaves, torch.ones_like(out)), strict=True):
        torch.testing.assert_close(ours.float(), one.float(), atol=1e-1, rtol=5e-2)


def test_a_learned_bias(activated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served with its gradient; PyTorch's where gradients have to repeat."""
    monkeypatch.setattr(doors, "_warned", set())
    slopes, leaves = SLOPES.clone().requires_grad_(), inputs()
    generator = torch.Generator("cuda").manual_seed(1)
    grad = torch.randn(leaves[0].shape, device="cuda", generator=generator).bfloat16()

    def learned(x: Tensor) -> Any:
        return lambda s, b, h, i, j: s - x[h] * (i - j).abs() / 64

    def gradient() -> tuple[Tensor, Tensor]:
        out: Tensor = pytorch.flex_attention(*leaves, learned(slopes), enable_gqa=True)  # type: ignore[assignment]
        return out, torch.autograd.grad(out, slopes, grad)[0]

    out, found = gradient()
    rows_first = [x.transpose(1, 2) for x in (*leaves, out, grad)]
    check_captured(found, rows_first[:3], *rows_first[3:], learned, slopes, None)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.warns(UserWarning, match="an epilogue's tensor is asked for with deterministic=True"):
            _, expected = gradient()
    finally:
        torch.use_deterministic_algorithms(False)
    # Both have bf16's rounding of out or of scores, a percent or two where much cancels.
    torch.testing.assert_close(found, expected, atol=0.1 * float(expected.abs().max()), rtol=0)
