"""The two products of the Ampere forward for fp32 in fp16 parts: of two parts three products, of one part one.

One part is a 16-bit operand whose products are in other units.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Float16, Int32, cute

import layouts
from cute_attn.device.forward_parts import gemm_pv_parts, gemm_qk_parts, parts_of_probabilities
from cute_attn.device.gemm import SmemResult, gemm
from cute_attn.kernels.forward_sm80.products import Products
from cute_attn.kernels.forward_sm80.storage import Operands


@dataclass(frozen=True)
class TwoPartProducts(Products):
    """Of two fp16 parts: rows of Q, K, V and P have hi, then lo."""

    parts: ClassVar[int] = 2
    scales_output: ClassVar[bool] = True

    @property
    def dtype(self) -> Any:
        return Float16

    @property
    def each(self) -> int:
        return 3

    def qk(self, op: Operands, acc_s: cute.Tensor, stage: Int32, unroll: int) -> None:
        factor = op.scales[0] * op.scales[1]
        gemm_qk_parts(op.tiled_mma, acc_s, op.q, op.k, stage, unroll, factor)

    def pv(
        self, op: Operands, acc_o: cute.Tensor, acc_s: cute.Tensor, stage: Int32, factors: cute.Tensor
    ) -> None:
        p = [layouts.as_operand_a(part) for part in parts_of_probabilities(acc_s)]
        gemm_pv_parts(op.tiled_mma, acc_o, *p, op.v, stage, factors)

    def store_p(
        self, op: Operands, acc_s: cute.Tensor, shape: tuple[int, int], s_p: cute.Tensor, thread: Int32
    ) -> None:
        result = SmemResult(op.tiled_mma, shape, s_p, thread)
        for i, part in enumerate(parts_of_probabilities(acc_s)):
            result.store(part, i * self.tile.tile_n)

    def stored_pv(self, op: Operands, acc_o: cute.Tensor, factors: cute.Tensor) -> None:
        assert op.p is not None
        op.p.load_all()
        parts = cute.logical_divide(op.p.fragment, (None, None, op.p.steps // 2))
        hi, lo = parts[None, None, (None, 0)], parts[None, None, (None, 1)]
        gemm_pv_parts(op.tiled_mma, acc_o, hi, lo, op.v, Int32(0), factors)


@dataclass(frozen=True)
class OnePartProducts(Products):
    """Of one fp16 part.

    Attributes:
        folds_factor: whether the softmax multiplies by the factor that undoes the scales of Q and K, as nothing else
            reads scores.
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
