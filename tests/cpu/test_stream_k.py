"""Stream-K ranges of all key blocks: the device code on the CPU, over random lengths, against brute force."""

from itertools import pairwise

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack, make_fake_stream
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cute_attn.work.block_range import BlockLists, BlockRange, KeySplit, Partials
from tests.divided_keys import KINDS, Line, divide_by_a_warp, fakes
from tests.tensors import int32, run


@settings(deadline=None, max_examples=120)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from((0, 3)),
    st.lists(
        st.tuples(st.sampled_from((0, 1, 1, 4, 16, 17, 50)), st.integers(0, 700)), min_size=1, max_size=9
    ),
    st.integers(1, 3),
    st.integers(1, 140),
)
@example("none", 0, [(1, 673), (17, 321)], 1, 17)
@example("causal", 0, [(50, 700), (50, 700)], 2, 33)
@example("none", 3, [(50, 700), (50, 700)], 2, 8)
def test_random_lengths(kind, overhead, lengths, heads, ctas):
    Line(kind, overhead, lengths, heads, ctas).check()


@pytest.mark.parametrize("overhead", [0, 3])
@pytest.mark.parametrize("batch", [31, 32, 33, 64, 100])
def test_more_sequences_than_a_warp_has_lanes(batch, overhead):
    generator = torch.Generator().manual_seed(batch)
    keys = torch.randint(0, 900, (batch,), generator=generator).tolist()
    queries = (torch.rand(batch, generator=generator) > 0.2).int().tolist()  # some have none
    Line("causal", overhead, list(zip(queries, keys, strict=True)), 2, 132).check()


LENGTHS = {
    "one-long-sequence": ([(1, 32768)], 8, 132),
    "fewer-blocks-than-ctas": ([(1, 40), (1, 65)], 1, 132),
    "no-keys": ([(1, 0), (3, 0)], 2, 4),
    "no-queries": ([(0, 50), (0, 0)], 2, 4),
    "no-queries-at-the-ends": ([(0, 50), (1, 900), (0, 70)], 2, 5),
    "one-cta": ([(1, 100), (1, 0), (17, 64)], 2, 1),
    "prefill-beside-decode": ([(64, 640), (1, 3000), (1, 31)], 2, 16),
}


@pytest.mark.parametrize(
    ("batch", "ctas", "used"), [(16, 132, 128), (17, 132, 132), (128, 132, 128), (32, 264, 256)]
)
def test_sequences_of_one_length_leave_nothing_to_merge(batch, ctas, used):
    line = Line("causal", 1, [(1, 640)] * batch, 8, ctas)
    line.check()
    assert line.used == used
    assert all(s["whole"] for s in line.ranges) == (used != ctas)


@pytest.mark.parametrize(
    ("kind", "keys", "used"), [("none", 6400, 108), ("causal", 6400, 108), ("causal", 600, 132)]
)
def test_query_blocks_that_see_nearly_the_same_keys_read_them_in_step(kind, keys, used):
    """There are nine such query blocks, of three heads: four ranges of each, on 108 of 132 CTAs."""
    line = Line(kind, 1, [(144, keys)], 3, 132)
    line.check()
    assert line.used == used


@pytest.mark.parametrize("overhead", [0, 2])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name, overhead):
    Line("causal", overhead, *LENGTHS[name]).check()


def test_slots_of_a_long_line():
    """Positions times ctas would exceed 32 bits."""
    line = Line("none", 0, [(1, 2**22 + 32), (1, 2**22 - 32)], 64, 264)
    assert line.total == 2**24
    bounds = {s["index"]: 0 for s in line.ranges}
    for s in line.ranges:
        bounds[s["index"]] += s["end"] - s["begin"]
    assert len(bounds) == 264 and max(bounds.values()) - min(bounds.values()) <= 1
    line.check_partials()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_warp_shares_the_search(arch, tmp_path):
    """On the device each lane measures a sequence: lanes exchange results by shuffles, without memory."""
    given = (fakes(), KINDS["causal"], 3, make_fake_stream())
    options = f"--gpu-arch {arch} --keep-ptx --dump-dir {tmp_path}"
    compiled = cute.compile(divide_by_a_warp, *given, options=options)
    ptx = compiled.__ptx__
    assert "shfl.sync.up" in ptx and "redux.sync.add" in ptx and ".local" not in ptx


# ---- splits of equal size or number ----

TILE = 64


