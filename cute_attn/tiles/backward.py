"""Tiles of the backward's main kernels and of its preprocess. The convert uses the main kernel's tile."""

import dataclasses
import math
from collections.abc import Iterator
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
    dq_transposed: ClassVar[bool] = False  # dQ's accumulator is (queries, head_dim)
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

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        yield self.num_warps_reason()
        yield from self._warps_reasons()
        yield from self._steps_reasons(traits)
        yield from self._products_reasons(traits)
        yield from self._fp32_reasons(traits)
        sizes = {"queries": self.queries, "tile_n": self.tile_n}
        yield self.copies_reason(traits, self.operand_bytes(traits), **sizes)

    def reject(self, traits: Traits, target: str) -> str | None:
        if self.dq_vector != 1 and target in ("sm80", "sm86", "sm89"):
            return f"dq_vector is {self.dq_vector}; accepted: 1 on {target}, which reduces single floats"
        reason = super().reject(traits, target)
        if reason is None and self.one_term(traits):
            reason = self.fallback(traits).reject(traits, target)
        return reason

    def _warps_reasons(self) -> Iterator[str | None]:
        for name in ("sdp_warps_m", "dkv_warps_m", "dq_warps_m"):
            divides = getattr(self, name) >= 1 and self.num_warps % getattr(self, name) == 0
            yield self.unless(divides, name, f"divisors of num_warps, which is {self.num_warps}")
        if self.p_in_regs and (self.sdp_warps_m, self.dkv_warps_m) != (1, self.num_warps):
            yield (
                f"sdp_warps_m is {self.sdp_warps_m} and dkv_warps_m is {self.dkv_warps_m}; "
                f"accepted with p_in_regs: 1 and {self.num_warps}, all warps along the keys"
            )

    def _steps_reasons(self, traits: Traits) -> Iterator[str | None]:
        for name in ("stages_q", "stages_do"):
            yield self.unless(getattr(self, name) in (1, 2), name, "1 or 2")
        d, chunk = padded(traits.head_dim), self.chunk(traits)
        if self.columns:
            whole = self.columns > 0 and self.columns % chunk == 0 and self.dq_passes * chunk == d
            if not whole or self.p_in_regs or self.v_in_regs:
                yield (
                    f"columns is {self.columns} with dq_passes {self.dq_passes}; accepted: 0, or multiples of "
                    f"{chunk} with dq_passes {d // chunk} and P, dS and V in shared memory"
                )
            accepted = f"up to {self.num_threads}, a row of LSE and D per thread"
            yield self.unless(self.tile_m <= self.num_threads, "tile_m", accepted)
        size = self.operand_bytes(traits)
        # A pass is a tile in shared memory, so it has K's swizzle atoms.
        atom = chunk if self.columns else atom_bytes(d * size) // size
        passes = self.dq_passes >= 1 and (self.dq_passes == 1 or d % (atom * self.dq_passes) == 0)
        accepted = f"1, or a divisor of padded head_dim {d} into multiples of {atom}"
        yield self.unless(passes, "dq_passes", accepted)
        yield self.unless(self.dq_vector in (1, 2, 4), "dq_vector", "1, 2 or 4")
        for name in ("sdp_unroll", "dkv_unroll", "dq_unroll", "queries_at_once"):
            yield self.unless(getattr(self, name) >= 0, name, "0 for all, or the number at a time")
        divides = not self.queries_at_once or (self.p_in_regs and self.tile_m % self.queries_at_once == 0)
        accepted = f"0, or with p_in_regs a divisor of tile_m, which is {self.tile_m}"
        yield self.unless(divides, "queries_at_once", accepted)
        whole = traits.dropout != "flash" or (self.tile_n % 32 == 0 and self.queries % 16 == 0)
        yield self.unless(whole, "tile_n", f"multiples of 32 for {traits}")

    def _fp32_reasons(self, traits: Traits) -> Iterator[str | None]:
        single = traits.dtype == "fp32"
        known = self.operands in (("whole", "terms", "fallback") if single else ("whole",))
        yield self.unless(known, "operands", f"{'whole or terms' if single else 'whole'} for {traits}")
        if self.in_terms and self.subtiles > 1:
            step = 16 * self.dq_warps_m
            if traits.fp32_terms == 2 or self.queries % step:
                accepted = "all of tile_m" if traits.fp32_terms == 2 else f"multiples of {step}"
                yield f"operands is terms with queries_at_once {self.queries_at_once}; accepted: {accepted}"
        yield self.unless(not (single and self.v_in_regs), "v_in_regs", f"false for {traits}")

    def _products_reasons(self, traits: Traits) -> Iterator[str | None]:
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
                yield f"{name} is {extent}; accepted: multiples of {step} for the warps of {self}"


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
        dq_bulk: dQ is staged in shared memory, and one warp adds it with one bulk reduction per query block. Not
            with ``scores_ahead``.
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
    num_threads: ClassVar[int] = 384
    compute_registers: ClassVar[int] = COMPUTE_REGISTERS[2]
    load_registers: ClassVar[int] = LOAD_REGISTERS[2]
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
        """Words of the dropout mask for each thread and step; see ``cute_attn.epilogues.dropout``."""
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

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        dims = padded(traits.head_dim), padded(traits.head_dim_v)
        divides = self.cluster in (1, 2) and all(dim % (32 * self.cluster) == 0 for dim in dims)
        accepted = f"1, or with padded head dims in multiples of 64 also 2, for {traits}"
        yield self.unless(divides, "cluster", accepted)
        yield self.unless(self.cluster == 1 or self.scores_ahead, "cluster", "with scores_ahead")
        yield from self._extents_reasons(traits)
        yield self.unless_positive("num_stages_q", "num_stages_do")
        yield self.unless(self.num_stages_ds in (1, 2), "num_stages_ds", "1 or 2")
        yield self.unless(
            self.p_in_smem or self.num_stages_ds == 2, "num_stages_ds", "2 with p_in_smem=false"
        )
        alone = not (self.dq_in_order and self.staggered)
        yield self.unless(alone, "dq_in_order", "without staggered")
        alone = self.may_be_direct and not (self.dq_bulk or self.dq_in_order)
        accepted = "without dq_bulk, dq_in_order, dq_transposed and cluster"
        yield self.unless(alone or not self.dq_direct, "dq_direct", accepted)
        whole = self.dq_rows == 0 or (self.dq_direct and self.dq_rows > 0 and self.dq_rows % self.tile_m == 0)
        accepted = f"0, or with dq_direct multiples of tile_m, {self.tile_m}"
        yield self.unless(whole, "dq_rows", accepted)
        ahead = self.p_in_smem and self.num_stages_q > 1
        accepted = "with p_in_smem and 2 or more num_stages_q"
        yield self.unless(ahead or not self.scores_ahead, "scores_ahead", accepted)
        yield self.unless(not (self.scores_ahead and self.dq_bulk), "dq_bulk", "without scores_ahead")
        by_tma = not self.bias_stages or (traits.bias in ("fp16", "bf16") and not self.p_in_smem)
        accepted = f"0, or with a bias of 16 bits and p_in_smem=false, num_stages_q, for {traits}"
        yield self.unless(by_tma, "bias_stages", accepted)
        accepted = f"0, or num_stages_q, which is {self.num_stages_q}"
        yield self.unless(self.bias_stages in (0, self.num_stages_q), "bias_stages", accepted)
        most = 0 if self.p_in_smem or traits.dropout != "flash" else self.idle_warps
        accepted = f"0, or with flash's dropout and p_in_smem=false up to {self.idle_warps}, for {traits}"
        yield self.unless(0 <= self.mask_warps <= most, "mask_warps", accepted)
        yield self.registers_reason(traits, self.compute_registers, f"with {self.warpgroups} warpgroups ")

    def _extents_reasons(self, traits: Traits) -> Iterator[str | None]:
        """The checks of the products' extents."""
        d, dv = self.columns_of(traits.head_dim), self.columns_of(traits.head_dim_v)
        keys = 16 if self.dkv_transposed else 64 if self.p_in_smem else 128
        whole = self.tile_n > 0 and (self.tile_n % keys == 0 if self.p_in_smem else self.tile_n == keys)
        yield self.unless(whole, "tile_n", f"{keys} with p_in_smem={str(self.p_in_smem).lower()}")
        fits = self.p_in_smem and d % 64 == dv % 64 == 0 and not traits.dropout
        accepted = f"with p_in_smem, head dims in multiples of 64 and no dropout, not {traits}"
        yield self.unless(fits or not self.dkv_transposed, "dkv_transposed", accepted)
        rows = 16 if self.dq_transposed and not self.p_in_smem else 64
        whole = 0 < self.tile_m <= 256 and self.tile_m % rows == 0
        yield self.unless(whole, "tile_m", f"multiples of {rows} up to 256")
        step = 64 * self.warpgroups
        accepted = (
            f"with head dims in multiples of {step}, 64 for each of {self.warpgroups} warpgroups, not {d}"
        )
        yield self.unless(not self.dq_transposed or d % step == 0, "dq_transposed", accepted)
        if self.p_in_smem:
            along_n = self.warpgroups // min(self.warpgroups, self.tile_m // 64)
            rows = 64 * self.warpgroups // along_n
            whole = self.tile_m % rows == self.tile_n % (self.store_columns * along_n) == 0
            accepted = f"with p_in_smem divisors of {self.tile_m} queries"
            yield self.unless(whole, "warpgroups", accepted)
        for what, dim, parts in (
            ("dQ", d, self.dq_warps_n),
            ("dK", d, self.dkv_warps_n),
            ("dV", dv, self.dkv_warps_n),
        ):
            accepted = f"such that {parts} divide {dim} columns of {what}"
            yield self.unless(dim % (16 * parts) == 0, "warpgroups", accepted)


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

    def reasons(self, traits: Traits) -> Iterator[str | None]:
        yield self.threads_reason()
        yield self.unless(self.tile_m > 0 and self.tile_m % 16 == 0, "tile_m", "multiples of 16")
        most = self.num_threads
        divides = 0 < self.rows <= most and self.tile_m % self.rows == self.rows % 4 == 0
        accepted = f"divisors of tile_m, {self.tile_m}, that are multiples of 4 and at most {most}, one for each thread"
        yield self.unless(divides, "rows", accepted)
