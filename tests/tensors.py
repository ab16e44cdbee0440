"""Tensors of tests: random ones that a seed determines, lengths, and arguments of device code that runs on the host."""

import torch
from cutlass.cute.runtime import from_dlpack


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def dynamic(x):
    """As an argument of any size, whose last dimension is contiguous; None stays."""
    return None if x is None else from_dlpack(x).mark_layout_dynamic(leading_dim=x.ndim - 1)
