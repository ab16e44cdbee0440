"""The Hopper forward for attention with a cache, for head dims above 256: up to 576 for q and k and 512 for v."""
