"""Tiles of the kernels around attention with a cache: combine and append."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

from cute_attn.tiles.base import Tile, areas_in_order, choice
from cute_attn.traits import LARGE_HEAD_DIM, Traits, aligned_head_dim

MAX_PARTIALS = 512
"""Maximum number of partial results that the combine kernel merges per row."""
FOLDED_KEYS = 1024
"""Keys per split in calls with ``same_bits``, counted from row 0: a multiple of the tile's key block."""


def partial_columns(traits: Traits) -> int:
    """Columns of a partial result, rounded up to whole 16-byte vectors."""
    return aligned_head_dim("fp32", traits.head_dim_v)


@dataclass(frozen=True)
class CacheCall:
    """Properties of a call with a cache that determine its tile.

    Attributes:
        seqlen_q: maximum number of queries per sequence.
        capacity: rows per cache entry.
        group: query heads per key head.
        page_size: rows per page, 0 for a contiguous cache.
        same_bits: results must not depend on the call's shapes, so all tiles have the same number of keys.
        planes: number of sequences times key heads if there are too few keys to split and not ``same_bits``, else 0.
    """

    seqlen_q: int = 1
    capacity: int = 1 << 16
    group: int = 1
    page_size: int = 0
    same_bits: bool = False
    planes: int = 0


