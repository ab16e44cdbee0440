"""block_mask on the GPU: torch's lists of the same function, in a graph with other tensors, and in attention."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cute_attn import attention, block_mask
from cute_attn.host.block_masks import block_lists

BATCH, NHEADS = 2, 3
LISTS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)


def masks(device: str = "cuda") -> dict[str, Any]:
    """Functions by name; those of documents, prefixes, padding and places capture tensors."""
    generator = torch.Generator().manual_seed(0)
    document = (torch.arange(3000) // 170).to(device)
    shuffled = torch.randint(0, 40, (BATCH, 3000), generator=generator, dtype=torch.int16).to(device)
    prefix = torch.tensor([300, 1100], dtype=torch.int32, device=device)
    padded = (torch.arange(3000) < torch.tensor([[700], [2000]])).to(device)
    time = torch.randint(0, 2**33, (3000,), generator=generator).cumsum(0).to(device)
    place = torch.rand(3000, 2, generator=generator).sort(0).values.to(device)
    blocks = (torch.rand(NHEADS, 24, 24, generator=generator) > 0.5).to(device)
    return {
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k <= 400 + 100 * h),
        "documents": lambda b, h, q, k: (q >= k) & (document[q] == document[k]),
        "shuffled": lambda b, h, q, k: shuffled[b, q] == shuffled[b, k],
        "prefix": lambda b, h, q, k: (k < prefix[b]) | (q >= k),
        "padded": lambda b, h, q, k: padded[b, q] & padded[b, k],
        "neighbourhood": lambda b, h, q, k: ((q // 48 - k // 48).abs() <= 6) & ((q % 48 - k % 48).abs() <= 6),
        "dilated": lambda b, h, q, k: ((q - k).abs() < 600) & ((q - k) % 16 == 0),
        "in time": lambda b, h, q, k: (time[q] - time[k]).abs() < 2**39,
        "near": lambda b, h, q, k: (place[q, 0] - place[k, 0]).abs() < 0.25 + place[k, 1],
        "table": lambda b, h, q, k: blocks[h, q // 128, k // 128],
        "everywhere": lambda b, h, q, k: q >= 0,
        "nowhere": lambda b, h, q, k: q < 0,
        "scattered": lambda b, h, q, k: (q * 31 + k * 17) % 1009 < 1,
    }


def assert_equal(found: BlockMask, expected: BlockMask) -> None:
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
    expected = create_block_mask(mask_mod, BATCH, NHEADS, *lengths, device="cuda", BLOCK_SIZE=block_size)
    torch.full((1 << 26,), -1, device="cuda")  # what the lists are allocated from afterwards
    for _ in range(5):
        assert_equal(block_mask(mask_mod, BATCH, NHEADS, *lengths, block_size=block_size), expected)


@pytest.mark.parametrize("block_size", [(128, 128), (64, 256), (32, 96)])
@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("lengths", [(5000, 1300), (256, 9000), (90, 128)])
def test_what_kernels_visit(
    lengths: tuple[int, int], heads: int, heads_kv: int, block_size: tuple[int, int]
) -> None:
    """Against the definition on the CPU."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (-(-n // size) for n, size in zip(lengths, block_size, strict=True))
    kinds = torch.randint(0, 3, (2, heads, rows, columns), generator=generator, dtype=torch.uint8)
    call = (block_size, 2, lengths[0], 4, lengths[1], heads_kv)
    for found, expected in zip(block_lists(kinds.cuda(), *call), block_lists(kinds, *call), strict=True):
        assert torch.equal(found.cpu(), expected)


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

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    for length in (300, 170, 700):
        document.copy_(torch.arange(2048, device="cuda") // length)
        graph.replay()
        for x, y in zip(found, step(), strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
