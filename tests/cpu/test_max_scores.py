"""return_max_scores on the CPU, its launches on a GPU, and its device code on every thread."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from cute_attn import attention, attention_with_kvcache, flex
from tests import machine, refusals


def tensors(rows: int = 7, keys: int = 9, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [
        torch.randn(2, n, h, 16, generator=generator).to(dtype) for n, h in ((rows, 4), (keys, 2), (keys, 2))
    ]


def greatest(q, k, v, **options):
    """The greatest score of each row, from the softmax and its LSE."""
    options.pop("dropout_p", 0)
    _, lse, p = attention(*(x.double() for x in (q, k, v)), return_lse=True, return_softmax=True, **options)
    found = p.amax(-1).log() + lse
    return found.masked_fill(p.amax(-1) == 0, -math.inf).float()


def test_greatest_scores():
    """Without dropout, which ``tests/fuzz`` does not draw."""
    given, options = (
        [x.requires_grad_() for x in tensors()],
        {"bias": torch.randn(2, 1, 7, 9), "dropout_p": 0.3},
    )
    _, lse, found = attention(*given, return_lse=True, return_max_scores=True, **options)
    assert not found.requires_grad
    assert found.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(found, greatest(*given, **options).detach(), atol=1e-5, rtol=1e-5)
    again = attention(*given, return_max_scores=True, **options)
    assert len(again) == 2
    torch.testing.assert_close(again[1], found)


def test_caches():
    q, k, v = tensors()
    lengths = torch.tensor([9, 0]).int()
    _, lse, found = attention_with_kvcache(
        *(q, k, v), cache_seqlens=lengths, causal=True, return_lse=True, return_max_scores=True
    )
    torch.testing.assert_close(found[0], greatest(q, k, v, causal=True)[0])
    assert (found[1] == -math.inf).all()
    assert attention_with_kvcache(q, k, v, return_max_scores=True)[1].shape == lse.shape


def test_flex_attention():
    q, k, v = (x.transpose(1, 2) for x in tensors())
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 7, 9, device="cpu")
    wanted = AuxRequest(lse=True, max_scores=True)  # PyTorch's own are on GPUs alone
    out, aux = flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=wanted)
    expected = attention(*tensors(), causal="top_left", return_lse=True, return_max_scores=True)
    torch.testing.assert_close((out.transpose(1, 2), *aux), expected)
    alone = flex.flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(max_scores=True))[1]
    assert alone.lse is None
    assert alone.max_scores is not None


@refusals.each("""
attention(q, k, v, return_max_scores=2) -> TypeError: return_max_scores is 2; accepted: False or True
attention(q, k, v, return_max_scores=True, return_softmax=True)
    -> ValueError: return_max_scores is True with return_softmax; accepted: one of them
attention_with_kvcache(q, k, v, return_max_scores=None) -> TypeError: return_max_scores is None
""")
def test_wrong_calls(call, sentence):
    names = {"attention": attention, "attention_with_kvcache": attention_with_kvcache}
    refusals.check(call, sentence, names | dict(zip("qkv", tensors(), strict=True)))


@pytest.mark.parametrize("cached", [False, True])
def test_launches(cached, monkeypatch):
    """Each call has maxima of its own, -inf before the kernel; the third call is recorded."""
    launched = []

    def main(kernel, target):
        return lambda given: launched.append((kernel.traits.name, given))

    machine.gpu(monkeypatch, main)
    q, k, v = tensors(33, 300, torch.bfloat16)
    function = attention_with_kvcache if cached else attention
    results = [function(q, k, v, causal=True, return_max_scores=True)[1] for _ in range(4)]
    assert all((x == -math.inf).all() and x.shape == (2, 4, 33) for x in results)
    assert len({x.data_ptr() for x in results}) == 4
    assert sum("max_scores" in name for name, _ in launched) == 4
