"""The Ampere forward for attention with a cache of keys and values."""