@dataclass(frozen=True)
class CombineTile(Tile):
    """Tile of the combine kernel.

    Attributes:
        rows: rows per CTA, a row being one query of one head.
        groups: groups of threads that divide the partial results of a row.
        unroll: partial results that a thread loads at once.
        eager: the first partial results are loaded together with the LSEs, before their weights are known.
        in_order: one group adds the partial results from the last to the first, whatever their number.
    """

    rows: int = choice(4, 1, 2, 4, 8)
    groups: int = choice(1, 1, 2, 4, 8)
    unroll: int = choice(4, 2, 4, 8, 16)
    eager: bool = False
    in_order: bool = field(default=False, kw_only=True)

    @staticmethod
    def of(partials: int, eager: bool = False) -> "CombineTile":
        """The tile for ``partials`` partial results per row; above four, several groups of threads divide them."""
        if partials <= 4:
            return CombineTile(rows=4, groups=1, eager=eager)
        groups = 8 if partials >= 64 else 4
        return CombineTile(1, groups, _unroll(partials, groups) if eager else 4, eager)

    def for_head_dim(self, head_dim_v: int) -> Self:
        """This tile; above 256 columns, with ``unroll`` at most 4, because rows are longer."""
        return self if head_dim_v <= LARGE_HEAD_DIM else replace(self, unroll=min(self.unroll, 4))

    @property
    def most_partials(self) -> int:
        """Maximum number of partial results per row."""
        return MAX_PARTIALS

    def threads_per_row(self, traits: Traits) -> int:
        """Adjacent threads of a group that load a partial row: the number that leaves the fewest idle.

        Each thread loads at most two 16-byte vectors of the row, above head dim 256 four.
        """
        vectors = partial_columns(traits) // 4
        each = 2 if traits.head_dim_v <= LARGE_HEAD_DIM else 4
        enough = [threads for threads in (32, 16, 8, 4, 2, 1) if each * threads >= vectors]
        return min(enough, key=lambda threads: -(-vectors // threads) * threads)

    def vectors(self, traits: Traits) -> int:
        """16-byte vectors of a partial row per thread."""
        return -(-partial_columns(traits) // (4 * self.threads_per_row(traits)))

    def num_threads(self, traits: Traits) -> int:
        return self.rows * self.groups * self.threads_per_row(traits)

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """Areas of LSEs, weights, and with several groups each group's sums of weighted rows and of weights."""
        sizes = {
            "lse": 4 * self.rows * self.most_partials,
            "weights": 4 * self.rows * self.most_partials,
            "sums": 4 * self.rows * self.groups * partial_columns(traits) if self.groups > 1 else 0,
            "totals": 4 * self.rows * self.groups if self.groups > 1 else 0,
        }
        return areas_in_order(sizes)

    def registers(self, traits: Traits) -> int:
        return 4 * self.vectors(traits) * (self.unroll + 1) + self.unroll + 40

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        yield self.unless_positive("rows", "groups", "unroll")
        alone = not (self.in_order and (self.groups > 1 or self.eager))
        yield self.unless(alone, "in_order", f"false with {self.groups} groups and eager={self.eager}")
        yield None if self.num_threads(traits) <= 1024 else self._threads_refused(traits, "up to 1024")

    def _threads_refused(self, traits: Traits, accepted: str) -> str:
        return (
            f"rows and groups are {self.rows} and {self.groups}, {self.num_threads(traits)} threads with "
            f"{self.threads_per_row(traits)} for each; accepted: {accepted}"
        )


def _unroll(partials: int, groups: int) -> int:
    """Partial results that a thread loads at once, such that one or few rounds of loads suffice for a row."""
    return 16 if partials > 8 * groups else 8


@dataclass(frozen=True)
class CombineStreamKTile(CombineTile):
    """Tile of the combine kernel after a kernel with stream-K.

    Attributes:
        tile_m, tile_n, pack_heads: the fields of these names in the tile of the kernel with stream-K.
        by_range: each CTA belongs to a stream-K range and merges the work tile that starts but does not end in it.
            Otherwise it belongs to a work tile. With many work tiles, most are not divided and need no CTA.
        kernel_ctas: maximum number of that kernel's CTAs; each leaves one partial result per row. A lower maximum needs
            less shared memory, so that combine CTAs can start while that kernel nearly fills the multiprocessors.
    """

    tile_m: int = 64
    tile_n: int = 64
    pack_heads: int = 1
    by_range: bool = False
    kernel_ctas: int = MAX_PARTIALS

    @property
    def most_partials(self) -> int:
        return self.kernel_ctas

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """Areas of :class:`CombineTile`, and one for the work tile that the first warp found."""
        areas = CombineTile.smem_areas(self, traits)
        end = max(end for _, end in areas.values())
        return areas | {"work_tile": (end, end + 32)}

    @staticmethod
    def after(tile: Any, traits: Traits, work_tiles: int, ctas: int, queries: int) -> "CombineStreamKTile":
        """The tile after a kernel with ``tile``, whose ``ctas`` CTAs divide at most ``work_tiles`` work tiles.

        queries: maximum per sequence. Each CTA must look up its work tile, so few CTAs with many rows are best.
        """
        partials = ctas // max(work_tiles, 1)
        groups = next((n for n in (8, 4, 2) if partials >= 4 * n), 1)
        of_tile = min(queries * tile.pack_heads, tile.tile_m)
        rows, unroll = (1, _unroll(partials, groups)) if groups > 1 else (4 if of_tile <= 4 else 16, 4)
        chosen = CombineStreamKTile(
            rows, groups, unroll, True, tile.tile_m, tile.tile_n, tile.pack_heads, work_tiles > ctas, ctas
        )
        while chosen.num_threads(traits) % 32:
            chosen = replace(chosen, rows=2 * chosen.rows)
        return chosen.for_head_dim(traits.head_dim_v)

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        yield self.unless_positive("tile_m", "tile_n", "pack_heads", "kernel_ctas")
        divides = self.tile_m % self.pack_heads == 0
        yield self.unless(divides, "pack_heads", f"divisors of tile_m, {self.tile_m}")
        yield from super().reasons(traits)
        yield self._threads_refused(traits, "whole warps of 32") if self.num_threads(traits) % 32 else None


@dataclass(frozen=True)
class AppendTile(Tile):
    """Tile of the append kernel.

    Attributes:
        num_threads: threads per CTA; each copies 16 bytes of a row, or ``traits.alignment`` elements if that is set.
    """

    num_threads: int = choice(128, 64, 128, 256)

    def registers(self, traits: Traits) -> int:
        return 64

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        yield self.threads_reason()
