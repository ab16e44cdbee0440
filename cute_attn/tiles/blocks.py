"""Tiles of the kernels that make block masks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from cute_attn.tiles.base import WarpTile, choice
from cute_attn.traits import BLOCK_OPS, Traits

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
