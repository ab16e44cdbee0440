"""The Hopper forward for head dims above 256, up to 576 for q and k and 512 for v."""

from cute_attn.kernels.head_dim_512_sm90.kernel import ForwardLargeSm90

__all__ = ["ForwardLargeSm90"]
