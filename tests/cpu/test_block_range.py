"""Which key blocks a query block visits, and how lengths are read: device code run on the CPU against brute force."""

import itertools
import random

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.work.block_range import BlockRange
from cute_attn.device.score_tile import ScoreContext
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.epilogues.mask import Mask

KINDS = {"none": Mask(False, False), "causal": Mask(True, False), "window": Mask(False, True)}
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 300)
BOUNDS = (0, 1, 15, 16, 63, 64, 100, 1000, UNBOUNDED)


@cute.jit
def block_ranges(problems: cute.Tensor, out: cute.Tensor, mask: Constexpr, tile_n: Constexpr):
    """out[i] = the range of problem i: (seqlen_k, shift, left, right, first query, end query)."""
    for i in cutlass.range(problems.shape[0]):
        p = problems[i, None]
        context = ScoreContext(*(Int32(0) for _ in range(4)), p[0], Int32(0), Int32(0), p[1], *[None] * 3)
        args = (p[2], p[3]) if cutlass.const_expr(mask.windowed) else ()
        blocks = BlockRange.of_queries(mask.begin(args, context), p[4], p[5], tile_n)
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = (
            blocks.begin,
            blocks.full_begin,
            blocks.full_end,
            blocks.end,
        )


def problems_of(kind, tile_m, top_left):
    """(seqlen_q, seqlen_k, left, right, first query, end query), every query block of many problems."""
    sampled = random.Random(0)
    for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
        for left, right in sampled.sample(
            list(itertools.product(BOUNDS, BOUNDS)), 9 if kind == "window" else 1
        ):
            for first in range(0, seqlen_q, tile_m):
                yield seqlen_q, seqlen_k, left, right, first, min(first + tile_m, seqlen_q)


def visible_keys(kind, shift, left, right, seqlen_k, queries):
    """For each query the set of its keys, from the definition."""
    keys = torch.arange(seqlen_k)
    distance = keys - (torch.arange(*queries).unsqueeze(1) + shift)
    if kind == "none":
        return torch.ones_like(distance, dtype=torch.bool)
    return distance <= 0 if kind == "causal" else (distance >= -left) & (distance <= right)


