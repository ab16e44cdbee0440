"""The Ampere forward's two products: their operands in shared memory, and the instructions for each element type.

16-bit operands are read by ldmatrix, V transposed. fp32 operands have terms: tf32 terms, split in registers, or fp16
terms, into which an earlier kernel has split K and V; see :mod:`cute_attn.device.gemm_terms`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Float16, Float32, Int32, TFloat32, cute

import layouts
from cute_attn.device.gemm import SmemOperand, SmemResult, gemm, gemm_rs
from cute_attn.device.gemm_terms import Fp32Values, PairedResult, SplitOnLoad, StoredTerms, paired_operand_a
from cute_attn.device.terms import P_EXPONENT, PRODUCTS, Terms, split
from cute_attn.kernels.fakes import CUTE_DTYPES
from cute_attn.kernels.forward_sm80.storage import Operands, SharedMemory
from cute_attn.tiles import ForwardSm80Tile
from cute_attn.traits import Traits

SUBTILES_AHEAD = 2
"""Maximum groups of 16 columns whose products of fp16 terms are in flight. Without a limit, ptxas computes the sums of
many groups before it adds any of them to the output, and spills."""


@dataclass(frozen=True)
class Products:
    """The products of 16-bit operands for (traits, tile)."""

    traits: Traits
    tile: ForwardSm80Tile

    scales_output: ClassVar[bool] = False
    """True if P stays in fp32 until it is multiplied, and ``pv`` also multiplies O by its rows' factors."""

    @property
    def dtype(self) -> Any:
        """Element type of operands in shared memory."""
        return CUTE_DTYPES[self.traits.dtype]

    @property
    def stored_terms(self) -> int:
        """Number of terms per element of Q, K, V and P in shared memory."""
        return 1

    @property
    def each(self) -> int:
        """Number of tensor-core products per product."""
        return 1

    def operands(
        self, tiled_mma: cute.TiledMma, shared: SharedMemory, thread: Int32, scales: cute.Tensor | None
    ) -> Operands:
        """Operands of both products in shared memory. scales: the scales of Q, K and V in fp16 terms."""
        copy_a = layouts.ldmatrix_copy_a(tiled_mma, self.dtype)
        copy_b = layouts.ldmatrix_copy_b(tiled_mma, self.dtype)
        return Operands(
            tiled_mma,
            self.operand(SmemOperand.a, tiled_mma, copy_a, shared.q, thread),
            self.operand(SmemOperand.b, tiled_mma, copy_b, shared.k, thread),
            self.v_operand(tiled_mma, shared, thread),
            None if shared.p is None else self.operand(SmemOperand.a, tiled_mma, copy_a, shared.p, thread),
            scales,
        )

    def operand(self, make: Any, *args: Any) -> Any:
        """Q, K or P as an operand. make: ``SmemOperand.a`` or ``.b``; args: the arguments of ``make``."""
        return make(*args)

    def v_operand(self, tiled_mma: cute.TiledMma, shared: SharedMemory, thread: Int32) -> Any:
        """V as an operand, read transposed."""
        copy_bt = layouts.ldmatrix_copy_b(tiled_mma, self.dtype, transpose=True)
        return SmemOperand.b(tiled_mma, copy_bt, layouts.transposed(shared.v), thread)

    def qk(self, op: Operands, acc_s: cute.Tensor, stage: Int32, unroll: int) -> None:
        """Add Q K^T to acc_s, ``unroll`` steps along head_dim at a time."""
        gemm(op.tiled_mma, acc_s, op.q, op.k, stage, unroll)

    def softmax_scale(self, op: Operands, scale_log2: Float32) -> Float32:
        """``scale_log2``, times any factor that :meth:`qk` has not applied to scores."""
        return scale_log2


