"""Level 8: the shipped kernel, and speculation.

What level 7 wasted: in every step each score goes through a maximum, the warp votes on it, and no exponential can start
before that.

The maximum only keeps exponentials within fp32's range, and after the first blocks of a row it hardly ever grows. So
``forward-sm90`` freezes the row maxima after the blocks that have a mask (``speculative``), and exponentiates against
them. fp32 has room: sums up to 2^40 lose no digit. A work tile with a larger sum is computed again, exactly, at the end
of its section of work tiles (``cute_attn.work.replay``); random inputs have none.

It has more than level 7. Q stays in registers at head dim 128, and head dim 64 has three or four warpgroups.
CTAs claim work tiles from a counter, longest first, by sections of heads whose K and V stay in L2. TMA stores O
while the next tile is computed. If queries are few, the heads of a group are packed as rows. It also has every
feature of the package: other dtypes and head dims, windows, biases, dropout, packed and paged sequences.
docs/a_kernel.md walks through it.

    attention(q, k, v, causal=True, kernel="sm90")
"""

from cute_attn.kernels.forward_sm90 import ForwardSm90

SHIPPED = ForwardSm90
