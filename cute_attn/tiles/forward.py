"""Tiles of the forward kernels, including those with a cache or tangents."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from cute_attn.epilogues.names import are_functions
from cute_attn.tiles.base import (
    COMPUTE_REGISTERS,
    LOAD_REGISTERS,
    Tile,
    WarpTile,
    areas_in_order,
    choice,
    padded,
    row_bytes,
)
from cute_attn.traits import Traits

SM90_SHARED_MEMORY = 233_472
"""Shared memory of a Hopper multiprocessor, in bytes; each CTA reserves 1024 bytes in addition to its areas."""

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 SXM and an H200."""

PACKS = (1, 2, 4, 8, 16, 32, 64)
GAIN = 1.1
"""Heads are packed if that divides the number of computed rows by at least this factor."""
TILE_ROWS = 64
"""Fixed cost of a work tile (K and V, prologue and epilogue), expressed as a number of rows."""


class Sizes(NamedTuple):
    """Sizes of a call that determine its tile.

    Attributes:
        seqlen_q, seqlen_k: lengths of the longest sequences.
        group: query heads per key head.
        pairs: number of (sequence, query head) pairs, or None if unknown; it is then assumed to fill the GPU.
        window: maximum number of keys that a query sees in a window, 0 without a window.
    """

    seqlen_q: int
    seqlen_k: int
    group: int
    pairs: int | None
    window: int


def may_pack_heads(traits: Traits) -> bool:
    """True if a work tile may have rows of several heads: no epilogue assumes one head per work tile.

    ALiBi does not assume that, nor do a bias and functions in kvcache kernels; in other kernels, these do.
    """
    if traits.op == "kvcache":
        return are_functions(traits.epilogues)
    return not (traits.bias or traits.dropout or traits.epilogues)


