"""What a step of the Ampere backward holds."""

from cute_attn.kernels.step import StepContent, mma_sync_count, product_loop
from cute_attn.tiles import BackwardSm80Tile, padded
from cute_attn.traits import Traits


def step_content(traits: Traits, tile: BackwardSm80Tile) -> StepContent:
    """A step that needs no mask: S and dP of each piece of its queries, then dV, dK and dQ of all of them."""
    m, n, warps = tile.tile_m, tile.tile_n, tile.num_warps
    d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
    mma_s, mma_dp = (mma_sync_count(tile.queries, n, dim, warps) for dim in (d, dv))
    mma_dk, mma_dv = (mma_sync_count(m, n, dim, warps) for dim in (d, dv))  # dQ takes as many as dK
    piece = product_loop(mma_s, d // 16, tile.steps_at_once(d, tile.sdp_unroll))
    if not tile.v_in_regs:
        piece += product_loop(mma_dp, dv // 16, tile.steps_at_once(dv, tile.sdp_unroll))
    loops = piece * tile.pieces
    if not tile.p_in_regs:
        at_once = tile.steps_at_once(m, tile.dkv_unroll)
        loops += product_loop(mma_dv, m // 16, at_once) + product_loop(mma_dk, m // 16, at_once)
    loops += product_loop(mma_dk, n // 16, tile.steps_at_once(n, tile.dq_unroll))
    mma, elements = tile.pieces * (mma_s + mma_dp) + mma_dv + 2 * mma_dk, m * n // tile.num_threads
    return StepContent(mma, elements * (1 + traits.softcap), elements, warps, loops)
