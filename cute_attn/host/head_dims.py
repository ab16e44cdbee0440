"""Conversion of tensors of any head dim and strides to ones that kernels accept."""

from torch import Tensor
from torch.nn import functional as F

from cute_attn.host.memory import rows_are_regular

_MULTIPLE = 8
"""Kernels accept head dims that are multiples of this."""


def has_whole_head_dim(x: Tensor) -> bool:
    """True if the last dimension is a multiple of 8."""
    return x.dim() == 0 or x.shape[-1] % _MULTIPLE == 0


def pad_head_dim(x: Tensor) -> Tensor:
    """``x`` with its last dimension padded by zeros to a multiple of 8; ``x`` itself if it is one.

    Scores do not change, and outputs have zeros in the padding.
    """
    return x if has_whole_head_dim(x) else F.pad(x, (0, -x.shape[-1] % _MULTIPLE))


def whole_head_dim(x: Tensor) -> Tensor:
    """:func:`pad_head_dim` of ``x``, with strides that kernels read; ``x`` itself if possible."""
    if not has_whole_head_dim(x):
        return pad_head_dim(x)
    return x if x.dim() == 0 or x.is_contiguous() or rows_are_regular(x) else x.contiguous()


def cut_head_dim(x: Tensor, head_dim: int) -> Tensor:
    """``x`` without its padding."""
    return x if x.shape[-1] == head_dim else x[..., :head_dim]
