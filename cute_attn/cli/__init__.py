"""The ``cute-attn`` command."""
