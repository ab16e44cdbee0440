"""Lists of a mask's blocks, for FlexAttention's BlockMask and for attention kernels to visit. Runs on every target.

:class:`ListBlocks` lists partial and full blocks in the format of BlockMask:

    partial_count[b, h, i], partial[b, h, i, :]     the partial key blocks of query block i, in order, then all others
    full_count[b, h, i], full[b, h, i, :]           the full key blocks of query block i, in order, then all others
    and the same lists of query blocks for each key block

A warp reads a row or a column of the table of kinds, 32 blocks at a time. It counts the blocks of each kind; then each
lane writes its block at the position given by the votes of the lanes before it. Lists are thus in order without a sort,
and no warp waits for another.

:class:`ListVisits` lists the blocks that attention kernels visit:

    counts[b, h, i] = (rows of key blocks without a mask, rows of all listed ones),   blocks[b, h, i, :] = 2 j + hides
    and the same for the query blocks of each key block

Lists have the format of :class:`cute_attn.work.block_range.BlockLists`, in blocks of ``LISTED_ROWS``. The mask's blocks
may be smaller or larger: a listed block is full if all mask blocks that it overlaps are full, hidden if all are hidden,
else partial. A query block is listed for a key block if it is visible in any query head of the kv head.

Full blocks come first, then partial, then hidden blocks, each in order. A block that reaches beyond the sequence needs
a mask, so it is listed as the last partial block; if it is a key block, its query blocks all count as partial. For a
cache, lists of query blocks are like those of key blocks a union over heads, and all blocks count as partial.

Limits: numbers of blocks fit in 32 bits.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

from cute_attn.device import warp
from cute_attn.kernels import fakes
from cute_attn.tiles.helpers import BlockListsTile
from cute_attn.traits import BLOCK_OPS, FULL, LISTED_ROWS, PARTIAL, Traits


class BlockCounts(NamedTuple):
    """The key blocks of each query block, or the query blocks of each key block.

    partial_count, full_count: int32 (batch, nheads, blocks); partial, full: int32 (batch, nheads, blocks, others).
    """

    partial_count: cute.Tensor
    partial: cute.Tensor
    full_count: cute.Tensor
    full: cute.Tensor


Counts = Annotated[tuple, lambda kernel: tuple(fakes.plain(Int32, ndim) for ndim in (3, 4, 3, 4))]
"""The tensors of ``BlockCounts``."""


@dataclass(frozen=True)
class ListsOfKinds:
    """Base of kernels for (traits, tile) that read kinds of blocks; each warp writes the lists of one line."""

    op: ClassVar[str]

    traits: Traits
    tile: BlockListsTile

    @classmethod
    def supports(cls, traits: Traits) -> str | None:
        if traits.op != cls.op:
            return f"it computes {cls.op}, not {traits.op}"
        plain = Traits(traits.op, "sm80", "bf16", LISTED_ROWS)
        return None if traits == plain else f"it reads kinds of blocks alone; accepted: {plain}"

    @classmethod
    def default_tile(cls, traits: Traits, target: str) -> BlockListsTile:
        return BlockListsTile.default(target)

    def launch(self, kernel: Any, lines: Int32, stream: cuda.CUstream) -> None:
        """Launch ``kernel`` with one warp per line: a row or a column of the table of blocks."""
        grid = [cute.ceil_div(lines, self.tile.num_warps), 1, 1]
        kernel.launch(grid=grid, block=[self.tile.num_threads, 1, 1], stream=stream)

    def line(self) -> Int32:
        """Index of the line that this warp handles."""
        return cute.arch.block_idx()[0] * self.tile.num_warps + cute.arch.thread_idx()[0] // warp.LANES


class ListBlocks(ListsOfKinds):
    """The block_lists kernel for (traits, tile); ``__call__`` launches it."""

    op = BLOCK_OPS[1]

    # ---- host ----

    @cute.jit
    def __call__(
        self, mKinds: fakes.Kinds, of_queries: Counts, of_keys: Counts, stream: cuda.CUstream
    ) -> None:
        batch, nheads, rows, columns = mKinds.shape
        self.launch(self.kernel(mKinds, of_queries, of_keys), batch * nheads * (rows + columns), stream)

    # ---- device ----

    @cute.kernel
    def kernel(self, mKinds: cute.Tensor, of_queries: tuple, of_keys: tuple) -> None:
        self.write(mKinds, BlockCounts(*of_queries), BlockCounts(*of_keys), self.line())

    # ---- device code that tests also run on the host ----

    @cute.jit
    def write(self, mKinds: cute.Tensor, of_queries: BlockCounts, of_keys: BlockCounts, line: Int32) -> None:
        """Write the lists of one line with a warp. Lines are the rows and then the columns of each (batch, head)."""
        batch, nheads, rows, columns = mKinds.shape
        number, at = line // (rows + columns), line % (rows + columns)
        b, h = number // nheads, number % nheads
        if b < batch:
            if at < rows:
                self.write_line(mKinds[b, h, at, None], *(of_line(x, b, h, at) for x in of_queries))
            else:
                at = at - rows
                self.write_line(mKinds[b, h, None, at], *(of_line(x, b, h, at) for x in of_keys))

    @cute.jit
    def write_line(
        self,
        kinds: cute.Tensor,
        partial_count: cute.Tensor,
        partial: cute.Tensor,
        full_count: cute.Tensor,
        full: cute.Tensor,
    ) -> None:
        """Write the counts and the lists of partial and full blocks of one line of kinds."""
        lane, lanes, size = warp.lane(), warp.width(), cute.size(kinds)
        partials, fulls = Int32(0), Int32(0)
        for start in cutlass.range(0, size, lanes):
            is_partial, is_full = _kinds(kinds, start + lane, size)
            partials += warp.count(warp.ballot(is_partial))
            fulls += warp.count(warp.ballot(is_full))
        if lane == 0:
            partial_count[0] = partials
            full_count[0] = fulls
        partials_before, fulls_before = Int32(0), Int32(0)
        for start in cutlass.range(0, size, lanes):
            block = start + lane
            is_partial, is_full = _kinds(kinds, block, size)
            votes, full_votes = warp.ballot(is_partial), warp.ballot(is_full)
            before = partials_before + warp.count_before(votes)
            full_before = fulls_before + warp.count_before(full_votes)
            place = before if is_partial else partials + block - before
            full_place = full_before if is_full else fulls + block - full_before
            if block < size:
                partial[place] = block
                full[full_place] = block
            partials_before += warp.count(votes)
            fulls_before += warp.count(full_votes)


def _kinds(kinds: cute.Tensor, block: Int32, size: Int32) -> tuple[Boolean, Boolean]:
    """(block is partial, block is full); both False beyond the end of the line."""
    kind = Int32(kinds[cutlass.min(block, size - 1)])
    return (kind == PARTIAL) & (block < size), (kind == FULL) & (block < size)


def of_line(x: cute.Tensor, b: Int32, h: Int32, at: Int32) -> cute.Tensor:
    """The line's list if ``x`` has lists, else its count, as a tensor of one element."""
    if cute.rank(x) == 4:
        return x[b, h, at, None]
    return cute.make_tensor(x.iterator + cute.crd2idx((b, h, at), x.layout), cute.make_layout(1))


