"""Tiles of the kernels that make block masks, copy rows to padded rows and back, and split fp32 tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from cute_attn.tiles.base import Tile, WarpTile, choice, padded
from cute_attn.traits import BLOCK_OPS, PADDED_TENSORS, Traits, aligned_head_dim

WARP = 32


@dataclass(frozen=True)
class BlockKindsTile(WarpTile):
    """Tile of the kernel that finds the kinds of a mask's blocks.

    Attributes:
        tile_m, tile_n: queries and keys of a block; the result is one kind per block.
        num_warps: warps per CTA; each evaluates one block at a time.
        rows: rows evaluated between two checks of whether the block's kind is known.
    """

    tile_m: int = 128
    tile_n: int = 128
    num_warps: int = choice(4, 2, 4, 8)
    rows: int = choice(4, 2, 4, 8)

    MOST_VALUES: ClassVar[int] = 32
    """Maximum number of values per query in shared memory, of up to 8 bytes each."""

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """Upper bounds of the areas; a mask with fewer values uses less."""
        return {"queries": (0, 8 * self.MOST_VALUES * self.tile_m)}

    def registers(self, traits: Traits) -> int:
        return 64 + 4 * self.tile_n // WARP

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        yield None if traits.op == BLOCK_OPS[0] else f"op is {traits.op}; accepted: {BLOCK_OPS[0]}"
        for name in ("tile_m", "tile_n"):
            size = getattr(self, name)
            yield self.unless(0 < size <= 512 and size % WARP == 0, name, f"multiples of {WARP} up to 512")
        yield self.unless(1 <= self.num_warps <= 32, "num_warps", "1 to 32")
        divides = self.rows >= 1 and self.tile_m % self.rows == 0
        yield self.unless(divides, "rows", f"divisors of tile_m, {self.tile_m}")


@dataclass(frozen=True)
class BlockListsTile(WarpTile):
    """Tile of the kernels that list blocks by their kinds.

    Attributes:
        num_warps: warps per CTA; each writes the lists of one row or column of blocks.
    """

    num_warps: int = choice(4, 1, 2, 4, 8)

    @classmethod
    def default(cls, target: str) -> Self:
        """The tile for a target. On sm120, ptxas spills so that 48 warps of small CTAs fit; 32 warps avoid that."""
        return cls(32) if target == "sm120" else cls()

    def registers(self, traits: Traits) -> int:
        return 48

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        accepted = BLOCK_OPS[1:]
        yield None if traits.op in accepted else f"op is {traits.op}; accepted: {', '.join(accepted)}"
        yield self.unless(1 <= self.num_warps <= 32, "num_warps", "1 to 32")


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
