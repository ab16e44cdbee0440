"""The Ampere backward."""

from cute_attn.kernels.backward_sm80.kernel import BackwardSm80

__all__ = ["BackwardSm80"]
