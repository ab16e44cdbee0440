"""The levels of the tour on the GPU: against the reference at odd lengths, and with an epilogue."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cutlass import Float32

from cute_attn import attention, compiler
from cute_attn.compiler import registry
from tests.checks import check_forward
from tests.gpu.compare import compare, compare_gradients, randn
from tests.gpu.test_fp32_backward import run
from tests.problem import Case
from tour.common import with_epilogue
from tour.levels import FORWARD_LEVELS, LEVELS, Entry

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


def nearer(score: Any, query: Any, key: Any, head: Any) -> Any:
    """An epilogue: scores fall with the distance, by head."""
    return score - 0.05 * Float32(head + 1) * Float32(query - key)


NEARER = {
    entry.number: with_epilogue(entry.kernel, nearer) for entry in LEVELS.values() if 4 <= entry.number < 8
}


def needed_kernels(params: dict[str, Any], target: str) -> Iterator[tuple[Any, Any, str]]:
    """Kernels for the fixture ``built`` to build in parallel."""
    entry = params.get("entry")
    if entry is not None and target in registry.RUNS_ON[entry.arch]:
        yield entry.traits(*params.get("dim_and_mask", (64, True))), params.get("tile"), target


def case_of(shape: str, head_dim: int, causal: bool) -> Case:
    names = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_kv")
    return Case(shape, head_dim=head_dim, causal=causal, **dict(zip(names, SHAPES[shape], strict=True)))


@pytest.mark.parametrize("dim_and_mask", DIMS_AND_MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entry", HERE, ids=lambda entry: f"level{entry.number}")
def test_a_level_against_the_reference(entry: Entry, shape: str, dim_and_mask: tuple[int, bool]) -> None:
    compare(case_of(shape, *dim_and_mask).build("cuda"), kernel=entry.name)


@pytest.mark.parametrize("dim_and_mask", DIMS_AND_MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entry", BACKWARD, ids=lambda entry: f"level{entry.number}")
def test_gradients_of_a_level(entry: Entry, shape: str, dim_and_mask: tuple[int, bool]) -> None:
    problem = case_of(shape, *dim_and_mask).build("cuda")
    start = problem.start()
    compare_gradients(problem, start, run(problem, start, kernel=entry.name))


@pytest.mark.parametrize("number", [number for number in NEARER if LEVELS[number] in HERE])
def test_an_epilogue_changes_the_scores(number: int) -> None:
    """LSE reveals a wrong query: it shifts all scores of a row equally, which leaves the softmax unchanged."""
    shapes = ((200, 4), (300, 2), (300, 2))
    q, k, v = (randn(2, n, heads, 128, seed=i) for i, (n, heads) in enumerate(shapes))
    out, lse = attention(q, k, v, causal=True, return_lse=True, kernel=LEVELS[number].name + "_nearer")

    def expected(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        wide = [x.to(dtype).repeat_interleave(4 // x.shape[2], 2).transpose(1, 2) for x in (q, k, v)]
        query, key = (torch.arange(n, device="cuda") for n in (200, 300))
        slopes = 0.05 * (1 + torch.arange(4, device="cuda", dtype=dtype))
        scores = wide[0] @ wide[1].mT * 128**-0.5 - slopes[:, None, None] * (query[:, None] - key).to(dtype)
        scores = scores.masked_fill(query[:, None] + 100 < key, -torch.inf)
        return {"out": (scores.softmax(-1) @ wide[2]).transpose(1, 2), "lse": scores.logsumexp(-1)}

    # The definition, plain torch for the output, and for LSE.
    dtypes = (torch.float64, torch.bfloat16, torch.float32)
    check_forward({"out": out, "lse": lse}, *map(expected, dtypes))
