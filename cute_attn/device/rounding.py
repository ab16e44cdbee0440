"""16-bit fragments that are operands of products and numbers to compute with as well."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from cute_attn.device.math import bf16_half, narrow, opaque
from cute_attn.device.score_tile import registers


@cute.jit
def rounded(wide: cute.Tensor, dtype: Any) -> cute.Tensor:
    """An fp32 fragment in 16 bits.

    As opaque pairs: otherwise elements that are used singly are rounded singly as well, at a fraction of the speed, and
    elements that are used twice are rounded twice.
    """
    fragment = cute.make_rmem_tensor_like(wide, dtype)
    narrow(wide, fragment)
    pairs = cute.recast_tensor(fragment, Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = opaque(pairs[i])
    return fragment


@dataclass(frozen=True)
class Widened:
    """(rows, cols) of 16 bits in registers, whose elements are read as fp32: of bf16 with one instruction each."""

    view: cute.Tensor

    def __getitem__(self, place: tuple[int, int]) -> Float32:
        if self.view.element_type is not BFloat16:
            return Float32(self.view[place])
        pair, high = divmod(cute.crd2idx(place, self.view.layout), 2)
        return bf16_half(cute.recast_tensor(registers(self.view), Int32)[pair], high)
