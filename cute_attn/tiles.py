"""Tiles: *how* a kernel computes. Block sizes, warps, stages, operands in registers, swizzle.

A tile is a frozen value that prints as text and parses back, knows what it will cost before anything is compiled, and
says why it cannot serve some traits on some GPU. It never changes a result, only how fast it comes.
"""

import dataclasses
import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from cute_attn.traits import Traits

SHARED_MEMORY_BYTES = {"sm80": 166_912, "sm86": 101_376, "sm89": 101_376, "sm90": 232_448}
"""Shared memory that one block may use on each target, in bytes."""

SM90_SHARED_MEMORY = 233_472
"""Shared memory of a Hopper multiprocessor, in bytes, of which each block costs 1024 more than it uses."""
TARGETS = tuple(SHARED_MEMORY_BYTES)
REGISTERS_PER_THREAD = 255
REGISTERS_PER_SM = 65_536
HEAD_DIM_PAD = 32


def padded(head_dim: int) -> int:
    """head_dim rounded up to what shared memory and registers hold of it."""
    return -(-head_dim // HEAD_DIM_PAD) * HEAD_DIM_PAD


def may_pack_heads(traits: Traits) -> bool:
    """Whether nothing but ALiBi's slope depends on a row's head, so that rows of several heads can be one block's."""
    return not (traits.bias or traits.dropout or traits.epilogues or traits.return_softmax)


def may_cluster(traits: Traits) -> bool:
    """Whether blocks that walk over keys together have been tried on the card with all that the traits ask for."""
    untried = traits.bias or traits.dropout or traits.epilogues or traits.seqused_q or traits.seqused_k
    return not (untried or traits.return_softmax)


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
        optimistic: in steps without mask, scores become probabilities under the maximum in use, with no look at the
            scores. A row's sum says at the end if that was wrong, and then the query block is computed again.
        polynomial: of 8 neighbouring exponentials in such steps, how many are polynomials (Cody and Waite) on the FMA
            units rather than work of the special-function unit.
        blocks_per_sm: how many blocks, of one computing warpgroup each, a multiprocessor has at a time, 1 to 3: one's
            first and last steps then run beside another's products, which short sequences live by.
        bias_stages: copies of a 16-bit bias's tile in shared memory, where TMA brings it, for each warpgroup that
            computes; 0: threads read the bias from global memory. Its rows must then be as those of q are.
        pack_heads: how many of the query heads that share a key head are rows of one block: row r is query
            r // pack_heads of head r % pack_heads. Few queries then fill a block, and K and V are read once for all of
            its heads. A power of two up to 64 that divides the heads of a group.
        cluster: 2: two blocks work on neighbouring query blocks of a head at the same time, and each loads half of
            every K and V for both, so that half as much is read from L2; both walk over all key blocks that one needs.
        p_in_smem: P goes through shared memory to P V rather than through registers, which it leaves free.
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
    optimistic: bool = False
    polynomial: int = 0
    blocks_per_sm: int = 1
    bias_stages: int = 0
    pack_heads: int = 1
    cluster: int = 1
    p_in_smem: bool = False

    @property
    def queries(self) -> int:
        """Queries of a block, each with a row for each of its heads."""
        return self.tile_m // self.pack_heads

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
        """Registers of a thread that computes: what the loading warpgroup leaves of the block's share of 65,536."""
        if self.blocks_per_sm > 1:
            return {2: 232, 3: 136}[self.blocks_per_sm]
        return {1: 255, 2: 240, 3: 160}[self.warpgroups]

    @property
    def load_registers(self) -> int:
        """Registers of a thread that loads."""
        return {1: 56, 2: 24, 3: 32}[self.warpgroups] if self.blocks_per_sm == 1 else 24

    def smem_bytes(self, traits: Traits) -> int:
        d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
        q, o = self.tile_m * d, self.tile_m * dv
        kv = self.tile_n * (d + dv) * self.num_stages
        scores = self.tile_m * self.tile_n * (self.bias_stages + self.p_in_smem)
        return 2 * (kv + (max(q, o) if self.share_qo_smem else q + o) + scores) + self.BARRIER_BYTES

    BARRIER_BYTES: ClassVar[int] = 1024
    REDO_START: ClassVar[int] = 512  # of them: which query blocks have to be done again

    def registers(self, traits: Traits) -> int:
        acc_o, acc_s = padded(traits.head_dim_v) // 2, self.tile_n // 2
        p = acc_s // 2 if self.overlap and not self.p_in_smem else 0
        bias = acc_s // (1 if traits.bias == "fp32" else 2) if traits.bias and not self.bias_stages else 0
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
        if not 0 <= self.polynomial <= (8 if self.optimistic else 0):
            return f"polynomial is {self.polynomial}; accepted: 0, and up to 8 with optimistic"
        if not 1 <= self.blocks_per_sm <= (3 if self.warpgroups == 1 else 1):
            return f"blocks_per_sm is {self.blocks_per_sm}; accepted: 1, and up to 3 with a tile_m of 64"
        if self.blocks_per_sm > 1 and padded(traits.head_dim_v) > 128:
            return f"blocks_per_sm is {self.blocks_per_sm}; accepted: 1 for a head_dim_v above 128"
        shared = self.blocks_per_sm * (self.smem_bytes(traits) + 1024)
        if shared > SM90_SHARED_MEMORY:
            return (
                f"{self.blocks_per_sm} blocks of tile {self} need {shared} bytes of shared memory for {traits}; "
                f"a multiprocessor has {SM90_SHARED_MEMORY}"
            )
        if self.bias_stages < 0 or (self.bias_stages and traits.bias not in ("fp16", "bf16")):
            return f"bias_stages is {self.bias_stages}; accepted: 0, or more with a bias of 16 bits, for {traits}"
        if self.pack_heads < 1 or 64 % self.pack_heads:
            return f"pack_heads is {self.pack_heads}; accepted: 1, 2, 4, 8, 16, 32 or 64, of a warpgroup's 64 rows"
        if self.pack_heads > 1 and not may_pack_heads(traits):
            return (
                f"pack_heads is {self.pack_heads}; accepted: 1 with a bias, dropout, users' epilogues or "
                f"return_softmax, for {traits}"
            )
        if self.cluster not in (1, 2 if self.pack_heads == 1 and may_cluster(traits) else 1):
            return (
                f"cluster is {self.cluster}; accepted: 1, and 2 with pack_heads 1 and without a bias, dropout, users' "
                f"epilogues, seqused_q, seqused_k or return_softmax, for {traits}"
            )
        if 16 * (1 + 2 * self.num_stages + self.warpgroups * self.bias_stages) > self.REDO_START:
            return f"num_stages is {self.num_stages}; accepted: few enough for {self.REDO_START} bytes of barriers"
        if self.registers(traits) > self.compute_registers:
            return (
                f"tile {self} needs about {self.registers(traits)} registers a thread for {traits}; with "
                f"{self.warpgroups} warpgroups there are {self.compute_registers}"
            )
        return None


@dataclass(frozen=True)
class BackwardSm80Tile(Tile):
    """Tile of the Ampere backward's main kernel.

    Attributes:
        tile_m: queries of a step.
        tile_n: keys of a block.
        num_warps: warps of a block.
        sdp_warps_m: of them along the queries in S = Q K^T and dP = dO V^T; the others divide the keys.
        dkv_warps_m: of them along the keys in dV = P^T dO and dK = dS^T Q; the others divide the head dims.
        dq_warps_m: of them along the queries in dQ = dS K; the others divide head_dim.
        stages_q, stages_do: copies of Q and of dO in shared memory, 1 or 2. 2: the next step's load during all of this
            one, and 1 during its last product.
        v_in_regs: V is read from shared memory once and kept in registers; P and dS take over its shared memory.
        p_in_regs: S and dP are computed transposed by warps that divide the keys alone, so that P and dS go on to dV
            and dK in registers and only dS passes through shared memory, for dQ. ``sdp_warps_m`` is then 1 and
            ``dkv_warps_m`` all warps.
        k_in_regs: with ``p_in_regs``, K as the operand of S is kept in registers too.
        queries_at_once: with ``p_in_regs``, queries whose scores are in registers at a time; 0 for all ``tile_m``.
        sdp_unroll, dkv_unroll, dq_unroll: steps of 16 that these products take at a time; 0 for all of them. No operand
            is read before an earlier group's products, so that few steps bound the registers that wait for them.
        dq_vector: floats of dQ that one reduction adds: 1, and with target sm90 also 2 and 4.
    """

    tile_m: int = 64
    tile_n: int = 64
    num_warps: int = 8
    sdp_warps_m: int = 4
    dkv_warps_m: int = 4
    dq_warps_m: int = 4
    stages_q: int = 2
    stages_do: int = 2
    v_in_regs: bool = False
    p_in_regs: bool = False
    k_in_regs: bool = False
    queries_at_once: int = 0
    sdp_unroll: int = 0
    dkv_unroll: int = 0
    dq_unroll: int = 0
    dq_vector: int = 1

    MAX_WARPS: ClassVar[int] = 16

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.num_warps

    @property
    def mma_threads(self) -> int:
        """Threads that multiply: all."""
        return self.num_threads

    @property
    def dq_transposed(self) -> bool:
        """dQ's accumulator is (queries, head_dim)."""
        return False

    @property
    def dq_warps_n(self) -> int:
        """Warps along head_dim in dQ."""
        return self.num_warps // self.dq_warps_m

    @property
    def queries(self) -> int:
        """Queries whose scores are in registers at a time."""
        return self.queries_at_once or self.tile_m

    @property
    def pieces(self) -> int:
        """Pieces in which a step takes its queries."""
        return self.tile_m // self.queries

    @staticmethod
    def steps_at_once(extent: int, unroll: int) -> int:
        """Steps of 16 along ``extent`` that a product takes at a time: at most ``unroll``, and a divisor of all."""
        steps = extent // 16
        return next(n for n in range(min(unroll or steps, steps), 0, -1) if steps % n == 0)

    def smem_bytes(self, traits: Traits) -> int:
        return max(end for _, end in self.smem_areas(traits).values())

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """First byte and end of everything in shared memory; dK and dV take over what is loaded."""
        d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
        m, n = self.tile_m, self.tile_n
        v, p = 2 * n * dv, 0 if self.p_in_regs else 2 * m * n
        areas, end = {}, 0
        between = [("p", p), ("ds", 2 * m * n)]
        rest = [
            ("q", 2 * m * d * self.stages_q),
            ("do", 2 * m * dv * self.stages_do),
            *([] if self.v_in_regs else between),
            ("lse", 4 * m * self.stages_q),
            ("dpsum", 4 * m * self.stages_do),
            ("parked", 80),
        ]
        for name, size in [("k", 2 * n * d), ("v", v)]:
            areas[name] = (end, end + size)
            end += size
        if self.v_in_regs:
            start = areas["v"][0]
            for name, size in between:
                areas[name] = (start, start + size)
                start += size
            end = max(end, start)
        for name, size in rest:
            areas[name] = (end, end + size)
            end += size
        areas["dk"], areas["dv"] = (0, 2 * n * d), (2 * n * d, 2 * n * d + v)
        return areas

    def registers(self, traits: Traits) -> int:
        d, dv, threads = padded(traits.head_dim), padded(traits.head_dim_v), self.num_threads
        gradients = self.tile_n * (d + dv) // threads
        scores = self.queries * self.tile_n // threads
        v = self.tile_n * dv // (2 * 32 * (self.num_warps // self.sdp_warps_m)) if self.v_in_regs else 0
        v += self.tile_n * d // (2 * threads) if self.k_in_regs else 0
        dq = self.tile_m * d // threads
        return gradients + v + max(2 * scores, dq) + 30

    def shape_reason(self, traits: Traits) -> str | None:
        return self._warps_reason() or self._steps_reason(traits) or self._products_reason(traits)

    def reject(self, traits: Traits, target: str) -> str | None:
        if self.dq_vector != 1 and target != "sm90":
            return f"dq_vector is {self.dq_vector}; accepted: 1 on {target}, which reduces single floats"
        return super().reject(traits, target)

    def _warps_reason(self) -> str | None:
        if not 1 <= self.num_warps <= self.MAX_WARPS:
            return f"num_warps is {self.num_warps}; accepted: 1 to {self.MAX_WARPS}"
        for name in ("sdp_warps_m", "dkv_warps_m", "dq_warps_m"):
            warps = getattr(self, name)
            if warps < 1 or self.num_warps % warps:
                return f"{name} is {warps}; accepted: divisors of num_warps, which is {self.num_warps}"
        if self.p_in_regs and (self.sdp_warps_m, self.dkv_warps_m) != (1, self.num_warps):
            return (
                f"sdp_warps_m is {self.sdp_warps_m} and dkv_warps_m is {self.dkv_warps_m}; "
                f"accepted with p_in_regs: 1 and {self.num_warps}, all warps along the keys"
            )
        if self.k_in_regs and not self.p_in_regs:
            return "k_in_regs is true; accepted: with p_in_regs, whose operand K is divided among all warps"
        return None

    def _steps_reason(self, traits: Traits) -> str | None:
        for name in ("stages_q", "stages_do"):
            if getattr(self, name) not in (1, 2):
                return f"{name} is {getattr(self, name)}; accepted: 1 or 2"
        if self.dq_vector not in (1, 2, 4):
            return f"dq_vector is {self.dq_vector}; accepted: 1, 2 or 4"
        if min(self.sdp_unroll, self.dkv_unroll, self.dq_unroll, self.queries_at_once) < 0:
            return "an unroll or queries_at_once is negative; accepted: 0 for all, or how many at a time"
        if self.queries_at_once and (not self.p_in_regs or self.tile_m % self.queries_at_once):
            return (
                f"queries_at_once is {self.queries_at_once}; accepted: 0, or with p_in_regs a divisor of tile_m, "
                f"which is {self.tile_m}"
            )
        if traits.dropout == "flash" and (self.tile_n % 32 or self.queries % 16):
            return f"tile_n is {self.tile_n}; accepted: multiples of 32 for {traits}"
        return None

    def _products_reason(self, traits: Traits) -> str | None:
        d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
        sdp_n, dkv_n, dq_n = (
            self.num_warps // w for w in (self.sdp_warps_m, self.dkv_warps_m, self.dq_warps_m)
        )
        keys_step = 16 * self.num_warps if self.p_in_regs else 16 * max(sdp_n, self.dkv_warps_m)
        for name, extent, step in (
            ("tile_m", self.tile_m, 16 * self.dq_warps_m),
            ("queries", self.queries, 16 * self.sdp_warps_m),
            ("tile_n", self.tile_n, keys_step),
            ("padded head_dim", d, 16 * dkv_n),
            ("padded head_dim_v", dv, 16 * dkv_n),
            ("padded head_dim", d, 16 * dq_n),
        ):
            if extent <= 0 or extent % step:
                return f"{name} is {extent}; accepted: multiples of {step}, which the warps of {self} divide"
        for dim in sorted({d, dv}):
            rows_per_pass = self.num_threads // (8 if dim % 64 == 0 else 4)
            for what, rows in (("queries", self.queries), ("tile_n", self.tile_n)):
                if rows % rows_per_pass:
                    return (
                        f"{what} is {rows}; accepted: multiples of {rows_per_pass} rows, which {self.num_warps} "
                        f"warps copy at once at head dim {dim}"
                    )
        return None


@dataclass(frozen=True)
class BackwardSm90Tile(Tile):
    """Tile of the Hopper backward.

    Attributes:
        tile_m: queries of a step, a multiple of 16 (of 64 unless ``dq_transposed``).
        tile_n: keys of a block, 64 for each warpgroup, or 64 in all with ``p_in_smem``.
        warpgroups: warpgroups that compute; one more loads.
        p_in_smem: P goes through shared memory as dS does, so that the warpgroups divide the head dims of dK and dV
            between them. Otherwise they divide the keys, and P and dS of their own keys stay in registers.
        num_stages_q, num_stages_do: copies of Q and dO in shared memory.
        num_stages_ds: copies of dS (and P) in shared memory; with 2 a step has one barrier, with 1 it has two.
        dq_transposed: dQ is computed as its transpose, so that the warpgroups divide the head dim in steps of 64.
        dq_vector: floats that one reduction adds to dQ: 1, 2 or 4.
        dq_bulk: dQ goes through shared memory, from where a warp that does nothing else adds it, by one bulk reduction
            a query block. Only with ``dq_vector=4``.
        p_rounded: dS is computed from P in 16 bits, the operand of dV, so that the scores' registers are free early.
            Not with dropout, which has set elements of it to zero by then.
        dq_late: when a step's dQ is computed: with 0 as soon as its dS is there, so that all warpgroups wait for each
            other; with 1 beside the next step's S and dP; with 2 after the next step's P, while the exponentials of
            warpgroups that are up to half a step behind still run. Only 0 with ``p_in_smem``.
        take_turns: warpgroups start S and dP one after the other, so that one's exponentials run beside another's
            products. Only with ``dq_late``: otherwise they wait for each other in every step all the same.
        bias_stages: copies of a 16-bit bias's tile in shared memory, where TMA brings it with Q, and so as many as of
            Q; 0: threads read the bias from global memory. With ``dq_late``, TMA also takes its gradient from where dS
            lies, if that is the same. Rows of both must then be as those of q are.
    """

    tile_m: int = 64
    tile_n: int = 128
    warpgroups: int = 2
    p_in_smem: bool = False
    num_stages_q: int = 2
    num_stages_do: int = 2
    num_stages_ds: int = 2
    dq_transposed: bool = False
    dq_vector: int = 4
    dq_bulk: bool = False
    p_rounded: bool = False
    dq_late: int = 0
    take_turns: bool = False
    bias_stages: int = 0

    BARRIER_BYTES: ClassVar[int] = 1024

    @property
    def mma_threads(self) -> int:
        """Threads that multiply."""
        return 128 * self.warpgroups

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return self.mma_threads + 128

    @property
    def compute_registers(self) -> int:
        """Registers of a thread that computes: what the loading warpgroup leaves of 65,536."""
        return {1: 255, 2: 240, 3: 160}[self.warpgroups]

    @property
    def load_registers(self) -> int:
        """Registers of a thread that loads."""
        return {1: 56, 2: 24, 3: 32}[self.warpgroups]

    @property
    def dq_warps_n(self) -> int:
        """Warpgroups along the second extent of dQ's accumulator."""
        return 1 if self.dq_transposed else self.warpgroups // math.gcd(self.warpgroups, self.tile_m // 64)

    @property
    def dkv_warps_n(self) -> int:
        """Warpgroups along the head dims of dK and dV."""
        return self.warpgroups // math.gcd(self.warpgroups, self.tile_n // 64) if self.p_in_smem else 1

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """First byte and end of everything in shared memory. dK and dV take over K and V."""
        d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
        sizes = {
            "barriers": self.BARRIER_BYTES,
            "k": 2 * self.tile_n * d,
            "v": 2 * self.tile_n * dv,
            "q": 2 * self.tile_m * d * self.num_stages_q,
            "do": 2 * self.tile_m * dv * self.num_stages_do,
            "ds": 2 * self.tile_m * self.tile_n * self.num_stages_ds,
            "p": 2 * self.tile_m * self.tile_n * self.num_stages_ds if self.p_in_smem else 0,
            "bias": 2 * self.tile_m * self.tile_n * self.bias_stages,
            "dq": 4 * self.tile_m * d if self.dq_bulk else 0,
            "lse": 4 * self.tile_m * self.num_stages_q,
            "dpsum": 4 * self.tile_m * self.num_stages_do,
        }
        areas, start = {}, 0
        for name, size in sizes.items():
            areas[name] = (start, start + size)
            start += size
        return areas

    def smem_bytes(self, traits: Traits) -> int:
        return max(end for _, end in self.smem_areas(traits).values())

    def registers(self, traits: Traits) -> int:
        d, dv, threads = padded(traits.head_dim), padded(traits.head_dim_v), self.mma_threads
        acc_dkv, acc_s = self.tile_n * (d + dv) // threads, self.tile_m * self.tile_n // threads
        acc_dq = self.tile_m * d // threads
        p16 = 0 if self.p_in_smem else acc_s // 2
        at_ds = acc_s + (2 * p16 if self.p_rounded else acc_s + p16)
        if self.dq_late:
            at_ds = acc_dq + acc_s + p16 + (0 if self.p_rounded else acc_s)
        at_p = 2 * acc_s + (acc_dq if self.dq_late == 1 else 0)
        return acc_dkv + max(at_p, at_ds, acc_dq + 2 * p16) + 20

    def shape_reason(self, traits: Traits) -> str | None:
        if self.warpgroups not in (1, 2, 3):
            return f"warpgroups is {self.warpgroups}; accepted: 1 to 3"
        d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
        keys = 64 if self.p_in_smem else 64 * self.warpgroups
        if self.tile_n <= 0 or self.tile_n % keys or (not self.p_in_smem and self.tile_n != keys):
            return f"tile_n is {self.tile_n}; accepted: {keys} with warpgroups={self.warpgroups}"
        rows = 16 if self.dq_transposed and not self.p_in_smem else 64
        if self.tile_m <= 0 or self.tile_m % rows or self.tile_m > 256:
            return f"tile_m is {self.tile_m}; accepted: multiples of {rows} up to 256"
        if self.dq_transposed and d % (64 * self.warpgroups):
            return (
                f"dq_transposed is true; accepted: with head dims of whole {64 * self.warpgroups}, 64 for each of "
                f"{self.warpgroups} warpgroups, not {d}"
            )
        along_n = self.warpgroups // min(self.warpgroups, self.tile_m // 64) if self.p_in_smem else 1
        if self.p_in_smem and (
            self.tile_m % (64 * self.warpgroups // along_n) or self.tile_n % (16 * along_n)
        ):
            return f"warpgroups is {self.warpgroups}; accepted with p_in_smem: what divides {self.tile_m} queries"
        for what, dim, parts in (
            ("dQ", d, self.dq_warps_n),
            ("dK", d, self.dkv_warps_n),
            ("dV", dv, self.dkv_warps_n),
        ):
            if dim % (16 * parts):
                return f"warpgroups is {self.warpgroups}; accepted: so many that {parts} divide {dim} columns of {what}"
        if min(self.num_stages_q, self.num_stages_do) < 1 or self.num_stages_ds not in (1, 2):
            return (
                f"num_stages_q, _do, _ds are {self.num_stages_q}, {self.num_stages_do}, {self.num_stages_ds}; "
                "accepted: 1 or more, 1 or more, 1 or 2"
            )
        if self.dq_late not in (0, 1, 2):
            return f"dq_late is {self.dq_late}; accepted: 0, 1 or 2"
        if self.dq_late and (self.p_in_smem or self.num_stages_ds != 2):
            return f"dq_late is {self.dq_late}; accepted: with p_in_smem=false and num_stages_ds=2"
        if self.take_turns and (self.warpgroups == 1 or not self.dq_late):
            return "take_turns is true; accepted: with 2 or 3 warpgroups and dq_late 1 or 2"
        if self.bias_stages and (traits.bias not in ("fp16", "bf16") or self.p_in_smem):
            return (
                f"bias_stages is {self.bias_stages}; accepted: 0, or with a bias of 16 bits and p_in_smem=false as "
                f"many as num_stages_q, for {traits}"
            )
        if self.bias_stages not in (0, self.num_stages_q):
            return f"bias_stages is {self.bias_stages}; accepted: 0, or num_stages_q, which is {self.num_stages_q}"
        if self.p_rounded and traits.dropout:
            return f"p_rounded is true; accepted: without dropout, not for {traits}"
        if self.dq_vector not in (1, 2, 4):
            return f"dq_vector is {self.dq_vector}; accepted: 1, 2 or 4"
        if self.dq_bulk and self.dq_vector != 4:
            return f"dq_bulk is true and dq_vector is {self.dq_vector}; accepted with dq_bulk: 4"
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
        """The tile for a main kernel's ``tile_m``: the most rows that keep all threads busy and fit their registers."""
        whole = BackwardPreprocessTile(tile_m, tile_m)
        tiles = [
            dataclasses.replace(whole, rows=n) for n in range(4, whole.num_threads + 1, 4) if tile_m % n == 0
        ]

        def badness(tile: BackwardPreprocessTile) -> tuple[bool, float, int]:
            vectors = tile.vectors(traits) * tile.passes(traits)
            return vectors > 5, tile.passes(traits) * tile.rows_at_once(traits) / tile.rows, -tile.rows

        return min(tiles, key=badness)

    def threads_per_row(self, traits: Traits) -> int:
        """Adjacent threads that read one row of O, three times 16 bytes each at most: what leaves the fewest idle."""
        pieces = traits.head_dim_v // 8
        enough = [threads for threads in (16, 8, 4) if 3 * threads >= pieces]
        return min(enough, key=lambda threads: -(-pieces // threads) * threads)

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
