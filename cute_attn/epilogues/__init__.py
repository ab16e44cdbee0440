"""Score epilogues: operations on a score tile in registers between the two matrix products.

Each epilogue serves all kernels, forward and backward, sm80 and sm90; ``base`` defines the protocol. All modules import
the compiler except ``inputs``, ``names`` and ``numbering``.
"""
