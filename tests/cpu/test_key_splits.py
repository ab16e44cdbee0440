"""Parts of a query block's keys: the device code on the CPU."""

from itertools import pairwise

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.work.block_range import BlockRange
from cute_attn.work.key_splits import KeySplit, Partials

TILE_N = 64


@cute.jit
def divide(numbers: cute.Tensor, found: cute.Tensor, tile_n: Constexpr):
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
    divide(from_dlpack(numbers), from_dlpack(found), TILE_N)
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
            assert all(block * TILE_N // split_keys == i for block in own)
    assert seen == list(range(begin, end)) and full == list(range(full_begin, full_end))
    if not split_keys:
        sizes = [split[3] - split[0] for split in found]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("end", [2**22 + 64, 2**23 - 64])
def test_bounds_of_many_blocks_have_32_bits(end):
    bounds = [3 + i * (end - 3) // 512 for i in range(513)]
    found = splits_of((3, 3, end, end), 512, 0)
    assert [(split[0], split[3]) for split in found] == list(pairwise(bounds))
