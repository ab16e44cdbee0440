"""Work tiles of a backward kernel: key blocks of a kv head, and the order in which CTAs compute them.

If there are too few work tiles, the query heads of a kv head, or also their queries, are divided among several, each
with a separate head of dK and dV: :class:`HeadSplits`. These heads of dK and dV are summed afterwards.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
from cutlass import Constexpr, Int32, Int64, cute

from cute_attn.device.math import rematerialize_each
from cute_attn.device.seqlen import SeqlenInfo, Seqlens, first_block, sequence_of_block
from cute_attn.work.block_range import BlockRange
from cute_attn.work.sections import Sections


class BackwardSchedule(NamedTuple):
    """Schedule arguments of a persistent backward kernel.

    Attributes:
        num_splits: a work tile is every num_splits-th key block of a (batch, kv head).
        split_stride: floats from one split's accumulator of dQ to the next; 0: all splits add to one accumulator.
        counter: 4 bytes, 0 before the launch: number of work tiles claimed beyond each CTA's first one. If the
            tile has ``dq_in_order``, the counters of :class:`cute_attn.outputs.accumulate.DqTurns` follow, from
            element ``cute_attn.tiles.backward.COUNTERS`` on.
        multiprocessors: number of the GPU's multiprocessors, or of clusters.
    """

    num_splits: Int32
    split_stride: Int64
    counter: cute.Tensor
    multiprocessors: Int32


@dataclass(frozen=True)
class QueryHeads:
    """The query heads [``first``, ``end``) of kv head ``head_kv`` that add to one head of dK and dV.

    Of their query blocks, ``part`` is (index, number) of several equal parts, or None for all.
    """

    head_kv: Int32
    first: Int32
    end: Int32
    part: tuple[Int32, Int32] | None = None

    def blocks(self, seen: BlockRange) -> BlockRange:
        """The heads' query blocks among those that see a key block."""
        if self.part is None:
            return seen
        count, (part, parts) = seen.end - seen.begin, self.part
        first, end = (seen.begin + count * i // parts for i in (part, part + 1))
        return seen.clipped(first, end)


@dataclass(frozen=True)
class HeadSplits:
    """Divides the query heads of each kv head among the kv head's heads of dK and dV, as evenly as possible.

    The first ``longer`` heads of dK and dV of a kv head have ``fewest + 1`` query heads each, the others ``fewest``.
    With ``parts``, a kv head may have a multiple of its query heads: then each query head's queries are divided too.
    """

    per_kvhead: cute.FastDivmodDivisorV2
    qheads_per_kvhead: Int32
    fewest: Int32
    longer: Int32
    parts: Int32 | None = None

    @staticmethod
    def make(
        mQ: cute.Tensor, mK: cute.Tensor, mDK: cute.Tensor, divides_queries: bool = False
    ) -> "HeadSplits":
        """Make the splits on the host, from the tensors' numbers of heads. divides_queries: with ``parts``."""
        nheads_kv = cutlass.max(mK.shape[-2], 1)
        splits, group = cutlass.max(mDK.shape[-2] // nheads_kv, 1), mQ.shape[-2] // nheads_kv
        divisor, parts = cute.FastDivmodDivisorV2(splits), None
        if divides_queries:
            parts = cutlass.max(splits // cutlass.max(group, 1), 1)
            splits //= parts
        return HeadSplits(divisor, group, group // splits, group % splits, parts)

    def of(self, head_dkv: Int32) -> QueryHeads:
        """The query heads of a head of dK and dV, and which of their queries."""
        head_kv, split = divmod(head_dkv, self.per_kvhead)
        part = None
        if self.parts is not None:
            heads = split // self.parts
            split, part = heads, (split - heads * self.parts, self.parts)
        first = head_kv * self.qheads_per_kvhead + split * self.fewest + cutlass.min(split, self.longer)
        return QueryHeads(head_kv, first, first + self.fewest + Int32(split < self.longer), part)


@dataclass(frozen=True)
class KeyTiles:
    """Key blocks ``first``, ``first + num_splits``, ... of one batch, for one head of dK and dV."""

    first: Int32
    head_dkv: Int32
    batch: Int32
    info: SeqlenInfo

    def queries_of(self, head: Int32) -> "KeyTiles":
        """The same tiles, rematerialized for each of several heads: otherwise the addresses of the sequence's
        first query in every tensor would stay in registers for all heads."""
        info = replace(self.info, offset_q=rematerialize_each(self.info.offset_q, head))
        return replace(self, first=rematerialize_each(self.first, head), info=info)


L2_SECTION_BYTES = 32 << 20
"""Maximum bytes of dQ to which CTAs running together add: fp32 reductions beyond L2 run at half the speed."""


@dataclass(frozen=True)
class KeyTileOrder:
    """All (first key block, head of dK and dV, batch) in the order in which CTAs compute them.

    These triples form a table. A column is a (batch, head), heads fastest, with a row for each first key block. If
    varlen, a column is a head, and its rows are the first key blocks of all sequences, one sequence after the other.

    Without ``longest_first``, a column's rows follow each other: CTAs that run together read the same queries and add
    to the same dQ. With ``longest_first``, sections of columns are visited row by row, because under a causal mask the
    most queries see a sequence's first key blocks. A section has as many columns as L2 has room for, with one query
    head's dQ per column (all CTAs visit the heads of a group one after the other, at about the same time), but at most
    a quarter as many columns as there are multiprocessors, so that some CTAs that run together read the same queries.

    With ``in_order``, each row of a column waits for the row after it. Sections are then visited row by row as well,
    from the last row on. Few rows of a column should run together, so a section has a column for each multiprocessor if
    L2 has room for the columns' dQ, Q and dO.

    A sequence has num_splits rows, or with ``packed`` about as many as it has key blocks. Then its first row is
    ``first_block(sequence)``, and the sequence of a row is found by bisection.
    """

    num_splits: cute.FastDivmodDivisorV2
    nheads_dkv: cute.FastDivmodDivisorV2
    section_blocks: cute.FastDivmodDivisorV2  # of one column without longest_first
    sections: Sections | None
    blocks: Int32
    packed: Int32
    tile_n: Constexpr
    last_row: Int32 | None = None  # with ``in_order``

    @staticmethod
    def make(
        seqlens: Seqlens,
        mDK: cute.Tensor,
        schedule: BackwardSchedule,
        head_bytes: Int64,
        tile_n: int,
        longest_first: bool,
        in_order: bool = False,
    ) -> "KeyTileOrder":
        """Make the order on the host; ``head_bytes``: bytes of one query head's dQ in a sequence."""
        batch, nheads_dkv, num_splits = seqlens.batch(mDK), mDK.shape[-2], schedule.num_splits
        packed = Int32(0)
        rows, columns = Int32(num_splits), nheads_dkv * batch
        if seqlens.cu_seqlens_k is not None:
            rows, columns = num_splits * batch, nheads_dkv
            fewest = Int32(mDK.shape[0]) // tile_n + batch
            packed = Int32((Int64(num_splits) * tile_n >= Int64(seqlens.max_seqlen_k)) & (fewest < rows))
            rows = cutlass.select_(packed == 1, fewest, rows)
        divisor, sections, together = cute.FastDivmodDivisorV2, None, 1
        if longest_first or in_order:
            section, most = L2_SECTION_BYTES, schedule.multiprocessors // 4
            if in_order:
                section, most = L2_SECTION_BYTES // 2, schedule.multiprocessors
            together = Int32(cutlass.max(section // cutlass.max(head_bytes, 1), 1))
            sections = Sections.make(columns, cutlass.min(together, most))
            together = sections.columns.divisor
        return KeyTileOrder(
            num_splits=divisor(cutlass.max(num_splits, 1)),
            nheads_dkv=divisor(cutlass.max(nheads_dkv, 1)),
            section_blocks=divisor(cutlass.max(rows * together, 1)),
            sections=sections,
            blocks=rows * columns,
            packed=packed,
            tile_n=tile_n,
            last_row=rows - 1 if in_order else None,
        )

    @cute.jit
    def find(self, block: Int32, cu_seqlens_k: cute.Tensor | None):
        """(first key block, head of dK, batch) of position ``block`` in the order; the key block may not exist."""
        row, column = self.row_and_column(block)
        if cutlass.const_expr(cu_seqlens_k is None):
            first = row
            batch, head_dkv = divmod(column, self.nheads_dkv)
        else:
            head_dkv = column
            batch, first = divmod(row, self.num_splits)
            if self.packed != 0:
                batch = sequence_of_block(cu_seqlens_k, row, self.tile_n)
                first = row - first_block(cu_seqlens_k, batch, self.tile_n)
                if first < 0:  # keys before the first sequence's
                    first = self.num_splits.divisor
        return first, head_dkv, batch

    @cute.jit
    def row_and_column(self, block: Int32):
        """The table's row and column at a position in the order."""
        section, position = divmod(block, self.section_blocks)
        row, column = position, section
        if cutlass.const_expr(self.sections is not None):
            row, column = self.sections.row_and_column(section, position)  # type: ignore[union-attr]
        if cutlass.const_expr(self.last_row is not None):
            row = self.last_row - row
        return row, column


@cute.jit
def key_tile_of(order: KeyTileOrder, seqlens: Seqlens, block: Int32) -> KeyTiles:
    """The CTA's key tile as warp-uniform numbers, computed again at every call.

    Values derived from them, such as pointers, are then in uniform registers.
    """
    found = order.find(cute.arch.make_warp_uniform(block), seqlens.cu_seqlens_k)
    first, head_dkv, batch = (cute.arch.make_warp_uniform(x) for x in found)
    info = SeqlenInfo.read(seqlens, batch)
    lengths = (info.seqlen_q, info.seqlen_k, info.offset_q, info.offset_k)
    info = SeqlenInfo(*(cute.arch.make_warp_uniform(Int32(x)) for x in lengths))
    return KeyTiles(first, head_dkv, batch, info)