@pytest.mark.parametrize("top_left", [False, True], ids=["bottom_right", "top_left"])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(64, 64), (128, 16), (16, 48), (192, 176)])
@pytest.mark.parametrize("kind", KINDS)
def test_block_ranges(kind, tile_m, tile_n, top_left):
    problems = list(problems_of(kind, tile_m, top_left))
    shifts = [0 if top_left else seqlen_k - seqlen_q for seqlen_q, seqlen_k, *_ in problems]
    table = torch.tensor(
        [(p[1], shift, *p[2:]) for p, shift in zip(problems, shifts, strict=True)], dtype=torch.int32
    )
    out = torch.full((len(problems), 4), -1, dtype=torch.int32)
    block_ranges(from_dlpack(table), from_dlpack(out), KINDS[kind], tile_n)
    for problem, shift, (begin, full_begin, full_end, end) in zip(
        problems, shifts, out.tolist(), strict=True
    ):
        _, seqlen_k, left, right, *queries = problem
        assert 0 <= begin <= full_begin <= full_end <= end, problem
        seen = visible_keys(kind, shift, left, right, seqlen_k, queries)
        columns = seen.any(0).nonzero().flatten()
        # Visited are the blocks from the first key that any query sees to the last one, and no others.
        if columns.numel() == 0:
            assert begin == end, problem
        else:
            assert (begin, end) == (int(columns[0]) // tile_n, int(columns[-1]) // tile_n + 1), problem
        # Without a mask are those that all queries see whole, of which none is left out.
        whole = [n for n in range(seqlen_k // tile_n) if bool(seen[:, n * tile_n : (n + 1) * tile_n].all())]
        assert list(range(full_begin, full_end)) == whole, problem


# ---- query blocks of a key block ----


@cute.jit
def query_ranges(problems: cute.Tensor, out: cute.Tensor, mask: Constexpr, tile_m: Constexpr):
    """out[i] = the range of problem i: (seqlen_k, shift, left, right, first key, end key, seqlen_q)."""
    for i in cutlass.range(problems.shape[0]):
        p = problems[i, None]
        context = ScoreContext(*(Int32(0) for _ in range(4)), p[0], Int32(0), Int32(0), p[1], *[None] * 3)
        args = (p[2], p[3]) if cutlass.const_expr(mask.windowed) else ()
        blocks = BlockRange.of_keys(mask.begin(args, context), p[4], p[5], p[6], tile_m)
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = (
            blocks.begin,
            blocks.full_begin,
            blocks.full_end,
            blocks.end,
        )


@pytest.mark.parametrize("top_left", [False, True], ids=["bottom_right", "top_left"])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(64, 64), (128, 16), (16, 48), (80, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_query_blocks_of_a_key_block(kind, tile_m, tile_n, top_left):
    """The same problems seen from the keys, with a key block behind the sequence's end besides."""
    problems = []
    sampled = random.Random(1)
    for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
        bounds = sampled.sample(list(itertools.product(BOUNDS, BOUNDS)), 9 if kind == "window" else 1)
        for (left, right), first in itertools.product(bounds, range(0, seqlen_k + tile_n, tile_n)):
            problems.append((seqlen_q, seqlen_k, left, right, first))
    table = torch.tensor(
        [
            (n_k, 0 if top_left else n_k - n_q, left, right, first, first + tile_n, n_q)
            for n_q, n_k, left, right, first in problems
        ],
        dtype=torch.int32,
    )
    out = torch.full((len(problems), 4), -1, dtype=torch.int32)
    query_ranges(from_dlpack(table), from_dlpack(out), KINDS[kind], tile_m)
    for problem, shift, got in zip(problems, table[:, 1].tolist(), out.tolist(), strict=True):
        seqlen_q, seqlen_k, left, right, first = problem
        begin, full_begin, full_end, end = got
        assert 0 <= begin <= full_begin <= full_end <= end, problem
        seen = visible_keys(kind, shift, left, right, seqlen_k, (0, seqlen_q))[:, first : first + tile_n]
        # Visited are the blocks from the first query that sees any of the keys to the last one, and no others.
        rows = seen.any(1).nonzero().flatten()
        if rows.numel() == 0:
            assert begin == end, problem
        else:
            assert (begin, end) == (int(rows[0]) // tile_m, int(rows[-1]) // tile_m + 1), problem
        # Without a mask are those whose queries, as far as they exist, all see all keys, of which none is left out.
        blocks = range(-(-seqlen_q // tile_m)) if first + tile_n <= seqlen_k else ()
        whole = [m for m in blocks if bool(seen[m * tile_m : (m + 1) * tile_m].all())]
        assert list(range(full_begin, full_end)) == whole, problem


# ---- lengths ----


@cute.jit
def read_lengths(seqlens: Seqlens, out: cute.Tensor):
    for batch in cutlass.range(out.shape[0]):
        info = SeqlenInfo.read(seqlens, batch)
        out[batch, 0], out[batch, 1] = info.seqlen_q, info.seqlen_k
        out[batch, 2], out[batch, 3] = info.offset_q, info.offset_k


@pytest.mark.parametrize("used", ["", "q", "k", "qk"])
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_are_read_for_each_batch(packed, used):
    lengths = {"q": [5, 0, 300, 7], "k": [9, 11, 0, 1]}
    counts = {"q": [4, 0, 301, 0], "k": [9, 2, 0, 5]}  # seqused beyond a sequence's own length is that length
    expected, tensors = [], {}
    for side, longest in (("q", 300), ("k", 11)):
        starts = [sum(lengths[side][:i]) for i in range(5)]
        own = lengths[side] if packed else [longest] * 4
        expected.append([min(n, m) for n, m in zip(own, counts[side], strict=True)] if side in used else own)
        expected.append(starts[:4] if packed else [0] * 4)
        tensors[f"cu_seqlens_{side}"] = int32(starts) if packed else None
        tensors[f"seqused_{side}"] = int32(counts[side]) if side in used else None
    out = torch.full((4, 4), -1, dtype=torch.int32)
    read_lengths(Seqlens(**tensors, max_seqlen_q=Int32(300), max_seqlen_k=Int32(11)), from_dlpack(out))
    seqlen_q, offset_q, seqlen_k, offset_k = expected
    assert out.T.tolist() == [seqlen_q, seqlen_k, offset_q, offset_k]


def int32(values):
    return from_dlpack(torch.tensor(values, dtype=torch.int32))
