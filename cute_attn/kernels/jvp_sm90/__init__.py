"""The Hopper forward with its forward-mode derivative."""

from cute_attn.kernels.jvp_sm90.kernel import JvpSm90

__all__ = ["JvpSm90"]
