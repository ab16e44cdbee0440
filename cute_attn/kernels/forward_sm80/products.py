"""The Ampere forward's two products: their operands in shared memory, and the instructions for each element type.

16-bit operands are read by ldmatrix, V transposed. fp32 ones are multiplied in tf32, see
:mod:`cute_attn.device.forward_fp32`, or in fp16 parts, see :mod:`cute_attn.kernels.fp32_sm80.products`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Int32, cute

import layouts
from cute_attn.device.forward_fp32 import Fp32Rows, PermutedResult, as_fp32, as_operand_a, gemm_pv, gemm_qk
from cute_attn.device.gemm import SmemOperand, gemm
from cute_attn.device.gemm_fp32 import split
from cute_attn.kernels.arguments import CUTE_DTYPES
from cute_attn.kernels.forward_sm80.storage import Operands, SharedMemory
from cute_attn.tiles import ForwardSm80Tile
from cute_attn.traits import Traits


@dataclass(frozen=True)
class Products:
    """The products of (traits, tile), of 16-bit operands."""

    traits: Traits
    tile: ForwardSm80Tile

    parts: ClassVar[int] = 1
    """Of an element of Q, K, V and P in shared memory."""
    scales_output: ClassVar[bool] = False
    """Whether P stays in fp32 until it is multiplied, and P V also multiplies O by the factor of each of its rows."""

    @property
    def dtype(self) -> Any:
        """Element type of operands in shared memory."""
        return CUTE_DTYPES[self.traits.dtype]

    @property
    def each(self) -> int:
        """How many products on tensor cores make one."""
        return 1

    def operands(
        self, tiled_mma: cute.TiledMma, shared: SharedMemory, thread: Int32, scales: cute.Tensor | None
    ) -> Operands:
        """Operands of both products in shared memory; scales: of Q, K and V in parts."""
        copy_a = layouts.ldmatrix_copy_a(tiled_mma, self.dtype)
        copy_b = layouts.ldmatrix_copy_b(tiled_mma, self.dtype)
        return Operands(
            tiled_mma,
            SmemOperand.a(tiled_mma, copy_a, shared.q, thread),
            SmemOperand.b(tiled_mma, copy_b, shared.k, thread),
            self.v_operand(tiled_mma, shared, thread),
            None if shared.p is None else SmemOperand.a(tiled_mma, copy_a, shared.p, thread),
            scales,
        )

    def v_operand(
        self, tiled_mma: cute.TiledMma, shared: SharedMemory, thread: Int32
    ) -> SmemOperand | Fp32Rows:
        """V as an operand, read transposed."""
        copy_bt = layouts.ldmatrix_copy_b(tiled_mma, self.dtype, transpose=True)
        return SmemOperand.b(tiled_mma, copy_bt, layouts.transposed(shared.v), thread)

    def qk(self, op: Operands, acc_s: cute.Tensor, stage: Int32, unroll: int) -> None:
        """acc_s += Q K^T, ``unroll`` steps along head_dim at a time."""
        gemm(op.tiled_mma, acc_s, op.q, op.k, stage, unroll)

    # ---- where ``scales_output`` ----

    def pv(
        self, op: Operands, acc_o: cute.Tensor, acc_s: cute.Tensor, stage: Int32, factors: cute.Tensor
    ) -> None:
        """acc_o = factors * acc_o + P V, P in the scores' accumulator."""
        raise NotImplementedError

    def store_p(
        self, op: Operands, acc_s: cute.Tensor, shape: tuple[int, int], s_p: cute.Tensor, thread: Int32
    ) -> None:
        """P in the scores' accumulator to shared memory, where warps divide columns."""
        raise NotImplementedError

    def stored_pv(self, op: Operands, acc_o: cute.Tensor, factors: cute.Tensor) -> None:
        """As :meth:`pv`, with P from shared memory."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fp32Products(Products):
    """In tf32: three products for the precision of fp32."""

    scales_output: ClassVar[bool] = True

    @property
    def each(self) -> int:
        return 1 if self.traits.precision else 3

    def v_operand(self, tiled_mma: cute.TiledMma, shared: SharedMemory, thread: Int32) -> Fp32Rows:
        return Fp32Rows(shared.v, thread, self.tile.warps_m, self.tile.warps_n)

    def qk(self, op: Operands, acc_s: cute.Tensor, stage: Int32, unroll: int) -> None:
        gemm_qk(op.tiled_mma, acc_s, op.q, op.k, stage, unroll, self.each)

    def pv(
        self, op: Operands, acc_o: cute.Tensor, acc_s: cute.Tensor, stage: Int32, factors: cute.Tensor
    ) -> None:
        p = split(as_operand_a(acc_s), self.each)
        gemm_pv(op.tiled_mma, acc_o, p, op.v, stage, factors, self.each)

    def store_p(
        self, op: Operands, acc_s: cute.Tensor, shape: tuple[int, int], s_p: cute.Tensor, thread: Int32
    ) -> None:
        PermutedResult(op.tiled_mma, shape, s_p, thread).store(acc_s)

    def stored_pv(self, op: Operands, acc_o: cute.Tensor, factors: cute.Tensor) -> None:
        assert op.p is not None
        op.p.load_all()
        p = split(as_fp32(op.p.fragment), self.each)
        gemm_pv(op.tiled_mma, acc_o, p, op.v, Int32(0), factors, self.each)
