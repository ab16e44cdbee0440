"""Q of a work tile in shared memory: which work tiles use it, and when it is free again."""

import enum
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Constexpr, Int32, cute

from cute_attn.device.pipeline import Accessed, Pipeline
from cute_attn.rows.tma import TmaTiles
from cute_attn.work.block_range import BlockRange
from cute_attn.work.query_tiles import QueryTile


class LastUse(enum.Enum):
    """The last use that a work tile makes of Q's buffer."""

    COPY = enum.auto()
    """The copy of Q into registers, with ``q_in_regs``."""
    PRODUCTS = enum.auto()
    """The last S = Q K^T."""
    STORE = enum.auto()
    """The store of O, which reuses the memory with ``share_qo_smem``."""


@dataclass(frozen=True)
class QueryBuffer:
    """One stage for Q, with its pipeline; use n is the n-th work tile that uses it."""

    tensor: cute.Tensor  # (64, head_dim, warpgroups along the rows)
    pipeline: Pipeline
    tile: Constexpr  # ForwardSm90Tile

    @property
    def last_use(self) -> LastUse:
        """The use after which the consumers release the buffer."""
        if self.tile.share_qo_smem:
            return LastUse.STORE
        return LastUse.COPY if self.tile.q_in_regs else LastUse.PRODUCTS

    @property
    def used_without_keys(self) -> bool:
        """With ``share_qo_smem``, even work tiles that see no key use the buffer: they store O's zeros from it."""
        return self.tile.share_qo_smem

    @cute.jit
    def used(self, blocks: BlockRange) -> Boolean | bool:
        """If False, the work tile that visits ``blocks`` neither loads nor releases the buffer."""
        return True if self.used_without_keys else blocks.begin < blocks.end

    @cute.jit
    def load(self, q: TmaTiles, tile: QueryTile, n: Int32) -> None:
        """By the producer warp: load Q of one work tile, 64 rows at a time."""
        tiles = q.sequence_of_tile(tile.info.offset_q + tile.row0, tile)
        self.pipeline.producer_acquire(n)
        for group in cutlass.range_constexpr(cute.size(self.tensor, mode=[2])):
            q.load_part(tiles, group, self.tensor[None, None, group], self.pipeline, n)

    @cute.jit
    def release_after(self, use: Constexpr, n: Int32) -> None:
        """By each consumer warp after ``use``, a :class:`LastUse`: release the buffer if it is :attr:`last_use`."""
        if cutlass.const_expr(use is self.last_use):
            products: Constexpr = use is LastUse.PRODUCTS
            self.pipeline.consumer_release(n, Accessed.BY_WGMMA if products else Accessed.BY_THREADS)
