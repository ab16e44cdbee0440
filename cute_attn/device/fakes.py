"""Fake tensors for compilation: sizes and strides are symbolic, and strides have 64 bits."""

from typing import Any

from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor


def plain(dtype: Any, ndim: int) -> cute.Tensor:
    """A tensor with a contiguous last dimension and any other strides."""
    shape = tuple(cute.sym_int() for _ in range(ndim))
    return make_fake_tensor(dtype, shape, stride=(*(cute.sym_int64() for _ in range(ndim - 1)), 1))


def strided(dtype: Any, ndim: int) -> cute.Tensor:
    """A tensor with any strides."""
    shape = tuple(cute.sym_int() for _ in range(ndim))
    return make_fake_tensor(dtype, shape, stride=tuple(cute.sym_int64() for _ in range(ndim)))
