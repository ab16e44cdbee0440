"""The levels of the tour on the GPU: against the reference at odd lengths, and with an epilogue."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cutlass import Float32

from cute_attn import attention, attention_backward, compiler, reference
from cute_attn.compiler import registry
from tests.checks import check_backward, check_forward
from tour.common import with_epilogue
from tour.levels import FORWARD_LEVELS, LEVELS, Entry
from tour.report import definition_gradients

TARGET = compiler.default_target("sm90")
HERE = [entry for entry in FORWARD_LEVELS.values() if TARGET in registry.RUNS_ON[entry.arch]]
BACKWARD = [entry for entry in (LEVELS[9], LEVELS[10]) if TARGET in registry.RUNS_ON[entry.arch]]
SHAPES = {
    # batch, seqlen_q, seqlen_k, query heads, key heads
    "one": (2, 1, 1, 2, 2),
    "63": (2, 63, 63, 4, 2),
    "129": (2, 129, 129, 4, 2),
    "1000": (1, 1000, 1000, 4, 1),
    "more-keys": (2, 100, 443, 3, 1),
    "fewer-keys": (2, 443, 100, 2, 2),
    "many-tiles": (16, 300, 300, 16, 4),
    # causal: tiles of 0, 1 and 2 key blocks, one after the other in a persistent CTA
    "many-tiles-some-empty": (16, 700, 130, 16, 4),
}
DIMS_AND_MASKS = [(128, False), (128, True), (64, False), (64, True)]
DTYPES = (torch.float64, torch.bfloat16, torch.float32)
"""Of the definition, of plain torch for the output, and for LSE."""


def nearer(score: Any, query: Any, key: Any, head: Any) -> Any:
    """An epilogue: scores fall with the distance, by head."""
    return score - 0.05 * Float32(head + 1) * Float32(query - key)


NEARER = {
    entry.number: with_epilogue(entry.kernel, nearer) for entry in LEVELS.values() if 4 <= entry.number < 8
}


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Any, Any, str]]:
    """What the fixture ``built`` builds in parallel."""
    entry = params.get("entry")
    if entry is not None and target in registry.RUNS_ON[entry.arch]:
        yield entry.traits(*params.get("dim_and_mask", (64, True))), params.get("tile"), target


def inputs(
    batch: int, seqlen_q: int, seqlen_k: int, nheads: int, nheads_kv: int, head_dim: int
) -> list[torch.Tensor]:
    torch.manual_seed(seqlen_q)
    shapes = ((seqlen_q, nheads), (seqlen_k, nheads_kv), (seqlen_k, nheads_kv))
    return [torch.randn(batch, n, h, head_dim, device="cuda", dtype=torch.bfloat16) for n, h in shapes]


def by_definition(q: Any, k: Any, v: Any, causal: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    features = reference.Features("causal" if causal else "")
    out, lse, _ = reference.attention(*(x.to(dtype) for x in (q, k, v)), q.shape[-1] ** -0.5, features)
    return {"out": out, "lse": lse}


@pytest.mark.parametrize("dim_and_mask", DIMS_AND_MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entry", HERE, ids=lambda entry: f"level{entry.number}")
def test_a_level_against_the_reference(entry: Entry, shape: str, dim_and_mask: tuple[int, bool]) -> None:
    head_dim, causal = dim_and_mask
    q, k, v = inputs(*SHAPES[shape], head_dim)
    out, lse = attention(q, k, v, causal=causal, return_lse=True, kernel=entry.name)
    check_forward({"out": out, "lse": lse}, *(by_definition(q, k, v, causal, dtype) for dtype in DTYPES))


@pytest.mark.parametrize("dim_and_mask", DIMS_AND_MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entry", BACKWARD, ids=lambda entry: f"level{entry.number}")
def test_gradients_of_a_level(entry: Entry, shape: str, dim_and_mask: tuple[int, bool]) -> None:
    head_dim, causal = dim_and_mask
    q, k, v = inputs(*SHAPES[shape], head_dim)
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    grad, names = torch.randn_like(out), ("dq", "dk", "dv")
    found = attention_backward(grad, q, k, v, out, lse, causal=causal, kernel=entry.name)
    expected = (definition_gradients((q, k, v), grad, causal, dtype) for dtype in DTYPES[:2])
    check_backward(*(dict(zip(names, one, strict=True)) for one in (found, *expected)))


@pytest.mark.parametrize("number", [number for number in NEARER if LEVELS[number] in HERE])
def test_an_epilogue_changes_the_scores(number: int) -> None:
    """LSE tells a wrong query, which shifts all scores of its row alike: the softmax is the same."""
    q, k, v = inputs(2, 200, 300, 4, 2, 128)
    out, lse = attention(q, k, v, causal=True, return_lse=True, kernel=LEVELS[number].name + "_nearer")

    def expected(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        wide = [x.to(dtype).repeat_interleave(4 // x.shape[2], 2).transpose(1, 2) for x in (q, k, v)]
        query, key = (torch.arange(n, device="cuda") for n in (200, 300))
        slopes = 0.05 * (1 + torch.arange(4, device="cuda", dtype=dtype))
        scores = wide[0] @ wide[1].mT * 128**-0.5 - slopes[:, None, None] * (query[:, None] - key).to(dtype)
        scores = scores.masked_fill(query[:, None] + 100 < key, -torch.inf)
        return {"out": (scores.softmax(-1) @ wide[2]).transpose(1, 2), "lse": scores.logsumexp(-1)}

    check_forward({"out": out, "lse": lse}, *map(expected, DTYPES))
