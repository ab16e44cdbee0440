"""Score epilogues: operations on a score tile in registers between the two matrix products.

Each serves all kernels, forward and backward, sm80 and sm90; ``base`` has the protocol. They import the compiler,
except ``cute_attn.epilogues.inputs``.
"""
