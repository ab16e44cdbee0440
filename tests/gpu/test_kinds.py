"""Kinds of calls that broke attention libraries: graphs, streams, records."""

import pytest
import torch

from cute_attn import attention, attention_varlen
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
