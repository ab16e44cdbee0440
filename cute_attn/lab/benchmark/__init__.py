"""Timing attention against its peers: workloads, implementations, timing, results.

Used by ``cute-attn bench`` and the scripts under ``bench/``.
"""

PEERS = ("fa2", "mem_efficient", "cudnn", "fa3", "fa4", "ffpa", "deterministic")
"""Names of the peers. Each is a function of :mod:`cute_attn.lab.benchmark.peers`, which loads torch."""
