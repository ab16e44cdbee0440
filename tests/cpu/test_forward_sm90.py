"""The Hopper forward: kernels of large head dims, and when Q's buffer is free."""

import pytest

from cute_attn.compiler import registry
from cute_attn.kernels.forward_sm90 import ForwardSm90
from cute_attn.kernels.head_dim_512_sm90.kernel import ForwardLargeSm90
from cute_attn.rows.tma import LastUse, QueryBuffer
from cute_attn.tiles import (
    BackwardSm90Tile,
    ForwardLargeTile,
    ForwardSm90Tile,
    KvcacheLargeTile,
    KvcacheSm90Tile,
)
from cute_attn.traits import Traits

D512 = Traits("forward", "sm90", "bf16", 512)


def test_large_head_dims_have_a_kernel_of_their_own():
    for dim, dim_v in ((264, 264), (64, 512), (576, 512), (576, 8)):
        kernel = registry.lookup(Traits("forward", "sm90", "bf16", dim, dim_v))
        assert isinstance(kernel, ForwardLargeSm90) and kernel.tile.reject(kernel.traits, "sm90") is None
    assert type(registry.lookup(Traits("forward", "sm90", "bf16", 256))) is ForwardSm90


def test_a_step_of_a_large_head_dim_has_the_products_of_both_warpgroups():
    content = registry.lookup(D512).step_content()
    assert content.mma == 512 // 16 + 64 // 16 and content.other_wgmma == (64 // 16, 256)


def test_areas_of_large_head_dims_follow_each_other():
    tile, traits = ForwardLargeTile(), Traits("forward", "sm90", "bf16", 576, 512)
    areas = list(tile.smem_areas(traits).values())
    assert [begin for begin, _ in areas] == [0, *(end for _, end in areas[:-1])]
    assert all(begin % 1024 == 0 for begin, _ in areas)  # wgmma's widest swizzle repeats after 1024 bytes
    assert tile.smem_bytes(traits) == areas[-1][1]


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


@pytest.mark.parametrize(
    "tile",
    [
        *(of(tile_m=64 * groups) for of in (ForwardSm90Tile, KvcacheSm90Tile) for groups in (1, 2, 3)),
        *(of(tile_m=64, blocks_per_sm=n) for of in (ForwardSm90Tile, KvcacheSm90Tile) for n in (2, 3)),
        *(ForwardSm90Tile(tile_m=256), ForwardLargeTile(), KvcacheLargeTile(), BackwardSm90Tile()),
    ],
    ids=lambda tile: f"{type(tile).__name__} {tile}",
)
def test_registers_of_all_warpgroups_fit(tile):
    """A warpgroup that asks for one register more than a CTA began with waits forever."""
    own = 65536 // (tile.num_threads * getattr(tile, "blocks_per_sm", 1)) // 8 * 8
    computing = tile.warpgroups * (tile.compute_registers // 8 * 8) + getattr(tile, "score_registers", 0)
    assert tile.load_registers + computing <= tile.num_threads // 128 * min(own, 255)
