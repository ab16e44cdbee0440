"""Tiles of the kernels around attention with a cache: combine and append."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

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
            "lse": 4 * self.rows * MAX_PARTIALS,
            "weights": 4 * self.rows * MAX_PARTIALS,
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
        if self.num_threads(traits) > 1024:
            yield (
                f"rows and groups are {self.rows} and {self.groups}, {self.num_threads(traits)} threads with "
                f"{self.threads_per_row(traits)} for each; accepted: up to 1024"
            )


def _unroll(partials: int, groups: int) -> int:
    """Partial results that a thread loads at once, such that one or few rounds of loads suffice for a row."""
    return 16 if partials > 8 * groups else 8


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
