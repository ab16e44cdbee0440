"""Which query blocks a block of threads works on, one after the other."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.cluster import rank_in_cluster
from cute_attn.device.math import opaque
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.device.work import QueryBlock

NOWHERE = 1 << 30
"""A first row behind every sequence's end: a round in which a block has nothing to do."""


@dataclass(frozen=True)
class TileOrder:
    """All (query block, head, batch), dealt out to the grid's blocks in rounds.

    Without ``longest_first`` a head's query blocks follow each other, and each round deals the next ones.

    With it, heads are taken a section at a time, as many as keep their K and V in L2, and a section's query blocks are
    sorted from the last ones of its heads, which under a causal band have the most work, to the first ones. They are
    dealt to and fro (0, 1, 2, 2, 1, 0, ...) in an even number of rounds, which gives every block the same work without
    asking a counter.

    Planes are (batch, head) with heads fastest; where a query block has several heads, (batch, first of them).

    With clusters it is they who are dealt to: as many neighbouring query blocks as they have blocks, which for all of
    the above count as one.
    """

    m_blocks: cute.FastDivmodDivisorV2
    nheads: cute.FastDivmodDivisorV2
    qheads_per_kvhead: cute.FastDivmodDivisorV2
    planes: cute.FastDivmodDivisorV2  # of a section
    last_planes: cute.FastDivmodDivisorV2  # of the last section
    section_rounds: cute.FastDivmodDivisorV2
    sections: Int32
    num_m_blocks: Int32
    total: Int32
    blocks: Int32
    rounds: Int32
    longest_first: Constexpr
    heads: Constexpr  # of a query block
    cluster: Constexpr

    @staticmethod
    def make(
        m_blocks: Int32,
        nheads: Int32,
        nheads_kv: Int32,
        batch: Int32,
        planes: Int32,
        blocks: Int32,
        longest_first: bool,
        heads: int = 1,
        cluster: int = 1,
    ) -> "TileOrder":
        """On the host; ``planes``: how many (batch, head) share L2; ``blocks``: how many the grid may have.

        ``nheads`` counts packs of ``heads`` heads, which a query block has all of; m_blocks and blocks count
        ``cluster`` of them as one.
        """
        total = m_blocks * nheads * batch
        m_blocks, all_planes = cutlass.max(m_blocks, 1), cutlass.max(nheads * batch, 1)
        blocks = cutlass.max(cutlass.min(blocks, total), 1)
        planes = cutlass.max(cutlass.min(planes, all_planes), 1)
        sections = cute.ceil_div(all_planes, planes) if longest_first else Int32(1)
        planes = planes if longest_first else all_planes
        rounds = cute.ceil_div(m_blocks * planes, blocks)
        if longest_first:
            rounds = (rounds + 1) // 2 * 2
        divisor = cute.FastDivmodDivisorV2
        return TileOrder(
            m_blocks=divisor(m_blocks),
            nheads=divisor(cutlass.max(nheads, 1)),
            qheads_per_kvhead=divisor(cutlass.max(nheads // cutlass.max(nheads_kv, 1), 1)),
            planes=divisor(planes),
            last_planes=divisor(all_planes - (sections - 1) * planes),
            section_rounds=divisor(rounds),
            sections=sections,
            num_m_blocks=m_blocks,
            total=total,
            blocks=cutlass.min(blocks, total),
            rounds=rounds * sections,
            longest_first=longest_first,
            heads=heads,
            cluster=cluster,
        )

    @cute.jit
    def place(self, deal: Int32, seqlens: Seqlens, queries: Constexpr) -> QueryBlock:
        """What the running block is dealt, ``queries`` of them; its row0 is ``NOWHERE`` if nothing is."""
        blocks = cute.arch.grid_dim()[0]
        block = opaque(cute.arch.block_idx()[0])
        if cutlass.const_expr(self.cluster > 1):
            blocks, block = blocks // self.cluster, block // self.cluster
        if cutlass.const_expr(self.longest_first):
            section, deal = divmod(deal, self.section_rounds)
            position = deal * blocks + (blocks - 1 - block if deal & 1 == 1 else block)
            from_last, plane = divmod(position, self.planes)
            if section == self.sections - 1:
                from_last, plane = divmod(position, self.last_planes)
            exists = from_last < self.num_m_blocks
            plane = plane + section * self.planes.divisor
        else:
            position = deal * blocks + block
            plane, from_last = divmod(position, self.m_blocks)
            exists = position < self.total
            plane = plane if exists else Int32(0)
        batch, head = divmod(plane, self.nheads)
        row0 = (self.num_m_blocks - 1 - from_last) * queries if exists else Int32(NOWHERE)
        if cutlass.const_expr(self.cluster > 1):
            row0 = row0 * self.cluster + rank_in_cluster() * queries if exists else row0
        info, head_kv = SeqlenInfo.read(seqlens, batch), head // self.qheads_per_kvhead
        return QueryBlock(row0, head * self.heads, head_kv, batch, info)
