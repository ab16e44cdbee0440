"""Parts of a query block's keys: the device code on the CPU."""

import cutlass
import pytest
import torch
from cutlass import Constexpr, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_attn.work.block_range import BlockRange
from cute_attn.work.key_parts import KeyPart, Partials

TILE_N = 64


@cute.jit
def divide(numbers: cute.Tensor, found: cute.Tensor, tile_n: Constexpr):
    """numbers: begin, full_begin, full_end, end, parts, part_keys; found: the first four of each part."""
    blocks = BlockRange(numbers[0], numbers[1], numbers[2], numbers[3])
    partials = Partials(found, found, numbers[4], numbers[5])
    for part in cutlass.range(numbers[4]):
        own = KeyPart.of(blocks, Int32(part), partials, tile_n)
        clipped = blocks.clipped(own.begin, own.end)
        found[part, 0], found[part, 1] = clipped.begin, clipped.full_begin
        found[part, 2], found[part, 3] = clipped.full_end, clipped.end


def parts_of(blocks, parts, part_keys):
    found = torch.full((parts, 4), -1, dtype=torch.int32)
    numbers = torch.tensor([*blocks, parts, part_keys], dtype=torch.int32)
    divide(from_dlpack(numbers), from_dlpack(found), TILE_N)
    return found.tolist()


RANGES = [(0, 0, 0, 0), (0, 0, 16, 17), (3, 5, 9, 11), (7, 7, 7, 8), (5, 5, 5, 5), (0, 1, 99, 100)]


@pytest.mark.parametrize("blocks", RANGES)
@pytest.mark.parametrize(("parts", "part_keys"), [(1, 0), (3, 0), (20, 0), (25, 256), (50, 128), (2, 6400)])
def test_every_block_is_in_one_part(blocks, parts, part_keys):
    begin, full_begin, full_end, end = blocks
    found, seen, full = parts_of(blocks, parts, part_keys), [], []
    for i, part in enumerate(found):
        assert part == sorted(part)
        own = list(range(part[0], part[3]))
        seen += own
        full += range(part[1], part[2])
        if part_keys:
            assert all(block * TILE_N // part_keys == i for block in own)
    assert seen == list(range(begin, end)) and full == list(range(full_begin, full_end))
    if not part_keys:
        sizes = [part[3] - part[0] for part in found]
        assert max(sizes) - min(sizes) <= 1
