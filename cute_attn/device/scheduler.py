"""Which query blocks a block of threads works on, one after the other."""

from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, cute

from cute_attn.device.math import opaque
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.device.work import QueryBlock


@dataclass(frozen=True)
class TileOrder:
    """All (query block, head, batch) in the order in which they are started.

    ``longest_first``: the last query block of every head comes first, then the one before it, ...: under a causal band
    that is from the most work to the least. Heads are taken a few at a time, as many as keep their K and V in L2.
    Otherwise a head's query blocks follow each other. Planes are (batch, head) with heads fastest.
    """

    m_blocks: cute.FastDivmodDivisorV2
    nheads: cute.FastDivmodDivisorV2
    qheads_per_kvhead: cute.FastDivmodDivisorV2
    section: cute.FastDivmodDivisorV2  # m_blocks * planes of a section
    planes: cute.FastDivmodDivisorV2  # planes of a section
    last_planes: cute.FastDivmodDivisorV2  # planes of the last section
    sections: Int32
    num_m_blocks: Int32
    total: Int32
    longest_first: Constexpr

    @staticmethod
    def make(
        m_blocks: Int32, nheads: Int32, nheads_kv: Int32, batch: Int32, planes: Int32, longest_first: bool
    ) -> "TileOrder":
        """On the host; ``planes``: how many (batch, head) share L2."""
        max, min = cutlass.max, cutlass.min
        m_blocks, all_planes = max(m_blocks, 1), max(nheads * batch, 1)
        planes = max(min(planes, all_planes), 1)
        sections = cute.ceil_div(all_planes, planes)
        last = all_planes - (sections - 1) * planes
        divisors = (m_blocks, max(nheads, 1), max(nheads // max(nheads_kv, 1), 1), m_blocks * planes, planes, last)
        return TileOrder(
            *(cute.FastDivmodDivisorV2(d) for d in divisors),
            sections=sections,
            num_m_blocks=m_blocks,
            total=m_blocks * all_planes,
            longest_first=longest_first,
        )

    @cute.jit
    def place(self, index: Int32, seqlens: Seqlens, tile_m: Constexpr) -> QueryBlock:
        """The index-th."""
        index = opaque(index)
        if cutlass.const_expr(self.longest_first):
            section, within = divmod(index, self.section)
            from_last, plane = divmod(within, self.planes)
            if section == self.sections - 1:
                from_last, plane = divmod(within, self.last_planes)
            plane = plane + section * self.planes.divisor
        else:
            plane, from_last = divmod(index, self.m_blocks)
        batch, head = divmod(plane, self.nheads)
        row0 = (self.num_m_blocks - 1 - from_last) * tile_m
        return QueryBlock(row0, head, head // self.qheads_per_kvhead, batch, SeqlenInfo.read(seqlens, batch))
