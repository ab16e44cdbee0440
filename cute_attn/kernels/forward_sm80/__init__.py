"""The Ampere forward."""

from cute_attn.kernels.forward_sm80.kernel import ForwardSm80

__all__ = ["ForwardSm80"]
