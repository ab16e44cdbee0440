"""The Ampere backward's five products: their operands in shared memory, and the instructions for each element type.

16-bit operands are read by ldmatrix, transposing where K is not contiguous. fp32 operands consist of terms: tf32 terms
split in registers, or stored fp16 terms; see :mod:`cute_attn.device.gemm_terms`. A single fp16 term (precision tf32) is
a 16-bit operand with scaled products: :meth:`Products.to_units`. :func:`step_content` counts a step's instructions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlass import Float16, Float32, Int32, TFloat32, cute

import layouts
from cute_attn.device.gemm import SmemOperand, SmemResult, gemm, gemm_rs, gemm_sr
from cute_attn.device.gemm_terms import Fp32Operand, Fp32Result, StoredTerms, paired_operand_a
from cute_attn.device.terms import P_EXPONENT, PRODUCTS, Terms, split
from cute_attn.kernels.backward_sm80.storage import BackwardSm80Storage
from cute_attn.kernels.base import StepContent, mma_sync_count, product_loop
from cute_attn.tiles import BackwardSm80Tile, padded
from cute_attn.traits import Traits

Operand = SmemOperand | Fp32Operand | StoredTerms


@dataclass(frozen=True)
class Operands:
    """The MMAs, the five products' operands in shared memory, and the places there for P and dS."""

    mma_sdp: cute.TiledMma
    mma_dkv: cute.TiledMma
    mma_dq: cute.TiledMma
    q: Operand
    k: Operand
    do: Operand
    v: Operand
    p_t: Operand | None
    do_t: Operand
    ds_t: Operand | None
    q_t: Operand
    ds: Operand
    k_ts: tuple[Operand, ...]  # K for each of dQ's passes
    p_out: SmemResult | None
    ds_out: SmemResult

    @property
    def k_t(self) -> Operand:
        """K^T of dQ's first pass."""
        return self.k_ts[0]


