"""Which queries of which head a block works on."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cute_attn.device.math import opaque
from cute_attn.device.seqlen import SeqlenInfo, Seqlens


@dataclass(frozen=True)
class QueryGrid:
    """A grid of (query blocks x heads x batch) in one dimension: the other two end at 65535.

    Divisors come with what turns a division into a multiplication: integer arithmetic alone stays in uniform registers,
    and with it everything that follows from head and batch, such as the pointers.
    """

    last_m_block: Int32
    m_blocks: cute.FastDivmodDivisorV2
    nheads: cute.FastDivmodDivisorV2
    qheads_per_kvhead: cute.FastDivmodDivisorV2

    @staticmethod
    def make(m_blocks: Int32, nheads: Int32, nheads_kv: Int32) -> "QueryGrid":
        """On the host. A grid of nothing may have divisors of 0, which are not launched."""
        divisors = (m_blocks, nheads, nheads // cutlass.max(nheads_kv, 1))
        return QueryGrid(m_blocks - 1, *(cute.FastDivmodDivisorV2(cutlass.max(d, 1)) for d in divisors))


@dataclass(frozen=True)
class QueryBlock:
    """One block's place in a grid: query blocks fastest and the last one first.

    The last query block has the most work under a causal band, so it starts first.
    """

    row0: Int32  # the first query
    head: Int32  # the first one, where a kernel packs several into a block
    head_kv: Int32
    batch: Int32
    info: SeqlenInfo

    @staticmethod
    @cute.jit
    def read(seqlens: Seqlens, grid: QueryGrid, tile_m: cutlass.Constexpr) -> "QueryBlock":
        """Of the running block.

        Each call computes it anew: after a main loop that is cheaper than to have kept it in registers, which the
        compiler would do otherwise, and spill.
        """
        block = opaque(cute.arch.block_idx()[0])
        plane, from_last = divmod(block, grid.m_blocks)
        batch, head = (cute.arch.make_warp_uniform(x) for x in divmod(plane, grid.nheads))
        row0 = (grid.last_m_block - from_last) * tile_m
        return QueryBlock(row0, head, head // grid.qheads_per_kvhead, batch, SeqlenInfo.read(seqlens, batch))
