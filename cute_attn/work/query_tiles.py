"""Work tiles of a forward: a query block of one head, or of several heads of one kv head (packed GQA)."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Constexpr, Int32, Int64, cute

from cute_attn.device.math import optimization_barrier
from cute_attn.device.seqlen import SeqlenInfo, Seqlens, first_block, sequence_of_block
from cute_attn.work.block_range import KeySplit
from cute_attn.work.sections import Sections

L2_SECTION_BYTES = 32 << 20
"""Bytes of K and V of one section of heads: as many as stay in an L2 of 50 MB."""


def kv_heads_of_section(seqlens: Seqlens, key_bytes: int) -> Int64:
    """On the host: number of kv heads, at least 1, whose K and V fit L2; key_bytes: bytes of a row of K and of V."""
    head_bytes = cutlass.max(Int64(seqlens.max_seqlen_k) * key_bytes, Int64(1))
    return cutlass.max(Int64(L2_SECTION_BYTES) // head_bytes, Int64(1))


@dataclass(frozen=True)
class QueryTile:
    """A work tile: one query block of a head or of a pack of heads."""

    row0: Int32  # the first query; seqlen_q or more if the tile is empty
    head: Int32  # the first one, in tiles of several heads
    head_kv: Int32
    batch: Int32
    info: SeqlenInfo
    head_in_group: Int32 | None = None  # ``head`` among the heads of its kv head, in tiles of several heads
    heads_left: Int32 | None = None  # the kv head's heads from ``head`` on: a tile may have rows for more
    split: KeySplit | None = None  # which of the key blocks, in kernels that divide them

    @property
    def exists(self) -> Boolean:
        """False for a padding tile without queries."""
        return self.row0 < self.info.seqlen_q


@dataclass(frozen=True)
class PackedHeads:
    """Packs of ``heads`` heads of one kv head; a kv head's last pack may have fewer."""

    per_sequence: cute.FastDivmodDivisorV2  # packs of all kv heads
    per_kvhead: cute.FastDivmodDivisorV2
    group: Int32  # heads of a kv head
    heads: Constexpr

    @staticmethod
    def make(group: Int32, nheads_kv: Int32, heads: int) -> "PackedHeads":
        """Make the packs on the host."""
        per_kvhead = cute.ceil_div(group, heads)
        divisor = cute.FastDivmodDivisorV2
        per_sequence = divisor(cutlass.max(per_kvhead * nheads_kv, 1))
        return PackedHeads(per_sequence, divisor(cutlass.max(per_kvhead, 1)), group, heads)

    @cute.jit
    def tile(self, row0: Int32, pack: Int32, batch: Int32, info: SeqlenInfo) -> QueryTile:
        """The work tile of the sequence's pack ``pack`` that begins at query ``row0``."""
        head_kv, of_kvhead = divmod(pack, self.per_kvhead)
        in_group = of_kvhead * self.heads
        head = head_kv * self.group + in_group
        return QueryTile(row0, head, head_kv, batch, info, in_group, self.group - in_group)


