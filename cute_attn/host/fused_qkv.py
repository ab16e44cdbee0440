"""q, k and v, or k and v, that are views of one tensor (..., 3 or 2, heads, dim), and their gradients as one tensor.

A fused projection leaves q, k and v as views of one tensor. The backward then writes dq, dk and dv into views of one
tensor as well, as PyTorch's memory-efficient backward does. :func:`unbind` returns that tensor as the gradient,
whereas ``torch.unbind`` would copy all three into a new tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_attn.host.memory import contiguous_strides, has_memory
from cute_attn.host.plans import no_dispatch_mode


def number_packed(tensors: Sequence[Tensor]) -> int:
    """Number of q, k and v, counted from v, that may be views of one packed tensor by their metadata: 3, 2 or 0."""
    x = tensors[-1]
    nheads, dim = x.shape[-2:]
    if x.stride(-1) != 1 or (nheads > 1 and x.stride(-2) != dim):  # heads have no gaps
        return 0
    for count in (3, 2):
        alike = all(other.shape == x.shape and other.stride() == x.stride() for other in tensors[-count:])
        if alike and x.stride(-3) >= count * nheads * dim:  # rows have room for all
            return count
    return 0


def are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """True if tensors that :func:`number_packed` counted follow each other in memory."""
    x = tensors[0]
    first, step = x.data_ptr(), x.shape[-1] * x.shape[-2] * x.element_size()
    return all(other.data_ptr() == first + i * step for i, other in enumerate(tensors))


def packed_strides(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """Strides of a view of shape (..., heads, dim) into a contiguous (..., count, heads, dim)."""
    *steps, _, head, one = contiguous_strides((*shape[:-2], count, *shape[-2:]))
    return (*steps, head, one)


class _Unbind(torch.autograd.Function):
    """``x.unbind(-3)``; if all gradients are views of one packed tensor, that tensor is the gradient of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        ctx.shape = x.shape
        return x.unbind(-3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient of ``x``, without a copy if ``grads`` are already views of one tensor."""
        *rows, count, nheads, dim = ctx.shape
        strides = packed_strides((*rows, nheads, dim), count)
        known = all(x.stride() == strides and has_memory(x) for x in grads)
        if known and are_adjacent(grads):
            storage = grads[0].untyped_storage().data_ptr()
            if all(x.untyped_storage().data_ptr() == storage for x in grads):
                whole = (*strides[:-2], nheads * dim, dim, 1)
                return grads[0].as_strided(ctx.shape, whole)
        return torch.stack(grads, -3)


def unbind(packed: Tensor) -> tuple[Tensor, ...]:
    """``packed.unbind(-3)``: views of (..., count, heads, dim), such as q, k and v of qkv.

    Its gradient is not copied if the backward of :func:`cute_attn.attention` wrote all gradients into one tensor.
    """
    learns = packed.requires_grad and torch.is_grad_enabled()
    if learns and no_dispatch_mode() and forward_ad._current_level < 0:
        return _Unbind.apply(packed)
    return packed.unbind(-3)