@cute.jit
def split(numbers: cute.Tensor, found: cute.Tensor, tile_n: Constexpr):
    """numbers: begin, full_begin, full_end, end, num_splits, split_keys; found: the first four of each split."""
    blocks = BlockRange(numbers[0], numbers[1], numbers[2], numbers[3])
    partials = Partials(found, found, numbers[4], numbers[5])
    for split in cutlass.range(numbers[4]):
        own = KeySplit.of(blocks, Int32(split), partials, tile_n)
        clipped = blocks.clipped(own.begin, own.end)
        found[split, 0], found[split, 1] = clipped.begin, clipped.full_begin
        found[split, 2], found[split, 3] = clipped.full_end, clipped.end


def splits_of(blocks, num_splits, split_keys):
    found = torch.full((num_splits, 4), -1, dtype=torch.int32)
    numbers = torch.tensor([*blocks, num_splits, split_keys], dtype=torch.int32)
    split(from_dlpack(numbers), from_dlpack(found), TILE)
    return found.tolist()


RANGES = [(0, 0, 0, 0), (0, 0, 16, 17), (3, 5, 9, 11), (7, 7, 7, 8), (5, 5, 5, 5), (0, 1, 99, 100)]


@pytest.mark.parametrize("blocks", RANGES)
@pytest.mark.parametrize(
    ("num_splits", "split_keys"), [(1, 0), (3, 0), (20, 0), (25, 256), (50, 128), (2, 6400)]
)
def test_every_block_is_in_one_split(blocks, num_splits, split_keys):
    begin, full_begin, full_end, end = blocks
    found, seen, full = splits_of(blocks, num_splits, split_keys), [], []
    for i, split in enumerate(found):
        assert split == sorted(split)
        own = list(range(split[0], split[3]))
        seen += own
        full += range(split[1], split[2])
        if split_keys:
            assert all(block * TILE // split_keys == i for block in own)
    assert seen == list(range(begin, end)) and full == list(range(full_begin, full_end))
    if not split_keys:
        sizes = [split[3] - split[0] for split in found]
        assert max(sizes) - min(sizes) <= 1


@cute.jit
def split_list(numbers: cute.Tensor, counts: cute.Tensor, listed: cute.Tensor, found: cute.Tensor):
    """numbers: the first key block and the end of those that exist, num_splits, split_keys.

    found: each split's blocks in the order of its steps.
    """
    lists, partials = BlockLists(counts, listed), Partials(found, found, numbers[2], numbers[3])
    zero = Int32(0)
    seen = BlockRange(numbers[0], numbers[0], numbers[0], numbers[1])
    blocks = lists.of(zero, zero, zero, TILE).within(seen, True)
    for split in cutlass.range(numbers[2]):
        own = KeySplit.of(blocks, Int32(split), partials, TILE)
        for step in cutlass.range(own.begin, own.end):
            found[split, step - own.begin] = blocks.clipped(own.begin, own.end).block(step)


@pytest.mark.parametrize("listed", [(), (0,), (5,), (1, 2, 6, 7, 11), tuple(range(12)), (0, 11)])
@pytest.mark.parametrize("seen", [(0, 24), (0, 0), (3, 13), (11, 12), (23, 24), (0, 15)])
@pytest.mark.parametrize(("num_splits", "split_keys"), [(1, 0), (3, 0), (20, 0), (6, 256), (3, 512)])
def test_listed_blocks_that_exist_are_in_one_split(listed, seen, num_splits, split_keys):
    """Lists of 128 keys are in order; a tile has 64."""
    blocks = torch.tensor([[[[*(2 * x for x in listed), *[-1] * (12 - len(listed))]]]], dtype=torch.int32)
    counts = torch.tensor([[[[0, 128 * len(listed)]]]], dtype=torch.int32)
    found = torch.full((num_splits, 24), -1, dtype=torch.int32)
    run(split_list, int32(*seen, num_splits, split_keys), counts, blocks, found)
    expected = [x for x in range(*seen) if x // 2 in listed]
    splits = [[x for x in own if x >= 0] for own in found.tolist()]
    assert [x for own in splits for x in own] == expected
    if split_keys:
        assert all(x * TILE // split_keys == i for i, own in enumerate(splits) for x in own)
    else:
        assert max(map(len, splits)) - min(map(len, splits)) <= 1


@pytest.mark.parametrize("end", [2**22 + 64, 2**23 - 64])
def test_bounds_of_many_blocks_have_32_bits(end):
    bounds = [3 + i * (end - 3) // 512 for i in range(513)]
    found = splits_of((3, 3, end, end), 512, 0)
    assert [(split[0], split[3]) for split in found] == list(pairwise(bounds))
