"""The kernels, one folder or file each.

A kernel imports no other kernel except the one that it extends. Attention with a cache, head dims above 256 on Hopper
and split fp32 on Ampere extend the forward of their generation and override only the methods in their folder. Kernels
use ``base`` (what attention kernels have in common, reasons to decline, and instruction counts of a main loop step)
and ``fakes`` (launch arguments).
"""
