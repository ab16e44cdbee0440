"""Which key blocks a query block visits, and how lengths are read: device code run on the CPU against brute force."""

import functools
import itertools
import random

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_attn.device.score_tile import ScoreContext
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.epilogues.mask import Mask
from cute_attn.work.block_range import BlockRange
from tests.tensors import dynamic

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
@pytest.mark.parametrize(("tile_m", "tile_n"), [(128, 16), (192, 176)])
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
        # Without a mask are those that all queries see whole, except for the one of the first query's last key.
        own = seen[0].nonzero().flatten()
        last = int(own[-1]) // tile_n if own.numel() else -1
        whole = [n for n in range(last) if bool(seen[:, n * tile_n : (n + 1) * tile_n].all())]
        assert list(range(full_begin, full_end)) == whole, problem


# ---- what speculation needs ----


@cute.jit
def block_range(problem: cute.Tensor, out: cute.Tensor):
    """out[i] = the range of query block i: (kind, seqlen_q, seqlen_k, shift, left, right, queries, tile_n)."""
    kind, seqlen_q, seqlen_k, shift, left, right, queries, tile_n = (problem[i] for i in range(8))
    context = ScoreContext(*(Int32(0) for _ in range(4)), seqlen_k, Int32(0), Int32(0), shift, *[None] * 3)
    for i in cutlass.range(out.shape[0], unroll=1):
        first, end = i * queries, cutlass.min((i + 1) * queries, seqlen_q)
        for number, mask in enumerate(KINDS.values()):
            if kind == number:
                band = mask.begin((left, right) if cutlass.const_expr(mask.windowed) else (), context)
                blocks = BlockRange.of_queries(band, first, end, tile_n)
                out[i, 0], out[i, 1] = blocks.begin, blocks.full_begin
                out[i, 2], out[i, 3] = blocks.full_end, blocks.end


@functools.cache
def compiled_block_range():
    """For any problem."""
    return cute.compile(
        block_range, *(dynamic(torch.zeros(shape, dtype=torch.int32)) for shape in (1, (1, 4)))
    )


@st.composite
def lengths(draw, *tiles):
    """Any, and many that end where a block does, or within two rows of it."""
    if draw(st.booleans()):
        return draw(st.integers(0, 600))
    return max(draw(st.integers(0, 4)) * draw(st.sampled_from(tiles)) + draw(st.integers(-2, 2)), 0)


@settings(max_examples=400)
@given(st.data())
def test_every_row_sees_a_key_before_the_first_block_without_a_mask(data):
    """So that frozen row maxima are some row's own; what is not masked all queries see whole, and none misses a key."""
    kind = data.draw(st.sampled_from(list(KINDS)), "kind")
    top_left = data.draw(st.booleans(), "top_left")
    packed_heads = data.draw(st.sampled_from((1, 1, 2, 8)), "pack_heads")
    queries = data.draw(st.sampled_from((16, 64, 128, 192)), "tile_m") // packed_heads
    tile_n = data.draw(st.sampled_from((16, 48, 64, 80, 128, 176)), "tile_n")
    seqlen_q = data.draw(lengths(queries, tile_n), "seqlen_q")
    seqlen_k = data.draw(lengths(queries, tile_n), "seqlen_k")
    left, right = (
        data.draw(st.one_of(lengths(tile_n), st.just(UNBOUNDED)), side) for side in ("left", "right")
    )
    shift = 0 if top_left else seqlen_k - seqlen_q
    numbers = [list(KINDS).index(kind), seqlen_q, seqlen_k, shift, left, right, queries, tile_n]
    ranges = torch.full((-(-seqlen_q // queries), 4), -1, dtype=torch.int32)
    compiled_block_range()(dynamic(torch.tensor(numbers, dtype=torch.int32)), dynamic(ranges))
    for i, (begin, full_begin, full_end, end) in enumerate(ranges.tolist()):
        rows = (i * queries, min((i + 1) * queries, seqlen_q))
        seen = visible_keys(kind, shift, left, right, seqlen_k, rows)
        key_blocks = torch.arange(seqlen_k) // tile_n
        visited = (key_blocks >= begin) & (key_blocks < end)
        unmasked = (key_blocks >= full_begin) & (key_blocks < full_end)
        assert not (seen & ~visited).any()
        assert seen[:, unmasked].all() and int(unmasked.sum()) == (full_end - full_begin) * tile_n
        # Blocks are visited from the last one down: those after the unmasked ones are visited before them.
        early = visited & (key_blocks >= full_end) if full_begin < full_end else visited
        assert torch.equal((seen & early).any(1), seen.any(1))


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
@pytest.mark.parametrize(("tile_m", "tile_n"), [(128, 16), (80, 128)])
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
    # Where key blocks take turns to add to a query block, the last one first, each waits for the one just before it
    # if that visits the query block. So those that visit a query block have to be adjacent.
    for _, own in itertools.groupby(zip(problems, out.tolist(), strict=True), lambda x: x[0][:4]):
        ranges = [(begin, end) for _, (begin, *_, end) in own]
        for apart, first in ((1, 0), (2, 0), (2, 1)):
            for m in range(max(end for _, end in ranges)):
                visits = [begin <= m < end for begin, end in ranges[first::apart]]
                changes = itertools.pairwise([False, *visits, False])
                assert sum(a != b for a, b in changes) <= 2, (ranges, m)


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
