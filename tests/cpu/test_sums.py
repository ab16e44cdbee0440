"""attention_sums on the CPU against sums of the softmax, and the launches that it takes on a GPU."""

import pytest
import torch

from cute_attn import attention, attention_sums
from tests import machine, refusals

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "causal window": {"causal": "bottom_right", "window": (4, None)},
    "alibi": {"alibi_slopes": torch.rand(2, 4), "window": (None, 3)},
    "sinks": {"sinks": torch.randn(4), "causal": True},
    "softcap": {"softcap": 2.0, "softmax_scale": -0.7},
    "lengths": {"causal": True, "seqused_k": torch.tensor([5, 0]).int()},
    "functions": {
        "score_mod": lambda s, b, h, i, j: s + (h + 1) * (i - 2 * j) * 0.1,
        "mask_mod": lambda b, h, i, j: (i + h + j) % 3 != b,
    },
    "hidden rows": {"mask_mod": lambda b, h, i, j: i > 5},
}


def tensors(rows: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(
        torch.randn(2, n, h, 16, generator=generator, dtype=dtype) for n, h in ((rows, 4), (keys, 2))
    )


@pytest.mark.parametrize("lengths", [(17, 33), (33, 17)])
@pytest.mark.parametrize("name", CASES)
def test_sums_of_the_softmax(name, lengths):
    q, k = tensors(*lengths)
    p = attention(*(x.double() for x in (q, k, k)), return_softmax=True, **CASES[name])[1]
    found = attention_sums(q, k, **CASES[name])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), p.sum(2), atol=1e-5, rtol=1e-5)


def test_packed_sequences():
    rows, keys = (5, 0, 12), (9, 4, 20)
    q, k = (x[0] for x in tensors(sum(rows), sum(keys), torch.float64))
    starts = [torch.tensor([0, *n]).cumsum(0).int() for n in (rows, keys)]
    options = {"score_mod": lambda s, b, h, i, j: s * (b + 1) - h * j, "causal": True}
    found = attention_sums(
        *(q, k), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=12, max_seqlen_k=20,
        seqused_k=torch.tensor([9, 4, 7]).int(), **options,
    )  # fmt: skip
    for b, end in enumerate((9, 4, 7)):
        own_q, own_k = q[None, starts[0][b] : starts[0][b + 1]], k[None, starts[1][b] : starts[1][b] + end]
        alone = {"causal": True, "score_mod": lambda s, _, h, i, j, b=b: s * (b + 1) - h * j}
        padded = torch.nn.functional.pad(attention_sums(own_q, own_k, **alone)[0], (0, keys[b] - end))
        torch.testing.assert_close(found[:, starts[1][b] : starts[1][b + 1]], padded)


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


def test_one_graph(monkeypatch):
    torch.compiler.reset()

    def call(q, k, slopes):
        return attention_sums(q, k, causal=True, alibi_slopes=slopes)

    given = (*tensors(9, 20), torch.rand(4))
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), call(*given))
