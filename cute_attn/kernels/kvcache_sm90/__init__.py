"""The Hopper forward for attention with a cache of keys and values."""

from cute_attn.kernels.kvcache_sm90.kernel import KvcacheSm90

__all__ = ["KvcacheSm90"]
