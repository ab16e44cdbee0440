"""Conversion of fp32 fragments to 16 bits."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from cute_attn.device.math import convert_to_16_bits, optimization_barrier


@cute.jit
def converted(wide: cute.Tensor, dtype: Any) -> cute.Tensor:
    """An fp32 fragment converted to ``dtype``, 16 bits, with the same layout.

    The optimization barrier keeps pairs together: elements used one by one would be converted one by one, more slowly.
    """
    fragment = cute.make_rmem_tensor_like(wide, dtype)
    convert_to_16_bits(wide, fragment)
    pairs = cute.recast_tensor(fragment, Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = optimization_barrier(pairs[i])
    return fragment