@dataclass(frozen=True)
class QueryGrid:
    """A grid with a CTA for each (query block, head or pack of heads, batch), all in x: y and z are limited to 65535.

    Query blocks vary fastest, from the last one down: under a causal mask it has the most work. Fast divisors keep the
    division in integer arithmetic: head, batch and the pointers computed from them stay in uniform registers.

    :meth:`longest_first` orders the grid in sections of heads instead; a section's last query blocks come first. Under
    a causal mask, the CTAs that start last then have little work.
    """

    last_m_block: Int32
    m_blocks: cute.FastDivmodDivisorV2
    nheads: cute.FastDivmodDivisorV2
    qheads_per_kvhead: cute.FastDivmodDivisorV2
    packs: PackedHeads | None = None
    section_tiles: cute.FastDivmodDivisorV2 | None = None
    sections: Sections | None = None  # of batch x heads
    claimed: Int32 | None = None  # the running CTA's work tile, if it is not the CTA's index

    @staticmethod
    def make(m_blocks: Int32, nheads: Int32, nheads_kv: Int32, heads: int = 1) -> "QueryGrid":
        """Make the grid on the host. An empty grid is not launched; its divisors are 1. heads: per tile."""
        group = nheads // cutlass.max(nheads_kv, 1)
        divisors = (m_blocks, nheads, group)
        grid = QueryGrid(m_blocks - 1, *(cute.FastDivmodDivisorV2(cutlass.max(d, 1)) for d in divisors))
        if heads == 1:
            return grid
        return replace(grid, packs=PackedHeads.make(group, nheads_kv, heads))

    def longest_first(self, seqlens: Seqlens, batch: Int32, key_bytes: int, fewest: Int32) -> "QueryGrid":
        """On the host: the grid in sections of the heads whose K and V fit L2, but of at least ``fewest`` work tiles.

        key_bytes: bytes of a row of K and of V.
        """
        group = (self.qheads_per_kvhead if self.packs is None else self.packs.per_kvhead).divisor
        m_blocks = cutlass.max(self.last_m_block + 1, 1)
        heads = kv_heads_of_section(seqlens, key_bytes) * group
        most = cutlass.max(heads, Int64(cute.ceil_div(fewest, m_blocks)))
        sections = Sections.make(self.planes * batch, most, group)
        tiles = cute.FastDivmodDivisorV2(m_blocks * sections.columns.divisor)
        return replace(self, section_tiles=tiles, sections=sections)

    @property
    def planes(self) -> Int32:
        """Number of heads, or of packs of heads, per sequence."""
        return self.nheads.divisor if self.packs is None else self.packs.per_sequence.divisor

    def tiles(self, batch: Int32) -> Int32:
        return (self.last_m_block + 1) * self.planes * batch

    @cute.jit
    def tile(self, seqlens: Seqlens, tile_m: Constexpr) -> QueryTile:
        """The work tile of the running CTA.

        Rematerialized at each call: otherwise the compiler keeps it in registers through the mainloop, and spills.
        """
        block = cute.arch.block_idx()[0] if self.claimed is None else self.claimed
        return self.at(optimization_barrier(block), seqlens, tile_m)

    @cute.jit
    def at(self, block: Int32, seqlens: Seqlens, tile_m: Constexpr) -> QueryTile:
        """The work tile ``block``; ``tile_m``: number of queries per tile."""
        plane, from_last = self.plane_and_block(block)
        planes = self.nheads if self.packs is None else self.packs.per_sequence
        batch, head = (cute.arch.make_warp_uniform(x) for x in divmod(plane, planes))
        row0 = (self.last_m_block - from_last) * tile_m
        if cutlass.const_expr(self.packs is not None):
            info = SeqlenInfo.read(seqlens, batch)
            return self.packs.tile(row0, head, batch, info)  # type: ignore[union-attr]
        return QueryTile(row0, head, head // self.qheads_per_kvhead, batch, SeqlenInfo.read(seqlens, batch))

    @cute.jit
    def plane_and_block(self, block: Int32):
        """(index of the head or pack among all sequences', query block counted from the last) of a work tile."""
        plane, from_last = block, block
        if cutlass.const_expr(self.sections is None):
            plane, from_last = divmod(block, self.m_blocks)
        else:
            section, position = divmod(block, self.section_tiles)
            from_last, plane = self.sections.row_and_column(section, position)  # type: ignore[union-attr]
        return plane, from_last


class ForwardSchedule(NamedTuple):
    """Schedule arguments of a persistent forward kernel.

    Attributes:
        counters: int32 (4,), 0 before the first launch: [0] work tiles claimed beyond each CTA's first, [1] finished
            CTAs (both 0 again after each launch), [2] work tiles replayed since the first launch, [3] unused.
            Concurrent launches need different counters.
        multiprocessors: number of the GPU's multiprocessors.
    """

    counters: cute.Tensor
    multiprocessors: Int32


@dataclass(frozen=True)
class QueryTileOrder:
    """All work tiles of a persistent kernel, in the order in which CTAs claim them.

    After each work tile, a CTA claims the next one: list scheduling (Graham 1966). In any order, the makespan is at
    most the ideal makespan plus one work tile.

    The order serves L2 and a balanced end of the list. With ``longest_first``, heads are in sections whose K and V fit
    L2, and the last query blocks of all heads of a section come first: under a causal mask they have the most work.
    Otherwise a head's query blocks follow each other, from the last one down. If varlen, these are the query
    blocks of all sequences, padded as in :func:`first_block`; a binary search finds a block's sequence.
    """

    m_blocks: cute.FastDivmodDivisorV2  # of a head; if varlen, of all sequences
    packs: cute.FastDivmodDivisorV2  # of ``heads`` heads
    packs_per_kvhead: cute.FastDivmodDivisorV2  # the last one may have fewer heads
    qheads_per_kvhead: cute.FastDivmodDivisorV2
    planes: cute.FastDivmodDivisorV2  # (batch, head) pairs of a section
    last_planes: cute.FastDivmodDivisorV2  # of the last section
    section_tiles: cute.FastDivmodDivisorV2
    last_section: Int32
    total: Int32
    queries: Constexpr  # of a tile
    heads: Constexpr  # of a tile
    longest_first: Constexpr

    @staticmethod
    def make(
        seqlens: Seqlens,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        key_bytes: int,
        queries: int,
        heads: int,
        longest_first: bool,
    ) -> "QueryTileOrder":
        """Make the order on the host; key_bytes: bytes of a row of K and of V."""
        varlen = seqlens.cu_seqlens_q is not None
        batch, nheads, nheads_kv = seqlens.batch(mQ), mQ.shape[-2], mK.shape[-2]
        divisor, group = cute.FastDivmodDivisorV2, cutlass.max(nheads // cutlass.max(nheads_kv, 1), 1)
        kv_packs = cute.ceil_div(group, heads)
        packs = nheads_kv * kv_packs
        if varlen:
            m_blocks, planes = Int32(mQ.shape[0]) // queries + batch, packs
        else:
            m_blocks, planes = cute.ceil_div(Int32(seqlens.max_seqlen_q), queries), packs * batch
        sorted_ = longest_first and not varlen
        most = kv_heads_of_section(seqlens, key_bytes) * kv_packs if sorted_ else planes
        sections = Sections.make(planes, most, kv_packs)
        return QueryTileOrder(
            m_blocks=divisor(cutlass.max(m_blocks, 1)),
            packs=divisor(cutlass.max(packs, 1)),
            packs_per_kvhead=divisor(kv_packs),
            qheads_per_kvhead=divisor(group),
            planes=sections.columns,
            last_planes=sections.last_columns,
            section_tiles=divisor(cutlass.max(m_blocks * sections.columns.divisor, 1)),
            last_section=sections.last,
            total=m_blocks * planes,
            queries=queries,
            heads=heads,
            longest_first=sorted_,
        )

    @cute.jit
    def tile(self, index: Int32, seqlens: Seqlens) -> QueryTile:
        """The work tile ``index`` of the order; it may be empty."""
        plane, from_last = Int32(0), Int32(0)
        if cutlass.const_expr(self.longest_first):
            section, position = divmod(index, self.section_tiles)
            sections = Sections(self.planes, self.last_planes, self.last_section)
            from_last, plane = sections.row_and_column(section, position)
        else:
            plane, from_last = divmod(index, self.m_blocks)
        m_block = self.m_blocks.divisor - 1 - from_last
        batch, pack = Int32(0), plane
        if cutlass.const_expr(seqlens.cu_seqlens_q is None):
            batch, pack = divmod(plane, self.packs)
        else:
            cu_seqlens = seqlens.cu_seqlens_q
            batch = sequence_of_block(cu_seqlens, from_last, self.queries)
            last_row = first_block(cu_seqlens, batch + 1, self.queries) - 1
            m_block = last_row - from_last
        return self.of(m_block * self.queries, self.first_head(pack), batch, seqlens)

    @cute.jit
    def first_head(self, pack: Int32) -> Int32:
        head = pack
        if cutlass.const_expr(self.heads > 1):
            head_kv, of_kvhead = divmod(pack, self.packs_per_kvhead)
            head = head_kv * self.qheads_per_kvhead.divisor + of_kvhead * self.heads
        return head

    @cute.jit
    def of(self, row0: Int32, head: Int32, batch: Int32, seqlens: Seqlens) -> QueryTile:
        """The work tile that begins at ``row0`` of ``head``."""
        row0, head, batch = (cute.arch.make_warp_uniform(x) for x in (row0, head, batch))
        info = SeqlenInfo.read(seqlens, batch)
        row0 = row0 if row0 >= 0 else info.seqlen_q  # a block between two sequences
        if cutlass.const_expr(self.heads == 1):
            return QueryTile(row0, head, head // self.qheads_per_kvhead, batch, info)
        head_kv, in_group = divmod(head, self.qheads_per_kvhead)
        return QueryTile(
            row0, head, head_kv, batch, info, in_group, self.qheads_per_kvhead.divisor - in_group
        )


@dataclass(frozen=True)
class WorkClaims:
    """Claims work tiles for a CTA's producer warp, by a counter in global memory."""

    counters: cute.Tensor  # see ``ForwardSchedule``

    @cute.jit
    def claim(self) -> Int32:
        """Claim a work tile; :meth:`index` waits for the result of the atomic."""
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = cute.arch.atomic_add(self.counters.iterator, Int32(1), sem="relaxed", scope="gpu")
        return taken

    @cute.jit
    def index(self, claimed: Int32) -> Int32:
        """The index of a claimed work tile: it follows the first work tiles, one per CTA, which are not claimed."""
        return cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(claimed, 0)

    @cute.jit
    def leave(self) -> None:
        """Called once per CTA, at its end: the last CTA resets the counters for the next launch."""
        if cute.arch.lane_idx() == 0:
            done = self.counters.iterator + 1
            before = cute.arch.atomic_add(done, Int32(1), sem="relaxed", scope="gpu")
            if before == cute.arch.grid_dim()[0] - 1:
                self.counters[0] = Int32(0)
                self.counters[1] = Int32(0)

    @cute.jit
    def count_replay(self) -> None:
        if cute.arch.lane_idx() == 0:
            cute.arch.atomic_add(self.counters.iterator + 2, Int32(1), sem="relaxed", scope="gpu")
