"""The Hopper backward."""

from cute_attn.kernels.backward_sm90.kernel import BackwardSm90

__all__ = ["BackwardSm90"]
