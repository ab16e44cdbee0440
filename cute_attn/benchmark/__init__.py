"""Timing attention against its peers: what is computed, who computes it, how it is timed, what is kept.

``cute-attn bench`` and the scripts under ``bench/`` are made of these.
"""
