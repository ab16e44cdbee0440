"""The Ampere forward for attention with a cache of keys and values."""

from cute_attn.kernels.kvcache_sm80.kernel import KvcacheSm80

__all__ = ["KvcacheSm80"]
