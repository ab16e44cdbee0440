"""Lists a mask's partial and full blocks in the format of FlexAttention's BlockMask. Runs on every target.

    partial_count[b, h, i], partial[b, h, i, :]     the partial key blocks of query block i, in order, then all others
    full_count[b, h, i], full[b, h, i, :]           the full key blocks of query block i, in order, then all others
    and the same lists of query blocks for each key block

A warp reads a row or a column of the table of kinds, 32 blocks at a time. It counts the blocks of each kind; then each
lane writes its block at the position given by the votes of the lanes before it. Lists are thus in order without a sort,
and no warp waits for another.

Limits: numbers of blocks fit in 32 bits.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Int32, cute

from cute_attn.device import warp
from cute_attn.kernels import fakes
from cute_attn.tiles.blocks import BlockListsTile
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
