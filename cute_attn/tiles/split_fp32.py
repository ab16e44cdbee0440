"""Tile of the kernels that split fp32 tensors into fp16 terms."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cute_attn.tiles.base import Tile, choice, padded
from cute_attn.traits import Traits


@dataclass(frozen=True)
class SplitFp32Tile(Tile):
    """Tile of the split.

    Attributes:
        num_threads: threads per CTA; eight adjacent threads split a row.
        blocks: CTAs per tensor, at most ``num_threads``; in the first kernel, each leaves one partial result.
    """

    num_threads: int = choice(256, 128, 256, 512)
    blocks: int = choice(256, 128, 256)

    LANES: ClassVar[int] = 8
    """Adjacent threads per row; each splits 16 bytes of every 128."""

    @property
    def rows(self) -> int:
        """Rows that a CTA splits at a time."""
        return self.num_threads // self.LANES

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        return {"numbers": (0, 2 * 4 * self.num_threads // 32)}

    def registers(self, traits: Traits) -> int:
        return padded(max(traits.head_dim, traits.head_dim_v)) // self.LANES + 40

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        yield self.threads_reason()
        most = self.num_threads
        yield self.unless(1 <= self.blocks <= most, "blocks", f"1 to {most}, num_threads")