def columns_of(s: cute.Tensor, layout_of: Callable[..., Any], index: int, count: int) -> cute.Tensor:
    """The ``index``-th of ``count`` equal column ranges of a tile, which is stored in columns of 128 bytes."""
    if count == 1:
        return s
    rows, cols = (cute.size(s, mode=[i]) for i in range(2))
    stages = (1,) if cute.rank(s) == 3 else (None,)
    return cute.make_tensor(
        s.iterator + index * rows * (cols // count), layout_of(rows, cols // count, *stages)
    )


@dataclass(frozen=True)
class Products:
    """The products for (traits, tile)."""

    traits: Traits
    tile: BackwardSm80Tile
    dtype: Any

    @property
    def of_fp32(self) -> bool:
        """True if fp32 operands are split into tf32 terms as they are loaded."""
        return self.traits.element_bytes == 4 and not self.tile.in_terms

    @property
    def count(self) -> int:
        """Number of terms per operand."""
        return self.traits.fp32_terms if self.traits.element_bytes == 4 else 1

    @property
    def stored_terms(self) -> int:
        """Number of terms per operand in global and shared memory."""
        return 1 if self.of_fp32 else self.count

    @property
    def one_term(self) -> bool:
        """True with one fp16 term: operands are loaded like 16-bit tensors, and products are scaled."""
        return self.tile.one_term(self.traits)

    @property
    def operand_dtype(self) -> Any:
        """Element type of operands in shared memory."""
        return Float16 if self.tile.in_terms else self.dtype

    @property
    def each(self) -> int:
        """Number of tensor-core products per product."""
        return len(PRODUCTS[self.count])

    def loaded_columns(self, head_dim: int) -> int:
        """Columns of an operand in global memory; fp16 terms are padded with zeros."""
        return padded(head_dim) if self.tile.in_terms else head_dim

    @property
    def scores_shape(self) -> tuple[int, int]:
        """(M, N) of an accumulator of scores."""
        tile = self.tile
        return (tile.tile_n, tile.queries) if tile.p_in_regs else (tile.tile_m, tile.tile_n)

    @property
    def scores_plane(self) -> tuple[int, int]:
        """(rows, cols) of P and dS in shared memory."""
        tile = self.tile
        return (tile.tile_n, tile.tile_m) if tile.p_in_regs else (tile.tile_m, tile.tile_n)

    # ---- operands ----

    def operands(
        self, mmas: tuple, smem: BackwardSm80Storage, layout_of: Callable[..., Any], thread: Int32
    ) -> Operands:
        """The operands of all products.

        mmas: the MMAs of (S, dP), (dK, dV) and dQ. layout_of: (rows, cols[, stages]) -> a layout in shared memory.
        """
        tile, (mma_sdp, mma_dkv, mma_dq) = self.tile, mmas
        sdp_m = tile.num_warps if tile.p_in_regs else tile.sdp_warps_m
        passes = 1 if tile.columns else tile.dq_passes  # of a chunk of columns, or of all columns

        def scores(s: cute.Tensor, of_queries: bool) -> Any:
            return self.operand(mma_sdp, sdp_m, of_queries != tile.p_in_regs, s, False, False, thread)

        def dkv(s: cute.Tensor, is_a: bool) -> Any:
            return self.operand(mma_dkv, tile.dkv_warps_m, is_a, s, True, True, thread)

        def of_dq(s: cute.Tensor, is_a: bool, whole: cute.Tensor) -> Any:
            paired = tile.p_in_regs  # both operands have the keys in the same order
            return self.operand(mma_dq, tile.dq_warps_m, is_a, s, paired or not is_a, paired, thread, whole)

        def result(s: cute.Tensor) -> Any:
            plane = cute.make_tensor(s.iterator, layout_of(*self.scores_plane, None))
            return self.scores_result(mma_sdp, plane, thread)

        def k_t(index: int) -> Any:
            return of_dq(columns_of(smem.k, layout_of, index, passes), False, smem.k)

        through_smem = not tile.p_in_regs
        return Operands(
            mma_sdp,
            mma_dkv,
            mma_dq,
            q=scores(smem.q, True),
            k=scores(smem.k, False),
            do=scores(smem.do, True),
            v=scores(smem.v, False),
            p_t=dkv(smem.p, True) if through_smem else None,
            do_t=dkv(smem.do, False),
            ds_t=dkv(smem.ds, True) if through_smem else None,
            q_t=dkv(smem.q, False),
            ds=of_dq(smem.ds, True, smem.ds),
            k_ts=tuple(k_t(index) for index in range(passes)),
            p_out=result(smem.p) if through_smem else None,
            ds_out=result(smem.ds),
        )

    def operand(
        self,
        mma: cute.TiledMma,
        warps_m: int,
        is_a: bool,
        s: cute.Tensor,
        transpose: bool,
        paired: bool,
        thread: Int32,
        whole: cute.Tensor | None = None,
    ) -> Any:
        """An operand in ``s``, (rows, cols, stage); ``transpose``: K is along the rows. paired: see ``Fp32Operand``.

        whole: the tile that contains ``s`` as a range of columns, or None for ``s``.
        """
        view = layouts.transposed(s) if transpose else s
        if self.of_fp32:
            along = warps_m if is_a else self.tile.num_warps // warps_m
            return Fp32Operand(view, thread, self.count, warps_m, along, is_a, transpose, paired)
        make_copy = layouts.ldmatrix_copy_a if is_a else layouts.ldmatrix_copy_b
        make = SmemOperand.a if is_a else SmemOperand.b
        given = (mma, make_copy(mma, self.operand_dtype, transpose), view, thread)
        if self.count == 1:
            return make(*given)
        shape = (s if whole is None else whole).shape
        return StoredTerms.in_planes(make, self.count, cute.size(shape[0]) * cute.size(shape[1]), *given)

    def scores_result(self, mma: cute.TiledMma, plane: cute.Tensor, thread: Int32) -> SmemResult:
        """Destination in shared memory of a thread's elements of P or dS."""
        kind = Fp32Result if self.of_fp32 else SmemResult
        return kind(mma, self.scores_shape, plane, thread, cute.size(plane))

    def result(self, mma: cute.TiledMma, s: cute.Tensor, thread: Int32) -> SmemResult:
        """Destination of a thread's elements of a product as large as ``s``, in the outputs' element type."""
        kind = Fp32Result if self.traits.element_bytes == 4 else SmemResult
        return kind(mma, tuple(cute.size(s, mode=[i]) for i in range(2)), s, thread)

    # ---- products ----

    def steps_at_once(self, extent: int, unroll: int) -> int:
        """Number of K steps of ``extent`` that a product unrolls."""
        return self.tile.steps_at_once(extent, unroll, self.tile.operand_bytes(self.traits))

    def multiply(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        a: Any,
        b: Any,
        stage: Int32,
        unroll: int,
        a_stage: Int32 | int = 0,
        factor: Float32 | None = None,
    ) -> None:
        """acc += A B^T with both operands in shared memory; the loop over K is unrolled by ``unroll``.

        factor: of products of operands in two fp16 terms, to undo their scales.
        """
        gemm(mma, acc, a, b, stage, unroll, a_stage, factor=factor if self.stored_terms > 1 else None)

    def multiply_scores(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        scores: Terms,
        b: Any,
        stage: Int32,
        factor: Float32 | None = None,
    ) -> None:
        """acc += A B^T with A = ``scores``: the terms of P^T or dS^T in registers."""
        if self.of_fp32:
            own = split(paired_operand_a(scores[0]), TFloat32, self.count)
        else:
            own = tuple(map(layouts.as_operand_a, scores))
        gemm_rs(mma, acc, own, b, stage, factor=factor if self.stored_terms > 1 else None)

    def in_terms(self, scores: cute.Tensor, factor: Float32) -> Terms:
        """P or dS as stored: in 16 bits, in fp32, or as fp16 terms of fp32 numbers times ``factor``."""
        return split(scores, Float16, self.count, factor) if self.tile.in_terms else (scores,)

    def operand_of_p(self, p: cute.Tensor) -> Terms:
        """P as stored; its terms, if any, are scaled by ``2**P_EXPONENT``."""
        return self.in_terms(p, Float32(2.0**P_EXPONENT))

    def to_units(self, acc: cute.Tensor, factor: Float32) -> None:
        """Multiply a product of operands in one fp16 term by ``factor``; other products already include the factor."""
        if self.one_term:
            for i in range(cute.size(acc)):
                acc[i] = acc[i] * factor

    def multiply_by_v(
        self, acc: cute.Tensor, op: Operands, stage: Int32, factor: Float32 | None = None
    ) -> None:
        """acc += dO V^T, or with ``p_in_regs`` its transpose, with V in registers if the tile says so."""
        tile, unroll = self.tile, self.steps_at_once(padded(self.traits.head_dim_v), self.tile.sdp_unroll)
        if tile.p_in_regs and tile.v_in_regs:
            gemm_rs(op.mma_sdp, acc, op.v.terms, op.do, stage)  # type: ignore[union-attr]
        elif tile.p_in_regs:
            self.multiply(op.mma_sdp, acc, op.v, op.do, stage, unroll, factor=factor)
        elif tile.v_in_regs:
            gemm_sr(op.mma_sdp, acc, op.do, op.v.fragment, stage)  # type: ignore[union-attr]
        else:
            self.multiply(op.mma_sdp, acc, op.do, op.v, Int32(0), unroll, stage, factor)


def step_content(traits: Traits, tile: BackwardSm80Tile, products: int = 1) -> StepContent:
    """Content of a step that needs no mask: S and dP of each query sub-tile, then dV, dK and dQ of all sub-tiles.

    products: MMA products per product of fp32 operands. K steps in tf32 are half as long.
    """
    m, n, warps, size = tile.tile_m, tile.tile_n, tile.num_warps, tile.operand_bytes(traits)
    d, dv = padded(traits.head_dim), padded(traits.head_dim_v)
    each = products if traits.element_bytes == 4 else 1

    def count(rows: int, cols: int, k: int) -> int:
        return mma_sync_count(rows, cols, k, warps) * (size // 2) * each

    def loop(mma: int, extent: int, unroll: int, of: int = 0) -> tuple:
        at_once = tile.steps_at_once(of or extent, unroll, size)
        return product_loop(mma, extent * size // 32, at_once)

    mma_s, mma_dp = (count(tile.queries, n, dim) for dim in (d, dv))
    own = (tile.columns, tile.columns) if tile.columns else (d, dv)
    mma_dk, mma_dv = (count(m, n, dim) for dim in own)  # dQ needs as many as dK
    chunk = tile.chunk(traits) if tile.columns else 0
    subtile = loop(mma_s, d, tile.sdp_unroll, chunk)
    if not tile.v_in_regs:
        subtile += loop(mma_dp, dv, tile.sdp_unroll, chunk)
    loops = subtile * tile.subtiles
    if tile.columns:
        chunks = tile.columns // chunk
        of_m, of_n = (
            loop(mma_dk // chunks, rows, un) for rows, un in ((m, tile.dkv_unroll), (n, tile.dq_unroll))
        )
        loops += (of_m + of_m + of_n) * chunks
    else:
        if not tile.p_in_regs:
            loops += loop(mma_dv, m, tile.dkv_unroll) + loop(mma_dk, m, tile.dkv_unroll)
        loops += loop(mma_dk // tile.dq_passes, n, tile.dq_unroll) * tile.dq_passes
    mma, elements = tile.subtiles * (mma_s + mma_dp) + mma_dv + 2 * mma_dk, m * n // tile.num_threads
    return StepContent(mma, elements * (1 + traits.softcap), elements, warps, loops)