@dataclass(frozen=True)
class Fp32Products(Products):
    """Products of tf32 terms: two terms for fp32's precision. Sums restart at zero; in P V, for each key block."""

    scales_output: ClassVar[bool] = True
    ahead: ClassVar[int] = 0

    @property
    def count(self) -> int:
        return self.traits.fp32_terms

    @property
    def each(self) -> int:
        return len(PRODUCTS[self.count])

    def operand(self, make: Any, *args: Any) -> Any:
        return SplitOnLoad(**vars(make(*args)), count=self.count)

    def v_operand(self, tiled_mma: cute.TiledMma, shared: SharedMemory, thread: Int32) -> Any:
        return Fp32Values(shared.v, thread, self.count, self.tile.warps_m, self.tile.warps_n)

    def qk(self, op: Operands, acc_s: cute.Tensor, stage: Int32, unroll: int) -> None:
        # With two terms, at most two steps are summed from zero: four double the error of scores.
        together = unroll if self.count == 1 else 2 - unroll % 2
        gemm(op.tiled_mma, acc_s, op.q, op.k, stage, unroll, 0, together, self.factor(op))

    def factor(self, op: Operands) -> Float32 | None:
        """The factor by which :meth:`qk` multiplies Q K^T, or None."""
        return None

    def terms_of_p(self, acc_s: cute.Tensor) -> Terms:
        """The terms of P, which is in ``acc_s``, as the A operand of P V."""
        return split(paired_operand_a(acc_s), TFloat32, self.count)

    def pv(
        self, op: Operands, acc_o: cute.Tensor, acc_s: cute.Tensor, stage: Int32, factors: cute.Tensor
    ) -> None:
        """Compute acc_o = factors * acc_o + P V, with P in ``acc_s``."""
        self._times_v(op, acc_o, self.terms_of_p(acc_s), stage, factors)

    def store_p(
        self, op: Operands, acc_s: cute.Tensor, shape: tuple[int, int], s_p: cute.Tensor, thread: Int32
    ) -> None:
        """Store P from ``acc_s`` to shared memory, for warps that divide columns."""
        PairedResult(op.tiled_mma, shape, s_p, thread).store((acc_s,))

    def stored_pv(self, op: Operands, acc_o: cute.Tensor, factors: cute.Tensor) -> None:
        """Like :meth:`pv`, with P from shared memory."""
        assert op.p is not None
        op.p.load_all()
        self._times_v(op, acc_o, op.p.terms, Int32(0), factors)

    def _times_v(
        self, op: Operands, acc_o: cute.Tensor, p: Terms, stage: Int32, factors: cute.Tensor
    ) -> None:
        gemm_rs(op.tiled_mma, acc_o, p, op.v, stage, op.v.steps, None, factors, self.ahead)


@dataclass(frozen=True)
class StoredTermsProducts(Fp32Products):
    """Products of two fp16 terms: rows of Q, K, V and P have all hi terms, then all lo terms."""

    ahead: ClassVar[int] = SUBTILES_AHEAD

    @property
    def dtype(self) -> Any:
        return Float16

    @property
    def stored_terms(self) -> int:
        return self.count

    def operand(self, make: Any, *args: Any) -> Any:
        return StoredTerms.in_rows(make, self.count, True, *args)

    def v_operand(self, tiled_mma: cute.TiledMma, shared: SharedMemory, thread: Int32) -> Any:
        copy_bt = layouts.ldmatrix_copy_b(tiled_mma, self.dtype, transpose=True)
        given = (tiled_mma, copy_bt, layouts.transposed(shared.v), thread)
        return StoredTerms.in_rows(SmemOperand.b, self.count, False, *given)

    def factor(self, op: Operands) -> Float32 | None:
        return op.scales[0] * op.scales[1]

    def terms_of_p(self, acc_s: cute.Tensor) -> Terms:
        return tuple(map(layouts.as_operand_a, self.split_p(acc_s)))

    def split_p(self, acc_s: cute.Tensor) -> Terms:
        """P's terms, in the accumulator's layout."""
        return split(acc_s, Float16, self.count, Float32(2.0**P_EXPONENT))

    def store_p(
        self, op: Operands, acc_s: cute.Tensor, shape: tuple[int, int], s_p: cute.Tensor, thread: Int32
    ) -> None:
        result = SmemResult(op.tiled_mma, shape, s_p, thread)
        for t, term in enumerate(self.split_p(acc_s)):
            result.store((term,), t * self.tile.tile_n)


@dataclass(frozen=True)
class OneTermProducts(Products):
    """Products of one fp16 term: like products of 16-bit operands, but scaled.

    Attributes:
        folds_factor: True if the softmax applies the factor that undoes the scales of Q and K, since nothing else reads
            scores.
    """

    folds_factor: bool

    @property
    def dtype(self) -> Any:
        return Float16

    def qk(self, op: Operands, acc_s: cute.Tensor, stage: Int32, unroll: int) -> None:
        gemm(op.tiled_mma, acc_s, op.q, op.k, stage, unroll)
        if not self.folds_factor:
            factor = op.scales[0] * op.scales[1]
            for i in range(cute.size(acc_s)):
                acc_s[i] = acc_s[i] * factor

    def softmax_scale(self, op: Operands, scale_log2: Float32) -> Float32:
        return scale_log2 * (op.scales[0] * op.scales[1]) if self.folds_factor else scale_log2
