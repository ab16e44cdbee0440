"""block_mask on the GPU: forward and backward against the CPU's reference in float64, and masks made by kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cute_attn import attention, attention_varlen, block_mask
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import assert_equal, captured, int32

ARCHS = runnable_archs()
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
        # Whatever is hidden there.
        full = torch.minimum(counts, torch.randint(0, 2, counts.shape, generator=generator))
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
@pytest.mark.parametrize("arch", ARCHS)
def test_equals_the_reference(arch: str, head_dim: int, name: str) -> None:
    for lengths in ((1000, 1000), (640, 1024), (333, 900)):
        check_lengths(arch, head_dim, name, lengths)


def check_lengths(arch: str, head_dim: int, name: str, lengths: tuple[int, int]) -> None:
    tensors = inputs(*lengths, head_dim)
    exact = results([x.double() for x in tensors], block_mask=mask_of(name, *lengths, "cpu"))
    own, mask = [x.cuda() for x in tensors], mask_of(name, *lengths, "cuda")
    torch.full((1 << 28,), float("nan"), device="cuda")  # the memory from which outputs are allocated next
    found = results(own, block_mask=mask, kernel=arch, deterministic=True)
    check(found, exact, lengths)
    for _ in range(20):
        assert_equal(results(own, block_mask=mask, kernel=arch, deterministic=True), found)


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
@pytest.mark.parametrize("arch", ARCHS)
def test_packed_sequences(arch: str, head_dim: int, name: str) -> None:
    """Calls are also repeated from a record, and with the tables of another mask."""
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
@pytest.mark.parametrize("arch", ARCHS)
def test_packed_sequences_see_no_other(arch: str, head_dim: int) -> None:
    """NaN in the next sequence's rows, which loads of the last block reach, and an empty sequence."""
    starts = int32(0, 700, 700, 2000)
    own = [x.flatten(0, 1).cuda() for x in inputs(1000, 1000, head_dim)]
    mask = mask_of("window", 1300, 1300, "cuda")
    lengths = (starts, starts, 1300, 1300)
    expected = results(own, *lengths, block_mask=mask, kernel=arch, deterministic=True)
    poisoned = [x.clone() for x in own]
    for x in poisoned:
        x[700:] = float("nan")
    found = results(poisoned, *lengths, block_mask=mask, kernel=arch, deterministic=True)
    found[1], expected[1] = found[1].T, expected[1].T
    assert_equal([x[:700] for x in found], [x[:700] for x in expected])


@pytest.mark.parametrize("kernel", ARCHS)
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


# ---- masks made by kernels: torch's lists of the same function ----

BATCH, HEADS = 2, 3
LISTS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)


def masks(device: str = "cuda") -> dict[str, Any]:
    """Mask functions by name; the ones of documents, times and places capture tensors."""
    generator = torch.Generator().manual_seed(0)
    document = (torch.arange(3000) // 170).to(device)
    shuffled = torch.randint(0, 40, (BATCH, 3000), generator=generator, dtype=torch.int16).to(device)
    time = torch.randint(0, 2**33, (3000,), generator=generator).cumsum(0).to(device)
    place = torch.rand(3000, 2, generator=generator).sort(0).values.to(device)
    blocks = (torch.rand(HEADS, 24, 24, generator=generator) > 0.5).to(device)
    return {
        "causal": lambda b, h, q, k: q >= k,
        "documents": lambda b, h, q, k: (q >= k) & (document[q] == document[k]),
        "shuffled": lambda b, h, q, k: shuffled[b, q] == shuffled[b, k],
        "neighbourhood": lambda b, h, q, k: ((q // 48 - k // 48).abs() <= 6) & ((q % 48 - k % 48).abs() <= 6),
        "in time": lambda b, h, q, k: (time[q] - time[k]).abs() < 2**39,
        "near": lambda b, h, q, k: (place[q, 0] - place[k, 0]).abs() < 0.25 + place[k, 1],
        "table": lambda b, h, q, k: blocks[h, q // 128, k // 128],
        "scattered": lambda b, h, q, k: (q * 31 + k * 17) % 1009 < 1,
    }


def assert_equal_masks(found: BlockMask, expected: BlockMask) -> None:
    for name in LISTS:
        x, y = getattr(found, name), getattr(expected, name)
        assert torch.equal(x.expand_as(y), y), name
    assert found.seq_lengths == expected.seq_lengths and found.BLOCK_SIZE == expected.BLOCK_SIZE


@pytest.mark.parametrize("name", masks("cpu"))
@pytest.mark.parametrize(
    ("lengths", "block_size"),
    [((1000, 1300), 128), ((2048, 2048), 128), ((333, 2900), (64, 256)), ((700, 65), 32)],
)
def test_lists_are_torch_s(name: str, lengths: tuple[int, int], block_size: Any) -> None:
    mask_mod = masks()[name]
    expected = create_block_mask(mask_mod, BATCH, HEADS, *lengths, device="cuda", BLOCK_SIZE=block_size)
    torch.full((1 << 26,), -1, device="cuda")  # the memory from which the lists are allocated next
    for _ in range(5):
        assert_equal_masks(block_mask(mask_mod, BATCH, HEADS, *lengths, block_size=block_size), expected)


def test_the_host_does_not_wait() -> None:
    mask_mod = masks()["documents"]
    block_mask(mask_mod, None, None, 2048, 2048)
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_mask(mask_mod, None, None, 2048, 2048)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_attention_and_the_mask_in_one_graph() -> None:
    """Two calls with the mask and their gradients, and other documents in a replay."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, 2048, 2, 64, generator=generator).cuda().bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    document = torch.arange(2048, device="cuda") // 170

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (document[i] == document[j])

    def step() -> list[Tensor]:
        mask = block_mask(mask_mod, None, None, 2048, 2048)
        out = attention(attention(*leaves, block_mask=mask), k, v, block_mask=mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    graph, found = captured(step)
    for length in (300, 170, 700):
        document.copy_(torch.arange(2048, device="cuda") // length)
        graph.replay()
        torch.testing.assert_close(found, step(), rtol=2e-2, atol=2e-2)
