"""The Hopper forward: its tiles' texts and refusals, and when Q's buffer is free."""

import re

import pytest

from cute_attn.kernels.forward_sm90.query_buffer import LastUse, QueryBuffer
from cute_attn.tiles import ForwardSm90Tile
from cute_attn.traits import Traits

D32 = Traits("forward", "sm90", "bf16", 32)
D128 = Traits("forward", "sm90", "bf16", 128)


@pytest.mark.parametrize(
    "tile, traits, message",
    [
        (ForwardSm90Tile(tile_m=96), D128, "tile_m is 96; accepted: 64, 128 or 192"),
        (ForwardSm90Tile(blocks_per_sm=2), D128, "blocks_per_sm is 2; accepted: 1, and up to 3"),
        (
            ForwardSm90Tile(64, 16, num_stages=15),
            D32,
            "num_stages is 15; accepted: stages whose barriers fit 480 bytes",
        ),
        (ForwardSm90Tile(pack_heads=3), D128, "pack_heads is 3; accepted: 1, 2, 4"),
    ],
)
def test_a_tile_that_cannot_work_is_refused_in_one_sentence(tile, traits, message):
    reason = tile.reject(traits, "sm90") or ""
    assert re.search(message, reason), reason
    assert "\n" not in reason


def test_the_text_parses_back():
    tile = ForwardSm90Tile(64, 80, speculative=True, pack_heads=4)
    assert ForwardSm90Tile().override(str(tile)) == tile


@pytest.mark.parametrize(
    "shared_with_o, in_registers, last_use",
    [
        (False, False, LastUse.PRODUCTS),
        (False, True, LastUse.COPY),
        (True, False, LastUse.STORE),
        (True, True, LastUse.STORE),  # Q is free before, but O takes over its memory
    ],
)
def test_last_use_of_the_buffer_of_q(shared_with_o, in_registers, last_use):
    tile = ForwardSm90Tile(share_qo_smem=shared_with_o, q_in_regs=in_registers)
    buffer = QueryBuffer(None, None, tile)
    assert buffer.last_use is last_use
    assert buffer.used_without_keys == shared_with_o
