"""block_mask on the GPU, forward and backward, against the CPU's reference in float64, repeated for equal bits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cute_attn import attention, attention_varlen
from tests.gpu.archs import runnable_archs

NHEADS, NHEADS_KV = 4, 2


def mask_of(name: str, seqlen_q: int, seqlen_k: int, device: str) -> Any:
    document = (torch.arange(2048) // 170).to(device)

    def causal_document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (document[q] == document[k])

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() <= 100 + 50 * h

    if name.startswith("blocks"):
        heads = NHEADS if name == "blocks of heads" else 1
        rows, columns = -(-seqlen_q // 128), -(-seqlen_k // 128)
        generator = torch.Generator().manual_seed(0)
        order = torch.rand(2, heads, rows, columns, generator=generator).argsort(-1)
        counts = torch.randint(0, columns + 1, (2, heads, rows), generator=generator)
        full = torch.minimum(
            counts, torch.randint(0, 2, counts.shape, generator=generator)
        )  # whatever is hidden there
        lists = counts - full, order, full, order.flip(-1)
        counts, order, full, others = (x.int().contiguous().to(device) for x in lists)
        return BlockMask.from_kv_blocks(counts, order, full, others, mask_mod=causal_document)
    sizes = {"document": (None, None, 128), "window": (None, NHEADS, 128), "small blocks": (None, None, 64)}
    batch, heads, size = sizes[name]
    function = window if name == "window" else causal_document
    return create_block_mask(function, batch, heads, seqlen_q, seqlen_k, device=device, BLOCK_SIZE=size)


def inputs(seqlen_q: int, seqlen_k: int, head_dim: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((seqlen_q, NHEADS), (seqlen_k, NHEADS_KV), (seqlen_k, NHEADS_KV), (seqlen_q, NHEADS))
    return [torch.randn(2, *size, head_dim, generator=generator).bfloat16() for size in sizes]


def results(tensors: list[Tensor], *lengths: Any, **options: Any) -> list[Tensor]:
    """lengths: of packed sequences, further arguments."""
    q, k, v, grad_out = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    call = attention_varlen if lengths else attention
    out, lse = call(*leaves, *lengths, return_lse=True, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)]


@pytest.mark.parametrize("name", ["document", "window", "blocks", "blocks of heads", "small blocks"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_equals_the_reference(arch: str, head_dim: int, name: str) -> None:
    if arch not in runnable_archs():
        pytest.skip(f"no GPU for {arch}")
    for lengths in ((1000, 1000), (640, 1024), (333, 900)):
        compare(arch, head_dim, name, lengths)


def compare(arch: str, head_dim: int, name: str, lengths: tuple[int, int]) -> None:
    tensors = inputs(*lengths, head_dim)
    exact = results([x.double() for x in tensors], block_mask=mask_of(name, *lengths, "cpu"))
    own, mask = [x.cuda() for x in tensors], mask_of(name, *lengths, "cuda")
    torch.full((1 << 28,), float("nan"), device="cuda")  # what outputs are allocated from afterwards
    found = results(own, block_mask=mask, kernel=arch, deterministic=True)
    check(found, exact, lengths)
    for _ in range(20):
        again = results(own, block_mask=mask, kernel=arch, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


def check(found: list[Tensor], exact: list[Tensor], lengths: Any) -> None:
    """A GPU's out, lse and gradients, against the definition's in float64."""
    seen = exact[1].isfinite()
    assert torch.equal(found[1].isfinite().cpu(), seen)
    torch.testing.assert_close(found[1].cpu().double()[seen], exact[1][seen], atol=2e-3, rtol=1e-3)
    for what, got, right in zip(
        ("out", "dq", "dk", "dv"), (found[0], *found[2:]), (exact[0], *exact[2:]), strict=True
    ):
        error = float((got.cpu().double() - right).abs().max() / right.abs().max())
        assert error < 1.5e-2, f"{what} of {lengths}: {error}"


@pytest.mark.parametrize("name", ["document", "window", "blocks", "blocks of heads", "small blocks"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_packed_sequences(arch: str, head_dim: int, name: str) -> None:
    """Also repeated, from a record, and with the tables of another mask."""
    if arch not in runnable_archs():
        pytest.skip(f"no GPU for {arch}")
    tensors = [x.flatten(0, 1) for x in inputs(1000, 1000, head_dim)]
    starts, longest = torch.tensor([0, 700, 2000], dtype=torch.int32), 1300
    cpus, own = (starts, starts, longest, longest), [x.cuda() for x in tensors]
    gpus = (starts.cuda(), starts.cuda(), longest, longest)
    for other in (name, "document"):
        mask = mask_of(other, longest, longest, "cuda")
        exact = results(
            [x.double() for x in tensors], *cpus, block_mask=mask_of(other, longest, longest, "cpu")
        )
        for _ in range(4):
            check(results(own, *gpus, block_mask=mask, kernel=arch), exact, other)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", runnable_archs())
def test_packed_sequences_see_no_other(arch: str, head_dim: int) -> None:
    """NaN in the next sequence's rows, which loads of the last block reach, and an empty sequence."""
    starts = torch.tensor([0, 700, 700, 2000], dtype=torch.int32, device="cuda")
    own = [x.flatten(0, 1).cuda() for x in inputs(1000, 1000, head_dim)]
    mask = mask_of("window", 1300, 1300, "cuda")
    lengths = (starts, starts, 1300, 1300)
    expected = results(own, *lengths, block_mask=mask, kernel=arch, deterministic=True)
    poisoned = [x.clone() for x in own]
    for x in poisoned:
        x[700:] = float("nan")
    found = results(poisoned, *lengths, block_mask=mask, kernel=arch, deterministic=True)
    for got, right in zip((found[0], *found[2:]), (expected[0], *expected[2:]), strict=True):
        assert torch.equal(got[:700], right[:700])
    assert torch.equal(found[1][:, :700], expected[1][:, :700])


@pytest.mark.parametrize("kernel", runnable_archs())
def test_keys_beyond_the_sequence_where_all_scores_are_low(kernel: str) -> None:
    """A mask of more keys than there are, whose last block is full for most queries."""
    q, k, v, grad_out = (x.cuda() for x in inputs(1024, 200, 64))
    q, k = torch.full_like(q, 4.0), torch.full_like(k, -4.0) + k / 16  # scores of -128
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1024, 1024, device="cuda")
    found = results([q, k, v, grad_out], block_mask=mask, kernel=kernel)
    own = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1024, 1024, device="cpu")
    exact = results([x.cpu().double() for x in (q, k, v, grad_out)], block_mask=own)
    for got, right in zip(found, exact, strict=True):
        torch.testing.assert_close(got.cpu().double(), right, atol=5e-2, rtol=5e-2)
