"""Tensors of callers who pay no attention to kernels: any head dim, any strides."""

from torch import Tensor
from torch.nn import functional as F

from cute_attn.params import rows_are_regular

_MULTIPLE = 8
"""Of the head dims that kernels take."""


def whole_head_dim(x: Tensor) -> Tensor:
    """``x`` with zeros up to a multiple of 8 in its last dimension, and strides that kernels read; itself if it can be.

    Scores do not change; outputs have zeros there as well.
    """
    if x.dim() == 0:
        return x
    if x.shape[-1] % _MULTIPLE:
        return F.pad(x, (0, -x.shape[-1] % _MULTIPLE))
    return x if x.is_contiguous() or rows_are_regular(x) else x.contiguous()