Visits = Annotated[tuple, lambda kernel: (fakes.plain(Int32, 4), fakes.plain(Int32, 4))]
"""(counts, blocks): see ``cute_attn.work.block_range.BlockLists``."""


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a call and its mask: sequence lengths, sizes of the mask's blocks, and query heads per kv head.

    in_order: 1 for the lists of a cache, else 0.
    """

    seqlen_q: Int32
    seqlen_k: Int32
    block_q: Int32
    block_k: Int32
    group: Int32
    in_order: Int32


@dataclass(frozen=True)
class VisitLine:
    """The list of one query block or one key block.

    Attributes:
        batch, head: indices in the table of kinds.
        heads: number of heads, starting at ``head``, that share the list.
        block: the query or key block whose list this is.
        size: number of key or query blocks that may be listed.
        missing: rows by which the last of these blocks exceeds the sequence.
        is_masked: True if all listed blocks need a mask.
    """

    batch: Int32
    head: Int32
    heads: Int32
    block: Int32
    size: Int32
    missing: Int32
    is_masked: Boolean


class ListVisits(ListsOfKinds):
    """The block_visits kernel for (traits, tile); ``__call__`` launches it."""

    op = BLOCK_OPS[2]

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        mKinds: fakes.Kinds,
        of_queries: Visits,
        of_keys: Visits,
        seqlen_q: Int32,
        seqlen_k: Int32,
        block_q: Int32,
        block_k: Int32,
        group: Int32,
        in_order: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the kernel. group: query heads per kv head, or 1 if mKinds has one head. in_order: 1 for a cache."""
        sizes = BlockSizes(seqlen_q, seqlen_k, block_q, block_k, group, in_order)
        lines = mKinds.shape[0] * mKinds.shape[1] * (of_queries[0].shape[2] + of_keys[0].shape[2])
        self.launch(self.kernel(mKinds, of_queries, of_keys, sizes), lines, stream)

    # ---- device ----

    @cute.kernel
    def kernel(self, mKinds: cute.Tensor, of_queries: tuple, of_keys: tuple, sizes: BlockSizes) -> None:
        self.write(mKinds, of_queries, of_keys, sizes, self.line())

    # ---- device code that tests also run on the host ----

    @cute.jit
    def write(
        self, mKinds: cute.Tensor, of_queries: tuple, of_keys: tuple, sizes: BlockSizes, line: Int32
    ) -> None:
        """Write one list with a warp. Lines are the query blocks and then the key blocks of each (batch, head)."""
        batch, nheads, _, _ = mKinds.shape
        rows, columns = Int32(of_queries[0].shape[2]), Int32(of_keys[0].shape[2])
        number, at = line // (rows + columns), line % (rows + columns)
        b, h = number // nheads, number % nheads
        missing_q, missing_k = rows * LISTED_ROWS - sizes.seqlen_q, columns * LISTED_ROWS - sizes.seqlen_k
        if b < batch:
            if at < rows:
                heads = cutlass.select_(sizes.in_order == 1, sizes.group, Int32(1))
                first = h // heads * heads
                one = VisitLine(b, first, heads, at, columns, missing_k, sizes.in_order == 1)
                self.write_line(
                    mKinds, one, sizes, True, of_queries[0][b, h, at, None], of_queries[1][b, h, at, None]
                )
            else:
                at = at - rows
                first = h // sizes.group * sizes.group
                is_masked = (at == columns - 1) & (missing_k > 0)
                one = VisitLine(b, first, sizes.group, at, rows, missing_q, is_masked)
                self.write_line(
                    mKinds, one, sizes, False, of_keys[0][b, h, at, None], of_keys[1][b, h, at, None]
                )

    @cute.jit
    def write_line(
        self,
        mKinds: cute.Tensor,
        line: VisitLine,
        sizes: BlockSizes,
        of_query: Constexpr,
        counts: cute.Tensor,
        blocks: cute.Tensor,
    ) -> None:
        """Write the counts and blocks of one list. of_query: True for a query block's list."""
        lane, lanes = warp.lane(), warp.width()
        fulls, partials, last = Int32(0), Int32(0), Int32(0)
        for start in cutlass.range(0, line.size, lanes, unroll=1):
            kind, as_listed = self.kind(mKinds, line, sizes, of_query, start + lane)
            fulls += warp.count(warp.ballot(as_listed == FULL))
            partials += warp.count(warp.ballot(as_listed == PARTIAL))
            is_last = (start + lane == line.size - 1) & (kind > 0)
            last += warp.count(warp.ballot(is_last))
        if lane == 0:
            counts[0] = fulls * LISTED_ROWS
            counts[1] = (fulls + partials) * LISTED_ROWS - last * line.missing
        fulls_before, partials_before = Int32(0), Int32(0)
        for start in cutlass.range(0, line.size, lanes, unroll=1):
            block = start + lane
            kind, as_listed = self.kind(mKinds, line, sizes, of_query, block)
            full_votes, votes = warp.ballot(as_listed == FULL), warp.ballot(as_listed == PARTIAL)
            full_before = fulls_before + warp.count_before(full_votes)
            before = partials_before + warp.count_before(votes)
            place = fulls + partials + block - full_before - before
            place = fulls + before if as_listed == PARTIAL else place
            place = full_before if as_listed == FULL else place
            if block < line.size:
                blocks[place] = 2 * block + Int32(kind == PARTIAL)
            fulls_before += warp.count(full_votes)
            partials_before += warp.count(votes)

    @cute.jit
    def kind(
        self, mKinds: cute.Tensor, line: VisitLine, sizes: BlockSizes, of_query: Constexpr, other: Int32
    ):
        """(kind, listed kind) of block ``other``: a full block that needs a mask is listed as partial. 0 if beyond."""
        block = cutlass.min(other, line.size - 1)
        row, column = (line.block, block) if of_query else (block, line.block)
        first_row, last_row = overlapped(row, sizes.block_q, sizes.seqlen_q, mKinds.shape[2])
        first_column, last_column = overlapped(column, sizes.block_k, sizes.seqlen_k, mKinds.shape[3])
        kinds = mKinds[line.batch, None, None, None]  # fewer registers than by four indices below
        most, least = Int32(0), Int32(FULL)
        for head in cutlass.range(line.head, line.head + line.heads, unroll=1):
            for i in cutlass.range(first_row, last_row + 1, unroll=1):
                for j in cutlass.range(first_column, last_column + 1, unroll=1):
                    one = Int32(kinds[head, i, j])
                    most, least = cutlass.max(most, one), cutlass.min(least, one)
        kind = least if least == FULL else cutlass.min(most, PARTIAL)
        kind = kind if other < line.size else Int32(0)
        needs_mask = line.is_masked | ((block == line.size - 1) & (line.missing > 0))
        return kind, cutlass.min(kind, PARTIAL) if needs_mask else kind


def overlapped(block: Int32, size: Int32, seqlen: Int32, count: Int32) -> tuple[Int32, Int32]:
    """First and last of the mask's ``count`` blocks, of ``size`` rows each, that a listed block overlaps."""
    first, last = block * LISTED_ROWS, cutlass.min(block * LISTED_ROWS + LISTED_ROWS, seqlen) - 1
    return cutlass.min(first // size, count - 1), cutlass.min(last // size, count - 1)
