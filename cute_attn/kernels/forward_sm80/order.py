"""The order of the Ampere forward's work tiles."""

from typing import Any

from cutlass import Int32, cute

from cute_attn.device.seqlen import Seqlens
from cute_attn.work.query_tiles import ForwardSchedule, QueryGrid

TILES_OF_A_SECTION = 4
"""Work tiles of a section of heads, for each multiprocessor: the last section starts with its longest tiles, and has to
have short ones for all CTAs after them, of which a multiprocessor has two."""


def query_grid(
    kernel: Any, seqlens: Seqlens, batch: Int32, nheads: Int32, nheads_kv: Int32, schedule: ForwardSchedule
) -> QueryGrid:
    """On the host: a kernel's work tiles in their order."""
    tile = kernel.tile
    m_blocks = cute.ceil_div(seqlens.max_seqlen_q, tile.queries)
    grid = QueryGrid.make(m_blocks, nheads, nheads_kv, tile.pack_heads)
    if not kernel.traits.causal:
        return grid
    key_bytes = sum(kernel.row_widths) * kernel.dtype.width // 8
    return grid.longest_first(seqlens, batch, key_bytes, schedule.multiprocessors * TILES_OF_A_SECTION)
