"""Masks and biases of any shape, as kernels read them."""

import torch
from torch import Tensor

from cute_attn.host.call import BIAS
from cute_attn.host.memory import Tensors
from cute_attn.host.values import python_number


def with_readable_bias(tensors: Tensors, max_seqlen_k: int | None) -> Tensors:
    """The tensors of a call (q, k, v, ...), with the bias as :func:`readable` returns it.

    max_seqlen_k: maximum keys of packed sequences, or None for a batched k.
    """
    q, k, bias = tensors[0], tensors[1], tensors[BIAS]
    if not isinstance(bias, Tensor) or not isinstance(k, Tensor) or k.dim() < 2 or k.is_nested:
        return tensors
    seqlen_k = k.shape[1] if max_seqlen_k is None else python_number(max_seqlen_k)
    # The checks report errors.
    fine = isinstance(seqlen_k, int | torch.SymInt) and 0 <= seqlen_k < 2**31 and q.is_floating_point()
    if not fine:
        return tensors
    bias = readable(bias, q.dtype, seqlen_k)
    return (*tensors[:BIAS], bias, *tensors[BIAS + 1 :])


def readable(bias: Tensor, dtype: torch.dtype, seqlen_k: int) -> Tensor:
    """The bias with four dimensions, the last one of full size and contiguous; as it is if the checks refuse it.

    Every step is differentiable, and none copies a bias that already has this form.

    Args:
        bias: (..., seqlen_q or 1, seqlen_k or 1), of two to four dimensions, as torch's scaled_dot_product_attention
            takes it. A bool mask becomes 0 where True and -inf elsewhere, in ``dtype``.
        dtype: q's dtype.
        seqlen_k: keys of the longest sequence.
    """
    if bias.layout is not torch.strided or bias.is_nested or not 2 <= bias.dim() <= 4:
        return bias
    if bias.dtype == torch.bool and dtype.is_floating_point:
        bias = torch.zeros_like(bias, dtype=dtype).masked_fill(~bias, -torch.inf)
    bias = four_dims(bias)
    if bias.shape[3] == 1 and seqlen_k != 1:
        bias = bias.expand(-1, -1, -1, seqlen_k)
    return last_contiguous(bias)


def four_dims(bias: Tensor) -> Tensor:
    """The bias with leading dimensions of size 1 in place of missing ones."""
    return bias if bias.dim() >= 4 else bias[(None,) * (4 - bias.dim())]


def last_contiguous(bias: Tensor) -> Tensor:
    """The bias, or a copy if elements of the last dimension are not adjacent, even for a bias without elements."""
    if bias.stride(-1) == 1 or bias.shape[-1] <= 1:
        return bias
    return bias.clone(memory_format=torch.contiguous_format)
