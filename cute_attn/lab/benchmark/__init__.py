"""Timing attention against its peers: workloads, implementations, timing, results.

Used by ``cute-attn bench`` and the scripts under ``bench/``.
"""
