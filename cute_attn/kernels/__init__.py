"""The kernels, a folder or a file each.

A kernel imports no other one, except the one that it extends: attention with a cache, head dims above 256 on Hopper and
fp32 in parts on Ampere extend the forward of their generation, and differ from it by what their folder has. All share
``arguments`` (what a launch takes), ``limits`` (what they decline) and ``step`` (what a step of a main loop holds).
"""
