"""fp32 fragments to 16 bits."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from cute_attn.device.math import narrow, opaque


@cute.jit
def rounded(wide: cute.Tensor, dtype: Any) -> cute.Tensor:
    """An fp32 fragment in 16 bits.

    As opaque pairs: otherwise elements that are used singly are rounded singly as well, at a fraction of the speed.
    """
    fragment = cute.make_rmem_tensor_like(wide, dtype)
    narrow(wide, fragment)
    pairs = cute.recast_tensor(fragment, Int32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = opaque(pairs[i])
    return fragment
