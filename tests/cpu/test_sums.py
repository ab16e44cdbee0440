"""attention_sums: wrong calls, and the launches that it takes on a GPU; ``tests/fuzz`` checks its values."""

import torch

from cute_attn import attention_sums
from tests import machine, refusals


def tensors(rows: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(
        torch.randn(2, n, h, 16, generator=generator, dtype=dtype) for n, h in ((rows, 4), (keys, 2))
    )


@refusals.each("""
attention_sums(q, k, causal="top_left") -> ValueError: causal is 'top_left'; accepted: False, True, 'bottom_right'
attention_sums(q, None) -> TypeError: k is a NoneType
attention_sums(q, k[..., :8]) -> ValueError: k has head_dim 8; accepted: 16, q's
attention_sums(q, k, cu_seqlens_q=torch.ones(2).int()) -> TypeError: cu_seqlens_k is a NoneType
attention_sums(q, k, window=(1,)) -> ValueError: window is (1,); accepted: (left, right)
""")
def test_wrong_calls(call, sentence):
    refusals.check(
        call, sentence, {"attention_sums": attention_sums, **dict(zip("qk", tensors(3, 5), strict=True))}
    )


def test_one_kernel_for_all_query_heads_of_a_key_head(monkeypatch):
    launched = []
    machine.gpu(monkeypatch, lambda kernel, target: lambda given: launched.append(kernel.traits.name))
    q, k = tensors(300, 500, torch.bfloat16)
    for _ in range(3):
        attention_sums(q, k, causal=True, mask_mod=lambda b, h, i, j: i + h != j)
    assert len(launched) == 9
    assert len(set(launched)) == 2
    assert all("-d16x8-" in name for name in launched)
