"""The Hopper forward for attention with a cache of keys and values."""
