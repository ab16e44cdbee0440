"""Kinds of calls that broke attention libraries: odd memory, graphs, streams, records."""

import pytest
import torch

from cute_attn import attention, attention_backward, attention_varlen
from tests.gpu.compare import assert_equal, captured, int32, with_gradients

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda").to(dtype)


def exact(call, inputs, grad_out):
    """Results by the definition in float64, on the CPU."""
    return with_gradients(call, [x.cpu().double() for x in inputs], grad_out.cpu().double())


def check(found, wanted):
    for own, other in zip(found, wanted, strict=True):
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(own.cpu().double(), other, atol=2e-2 * scale, rtol=2e-2)


def packed(*bounds, longest):
    """A call of packed sequences that start and end there."""

    def call(q, k, v):
        cu = torch.tensor(bounds, dtype=torch.int32, device=q.device)
        return attention_varlen(q, k, v, cu, cu, longest, longest, causal=True)

    return call


# ---- memory ----


def unaligned(x, pitch):
    """The same numbers in rows that start at any even byte."""
    memory = torch.full((x[..., 0].numel() * pitch + 1,), torch.nan, dtype=x.dtype, device=x.device)[1:]
    found = memory.view(*x.shape[:-1], pitch)[..., : x.shape[-1]]
    return found.copy_(x)


def test_a_backward_of_outputs_with_other_strides():
    q, k, v = randn(2, 130, 4, 64), randn(2, 77, 2, 64), randn(2, 77, 2, 64)
    grad_out, grad_lse = randn(2, 130, 4, 64), randn(2, 4, 130, dtype=torch.float32)
    out, lse = attention(q, k, v, return_lse=True)
    wanted = attention_backward(grad_out, q, k, v, out, lse, grad_lse=grad_lse, deterministic=True)
    order = (0, 2, 1, 3)
    heads_first = [x.permute(order).contiguous().permute(order) for x in (grad_out, out)]
    rows_first = [x.mT.contiguous().mT for x in (lse, grad_lse)]
    apart = [torch.stack((x, x), -1)[..., 0] for x in (lse, grad_lse)]
    for new_grad, new_out in ((grad_out, out), heads_first, (unaligned(grad_out, 67), unaligned(out, 67))):
        for new_lse, new_grad_lse in ((lse, grad_lse), rows_first, apart):
            found = attention_backward(
                new_grad, q, k, v, new_out, new_lse, grad_lse=new_grad_lse, deterministic=True
            )
            assert_equal(found, wanted)


def test_deterministic_algorithms_with_filled_memory():
    """torch.use_deterministic_algorithms fills new memory with NaN."""
    inputs = (randn(2, 300, 4, 64), randn(2, 300, 2, 64), randn(2, 300, 2, 64), randn(1, 4, 300, 300))
    grad_out = randn(2, 300, 4, 64)

    def call(q, k, v, bias):
        return attention(q, k, v, bias=bias, window=(100, 0))

    wanted = exact(call, inputs, grad_out)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1, device="cuda").isnan()
        first, second = (with_gradients(call, inputs, grad_out) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    check(first, wanted)
    assert_equal(first, second)


# ---- graphs, streams, records ----


def test_a_graph_of_a_packed_training_step():
    """The tensor of lengths has more entries than sequences; the rest repeats the end of the last sequence."""
    rows, most = 700, 6
    inputs, grad_out = [randn(rows, heads, 64) for heads in (4, 2, 2)], randn(rows, 4, 64)
    leaves = [x.requires_grad_() for x in inputs]
    cu = int32(0, *[rows] * most)

    def step():
        out = attention_varlen(*leaves, cu, cu, rows, rows, causal=True)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    graph, found = captured(step)
    for bounds in ((0, 300, 700), (0, 1, 128, 128, 257, 640, 641), (0, 512), (0, 0, 700)):
        cu.copy_(int32(*bounds, *[bounds[-1]] * (most + 1 - len(bounds))))
        with torch.no_grad():
            leaves[0].copy_(randn(rows, 4, 64))
        graph.replay()
        owned = bounds[-1]
        call = packed(*bounds, longest=rows)
        check([x[:owned] for x in found], exact(call, [x.detach()[:owned] for x in leaves], grad_out[:owned]))
        assert not any(x[owned:].any() for x in found[1:])


@pytest.mark.parametrize("first", ["default", "side"])
def test_a_record_follows_the_stream(first):
    """A call that one stream recorded is repeated on another stream, ordered after that stream's earlier work."""
    inputs, grad_out = [randn(2, 300, 4, 64) for _ in range(3)], randn(2, 300, 4, 64)

    def call(q, k, v):
        return attention(q, k, v, causal=True, deterministic=True)

    slow = torch.randn(4096, 4096, device="cuda")
    side, default = torch.cuda.Stream(), torch.cuda.current_stream()
    before, after = (default, side) if first == "default" else (side, default)
    side.wait_stream(default)
    with torch.cuda.stream(before):
        for _ in range(3):
            wanted = with_gradients(call, inputs, grad_out)
        late = [torch.zeros_like(x) for x in (*inputs, grad_out)]
    after.wait_stream(before)
    with torch.cuda.stream(after):
        for _ in range(20):
            slow = slow @ slow * 1e-3
        for x, y in zip(late, (*inputs, grad_out), strict=True):
            x.copy_(y)  # a launch on another stream would not wait for it
        found = with_gradients(call, late[:3], late[3])
    torch.cuda.synchronize()
    assert_equal(found, wanted)
