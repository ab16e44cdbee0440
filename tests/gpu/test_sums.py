"""attention_sums on the GPU against the definition in float64: more query heads than key heads, odd lengths."""

from typing import Any

import pytest
import torch

from cute_attn import attention, attention_sums
from tests.gpu.compare import captured, int32, randn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def options(name: str) -> dict[str, Any]:
    table = torch.arange(4, device="cuda") / 4
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True, "alibi_slopes": table},
        "window": {"window": (70, 3), "softcap": 3.0},
        "lengths": {"causal": True, "seqused_k": int32(77, 0), "sinks": table},
        "functions": {
            "score_mod": lambda s, b, h, i, j: s + table[h] * (i - j) / 64,
            "mask_mod": lambda b, h, i, j: ((i + j) % 3 != b) & (i > 5),
        },
    }
    return cases[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "causal", "window", "lengths", "functions"])
@pytest.mark.parametrize(("rows", "keys", "dim"), [(301, 517, 64), (517, 301, 128), (33, 1000, 100)])
def test_sums_of_the_softmax(rows: int, keys: int, dim: int, name: str, dtype: str) -> None:
    q, k = (randn(2, n, h, dim, seed=n, dtype=DTYPES[dtype]) for n, h in ((rows, 4), (keys, 2)))
    own = options(name)
    wide = own | ({"sinks": own["sinks"].double()} if "sinks" in own else {})
    wide = {key: x.cpu() if isinstance(x, torch.Tensor) else x for key, x in wide.items()}
    if name == "functions":
        on_cpu = torch.arange(4) / 4
        wide["score_mod"] = lambda s, b, h, i, j: s + on_cpu[h] * (i - j) / 64
    exact = attention_sums(*(x.cpu().double() for x in (q, k)), **wide)
    for _ in range(4):  # the third call is recorded
        found = attention_sums(q, k, **own)
        torch.testing.assert_close(found.cpu().double(), exact, atol=2e-3, rtol=2e-3)


def test_packed_sequences_in_a_graph() -> None:
    rows, keys = (150, 0, 333), (200, 40, 401)
    q, k = (randn(sum(n), h, 64, seed=h) for n, h in ((rows, 8), (keys, 2)))
    starts = [int32(0, *torch.tensor(n).cumsum(0).tolist()) for n in (rows, keys)]
    own = dict(
        zip(
            ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), (*starts, 333, 401), strict=True
        )
    )
    graph, found = captured(lambda: attention_sums(q, k, causal=True, **own))
    q.copy_(randn(*q.shape, seed=5))
    graph.replay()
    for b in range(3):
        own_q, own_k = (x[None, s[b] : s[b + 1]].cpu().double() for x, s in ((q, starts[0]), (k, starts[1])))
        p = attention(own_q, own_k, own_k, causal=True, return_softmax=True)[1]
        sums = found[:, starts[1][b] : starts[1][b + 1]].cpu().double()
        torch.testing.assert_close(sums, p[0].sum(1), atol=2e-3, rtol=2e-3)
