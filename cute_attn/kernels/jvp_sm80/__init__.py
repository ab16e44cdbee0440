"""The Ampere forward with its forward-mode derivative."""

from cute_attn.kernels.jvp_sm80.kernel import JvpSm80

__all__ = ["JvpSm80"]