def best_packing(tiles: Sequence[Any], plain: Any, seqlen_q: int, group: int, varlen: bool) -> Any:
    """Choose the tile and ``pack_heads`` that compute the fewest rows; None if ``plain`` computes hardly more.

    Args:
        tiles: forward tiles of one kernel, without packing.
        plain: the tile to compare with.
        seqlen_q: maximum number of queries per sequence.
        group: query heads per key head.
        varlen: whether sequences are packed; then their lengths differ, and only the longest is known here.
    """
    candidates = [(tile, n) for tile in tiles for n in PACKS if n < 2 * group and n <= tile.tile_m]
    lengths = (seqlen_q, -(-seqlen_q // 2)) if varlen and group > 1 else (seqlen_q,)

    def count(tile: Any, pack: int) -> int:
        """Number of work tiles per key head."""
        return -(-group // pack) * sum(-(-n // (tile.tile_m // pack)) for n in lengths)

    best, pack = min(candidates, key=lambda one: (count(*one) * (one[0].tile_m + TILE_ROWS), -one[1]))
    gain = count(plain, plain.pack_heads) * plain.tile_m / max(count(best, pack) * best.tile_m, 1)
    return replace(best, pack_heads=pack) if gain >= GAIN and (pack > 1 or best.tile_m >= seqlen_q) else None


def pack_heads_reason(pack_heads: int, rows: int, traits: Traits) -> str | None:
    """Why a tile for ``traits`` cannot pack ``pack_heads`` heads, a divisor of ``rows``, or None."""
    accepted = [n for n in PACKS if rows % n == 0]
    if pack_heads not in accepted:
        words = f"{', '.join(map(str, accepted[:-1]))} or {accepted[-1]}"
        return f"pack_heads is {pack_heads}; accepted: {words}"
    if pack_heads > 1 and not may_pack_heads(traits):
        return (
            f"pack_heads is {pack_heads}; accepted: 1 with a bias, dropout or users' epilogues, for {traits}"
        )
    return None


def pages_reason(tile: Any, traits: Traits) -> str | None:
    """Why TMA cannot load boxes of the tile's ``page_rows``, or None."""
    rows = tile.page_rows
    if not traits.paged:
        return tile.unless(not rows, "page_rows", f"0 without pages, for {traits}")
    fits = rows >= 8 and rows % 8 == 0 and tile.tile_n % rows == 0
    return tile.unless(fits, "page_rows", f"multiples of 8 that divide tile_n, {tile.tile_n}, for {traits}")


@dataclass(frozen=True)
class ForwardSm80Tile(WarpTile):
    """Tile of the Ampere forward.

    Attributes:
        tile_m: rows per CTA, a multiple of 16 per warp along the rows.
        tile_n: keys per step, a multiple of 16 (of 32 with the flash dropout mask) for each of ``key_groups``.
        num_warps: warps of a key group; num_warps / warps_n of them divide the rows.
        num_stages: stages of K and V. 1: the next step's K loads during the softmax and V during Q K^T, with two
            barriers per step; 2 or more: K and V load num_stages - 1 steps ahead, with one barrier per step.
        q_in_regs: Q is read from shared memory once and kept in registers.
        qk_unroll: MMA steps of 16 columns of head_dim (of 8 in fp32) that Q K^T loads at a time; 0 for all steps.
            Fewer steps need fewer operand registers. With one key group, any value except 0 also keeps the row
            statistics in shared memory.
        swizzle_bits: log2 of the number of 16-byte vectors over which shared-memory rows are permuted; -1: maximum.
        key_groups: groups of ``num_warps`` warps that divide the keys of every step. Each group loads only its keys,
            waits for no other group until the last step, and has separate row statistics and O, merged at the end.
            Meant for few rows: otherwise one warp would read all of K and V from shared memory, and too few bytes
            would be in flight.
        pack_heads: packed GQA: the number of query heads of one key head in a work tile, which reads K and V once for
            all of these heads. A power of two up to 64.
        blocks_per_sm: CTAs per multiprocessor in a kvcache kernel.
        warps_n: warps that work on the same rows and divide a step's keys and the columns of V and O. Meant for large
            head dims, where one warp cannot hold O. Requires one stage.
    """

    tile_m: int = choice(128, 16, 32, 64, 128, 192, 256)
    tile_n: int = choice(64, *range(16, 193, 16))
    num_warps: int = choice(4, 2, 4, 8)
    num_stages: int = choice(1, 1, 2, 3)
    q_in_regs: bool = False
    swizzle_bits: int = -1
    qk_unroll: int = choice(0, 0, 1, 2, 4)
    key_groups: int = choice(1, 1, 2, 4, 8)
    pack_heads: int = choice(1, 1, 2, 4, 8, 16, 32, 64)
    blocks_per_sm: int = choice(1, 1, 2, 3, 4)
    warps_n: int = choice(1, 1, 2, 4)

    @property
    def warps_m(self) -> int:
        """Warps of a key group along the rows."""
        return self.num_warps // self.warps_n

    @property
    def queries(self) -> int:
        """Queries of a work tile, each with one row per packed head."""
        return self.tile_m // self.pack_heads

    @property
    def group_keys(self) -> int:
        """Keys per step of one key group."""
        return self.tile_n // self.key_groups

    @property
    def group_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def num_threads(self) -> int:
        return self.group_threads * self.key_groups

    @property
    def stats_in_smem(self) -> bool:
        """True if row maxima and sums are in shared memory during Q K^T.

        This saves eight registers, so that a tile of 128 queries and 64 keys does not spill.
        """
        return self.qk_unroll > 0 and self.key_groups == 1

    @property
    def stats_bytes(self) -> int:
        """Shared memory for the row statistics, in bytes: two fp32 per row and lane, with four lanes per row."""
        return 2 * 4 * 4 * self.tile_m * self.warps_n if self.stats_in_smem else 0

    @staticmethod
    def operand_bytes(traits: Traits) -> int:
        """Bytes of an element of Q, K, V and P in shared memory."""
        return traits.element_bytes

    def row_bytes(self, traits: Traits) -> tuple[int, int]:
        """Bytes in shared memory of a row of Q and K, and of V and O; a variant with tangents doubles them."""
        d, dv = (self.operand_bytes(traits) * padded(d) for d in (traits.head_dim, traits.head_dim_v))
        return d, dv

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """First byte and end of Q, K and V of all stages, O and the row statistics; O reuses the operands' memory."""
        row, row_v = self.row_bytes(traits)
        q, o = self.tile_m * row, 0 if traits.dtype == "fp32" else self.tile_m * row_v
        k_end = q + self.tile_n * row * self.num_stages
        v_end = k_end + self.tile_n * row_v * self.num_stages
        merge = self.merge_bytes(traits)
        stats = max(v_end, o, q + merge)
        end = stats + self.stats_bytes
        return {
            "q": (0, q),
            "k": (q, k_end),
            "v": (k_end, v_end),
            "o": (0, o),
            "merge": (q, q + merge),
            "stats": (stats, end),
            **self._exchange_areas(end, traits),
        }

    def _exchange_areas(self, start: int, traits: Traits) -> dict[str, tuple[int, int]]:
        """First byte and end of P, and of one number per row and each of its warps, if ``warps_n`` is above 1."""
        if self.warps_n == 1:
            return {}
        end = start + self.tile_m * self.tile_n * self.operand_bytes(traits)
        return {"p": (start, end), "exchange": (end, end + 4 * self.tile_m * self.warps_n)}

    def merge_bytes(self, traits: Traits) -> int:
        """Shared memory for O and row statistics of all key groups except the first, in bytes."""
        rows = self.tile_m // self.num_warps // 8  # of a thread
        values = self.tile_m * padded(traits.head_dim_v) // self.group_threads + 2 * rows
        return 4 * values * self.group_threads * (self.key_groups - 1)

    def registers(self, traits: Traits) -> int:
        rows, dv = self.tile_m // self.warps_m, padded(traits.head_dim_v)
        acc_o, acc_s = rows * dv // 32 // self.warps_n, rows * self.group_keys // 32 // self.warps_n
        if traits.dtype == "fp32":  # P as two tf32 numbers, and a group of columns of O summed from zero
            exact = not traits.precision
            return acc_o + acc_s * (1 + exact) + rows * exact + rows // 4 * (1 + exact) + 40
        return self._registers_16_bit(traits, acc_o, acc_s)

    def _registers_16_bit(self, traits: Traits, acc_o: int, acc_s: int) -> int:
        """Registers per thread with 16-bit operands, and ``acc_o`` and ``acc_s`` registers for the accumulators."""
        rows, d = self.tile_m // self.warps_m, padded(traits.head_dim)
        q = rows * d // 64 if self.q_in_regs else rows // 4
        bias = acc_s // (1 if traits.bias == "fp32" else 2) if traits.bias else 0
        return acc_o + acc_s + acc_s // 8 + q + bias // 2 + 24

    def _warps_n_reasons(self, traits: Traits) -> Iterator[str | None]:
        n = self.warps_n
        yield self.unless(
            n >= 1 and self.num_warps % n == 0, "warps_n", f"a divisor of {self.num_warps} warps"
        )
        if n == 1:
            return
        pack = self.pack_heads if traits.op == "kvcache" else 1
        plain = replace(self, num_stages=1, q_in_regs=False, key_groups=1, pack_heads=pack)
        yield self.unless(self == plain, "warps_n", f"1 with other fields than those of tile {plain}")
        single = traits.dtype == "fp32"
        yield self.unless(traits.op != "kvcache" or not single, "warps_n", f"1 for {traits}")
        columns = (32 if single else 16) * n
        whole = self.tile_n % (16 * n) == padded(traits.head_dim_v) % columns == 0
        accepted = f"with whole {16 * n} keys of tile_n and whole {columns} columns of padded head_dim_v, for {traits}"
        yield self.unless(whole, "warps_n", accepted)

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        yield self.num_warps_reason()
        yield from self._warps_n_reasons(traits)
        whole = self.tile_m > 0 and self.tile_m % (16 * self.warps_m) == 0
        yield self.unless(whole, "tile_m", f"multiples of 16 rows for each of {self.warps_m} warps")
        few = self.key_groups >= 1 and self.num_warps * self.key_groups <= self.MAX_WARPS
        accepted = f"1 or more, with up to {self.MAX_WARPS} warps in all, {self.num_warps} each"
        yield self.unless(few, "key_groups", accepted)
        step = (32 if traits.dropout == "flash" else 16) * self.key_groups
        whole = self.tile_n > 0 and self.tile_n % step == 0
        yield self.unless(whole, "tile_n", f"multiples of {step} for {traits}")
        yield pack_heads_reason(self.pack_heads, math.gcd(self.tile_m, 64), traits)
        yield self.unless_positive("num_stages", "blocks_per_sm")
        yield self.unless(
            self.qk_unroll >= 0, "qk_unroll", "0 for all steps, or the number of steps at a time"
        )
        yield self.unless(-1 <= self.swizzle_bits <= 3, "swizzle_bits", "0 to 3, or -1 for the widest")
        dims = sorted({padded(traits.head_dim), padded(traits.head_dim_v)})
        widest = 2 if any(d % 64 for d in dims) else 3
        accepted = f"at most {widest} with rows of {dims} elements"
        yield self.unless(self.swizzle_bits <= widest, "swizzle_bits", accepted)
        of_group = self if self.key_groups == 1 else replace(self, tile_n=self.group_keys, key_groups=1)
        sizes = {"tile_m": self.tile_m, "tile_n": self.group_keys}
        yield of_group.copies_reason(traits, self.operand_bytes(traits), **sizes)


@dataclass(frozen=True)
class ForwardTermsTile(ForwardSm80Tile):
    """Tile of the Ampere fp32 forward in fp16 terms. With two, each ``qk_unroll`` MMA steps are summed from zero."""

    qk_unroll: int = choice(2, 1, 2)

    @staticmethod
    def mma_depth(traits: Traits) -> int:
        return 16

    @staticmethod
    def operand_bytes(traits: Traits) -> int:
        """Bytes of all terms of an element."""
        return 2 * traits.fp32_terms

    def registers(self, traits: Traits) -> int:
        rows = self.tile_m // self.warps_m
        acc_o = rows * padded(traits.head_dim_v) // 32 // self.warps_n
        acc_s = rows * self.tile_n // 32 // self.warps_n
        if traits.fp32_terms == 1:
            return self._registers_16_bit(traits, acc_o, acc_s)
        return acc_o + acc_s + rows // 2 + rows // 2 * self.qk_unroll + 40

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        plain = replace(self, q_in_regs=False, key_groups=1, pack_heads=1, blocks_per_sm=1)
        yield None if self == plain else f"tile is {self}; accepted for fp32 in terms: {plain}"
        few = traits.fp32_terms != 2 or self.qk_unroll in (1, 2)
        yield self.unless(few, "qk_unroll", "1 or 2 steps for fp32 in two terms")
        yield from super().reasons(traits)


@dataclass(frozen=True)
class JvpSm80Tile(ForwardSm80Tile):
    """Tile of the Ampere forward with its forward-mode derivative: operands and O have their tangents next to them."""

    tile_m: int = choice(64, 32, 64, 128)
    tile_n: int = choice(64, *range(16, 129, 16))

    def row_bytes(self, traits: Traits) -> tuple[int, int]:
        """Bytes of a row and its tangent."""
        row, row_v = super().row_bytes(traits)
        return 2 * row, 2 * row_v

    def registers(self, traits: Traits) -> int:
        rows = self.tile_m // self.num_warps
        acc_o, acc_s = rows * padded(traits.head_dim_v) // 32, rows * self.tile_n // 32
        return 2 * (acc_o + acc_s) + acc_s // 8 + rows // 2 + 24

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        plain = replace(self, q_in_regs=False, key_groups=1, pack_heads=1, blocks_per_sm=1, warps_n=1)
        yield None if self == plain else f"tile is {self}; accepted with tangents: {plain}"
        yield from super().reasons(traits)


@dataclass(frozen=True)
class ForwardSm90Tile(Tile):
    """Tile of the Hopper forward.

    Attributes:
        tile_m: rows of a work tile, 64 per consumer warpgroup.
        tile_n: keys per step, a multiple of 16 (of 32 with the flash dropout mask), at most 256.
        num_stages: stages of K and V.
        q_in_regs: Q is read from shared memory once and kept in registers.
        rescale_threshold: O is rescaled only when a score exceeds the row maximum in use by more than this many powers
            of two; 0 rescales in every step.
        share_qo_smem: O reuses Q's shared memory, so the next Q loads only after O has been stored.
        speculative: row maxima are not updated after the masked blocks; a work tile with a row sum above 2^40
            is replayed with exact online softmax.
        blocks_per_sm: CTAs per multiprocessor, 1 to 3; 2 or 3 require one consumer warpgroup. The prologue and epilogue
            of one CTA overlap the products of another, which pays for short sequences.
        bias_stages: stages per consumer warpgroup of a 16-bit bias that TMA loads, for bias rows aligned like q's;
            0: threads read the bias from global memory.
        pack_heads: packed GQA: the number of query heads of one key head in a work tile. Row r is query r // pack_heads
            of head r % pack_heads; K and V are read once for all of these heads. A power of two up to 64; if it does
            not divide the number of query heads per key head, the excess rows are empty.
    """

    tile_m: int = choice(128, 64, 128, 192, 256)
    tile_n: int = choice(128, *range(32, 257, 16))
    num_stages: int = choice(2, 1, 2, 3, 4)
    q_in_regs: bool = False
    rescale_threshold: int = choice(0, 0, 8)
    share_qo_smem: bool = False
    speculative: bool = False
    blocks_per_sm: int = choice(1, 1, 2, 3)
    bias_stages: int = choice(0, 0, 1, 2, 3)
    pack_heads: int = choice(1, 1, 2, 4, 8, 16, 32, 64)

    @property
    def queries(self) -> int:
        """Queries of a work tile, each with one row per packed head."""
        return self.tile_m // self.pack_heads

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups, in addition to one producer warpgroup."""
        return self.tile_m // 64

    @property
    def num_threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def compute_registers(self) -> int:
        """Registers per consumer thread: the CTA's fraction of 65,536 less the producer's."""
        if self.blocks_per_sm > 1:
            return {2: 232, 3: 136}[self.blocks_per_sm]
        return COMPUTE_REGISTERS[self.warpgroups]

    @property
    def load_registers(self) -> int:
        return LOAD_REGISTERS[self.warpgroups] if self.blocks_per_sm == 1 else 24

    NUMBERS: ClassVar[int] = 1  # tiles of each operand, next to each other

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """First byte and end of the barriers, Q, K and V of all stages, O and a bias; see ``share_qo_smem``."""
        o, start = self.tile_m * row_bytes(traits)[1], self.BARRIER_BYTES
        row, row_v = (self.NUMBERS * size for size in row_bytes(traits))
        q = self.tile_m * row
        k_start = start + (max(q, o) if self.share_qo_smem else q)
        v_start = k_start + self.tile_n * row * self.num_stages
        v_end = v_start + self.tile_n * row_v * self.num_stages
        o_start = start if self.share_qo_smem else v_end
        bias_start = max(v_end, o_start + o)
        scores = 2 * self.tile_m * self.tile_n * self.bias_stages  # a bias of 16 bits
        return {
            "barriers": (0, start),
            "q": (start, start + q),
            "k": (k_start, v_start),
            "v": (v_start, v_end),
            "o": (o_start, o_start + o),
            "bias": (bias_start, bias_start + scores),
        }

    BARRIER_BYTES: ClassVar[int] = 1024
    BROADCAST_START: ClassVar[int] = 480  # within the barriers: the work broadcast's items
    REPLAY_START: ClassVar[int] = 512  # and the replay list

    def registers(self, traits: Traits) -> int:
        acc_o, acc_s = padded(traits.head_dim_v) // 2, self.tile_n // 2
        p = acc_s // 2
        bias = acc_s // (1 if traits.bias == "fp32" else 2) if traits.bias and not self.bias_stages else 0
        q = padded(traits.head_dim) // 4 if self.q_in_regs else 0
        return acc_o + acc_s + p + q + bias + 16

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        accepted = "64, 128, 192 or 256, 64 for each of one to four warpgroups"
        yield self.unless(self.tile_m in (64, 128, 192, 256), "tile_m", accepted)
        yield _key_block_reason(self, traits)
        yield self.unless_positive("num_stages")
        few = 1 <= self.blocks_per_sm <= (3 if self.warpgroups == 1 else 1)
        yield self.unless(few, "blocks_per_sm", "1, and up to 3 with a tile_m of 64")
        few = self.blocks_per_sm == 1 or padded(traits.head_dim_v) <= 128
        yield self.unless(few, "blocks_per_sm", "1 for a head_dim_v above 128")
        shared = self.blocks_per_sm * (self.smem_bytes(traits) + 1024)
        if shared > SM90_SHARED_MEMORY:
            yield (
                f"{self.blocks_per_sm} CTAs of tile {self} need {shared} bytes of shared memory for {traits}; "
                f"a multiprocessor has {SM90_SHARED_MEMORY}"
            )
        halves = self.bias_stages == 0 or (self.bias_stages > 0 and traits.bias in ("fp16", "bf16"))
        yield self.unless(halves, "bias_stages", f"0, or more with a bias of 16 bits, for {traits}")
        yield pack_heads_reason(self.pack_heads, 64, traits)
        barriers = 16 * (3 + 2 * self.num_stages + self.warpgroups * self.bias_stages)
        accepted = f"stages whose barriers fit {self.BROADCAST_START} bytes"
        yield self.unless(barriers <= self.BROADCAST_START, "num_stages", accepted)
        yield self.registers_reason(traits, self.compute_registers, f"with {self.warpgroups} warpgroups ")


def _key_block_reason(tile: Any, traits: Traits) -> str | None:
    """Why a Hopper kernel cannot compute the tile's ``tile_n`` keys per step, or None."""
    step = 32 if traits.dropout == "flash" else 16
    fits = 0 < tile.tile_n <= 256 and tile.tile_n % step == 0
    return tile.unless(fits, "tile_n", f"multiples of {step} up to 256 for {traits}")


@dataclass(frozen=True)
class JvpSm90Tile(ForwardSm90Tile):
    """Tile of the Hopper forward with its forward-mode derivative: operands have their tangents next to them.

    O and its tangent are stored one after the other, through the same shared memory.
    """

    tile_n: int = choice(48, *range(32, 129, 16))
    rescale_threshold: int = choice(8, 0, 8)

    NUMBERS: ClassVar[int] = 2
    # Fields of the forward's tile that are fixed here:
    q_in_regs: ClassVar[bool] = False  # type: ignore[misc]
    share_qo_smem: ClassVar[bool] = False  # type: ignore[misc]
    blocks_per_sm: ClassVar[int] = 1  # type: ignore[misc]
    bias_stages: ClassVar[int] = 0  # type: ignore[misc]
    pack_heads: ClassVar[int] = 1  # type: ignore[misc]

    def registers(self, traits: Traits) -> int:
        acc_o, acc_s = padded(traits.head_dim_v) // 2, self.tile_n // 2
        bias = acc_s // (1 if traits.bias == "fp32" else 2) if traits.bias else 0
        return 2 * (acc_o + acc_s) + acc_s + bias // 2 + 16


@dataclass(frozen=True)
class ForwardLargeTile(Tile):
    """Tile of the Hopper forward for head dims above 256: 64 rows per CTA.

    Attributes:
        tile_n, num_stages, pack_heads: as in :class:`ForwardSm90Tile`.
    """

    tile_n: int = choice(64, *range(32, 129, 16))
    num_stages: int = choice(1, 1, 2, 3, 4)
    pack_heads: int = choice(1, 1, 2, 4, 8, 16, 32, 64)

    tile_m: ClassVar[int] = 64
    warpgroups: ClassVar[int] = 2  # consumers, each with half of O's columns
    score_warps: ClassVar[int] = 0  # that compute scores only
    num_threads: ClassVar[int] = 384
    compute_registers: ClassVar[int] = 232
    load_registers: ClassVar[int] = 40
    blocks_per_sm: ClassVar[int] = 1
    # A step's P is written before the other warpgroup has read the previous step's.
    p_stages: ClassVar[int] = 2
    # Fields of the Hopper forward's tile that are fixed here:
    rescale_threshold: ClassVar[int] = 8
    share_qo_smem: ClassVar[bool] = True
    q_in_regs: ClassVar[bool] = False
    speculative: ClassVar[bool] = False
    bias_stages: ClassVar[int] = 0
    NUMBERS: ClassVar[int] = ForwardSm90Tile.NUMBERS
    BARRIER_BYTES: ClassVar[int] = ForwardSm90Tile.BARRIER_BYTES
    BROADCAST_START: ClassVar[int] = ForwardSm90Tile.BROADCAST_START
    REPLAY_START: ClassVar[int] = ForwardSm90Tile.REPLAY_START

    @property
    def queries(self) -> int:
        """Queries of a work tile, each with one row per packed head."""
        return self.tile_m // self.pack_heads

    @staticmethod
    def columns_of_v(traits: Traits) -> int:
        """Columns of V and O in shared memory. Each warpgroup has half of O's columns in registers."""
        return -(-traits.head_dim_v // 64) * 64

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """First byte and end of the barriers, Q (later O in its place), K, V, P and the scale factors of O's rows."""
        return self._areas(traits, max(padded(traits.head_dim), self.columns_of_v(traits)))

    def _areas(self, traits: Traits, columns_of_q: int) -> dict[str, tuple[int, int]]:
        d, dv = padded(traits.head_dim), self.columns_of_v(traits)
        sizes = {
            "barriers": self.BARRIER_BYTES,
            "q": 2 * self.tile_m * columns_of_q,
            "k": 2 * self.tile_n * d * self.num_stages,
            "v": 0 if traits.latent else 2 * self.tile_n * dv * self.num_stages,
            "p": 2 * self.tile_m * self.tile_n * self.p_stages,
            "factors": 4 * self.tile_m * self.p_stages,
        }
        return areas_in_order(sizes)

    def registers(self, traits: Traits) -> int:
        acc_o, acc_s = self.columns_of_v(traits) // 4, self.tile_n // 2
        bias = acc_s // (1 if traits.bias == "fp32" else 2) if traits.bias else 0
        return acc_o + acc_s + acc_s // 2 + bias + 24

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        yield _key_block_reason(self, traits)
        yield self.unless(1 <= self.num_stages <= 8, "num_stages", "1 to 8")
        yield pack_heads_reason(self.pack_heads, self.tile_m, traits)
        yield self.registers_reason(traits, self.compute_registers)


@dataclass(frozen=True)
class KvcacheLargeTile(ForwardLargeTile):
    """Tile of the Hopper forward with a cache for head dims above 256; O is stored from registers.

    Attributes:
        page_rows: rows of each TMA box of a page, as in :class:`KvcacheSm90Tile`.
    """

    page_rows: int = choice(0, 0, 8, 16, 32, 64)

    p_stages: ClassVar[int] = 1
    score_warps: ClassVar[int] = 4
    num_threads: ClassVar[int] = 512
    compute_registers: ClassVar[int] = 160
    score_registers: ClassVar[int] = 136
    load_registers: ClassVar[int] = 56  # the producer looks up pages
    min_blocks_per_sm: ClassVar[int] = 1
    share_qo_smem: ClassVar[bool] = False
    BROADCAST_START: ClassVar[int] = 448  # items with key ranges are twice as large

    @staticmethod
    def columns_of_v(traits: Traits) -> int:
        """Columns of V and O in shared memory. A warpgroup's half is one instruction's columns, or 256."""
        columns = ForwardLargeTile.columns_of_v(traits)
        return columns if columns <= 384 else 512

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        return self._areas(traits, padded(traits.head_dim))

    def registers(self, traits: Traits) -> int:
        """Registers that a thread with columns of O needs, or one with scores, which has fewer, plus the difference."""
        columns = self.columns_of_v(traits) // 4
        scores = super().registers(traits) - columns
        return max(columns + 24, scores + self.compute_registers - self.score_registers)

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        yield pages_reason(self, traits)
        yield from super().reasons(traits)


@dataclass(frozen=True)
class KvcacheSm90Tile(ForwardSm90Tile):
    """Tile of the Hopper forward for attention with a cache; O is stored from registers.

    Attributes:
        page_rows: rows of each TMA box of a page; page sizes are multiples of page_rows. 0: no pages.
        half_registers: a CTA with one consumer warpgroup uses only half of the multiprocessor's registers, although it
            is this kernel's only CTA there, so that CTAs of the combine kernel can start next to it and wait.
    """

    page_rows: int = choice(0, 0, 8, 16, 32, 64, 128)
    half_registers: bool = False

    # O and a bias have no shared memory.
    share_qo_smem: ClassVar[bool] = False  # type: ignore[misc]
    bias_stages: ClassVar[int] = 0  # type: ignore[misc]
    BROADCAST_START: ClassVar[int] = 448  # items with key ranges are twice as large

    @property
    def compute_registers(self) -> int:
        """Registers per consumer thread: fewer than in the forward, because the producer needs more."""
        if self.blocks_per_sm > 1:
            return {2: 200, 3: 104}[self.blocks_per_sm]
        return 200 if self.half_registers else {1: 255, 2: 224, 3: 152}[self.warpgroups]

    @property
    def load_registers(self) -> int:
        """Registers per producer thread; the producer looks up pages."""
        return 56

    @property
    def min_blocks_per_sm(self) -> int:
        """CTAs that a multiprocessor has registers for."""
        return 2 if self.half_registers else self.blocks_per_sm

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """The areas of the forward's tile, with empty areas for O and the bias."""
        areas = super().smem_areas(traits)
        return areas | dict.fromkeys(("o", "bias"), (areas["v"][1], areas["v"][1]))

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        alone = not self.half_registers or (self.warpgroups, self.blocks_per_sm) == (1, 1)
        yield self.unless(alone, "half_registers", f"with tile_m 64 and blocks_per_sm 1, for {traits}")
        yield pages_reason(self, traits)
        yield from super().reasons(traits)
