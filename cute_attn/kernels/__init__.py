"""The kernels, a folder or a file each.

A kernel imports no other one, except the one that it extends: attention with a cache, head dims above 256 on Hopper and
split fp32 on Ampere extend the forward of their generation and override only the methods in their folder. All use
``arguments`` (of a launch), ``limits`` (reasons to decline) and ``step`` (instruction counts of a main loop's step).
"""
