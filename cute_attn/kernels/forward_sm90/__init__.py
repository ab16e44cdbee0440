"""The Hopper forward."""

from cute_attn.kernels.forward_sm90.kernel import ForwardSm90

__all__ = ["ForwardSm90"]
