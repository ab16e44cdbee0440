"""The query blocks that a key block visits, and how lengths are read: device code on the CPU against brute force.

Which key blocks a query block visits is checked with the scores, in test_epilogues.py.
"""

import functools
import itertools
import random

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.device.score_tile import ScoreContext
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.epilogues.mask import Mask
from cute_attn.work.block_range import BlockRange
from tests.tensors import dynamic, int32

KINDS = {"none": Mask(False, False), "causal": Mask(True, False), "window": Mask(False, True)}
LENGTHS = (0, 1, 2, 15, 16, 17, 47, 48, 63, 64, 65, 79, 80, 100, 127, 128, 129, 193, 300)
BOUNDS = (0, 1, 15, 16, 63, 64, 100, 1000, UNBOUNDED)


@cute.jit
def block_ranges(problems: cute.Tensor, out: cute.Tensor, mask: Constexpr):
    """out[i] = the range of problem i: (seqlen_q, seqlen_k, shift, left, right, first key, end, tile)."""
    for i in cutlass.range(problems.shape[0], unroll=1):
        p = problems[i, None]
        context = ScoreContext(*(Int32(0) for _ in range(4)), p[1], Int32(0), Int32(0), p[2], *[None] * 3)
        band = mask.begin((p[3], p[4]) if cutlass.const_expr(mask.windowed) else (), context)
        blocks = BlockRange.of_keys(band, p[5], p[6], p[0], p[7])
        out[i, 0], out[i, 1] = blocks.begin, blocks.full_begin
        out[i, 2], out[i, 3] = blocks.full_end, blocks.end


@functools.cache
def compiled(kind):
    """``block_ranges`` of a kind, compiled for any number of problems."""
    tensors = (dynamic(torch.zeros(1, n, dtype=torch.int32)) for n in (8, 4))
    return cute.compile(block_ranges, *tensors, KINDS[kind])


def ranges_of(problems, kind, top_left, tile):
    """(shift, range) of each problem: (seqlen_q, seqlen_k, left, right, first key, end)."""
    shifts = [0 if top_left else seqlen_k - seqlen_q for seqlen_q, seqlen_k, *_ in problems]
    rows = [(*p[:2], shift, *p[2:], tile) for p, shift in zip(problems, shifts, strict=True)]
    out = torch.full((len(rows), 4), -1, dtype=torch.int32)
    compiled(kind)(dynamic(int32(*rows)), dynamic(out))
    for problem, found in zip(problems, out.tolist(), strict=True):
        assert 0 <= found[0] <= found[1] <= found[2] <= found[3], problem
    return list(zip(shifts, out.tolist(), strict=True))


def lengths_and_bounds(kind):
    sampled, windows = random.Random(0), list(itertools.product(BOUNDS, BOUNDS))
    for sizes in itertools.product(LENGTHS, LENGTHS):
        yield from ((*sizes, *bounds) for bounds in sampled.sample(windows, 9 if kind == "window" else 1))


def visible_keys(kind, shift, left, right, seqlen_k, seqlen_q):
    """Set of the keys that each query sees, from the definition."""
    keys = torch.arange(seqlen_k)
    distance = keys - (torch.arange(seqlen_q).unsqueeze(1) + shift)
    if kind == "none":
        return torch.ones_like(distance, dtype=torch.bool)
    return distance <= 0 if kind == "causal" else (distance >= -left) & (distance <= right)


@pytest.mark.parametrize("top_left", [False, True], ids=["bottom_right", "top_left"])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(128, 16), (80, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_query_blocks_of_a_key_block(kind, tile_m, tile_n, top_left):
    """One key block lies after the sequence's end."""
    problems = [
        (*given, first, first + tile_n)
        for given in lengths_and_bounds(kind)
        for first in range(0, given[1] + tile_n, tile_n)
    ]
    found = ranges_of(problems, kind, top_left, tile_m)
    for problem, (shift, (begin, full_begin, full_end, end)) in zip(problems, found, strict=True):
        seqlen_q, seqlen_k, left, right, first, _ = problem
        seen = visible_keys(kind, shift, left, right, seqlen_k, seqlen_q)[:, first : first + tile_n]
        # Visited are the blocks from the first query that sees any of the keys to the last one, and no others.
        rows = seen.any(1).nonzero().flatten()
        if rows.numel() == 0:
            assert begin == end, problem
        else:
            assert (begin, end) == (int(rows[0]) // tile_m, int(rows[-1]) // tile_m + 1), problem
        # Blocks without a mask are the ones whose existing queries all see all keys; none of them is left out.
        blocks = range(-(-seqlen_q // tile_m)) if first + tile_n <= seqlen_k else ()
        whole = [m for m in blocks if bool(seen[m * tile_m : (m + 1) * tile_m].all())]
        assert list(range(full_begin, full_end)) == whole, problem
    # If key blocks take turns to add to a query block, from the last one down, each waits for the previous one,
    # if it visits the query block. So all key blocks that visit a query block must be adjacent.
    for _, own in itertools.groupby(zip(problems, found, strict=True), lambda x: x[0][:4]):
        ranges = [(begin, end) for _, (_, (begin, *_, end)) in own]
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
    counts = {"q": [4, 0, 301, 0], "k": [9, 2, 0, 5]}  # a larger seqused counts as the sequence's length
    expected, tensors = [], {}
    for side, longest in (("q", 300), ("k", 11)):
        starts = [sum(lengths[side][:i]) for i in range(5)]
        own = lengths[side] if packed else [longest] * 4
        expected.append([min(n, m) for n, m in zip(own, counts[side], strict=True)] if side in used else own)
        expected.append(starts[:4] if packed else [0] * 4)
        tensors[f"cu_seqlens_{side}"] = from_dlpack(int32(*starts)) if packed else None
        tensors[f"seqused_{side}"] = from_dlpack(int32(*counts[side])) if side in used else None
    out = torch.full((4, 4), -1, dtype=torch.int32)
    read_lengths(Seqlens(**tensors, max_seqlen_q=Int32(300), max_seqlen_k=Int32(11)), from_dlpack(out))
    seqlen_q, offset_q, seqlen_k, offset_k = expected
    assert out.T.tolist() == [seqlen_q, seqlen_k, offset_q, offset_k]
