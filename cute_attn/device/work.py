"""Which queries of which head a block works on."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cute_attn.device.math import opaque
from cute_attn.device.seqlen import SeqlenInfo, Seqlens


@dataclass(frozen=True)
class QueryBlock:
    """One block's place in a grid of (query blocks x heads x batch), query blocks fastest and the last one first.

    The last query block has the most work under a causal band, so it starts first. One grid dimension holds them all:
    the other two end at 65535.
    """

    row0: Int32
    head: Int32
    batch: Int32
    info: SeqlenInfo

    @staticmethod
    @cute.jit
    def read(seqlens: Seqlens, m_blocks: Int32, nheads: Int32, tile_m: cutlass.Constexpr) -> "QueryBlock":
        """Of the running block.

        Each call computes it anew: after a main loop that is cheaper than to have kept it in registers, which the
        compiler would do otherwise, and spill.
        """
        block = opaque(cute.arch.block_idx()[0])
        m_block = m_blocks - 1 - block % m_blocks
        plane = block // m_blocks
        batch = plane // nheads
        return QueryBlock(m_block * tile_m, plane % nheads, batch, SeqlenInfo.read(seqlens, batch))
