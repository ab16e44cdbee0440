"""What happens to a score tile in registers between the two matrix products.

Each epilogue is written once and used by every kernel, forward and backward, on every arch; see ``base`` for the
protocol. Importing this package imports the compiler; ``cute_attn.epilogues.inputs`` alone does not need it.
"""
