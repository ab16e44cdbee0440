"""Instruction counts of a step of the Ampere backward."""

from cute_attn.kernels.step import StepContent, mma_sync_count, product_loop
from cute_attn.tiles import BackwardSm80Tile, padded
from cute_attn.traits import Traits


def step_content(traits: Traits, tile: BackwardSm80Tile, products: int = 1) -> StepContent:
    """Content of a step that needs no mask: S and dP of each query sub-tile, then dV, dK and dQ of all sub-tiles.

    products: MMA products per product of fp32 operands. K steps in tf32 are half as long.
    """
    m, n, warps, size = tile.tile_m, tile.tile_n, tile.num_warps, tile.operand_bytes(traits)
    d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
    each = products if traits.element_bytes == 4 else 1

    def count(rows: int, cols: int, k: int) -> int:
        return mma_sync_count(rows, cols, k, warps) * (size // 2) * each

    def loop(mma: int, extent: int, unroll: int, of: int = 0) -> tuple:
        at_once = tile.steps_at_once(of or extent, unroll, size)
        return product_loop(mma, extent * size // 32, at_once)

    mma_s, mma_dp = (count(tile.queries, n, dim) for dim in (d, dv))
    own = (tile.columns, tile.columns) if tile.columns else (d, dv)
    mma_dk, mma_dv = (count(m, n, dim) for dim in own)  # dQ needs as many as dK
    chunk = tile.chunk(traits) if tile.columns else 0
    subtile = loop(mma_s, d, tile.sdp_unroll, chunk)
    if not tile.v_in_regs:
        subtile += loop(mma_dp, dv, tile.sdp_unroll, chunk)
    loops = subtile * tile.subtiles
    if tile.columns:
        chunks = tile.columns // chunk
        of_m, of_n = (
            loop(mma_dk // chunks, rows, un) for rows, un in ((m, tile.dkv_unroll), (n, tile.dq_unroll))
        )
        loops += (of_m + of_m + of_n) * chunks
    else:
        if not tile.p_in_regs:
            loops += loop(mma_dv, m, tile.dkv_unroll) + loop(mma_dk, m, tile.dkv_unroll)
        loops += loop(mma_dk // tile.dq_passes, n, tile.dq_unroll) * tile.dq_passes
    mma, elements = tile.subtiles * (mma_s + mma_dp) + mma_dv + 2 * mma_dk, m * n // tile.num_threads
    return StepContent(mma, elements * (1 + traits.softcap), elements, warps, loops)
