"""Tiles of the backward's main kernels and of its preprocess. The convert uses the main kernel's tile."""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from cute_attn.tiles.base import (
    COMPUTE_REGISTERS,
    LOAD_REGISTERS,
    SHARED_MEMORY_BYTES,
    Tile,
    WarpTile,
    areas_in_order,
    atom_bytes,
    choice,
    padded,
    row_bytes,
)
from cute_attn.traits import Traits

COUNTERS = 16
"""Number of int32 counters before those of dQ's turns: the first counts claimed work tiles, the rest are padding."""


@dataclass(frozen=True)
class BackwardSm80Tile(WarpTile):
    """Tile of the Ampere backward's main kernel.

    Attributes:
        tile_m: queries per step.
        tile_n: keys per CTA.
        num_warps: warps per CTA.
        sdp_warps_m: warps along the queries in S = Q K^T and dP = dO V^T; num_warps / sdp_warps_m are along the keys.
        dkv_warps_m: warps along the keys in dV = P^T dO and dK = dS^T Q; num_warps / dkv_warps_m are along head dims.
        dq_warps_m: warps along the queries in dQ = dS K; num_warps / dq_warps_m are along head_dim.
        stages_q, stages_do: stages of Q and dO, 1 or 2. With 2, the next step's load overlaps this whole step; with 1,
            only this step's last product.
        v_in_regs: V is read from shared memory once and kept in registers; P and dS reuse its shared memory.
        p_in_regs: S and dP are computed transposed with all warps along the keys, so that P and dS are register
            operands of dV and dK, and only dS passes through shared memory, for dQ. Requires ``sdp_warps_m`` 1 and
            ``dkv_warps_m`` equal to num_warps.
        queries_at_once: with ``p_in_regs``, queries whose scores are in registers at a time; 0 for all ``tile_m``.
        sdp_unroll, dkv_unroll, dq_unroll: MMA steps that each of these products loads at a time; 0 for all steps.
            Fewer steps need fewer operand registers.
        dq_vector: floats of dQ that one reduction adds: 1, or from target sm90 on also 2 or 4.
        dq_passes: ranges of head_dim, each in whole swizzle atoms of K, for which dQ is computed one after the other,
            since large head dims leave too few registers for all of dQ.
        columns: columns of dK, dV and dQ that a CTA computes; other CTAs compute the rest. Operands then pass through
            shared memory in ``dq_passes`` chunks of columns instead of staying there. 0: all columns.
        operands: ``whole``, or for fp32 ``terms``: another kernel stores Q, K, V and dO as two fp16 terms (a product
            becomes three fp16 products), or as one term with precision tf32; this kernel splits P and dS.
            ``fallback``: like ``whole``, but the kernel returns at once if all tensors fit their terms, since the
            kernel with ``terms`` has then computed the gradients.
    """

    MIN_WARPS: ClassVar[int] = 2  # which load the 8 rows of an atom at once
    tile_m: int = choice(64, 16, 32, 64, 96, 128)
    tile_n: int = choice(64, 32, 64, 96, 128, 192)
    num_warps: int = choice(8, 4, 8, 16)
    sdp_warps_m: int = choice(4, 1, 2, 4, 8)
    dkv_warps_m: int = choice(4, 1, 2, 4, 8)
    dq_warps_m: int = choice(4, 1, 2, 4, 8)
    stages_q: int = choice(2, 1, 2)
    stages_do: int = choice(2, 1, 2)
    v_in_regs: bool = False
    p_in_regs: bool = False
    queries_at_once: int = choice(0, 0, 16, 32, 64)
    sdp_unroll: int = choice(0, 0, 1, 2, 4)
    dkv_unroll: int = choice(0, 0, 1, 2, 4)
    dq_unroll: int = choice(0, 0, 1, 2, 4)
    dq_vector: int = choice(1, 1, 2, 4)
    dq_passes: int = choice(1, 1, 2, 4)
    columns: int = choice(0, 0, 64, 128, 256)
    operands: str = choice("whole", "whole", "terms")

    @property
    def in_terms(self) -> bool:
        """True if another kernel has split the operands into fp16 terms."""
        return self.operands == "terms"

    @property
    def speculative(self) -> bool:
        """True if the kernel reads the scales first, and returns at once if the other kernel computes the gradients."""
        return self.operands != "whole"

    @property
    def mma_threads(self) -> int:
        """Threads of the tiled MMAs: all threads of the CTA."""
        return self.num_threads

    def for_convert(self) -> "BackwardSm80Tile":
        """The convert's tile: this one, with ``terms`` replaced by ``fallback``, which orders dQ in memory equally."""
        return dataclasses.replace(self, operands="fallback") if self.in_terms else self

    def fallback(self, traits: Traits) -> "BackwardSm80Tile":
        """The tile for whole fp32 operands, with the query blocks and order of dQ of this tile with ``terms``.

        Whole operands need twice the shared memory of one term. The tile therefore has single stages, and half the
        keys if ``tile_n`` keys do not fit every target (then with twice the launches). With several dQ passes, operands
        are streamed in chunks.
        """
        tile = dataclasses.replace(self, operands="fallback")
        if traits.fp32_terms == 2 or self.columns:
            return tile
        tile = dataclasses.replace(tile, stages_q=1, stages_do=1, sdp_unroll=2, dkv_unroll=1, dq_unroll=1)
        if self.dq_passes == 1:
            fits = tile.smem_bytes(traits) <= min(SHARED_MEMORY_BYTES.values())
            return tile if fits else dataclasses.replace(tile, tile_n=self.tile_n // 2)
        return dataclasses.replace(tile, tile_n=64, sdp_warps_m=4, dkv_warps_m=4, columns=256)

    def operand_bytes(self, traits: Traits) -> int:
        """Bytes per operand element; with ``terms``, bytes of one term."""
        return 2 if self.in_terms else traits.element_bytes

    def one_term(self, traits: Traits) -> bool:
        """True if operands are one fp16 term, and so have the size of 16-bit tensors."""
        return self.in_terms and traits.fp32_terms == 1

    @property
    def dq_transposed(self) -> bool:
        """Always False: dQ's accumulator is (queries, head_dim)."""
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
    def subtiles(self) -> int:
        """Sub-tiles of ``queries`` queries in a step."""
        return self.tile_m // self.queries

    def chunk(self, traits: Traits) -> int:
        """Columns per chunk if ``columns`` is set: 128 bytes, or 64 if a padded head dim is not a multiple of 128.

        The fallback kernel's tile also counts 2 bytes per element, like a term, since dQ's order depends on the chunk.
        """
        size = 2 if self.speculative else traits.element_bytes
        dims = padded(traits.head_dim), padded(traits.head_dim_v)
        return (128 if all(dim * size % 128 == 0 for dim in dims) else 64) // size

    def parts(self, traits: Traits) -> int:
        """Number of CTAs that divide the columns of a key block."""
        widest = max(padded(traits.head_dim), padded(traits.head_dim_v))
        return -(-widest // self.columns) if self.columns else 1

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """Name -> first byte and end of each area of shared memory; dK and dV reuse the operands' memory."""
        (row, row_v), size = row_bytes(traits), traits.element_bytes
        m, n = self.tile_m, self.tile_n
        dk, dv = n * row, n * row_v
        if self.one_term(traits):
            row, row_v, size = row // 2, row_v // 2, 2
        k, v, scores = n * row, n * row_v, size * m * n
        if self.columns:
            chunk = 2 * self.chunk(traits) * size  # two stages
            named = {"queries": m * chunk, "keys": n * chunk, "p": scores, "ds": scores, "lse": 4 * m}
            return areas_in_order(named | {"minus_d": 4 * m} | self._scale_areas(traits))
        between = [("p", 0 if self.p_in_regs else scores), ("ds", scores)]
        rest = [
            ("q", m * row * self.stages_q),
            ("do", m * row_v * self.stages_do),
            *([] if self.v_in_regs else between),
            ("lse", 4 * m * self.stages_q),
            ("minus_d", 4 * m * self.stages_do),
            ("spilled", 80),
            *self._scale_areas(traits).items(),
        ]
        areas, end = areas_in_order({"k": k, "v": v}), k + v
        if self.v_in_regs:
            areas |= areas_in_order(dict(between), start=k)
            end = max(end, areas["ds"][1])
        for name, size in rest:
            if name == "lse":
                end = max(end, dk + dv)  # the next areas are read while dK and dV are written
            areas[name] = (end, end + size)
            end += size
        areas["dk"], areas["dv"] = (0, dk), (dk, dk + dv)
        return areas

    def _scale_areas(self, traits: Traits) -> dict[str, int]:
        """Name -> additional bytes of shared memory for operands in terms."""
        if not self.in_terms:
            return {}
        warps = 4 * self.num_warps
        if not self.one_term(traits):
            return {"factors": 32, "largest": warps}
        return {"factors": 32, "largest": warps * self.subtiles, "applied": warps}

    def registers(self, traits: Traits) -> int:
        d, dv, threads = padded(traits.head_dim), padded(traits.head_dim_v), self.num_threads
        gradients = self.tile_n * (2 * self.columns or d + dv) // threads
        scores = self.queries * self.tile_n // threads
        v = self.tile_n * dv // (2 * 32 * (self.num_warps // self.sdp_warps_m)) if self.v_in_regs else 0
        dq = self.tile_m * d // (threads * self.dq_passes)
        return gradients + v + max(2 * scores, dq) + 30

    def shape_reason(self, traits: Traits) -> str | None:
        own = self.num_warps_reason() or self._warps_reason() or self._steps_reason(traits)
        own = own or self._products_reason(traits) or self._fp32_reason(traits)
        sizes = {"queries": self.queries, "tile_n": self.tile_n}
        return own or self.copies_reason(traits, self.operand_bytes(traits), **sizes)

    def reject(self, traits: Traits, target: str) -> str | None:
        if self.dq_vector != 1 and target in ("sm80", "sm86", "sm89"):
            return f"dq_vector is {self.dq_vector}; accepted: 1 on {target}, which reduces single floats"
        reason = super().reject(traits, target)
        if reason is None and self.one_term(traits):
            reason = self.fallback(traits).reject(traits, target)
        return reason

    def _warps_reason(self) -> str | None:
        for name in ("sdp_warps_m", "dkv_warps_m", "dq_warps_m"):
            warps = getattr(self, name)
            if warps < 1 or self.num_warps % warps:
                return f"{name} is {warps}; accepted: divisors of num_warps, which is {self.num_warps}"
        if self.p_in_regs and (self.sdp_warps_m, self.dkv_warps_m) != (1, self.num_warps):
            return (
                f"sdp_warps_m is {self.sdp_warps_m} and dkv_warps_m is {self.dkv_warps_m}; "
                f"accepted with p_in_regs: 1 and {self.num_warps}, all warps along the keys"
            )
        return None

    def _steps_reason(self, traits: Traits) -> str | None:
        for name in ("stages_q", "stages_do"):
            if getattr(self, name) not in (1, 2):
                return f"{name} is {getattr(self, name)}; accepted: 1 or 2"
        if self.columns and (
            self.columns % self.chunk(traits)
            or self.columns < 0
            or self.p_in_regs
            or self.v_in_regs
            or self.dq_passes * self.chunk(traits) != padded(traits.head_dim)
        ):
            return (
                f"columns is {self.columns} with dq_passes {self.dq_passes}; accepted: 0, or multiples of "
                f"{self.chunk(traits)} with dq_passes {padded(traits.head_dim) // self.chunk(traits)} and P, dS and V "
                "in shared memory"
            )
        if self.columns and self.tile_m > self.num_threads:
            return (
                f"tile_m is {self.tile_m}; accepted: up to {self.num_threads}, a row of LSE and D per thread"
            )
        size = self.operand_bytes(traits)
        # A pass is a tile in shared memory, so it has K's swizzle atoms.
        whole = self.chunk(traits) if self.columns else atom_bytes(padded(traits.head_dim) * size) // size
        if self.dq_passes < 1 or (self.dq_passes > 1 and padded(traits.head_dim) % (whole * self.dq_passes)):
            return (
                f"dq_passes is {self.dq_passes}; accepted: 1, or a divisor of padded head_dim "
                f"{padded(traits.head_dim)} into multiples of {whole}"
            )
        if self.dq_vector not in (1, 2, 4):
            return f"dq_vector is {self.dq_vector}; accepted: 1, 2 or 4"
        if min(self.sdp_unroll, self.dkv_unroll, self.dq_unroll, self.queries_at_once) < 0:
            return "an unroll or queries_at_once is negative; accepted: 0 for all, or the number at a time"
        if self.queries_at_once and (not self.p_in_regs or self.tile_m % self.queries_at_once):
            return (
                f"queries_at_once is {self.queries_at_once}; accepted: 0, or with p_in_regs a divisor of tile_m, "
                f"which is {self.tile_m}"
            )
        if traits.dropout == "flash" and (self.tile_n % 32 or self.queries % 16):
            return f"tile_n is {self.tile_n}; accepted: multiples of 32 for {traits}"
        return None

    def _fp32_reason(self, traits: Traits) -> str | None:
        whole = traits.dtype != "fp32"
        if self.operands not in (("whole",) if whole else ("whole", "terms", "fallback")):
            accepted = "whole" if whole else "whole or terms"
            return f"operands is {self.operands!r}; accepted: {accepted} for {traits}"
        if self.in_terms and self.subtiles > 1:
            step = 16 * self.dq_warps_m
            if traits.fp32_terms == 2 or self.queries % step:
                accepted = "all of tile_m" if traits.fp32_terms == 2 else f"multiples of {step}"
                return f"operands is terms with queries_at_once {self.queries_at_once}; accepted: {accepted}"
        if traits.element_bytes == 2:
            return None
        if self.v_in_regs:
            return f"v_in_regs is True; accepted: False for {traits}"
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
            ("padded head_dim", self.chunk(traits) if self.columns else d, 16 * dkv_n),
            ("padded head_dim_v", self.chunk(traits) if self.columns else dv, 16 * dkv_n),
            ("padded head_dim of a pass", d // self.dq_passes, 16 * dq_n),
        ):
            if extent <= 0 or extent % step:
                return f"{name} is {extent}; accepted: multiples of {step} for the warps of {self}"
        return None


@dataclass(frozen=True)
class BackwardSm90Tile(Tile):
    """Tile of the Hopper backward.

    Attributes:
        tile_m: queries per step, a multiple of 64, or of 16 with ``dq_transposed`` and without ``p_in_smem``.
        tile_n: keys of a key tile: 128, 64 per consumer warpgroup; with ``p_in_smem`` any multiple of 64, or with
            ``dkv_transposed`` of 16.
        p_in_smem: P passes through shared memory as dS does, and the warpgroups divide the head dims of dK and dV.
            Otherwise the warpgroups divide the keys, and P and dS are register operands.
        dkv_transposed: dK and dV are computed transposed, so that the warpgroups divide the keys, and ``tile_n`` need
            not be a multiple of 64. Requires ``p_in_smem``, head dims in multiples of 64 and no dropout.
        num_stages_q, num_stages_do: stages of Q and dO.
        num_stages_ds: stages of dS (and P): with 2, a step has one barrier; with 1, two barriers.
        dq_transposed: dQ is computed transposed, so that the warpgroups divide head_dim in steps of 64.
        dq_bulk: dQ is staged in shared memory, and one warp adds it with one bulk reduction per query block. Requires
            ``p_in_smem`` to be false.
        dq_in_order: key blocks add to a query block's dQ in a fixed order, so that gradients repeat bit for bit. Set
            by calls with ``deterministic=True``. A warp of the producer warpgroup waits for the turns. Not possible
            with a block list.
        dq_direct: dQ is stored in its own type by the CTA that computed all of it, instead of added in fp32 to global
            memory. Set by calls whose keys are one key tile that all queries visit, or with ``dq_rows``.
        dq_rows: queries whose dQ is summed in shared memory: a CTA computes all key tiles of a sequence. 0: a sequence
            is one key tile. Set by calls of many short sequences.
        bias_stages: stages of a 16-bit bias that TMA loads with Q: ``num_stages_q`` for bias rows aligned like q's, or
            0: threads read the bias from global memory. If the bias's gradient equals dS, TMA then stores dS.
        mask_warps: warps of the producer warpgroup that compute the flash dropout mask, at most 3, or 1 with
            ``dq_bulk`` or ``dq_in_order``. 0 (the only choice with ``p_in_smem``): consumer threads compute the mask.
        cluster: CTAs that divide the columns of Q, K, V, dO, dQ, dK and dV. Two CTAs exchange partial S and dP; they
            require ``scores_ahead`` and padded head dims in multiples of 64.
        scores_ahead: a product runs at all times: a query block's dP while its P is computed, dV while dS is computed,
            and the next query block's S while dQ is added. Requires ``p_in_smem`` and two stages of Q.
        staggered: if all queries see every key block, CTAs start at different query blocks, so that CTAs of one
            head do not add to the same dQ at the same time.
    """

    tile_m: int = choice(64, *range(16, 129, 16))
    tile_n: int = choice(128, *range(48, 193, 16))
    p_in_smem: bool = False
    dkv_transposed: bool = False
    num_stages_q: int = choice(2, 1, 2, 3)
    num_stages_do: int = choice(2, 1, 2, 3)
    num_stages_ds: int = choice(2, 1, 2)
    dq_transposed: bool = False
    dq_bulk: bool = False
    dq_in_order: bool = choice(False, False)  # by the call
    dq_direct: bool = choice(False, False)  # by the call
    dq_rows: int = choice(0, 0)  # by the call
    bias_stages: int = choice(0, 0, 1, 2, 3)
    mask_warps: int = choice(0, 0, 1, 2, 3)
    cluster: int = choice(1, 1, 2)
    scores_ahead: bool = False
    staggered: bool = False

    BARRIER_BYTES: ClassVar[int] = 1024
    MASK_STAGES: ClassVar[int] = 2
    warpgroups: ClassVar[int] = 2  # consumers, in addition to one producer warpgroup
    mma_threads: ClassVar[int] = 256
    dq_vector: ClassVar[int] = 4  # floats of dQ that one reduction adds

    def columns_of(self, head_dim: int) -> int:
        """Columns per CTA: the padded head dim divided by the CTAs of a cluster."""
        return padded(head_dim) // self.cluster

    @property
    def dq_passes(self) -> int:
        """Ranges of head_dim with a dQ accumulator each: one per CTA of the cluster."""
        return self.cluster

    def for_convert(self) -> "BackwardSm90Tile":
        """The convert's tile: this one with the fields reset that do not affect dQ's order in memory."""
        return dataclasses.replace(
            self, bias_stages=0, mask_warps=0, dq_bulk=False, dq_in_order=False, staggered=False
        )

    def in_order(self) -> "BackwardSm90Tile":
        """This tile with ``dq_in_order``. If too few warps are left for the mask, consumers compute it."""
        ordered = dataclasses.replace(self, dq_in_order=True, staggered=False)
        enough = self.mask_warps <= ordered.idle_warps
        return dataclasses.replace(ordered, mask_warps=self.mask_warps if enough else 0)

    @property
    def may_be_direct(self) -> bool:
        """True if ``dq_direct`` is possible: a CTA's rows of dQ are whole and not transposed."""
        return not self.dq_transposed and self.cluster == 1

    def direct(self, dq_rows: int = 0) -> "BackwardSm90Tile":
        """This tile with ``dq_direct``."""
        return dataclasses.replace(
            self, dq_direct=True, dq_rows=dq_rows, dq_bulk=False, dq_in_order=False, staggered=False
        )

    @property
    def num_threads(self) -> int:
        return self.mma_threads + 128

    @property
    def compute_registers(self) -> int:
        return COMPUTE_REGISTERS[self.warpgroups]

    @property
    def load_registers(self) -> int:
        return LOAD_REGISTERS[self.warpgroups]

    @property
    def dq_warps_n(self) -> int:
        """Warpgroups along the second extent of dQ's accumulator."""
        return 1 if self.dq_transposed else self.warpgroups // math.gcd(self.warpgroups, self.tile_m // 64)

    @property
    def dkv_warps_n(self) -> int:
        """Warpgroups along the head dims of dK and dV."""
        divided = self.p_in_smem and not self.dkv_transposed
        return self.warpgroups // math.gcd(self.warpgroups, self.tile_n // 64) if divided else 1

    @property
    def ds_warps_n(self) -> int:
        """Warpgroups that divide the keys of P and dS as the second operand of dV and dK."""
        return self.warpgroups if self.dkv_transposed else 1

    def dk_leaves_k(self, traits: Traits) -> bool:
        """True if dK is stored from the memory of dS and P instead of K's, so that the next K loads meanwhile.

        False if TMA may still be storing dS as the bias's gradient.
        """
        room = self.tile_m * self.num_stages_ds * (2 if self.p_in_smem else 1)
        return room >= self.columns_of(traits.head_dim) and not (self.bias_stages and traits.bias_grad)

    def dv_leaves_v(self, traits: Traits) -> bool:
        """True if dV is stored from memory other than V's, so that the next V loads meanwhile."""
        areas = self.smem_areas(traits)
        return areas["dv"] != areas["v"]

    @property
    def row_stride(self) -> int:
        """Stride of the stages of LSE and D in fp32 numbers: TMA writes to multiples of 128 bytes."""
        return -(-self.tile_m // 32) * 32

    @property
    def idle_warps(self) -> int:
        """Warps of the producer warpgroup that are free for the dropout mask."""
        return 1 if self.dq_bulk or self.dq_in_order else 3

    @property
    def mask_words(self) -> int:
        """Words of the dropout mask for each thread and step; see ``cute_attn.epilogues.dropout_words``."""
        return -(-self.tile_m // 64)

    def smem_areas(self, traits: Traits) -> dict[str, tuple[int, int]]:
        """Name -> first byte and end of each area of shared memory.

        dK reuses the memory of dS or K; dV reuses V's, or that of dS after dK. If dS has no room for dV, head dims up
        to 96 get separate memory for dV. With more columns, a key block's products are long enough to hide V's load.
        """
        d, dv = self.columns_of(traits.head_dim), self.columns_of(traits.head_dim_v)
        sizes = {
            "barriers": self.BARRIER_BYTES,
            "k": 2 * self.tile_n * d,
            "v": 2 * self.tile_n * dv,
            "q": 2 * self.tile_m * d * self.num_stages_q,
            "do": 2 * self.tile_m * dv * self.num_stages_do,
            "ds": 2 * self.tile_m * self.tile_n * self.num_stages_ds,
            "p": 2 * self.tile_m * self.tile_n * self.num_stages_ds if self.p_in_smem else 0,
            "bias": 2 * self.tile_m * self.tile_n * self.bias_stages,
            "dq": 4 * d * (self.tile_m if self.dq_bulk else self.dq_rows),
            "sums": 4 * self.tile_m * self.tile_n * (2 if self.cluster > 1 else 0),
            "lse": 4 * self.row_stride * self.num_stages_q,
            "minus_d": 4 * self.row_stride * self.num_stages_do,
            "mask": 4 * self.mask_words * self.mma_threads * (self.MASK_STAGES if self.mask_warps else 0),
        }
        areas = areas_in_order(sizes)
        start = sum(sizes.values())
        first, _ = areas["ds" if self.dk_leaves_k(traits) else "k"]
        areas["dk"], areas["dv"] = (first, first + sizes["k"]), areas["v"]
        if self.dk_leaves_k(traits) and not self.p_in_smem and max(d, dv) <= 96:
            if sizes["k"] + sizes["v"] <= sizes["ds"]:
                areas["dv"] = first + sizes["k"], first + sizes["k"] + sizes["v"]
            elif start + sizes["v"] <= SHARED_MEMORY_BYTES["sm90"]:
                areas["dv"] = start, start + sizes["v"]
        return areas

    def registers(self, traits: Traits) -> int:
        d, dv = self.columns_of(traits.head_dim), self.columns_of(traits.head_dim_v)
        threads = self.mma_threads
        acc_dkv, acc_s = self.tile_n * (d + dv) // threads, self.tile_m * self.tile_n // threads
        acc_dq = self.tile_m * d // threads
        if self.p_in_smem:  # S and dP are gone before dQ is computed
            return acc_dkv + max(2 * acc_s + 28, acc_dq + (acc_s + 16 if self.scores_ahead else 28))
        return acc_dkv + max(2 * acc_s, acc_dq + acc_s) + 20

    @property
    def store_columns(self) -> int:
        """Columns of P, dS, dK and dV that one stmatrix stores."""
        return 8 if self.dkv_transposed and self.tile_n % 32 else 16

    def shape_reason(self, traits: Traits) -> str | None:
        d, dv = self.columns_of(traits.head_dim), self.columns_of(traits.head_dim_v)
        if self.cluster not in (1, 2) or any(
            padded(dim) % (32 * self.cluster) for dim in (traits.head_dim, traits.head_dim_v)
        ):
            return (
                f"cluster is {self.cluster}; accepted: 1, or with padded head dims in multiples of 64 also 2, "
                f"for {traits}"
            )
        if self.cluster > 1 and not self.scores_ahead:
            return "cluster is 2; accepted: with scores_ahead"
        keys = 16 if self.dkv_transposed else 64 if self.p_in_smem else 128
        if self.tile_n <= 0 or self.tile_n % keys or (not self.p_in_smem and self.tile_n != keys):
            return f"tile_n is {self.tile_n}; accepted: {keys} with p_in_smem={str(self.p_in_smem).lower()}"
        if self.dkv_transposed and (not self.p_in_smem or d % 64 or dv % 64 or traits.dropout):
            return (
                "dkv_transposed is true; accepted: with p_in_smem, head dims in multiples of 64 and no dropout, "
                f"not {traits}"
            )
        rows = 16 if self.dq_transposed and not self.p_in_smem else 64
        if self.tile_m <= 0 or self.tile_m % rows or self.tile_m > 256:
            return f"tile_m is {self.tile_m}; accepted: multiples of {rows} up to 256"
        if self.dq_transposed and d % (64 * self.warpgroups):
            return (
                f"dq_transposed is true; accepted: with head dims in multiples of {64 * self.warpgroups}, 64 "
                f"for each of {self.warpgroups} warpgroups, not {d}"
            )
        along_n = self.warpgroups // min(self.warpgroups, self.tile_m // 64) if self.p_in_smem else 1
        if self.p_in_smem and (
            self.tile_m % (64 * self.warpgroups // along_n) or self.tile_n % (self.store_columns * along_n)
        ):
            return (
                f"warpgroups is {self.warpgroups}; accepted with p_in_smem: divisors of {self.tile_m} queries"
            )
        for what, dim, parts in (
            ("dQ", d, self.dq_warps_n),
            ("dK", d, self.dkv_warps_n),
            ("dV", dv, self.dkv_warps_n),
        ):
            if dim % (16 * parts):
                return f"warpgroups is {self.warpgroups}; accepted: such that {parts} divide {dim} columns of {what}"
        if min(self.num_stages_q, self.num_stages_do) < 1 or self.num_stages_ds not in (1, 2):
            return (
                f"num_stages_q, _do, _ds are {self.num_stages_q}, {self.num_stages_do}, {self.num_stages_ds}; "
                "accepted: 1 or more, 1 or more, 1 or 2"
            )
        if not self.p_in_smem and self.num_stages_ds != 2:
            return f"num_stages_ds is {self.num_stages_ds}; accepted: 2 with p_in_smem=false"
        if self.p_in_smem and self.dq_bulk:
            return "dq_bulk is true; accepted: with p_in_smem=false"
        if self.dq_in_order and self.staggered:
            return "dq_in_order is true with staggered; accepted: one of them"
        if self.dq_direct and (self.dq_bulk or self.dq_in_order or not self.may_be_direct):
            return "dq_direct is true; accepted: without dq_bulk, dq_in_order, dq_transposed and cluster"
        if self.dq_rows < 0 or self.dq_rows % self.tile_m or (self.dq_rows and not self.dq_direct):
            return f"dq_rows is {self.dq_rows}; accepted: 0, or with dq_direct multiples of tile_m, {self.tile_m}"
        if self.scores_ahead and not (self.p_in_smem and self.num_stages_q > 1):
            return "scores_ahead is true; accepted: with p_in_smem and 2 or more num_stages_q"
        if self.bias_stages and (traits.bias not in ("fp16", "bf16") or self.p_in_smem):
            return (
                f"bias_stages is {self.bias_stages}; accepted: 0, or with a bias of 16 bits and p_in_smem=false, "
                f"num_stages_q, for {traits}"
            )
        if self.bias_stages not in (0, self.num_stages_q):
            return f"bias_stages is {self.bias_stages}; accepted: 0, or num_stages_q, which is {self.num_stages_q}"
        most = 0 if self.p_in_smem or traits.dropout != "flash" else self.idle_warps
        if not 0 <= self.mask_warps <= most:
            return (
                f"mask_warps is {self.mask_warps}; accepted: 0, or with flash's dropout and p_in_smem=false up to "
                f"{self.idle_warps}, for {traits}"
            )
        return self.registers_reason(traits, self.compute_registers, f"with {self.warpgroups} warpgroups ")


@dataclass(frozen=True)
class BackwardPreprocessTile(Tile):
    """Tile of the backward's preprocess.

    Attributes:
        tile_m: queries per step of the main kernel; the workspace pads sequences to multiples of tile_m.
        rows: queries per CTA, a divisor of tile_m.
        num_threads: threads per CTA, at least one per row.
    """

    tile_m: int = 128
    rows: int = 64
    num_threads: int = 256

    @staticmethod
    def of(traits: Traits, tile_m: int) -> "BackwardPreprocessTile":
        """The tile for a main kernel's ``tile_m``: fits the registers, has fewest idle threads, then most rows."""
        whole = BackwardPreprocessTile(tile_m, tile_m)
        tiles = [
            dataclasses.replace(whole, rows=n) for n in range(4, whole.num_threads + 1, 4) if tile_m % n == 0
        ]

        def cost(tile: BackwardPreprocessTile) -> tuple[bool, float, int]:
            vectors = tile.vectors(traits) * tile.passes(traits)
            return vectors > 5, tile.passes(traits) * tile.rows_at_once(traits) / tile.rows, -tile.rows

        return min(tiles, key=cost)

    @staticmethod
    def length(traits: Traits) -> int:
        """Elements of a 16-byte vector."""
        return 16 // traits.element_bytes

    def threads_per_row(self, traits: Traits) -> int:
        """Adjacent threads (4 to 32) per row of O, each with up to three 16-byte vectors; leaves the fewest idle."""
        vectors = -(-traits.head_dim_v // self.length(traits))
        enough = [threads for threads in (16, 8, 4, 32) if 3 * threads >= vectors] or [32]
        return min(enough, key=lambda threads: -(-vectors // threads) * threads)

    def vectors(self, traits: Traits) -> int:
        """16-byte vectors of a row of O per thread."""
        return -(-traits.head_dim_v // (self.length(traits) * self.threads_per_row(traits)))

    def rows_at_once(self, traits: Traits) -> int:
        """Rows that a CTA reads at a time."""
        return self.num_threads // self.threads_per_row(traits)

    def passes(self, traits: Traits) -> int:
        """Number of passes over a CTA's rows, ``rows_at_once`` at a time."""
        return -(-self.rows // self.rows_at_once(traits))

    def smem_bytes(self, traits: Traits) -> int:
        return 4 * self.rows

    def registers(self, traits: Traits) -> int:
        return 2 * 4 * self.vectors(traits) * self.passes(traits) + 32

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
