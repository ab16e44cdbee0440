"""The definition of attention with a cache, against loops over sequences, rows, heads and elements."""

import itertools
import math

import pytest
import torch

from cute_attn import reference
from cute_attn.reference import kvcache as ref
from tests.kvcache_problem import CASES, Problem, random_case


def check(problem: Problem):
    """The cache, out and lse equal the results of the loops."""
    expected_cache = problem.appended()
    out, lse = problem.run()
    torch.testing.assert_close((problem.k, problem.v), expected_cache, equal_nan=True)
    outs, lses = problem.expected()
    for b, (own_out, own_lse) in enumerate(zip(outs, lses, strict=True)):
        torch.testing.assert_close(problem.rows_of(out, b, problem.cu_q), own_out)
        found = lse[b].T if problem.cu_q is None else problem.rows_of(lse.T, b, problem.cu_q)
        torch.testing.assert_close(found, own_lse)


@pytest.mark.parametrize("name", CASES)
def test_against_loops(name):
    check(Problem(CASES[name]))


@pytest.mark.parametrize("seed", range(40))
def test_random_cases_against_loops(seed):
    check(Problem(random_case(seed), seed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_rounds_once(dtype, interleaved):
    """Products of 16-bit numbers are exact in float32, so only the end result is rounded."""
    x, angle = torch.randn(50, 3, 32).to(dtype), torch.randn(64, 8)
    rotary = ref.Rotary(angle.cos().to(dtype), angle.sin().to(dtype), interleaved)
    positions = torch.arange(50)
    found = ref.rotate(x, positions, rotary)
    wide = ref.rotate(
        x.double(), positions, ref.Rotary(rotary.cos.double(), rotary.sin.double(), interleaved)
    )
    assert found.dtype == dtype and found[..., 16:].equal(x[..., 16:])
    # float64 rounds elsewhere only where the float32 sum was rounded onto a tie.
    assert (found != wide.to(dtype)).double().mean() < 1e-3
    torch.testing.assert_close(found, wide.to(dtype))


# ---- merge ----


def partial_results(q, k, v, bounds):
    parts = [
        reference.attention(q, k[:, begin:end], v[:, begin:end], 0.4)[:2]
        for begin, end in itertools.pairwise(bounds)
    ]
    return tuple(map(torch.stack, zip(*parts, strict=True)))


@pytest.mark.parametrize("bounds", [(0, 20), (0, 1, 20), (0, 7, 7, 8, 20, 20), tuple(range(21))])
def test_merging_parts_gives_the_whole(bounds):
    q, k, v = (torch.randn(2, n, 3, 8, dtype=torch.float64) for n in (5, 20, 20))
    expected = reference.attention(q, k, v, 0.4)
    outs, lses = partial_results(q, k, v, bounds)
    for empty in (-math.inf, math.inf):
        outs[lses.transpose(-1, -2) == -math.inf] = math.nan
        lses[lses == -math.inf] = empty
        torch.testing.assert_close(ref.merge(outs, lses), expected[:2])


def test_merging_packed_parts_gives_the_whole():
    q, k, v = (torch.randn(1, n, 3, 8, dtype=torch.float64) for n in (5, 20, 20))
    outs, lses = partial_results(q, k, v, (0, 6, 20))
    expected = reference.attention(q, k, v, 0.4)
    torch.testing.assert_close(ref.merge(outs[:, 0], lses[:, 0]), tuple(x[0] for x in expected[:2]))


def test_merging_nothing_gives_nothing():
    out, lse = ref.merge(torch.full((3, 1, 2, 4, 8), math.nan), torch.full((3, 1, 4, 2), -math.inf))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_merging_large_and_distant_logarithms():
    lses = torch.tensor([1e4, 1e4 - 1, -1e4, -math.inf]).view(4, 1, 1)
    outs = torch.tensor([1.0, 2.0, math.nan, math.nan]).view(4, 1, 1, 1)
    out, lse = ref.merge(outs, lses)
    share = 1 / (1 + math.exp(-1))
    assert out.item() == pytest.approx(share + 2 * (1 - share)) and lse.item() == pytest.approx(1e4, abs=1)
