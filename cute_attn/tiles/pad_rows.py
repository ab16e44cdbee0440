"""Tile of the kernels that copy rows to padded rows and back."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cute_attn.tiles.base import Tile, choice
from cute_attn.traits import PADDED_TENSORS, Traits, aligned_head_dim


@dataclass(frozen=True)
class PadRowsTile(Tile):
    """Tile of the padding copies.

    Attributes:
        num_threads: threads per CTA.
        vectors: maximum number of 8-byte vectors that a thread loads before it stores any, unless rows are very long.
    """

    num_threads: int = choice(256, 128, 256, 512)
    vectors: int = choice(4, 2, 4, 8)

    VECTOR_BYTES: ClassVar[int] = 8
    """Bytes that a thread stores at once. 16-bit elements are loaded one by one, so adjacent threads load from
    addresses 8 bytes apart, for which L1 needs a third of the time of 16 bytes apart."""
    ROWS: ClassVar[int] = 8
    """``ROWS`` adjacent rows of any head dim are a multiple of 16 bytes."""

    def vector(self, traits: Traits) -> int:
        """Elements of a vector of ``VECTOR_BYTES``."""
        return self.VECTOR_BYTES // traits.element_bytes

    def rows(self, traits: Traits, head_dim: int) -> int:
        """Rows per CTA of a tensor with ``head_dim`` columns."""
        vectors = aligned_head_dim(traits.dtype, head_dim) // self.vector(traits)
        return max(self.vectors * self.num_threads // vectors // self.ROWS, 1) * self.ROWS

    def registers(self, traits: Traits) -> int:
        longest = max(traits.head_dim, traits.head_dim_v)
        vectors = self.rows(traits, longest) * aligned_head_dim(traits.dtype, longest) // self.vector(traits)
        return 4 * -(-vectors // self.num_threads) + 40

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        known = traits.op in PADDED_TENSORS
        yield None if known else f"op is {traits.op}; accepted: {', '.join(PADDED_TENSORS)}"
        yield self.threads_reason()
        yield self.unless(1 <= self.vectors <= 16, "vectors", "1 to 16")
