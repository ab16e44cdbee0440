"""Tiles: *how* a kernel computes. Block sizes, warps, stages, operands in registers, swizzle.

A tile is a frozen value that prints as text and parses back, knows what it will cost before anything is compiled, and
says why it cannot serve some traits on some GPU. It never changes a result, only how fast it comes.
"""

import dataclasses
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from cute_attn.traits import Traits

SHARED_MEMORY_BYTES = {"sm80": 166_912, "sm86": 101_376, "sm89": 101_376, "sm90": 232_448}
"""Shared memory that one block may use on each target, in bytes."""

TARGETS = tuple(SHARED_MEMORY_BYTES)
REGISTERS_PER_THREAD = 255
REGISTERS_PER_SM = 65_536
HEAD_DIM_PAD = 32


def padded(head_dim: int) -> int:
    """head_dim rounded up to what shared memory and registers hold of it."""
    return -(-head_dim // HEAD_DIM_PAD) * HEAD_DIM_PAD


class Tile:
    """Base of all tiles: text both ways, and the checks that every tile needs."""

    def __str__(self) -> str:
        return ",".join(f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self))  # type: ignore[arg-type]

    def override(self, text: str) -> Self:
        """This tile with the fields that ``text`` names changed: ``"tile_n=128,q_in_regs=true"``.

        Raises:
            ValueError: a field that does not exist or a value that does not parse.
        """
        types = {f.name: type(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        changes: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = item.partition("=")
            if not equals or name not in types:
                raise ValueError(
                    f"tile has {item!r}; accepted: FIELD=VALUE with a field of {', '.join(types)}"
                )
            changes[name] = _parse(name, value, types[name])
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def smem_bytes(self, traits: Traits) -> int:
        """Shared memory of one block, in bytes."""
        raise NotImplementedError

    def registers(self, traits: Traits) -> int:
        """An estimate of registers a thread, from the fragments that live through the main loop."""
        raise NotImplementedError

    def shape_reason(self, traits: Traits) -> str | None:
        """Why these fields do not go together, or None."""
        raise NotImplementedError

    def reject(self, traits: Traits, target: str) -> str | None:
        """Why this tile cannot serve ``traits`` on ``target``, or None if it can."""
        reason = self.shape_reason(traits)
        if reason:
            return reason
        capacity, needed = SHARED_MEMORY_BYTES[target], self.smem_bytes(traits)
        if needed > capacity:
            return f"tile {self} needs {needed} bytes of shared memory for {traits}; {target} has {capacity}"
        if self.registers(traits) > REGISTERS_PER_THREAD:
            return (
                f"tile {self} needs about {self.registers(traits)} registers a thread for {traits}; "
                f"there are {REGISTERS_PER_THREAD}"
            )
        return None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse(name: str, value: str, kind: type) -> Any:
    if kind is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind is int and value.lstrip("-").isdigit():
        return int(value)
    if kind is str:
        return value
    raise ValueError(
        f"tile field {name} is {value!r}; accepted: {'true or false' if kind is bool else kind.__name__}"
    )


@dataclass(frozen=True)
class ForwardSm80Tile(Tile):
    """Tile of the Ampere forward.

    Attributes:
        tile_m: queries of a block, a multiple of 16 a warp.
        tile_n: keys of a step, a multiple of 16 (of 32 with the flash dropout mask).
        num_warps: warps of a block; each has tile_m / num_warps queries.
        num_stages: copies of K and V in shared memory. 1: K of the next step loads during the softmax and V during
            Q K^T, two barriers a step; 2 and more: whole steps load ahead, one barrier a step.
        q_in_regs: Q is read from shared memory once and kept in registers.
        share_qk_smem: K takes over Q's shared memory (implies that Q is kept in registers).
        park_statistics: row maxima and sums wait in shared memory while the scores are computed: eight registers less,
            which is what lets 64 keys beside 128 rows of output do without spills.
        qk_unroll: steps of 16 along head_dim that Q K^T takes at a time; 0 for all of them. No operand is read before
            an earlier group's products, so that few steps bound the registers that wait for them.
        swizzle_bits: log2 of the 16-byte units that shared-memory rows are permuted over; -1 for the widest.
    """

    tile_m: int = 128
    tile_n: int = 64
    num_warps: int = 4
    num_stages: int = 1
    q_in_regs: bool = False
    share_qk_smem: bool = False
    swizzle_bits: int = -1
    park_statistics: bool = False
    qk_unroll: int = 0

    MAX_WARPS: ClassVar[int] = 16

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.num_warps

    @property
    def parked_bytes(self) -> int:
        """Shared memory for the row statistics: two numbers a row, for each of the four lanes that share it."""
        return 2 * 4 * 4 * self.tile_m if self.park_statistics else 0

    def steps_at_once(self, traits: Traits) -> int:
        """Steps of 16 along head_dim that Q K^T takes at a time: at most ``qk_unroll``, and a divisor of all."""
        steps = padded(traits.head_dim) // 16
        return next(n for n in range(min(self.qk_unroll or steps, steps), 0, -1) if steps % n == 0)

    @property
    def keeps_q(self) -> bool:
        """Whether Q lives in registers through the main loop."""
        return self.q_in_regs or self.share_qk_smem

    def smem_bytes(self, traits: Traits) -> int:
        return max(end for _, end in self.smem_areas(traits).values())

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """First byte and end of Q, K and V of all stages, O and the parked statistics; O takes over what is loaded."""
        d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
        q, o = 2 * self.tile_m * d, 2 * self.tile_m * dv
        k_start = 0 if self.share_qk_smem else q
        v_start = max(q, k_start + 2 * self.tile_n * d * self.num_stages)
        v_end = v_start + 2 * self.tile_n * dv * self.num_stages
        parked = max(v_end, o)
        return {
            "q": (0, q),
            "k": (k_start, k_start + 2 * self.tile_n * d * self.num_stages),
            "v": (v_start, v_end),
            "o": (0, o),
            "parked": (parked, parked + self.parked_bytes),
        }

    def registers(self, traits: Traits) -> int:
        d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
        rows = self.tile_m // self.num_warps
        acc_o, acc_s = rows * dv // 32, rows * self.tile_n // 32
        q = rows * d // 64 if self.keeps_q else rows // 4
        bias = acc_s // (1 if traits.bias == "fp32" else 2) if traits.bias else 0
        return acc_o + acc_s + acc_s // 8 + q + bias // 2 + 24

    def shape_reason(self, traits: Traits) -> str | None:
        if not 1 <= self.num_warps <= self.MAX_WARPS:
            return f"num_warps is {self.num_warps}; accepted: 1 to {self.MAX_WARPS}"
        if self.tile_m <= 0 or self.tile_m % (16 * self.num_warps):
            return (
                f"tile_m is {self.tile_m}; accepted: multiples of 16 rows for each of {self.num_warps} warps"
            )
        step = 32 if traits.dropout == "flash" else 16
        if self.tile_n <= 0 or self.tile_n % step:
            return f"tile_n is {self.tile_n}; accepted: multiples of {step} for {traits}"
        if self.num_stages < 1:
            return f"num_stages is {self.num_stages}; accepted: 1 or more"
        if self.qk_unroll < 0:
            return f"qk_unroll is {self.qk_unroll}; accepted: 0 for all steps, or how many at a time"
        if not -1 <= self.swizzle_bits <= 3:
            return f"swizzle_bits is {self.swizzle_bits}; accepted: 0 to 3, or -1 for the widest"
        dims = sorted({padded(traits.head_dim), padded(traits.head_dim_v)})
        widest = 2 if any(d % 64 for d in dims) else 3
        if self.swizzle_bits > widest:
            return f"swizzle_bits is {self.swizzle_bits}; accepted: at most {widest} with rows of {dims} elements"
        for dim in dims:
            threads_per_row = 8 if dim % 64 == 0 else 4
            for what, rows in (("tile_m", self.tile_m), ("tile_n", self.tile_n)):
                rows_per_pass = self.num_threads // threads_per_row
                if rows % rows_per_pass:
                    return (
                        f"{what} is {rows}; accepted: multiples of {rows_per_pass} rows, which {self.num_warps} "
                        f"warps copy at once at head dim {dim}"
                    )
        return None


@dataclass(frozen=True)
class ForwardSm90Tile(Tile):
    """Tile of the Hopper forward.

    Attributes:
        tile_m: queries of a block, 64 for each warpgroup that computes.
        tile_n: keys of a step, a multiple of 16 (of 32 with the flash dropout mask), at most 256.
        num_stages: copies of K and V in shared memory.
        take_turns: the warpgroups issue their products one after the other (ping-pong), so that the softmax of one runs
            beside the products of another.
        overlap: within a warpgroup, Q K^T of a step is issued before P V of the one before it, which then runs beside
            the softmax.
        persistent: as many blocks as the GPU has multiprocessors, each with a list of query blocks; the next one's
            loads start while the last one's output is stored. Otherwise a block a query block.
        q_in_regs: Q is read from shared memory once: a third less of it is read for Q K^T.
        rescale_threshold: the output is rescaled only when a score exceeds the maximum in use by more than so many
            powers of two; 0 rescales in every step.
        share_qo_smem: O takes over Q's shared memory, so that the next Q waits for O to be stored.
    """

    tile_m: int = 128
    tile_n: int = 128
    num_stages: int = 2
    take_turns: bool = True
    overlap: bool = True
    persistent: bool = True
    q_in_regs: bool = False
    rescale_threshold: int = 0
    share_qo_smem: bool = False

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute; one more loads."""
        return self.tile_m // 64

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.warpgroups + 1)

    @property
    def compute_registers(self) -> int:
        """Registers of a thread that computes: what the loading warpgroup leaves of 65,536."""
        return {1: 255, 2: 240, 3: 160}[self.warpgroups]

    @property
    def load_registers(self) -> int:
        """Registers of a thread that loads."""
        return {1: 56, 2: 24, 3: 32}[self.warpgroups]

    def smem_bytes(self, traits: Traits) -> int:
        d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
        q, o = self.tile_m * d, self.tile_m * dv
        kv = self.tile_n * (d + dv) * self.num_stages
        return 2 * (kv + (max(q, o) if self.share_qo_smem else q + o)) + self.BARRIER_BYTES

    BARRIER_BYTES: ClassVar[int] = 1024

    def registers(self, traits: Traits) -> int:
        acc_o, acc_s = padded(traits.head_dim_v) // 2, self.tile_n // 2
        p = acc_s // 2 if self.overlap else 0
        bias = acc_s // (1 if traits.bias == "fp32" else 2) if traits.bias else 0
        q = padded(traits.head_dim) // 4 if self.q_in_regs else 0
        return acc_o + acc_s + p + q + bias + 16

    def shape_reason(self, traits: Traits) -> str | None:
        if self.tile_m not in (64, 128, 192):
            return (
                f"tile_m is {self.tile_m}; accepted: 64, 128 or 192, 64 for each of one to three warpgroups"
            )
        step = 32 if traits.dropout == "flash" else 16
        if self.tile_n <= 0 or self.tile_n % step or self.tile_n > 256:
            return f"tile_n is {self.tile_n}; accepted: multiples of {step} up to 256 for {traits}"
        if self.num_stages < 1:
            return f"num_stages is {self.num_stages}; accepted: 1 or more"
        if self.registers(traits) > self.compute_registers:
            return (
                f"tile {self} needs about {self.registers(traits)} registers a thread for {traits}; with "
                f"{self.warpgroups} warpgroups there are {self.compute_registers}"
            )
        return None


@dataclass(frozen=True)
class BackwardPreprocessTile(Tile):
    """Tile of the backward's preprocess.

    Attributes:
        tile_m: the main kernel's queries of a block, which sequences are padded to in the workspace.
        rows: queries of a block here, a divisor of tile_m.
        num_threads: threads of a block, at least one a row.
    """

    tile_m: int = 128
    rows: int = 64
    num_threads: int = 256

    @staticmethod
    def of(traits: Traits, tile_m: int) -> "BackwardPreprocessTile":
        """The tile for a main kernel's ``tile_m``: as many rows as give each thread eight vectors to wait for."""
        whole = BackwardPreprocessTile(tile_m, tile_m)
        rows = min(4 * whole.rows_at_once(traits) // whole.vectors(traits), whole.num_threads)
        return dataclasses.replace(whole, rows=next(n for n in range(rows, 0, -1) if tile_m % n == 0))

    def threads_per_row(self, traits: Traits) -> int:
        """Adjacent threads that read one row of O, 16 bytes each at a time: what leaves the fewest of them idle."""
        pieces = traits.head_dim_v // 8
        return min((16, 8, 4), key=lambda threads: -(-pieces // threads) * threads)

    def vectors(self, traits: Traits) -> int:
        """Vectors of 16 bytes that a thread reads of a row of O."""
        return -(-traits.head_dim_v // (8 * self.threads_per_row(traits)))

    def rows_at_once(self, traits: Traits) -> int:
        """Rows that the threads of a block read side by side."""
        return self.num_threads // self.threads_per_row(traits)

    def passes(self, traits: Traits) -> int:
        """How often they do."""
        return -(-self.rows // self.rows_at_once(traits))

    def smem_bytes(self, traits: Traits) -> int:
        return 4 * self.rows

    def registers(self, traits: Traits) -> int:
        return 8 * self.vectors(traits) * self.passes(traits) + 32

    def shape_reason(self, traits: Traits) -> str | None:
        if self.num_threads <= 0 or self.num_threads % 32 or self.num_threads > 1024:
            return f"num_threads is {self.num_threads}; accepted: multiples of 32 up to 1024"
        if self.tile_m <= 0 or self.tile_m % 16:
            return f"tile_m is {self.tile_m}; accepted: multiples of 16"
        if self.rows <= 0 or self.tile_m % self.rows or self.rows % 4 or self.rows > self.num_threads:
            return (
                f"rows is {self.rows}; accepted: divisors of tile_m, {self.tile_m}, that are multiples of 4 and at "
                f"most {self.num_threads}, one for each thread"
            )
        return None
