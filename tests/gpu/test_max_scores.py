"""return_max_scores on the GPU: every kernel family against the definition in float64, with odd lengths."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from cute_attn import attention, attention_with_kvcache, flex
from tests.gpu.archs import runnable_archs
from tests.gpu.compare import captured, int32, randn

ARCHS = runnable_archs()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (130, 3), "softmax_scale": -0.3},
    "top_left": {"causal": "top_left", "softcap": 2.0},
    "functions": {
        "score_mod": lambda s, b, h, i, j: s + (h + 1) * (i - j) / 64,
        "mask_mod": lambda b, h, i, j: ((i + j) % 3 != b) & (i > 5),
    },
}


def tensors(
    rows: int, keys: int, dim: int, dtype: str = "bf16", heads: tuple[int, int] = (4, 2)
) -> list[Tensor]:
    sizes = ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]))
    return [randn(2, n, h, dim, seed=i, dtype=DTYPES[dtype]) for i, (n, h) in enumerate(sizes)]


def on_cpu(given: Any) -> Any:
    """The arguments in float64 on the CPU, where the definition computes them."""
    if isinstance(given, Tensor):
        return given.cpu().double() if given.is_floating_point() else given.cpu()
    return given


def check(found: Tensor, function: Any, *given: Any, **options: Any) -> None:
    options = {name: on_cpu(x) for name, x in options.items()}
    if options.get("alibi_slopes") is not None:
        options["alibi_slopes"] = options["alibi_slopes"].float()
    exact = function(*map(on_cpu, given), return_max_scores=True, **options)[-1]
    tolerance = 4e-3 if options.get("softcap") else 1e-4  # tanh is approximate
    torch.testing.assert_close(found.cpu().double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "keys", "dim"), [(517, 1000, 64), (700, 389, 128), (130, 300, 256)])
def test_batches(rows: int, keys: int, dim: int, name: str, arch: str) -> None:
    given = tensors(rows, keys, dim)
    without = attention(*given, kernel=arch, return_lse=True, **CASES[name])
    for _ in range(4):  # the third call is recorded
        *others, found = attention(
            *given, kernel=arch, return_lse=True, return_max_scores=True, **CASES[name]
        )
    check(found, attention, *given, **CASES[name])
    torch.testing.assert_close(tuple(others), without, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "dim"), [("fp32", 64), ("fp32", 128), ("fp16", 100), ("bf16", 512), ("bf16", 192)]
)
@pytest.mark.parametrize("rows", [33, 1500])
def test_other_kernels(rows: int, dtype: str, dim: int) -> None:
    """fp32 in tf32 and fp16 terms, padded rows, head dims above 256, few queries."""
    given = tensors(rows, 1500, dim, dtype, (8, 2))
    check(attention(*given, causal=True, return_max_scores=True)[1], attention, *given, causal=True)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_replayed_work_tiles(scale: float) -> None:
    """Keys that grow make speculation fail, in one direction or the other."""
    q, k, v = tensors(1000, 3000, 128)
    for factors in (torch.linspace(1, scale, 3000), torch.linspace(scale, 1, 3000)):
        grown = k * factors.cuda()[:, None, None].to(k.dtype)
        check(attention(q, grown, v, return_max_scores=True)[1], attention, q, grown, v)


@pytest.mark.parametrize("features", ["bias", "dropout", "alibi", "sinks"])
def test_score_features(features: str) -> None:
    given = tensors(301, 517, 64)
    options: dict[str, Any] = {
        "bias": {"bias": randn(2, 4, 301, 517, seed=7), "causal": True},
        "dropout": {"dropout_p": 0.3},
        "alibi": {"alibi_slopes": torch.rand(4, device="cuda"), "causal": True},
        "sinks": {"sinks": torch.full((4,), 20.0, device="cuda")},
    }[features]
    found = attention(*given, return_max_scores=True, **options)[1]
    options.pop("dropout_p", 0)
    check(found, attention, *given, **options)


@pytest.mark.parametrize("splits", [0, 1, 5])
@pytest.mark.parametrize("same_bits", [False, True])
@pytest.mark.parametrize("arch", [*ARCHS, None])
@pytest.mark.parametrize(("rows", "dim"), [(1, 128), (5, 64), (200, 128), (3, 256)])
def test_caches(rows: int, dim: int, arch: str | None, same_bits: bool, splits: int) -> None:
    """Keys divided among CTAs, and packed heads: 6 heads do not fill a pack."""
    if same_bits and (splits or arch == "sm80" or "sm90" not in ARCHS):
        pytest.skip("same_bits takes Hopper's kernels and no num_splits")
    given = tensors(rows, 4100, dim, heads=(12, 2))
    options: dict[str, Any] = {"cache_seqlens": int32(4003, 7), "causal": True, "return_lse": True}
    for _ in range(4):
        found = attention_with_kvcache(
            *given, kernel=arch, num_splits=splits, same_bits=same_bits, return_max_scores=True, **options
        )[2]
    check(found, attention_with_kvcache, *given, **options)


def test_latent_pages_in_a_graph() -> None:
    q, pages = randn(2, 1, 16, 576), randn(32, 64, 1, 576, seed=1)
    table = torch.randperm(32, device="cuda", dtype=torch.int32).view(2, 16)
    lengths = int32(1000, 333)
    options: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table, "causal": True}

    def call() -> Any:
        return attention_with_kvcache(q, pages, pages[..., :512], return_max_scores=True, **options)[1]

    graph, found = captured(call)
    lengths.copy_(int32(77, 1024))
    for _ in range(2):
        graph.replay()
    check(found, attention_with_kvcache, q, pages, pages[..., :512], **options)


def test_flex_attention_and_a_whole_graph() -> None:
    """As PyTorch's own, compiled."""
    torch.compiler.reset()
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in tensors(300, 300, 64, heads=(4, 4)))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cuda")
    options = {"block_mask": mask, "return_aux": AuxRequest(lse=True, max_scores=True)}
    theirs = torch.compile(torch.nn.attention.flex_attention.flex_attention)(q, k, v, **options)[1]
    for function in (flex.flex_attention, torch.compile(flex.flex_attention, fullgraph=True)):
        out, ours = function(q, k, v, **options)
        torch.testing.assert_close(ours.max_scores, theirs.max_scores, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(ours.lse, theirs.lse, atol=1e-3, rtol=1e-3)
        out.float().sum().backward()
    assert not ours.max_scores.requires_grad
