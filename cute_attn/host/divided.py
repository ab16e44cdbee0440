"""Attention of few queries with many keys on Hopper, with the kernels for a cache, which split keys among CTAs.

Keys and values are passed as a cache with one entry per sequence, or as packed sequences. The host chooses these
kernels if the forward would have far fewer work tiles than multiprocessors.
"""

import math
from typing import Any

from torch import Tensor

from cute_attn.compiler import registry
from cute_attn.epilogues.names import are_functions
from cute_attn.host import split_kv
from cute_attn.host.call import Call
from cute_attn.host.checks import KERNEL_DTYPES, check_query_blocks
from cute_attn.host.plans import Plan
from cute_attn.traits import LARGE_HEAD_DIM

FEW_TILES, LEAST_NUMBERS = 0.5, 1 << 18
"""Maximum work tiles per multiprocessor, and minimum elements of K and V that a query sees (those of 1,024 keys of head
dim 128), for a split to pay for a second launch."""
FEW_PACKED = 1.0
"""Maximum work tiles per multiprocessor with few queries of packed sequences: they do not end together, since lengths
differ."""
LAST_WAVE, MANY_KEYS = 1.5, 16384
"""For more work tiles: minimum ratio of rounded-up to exact waves, and minimum keys, for a split to pay."""


def as_cache(call: Call) -> Call:
    """The same attention for Hopper's kernels with a cache: one entry per sequence, or packed sequences."""
    kept: Any = call._replace(k_cache=call.k, v_cache=call.v, cache_seqlens=call.seqused_k, kernel="sm90")
    return kept._replace(k=None, v=None, seqused_k=None)


def is_wanted(call: Call, kernel: Any, target: str, multiprocessors: int) -> bool:
    """True if splitting keys pays: few work tiles, many keys, and no feature that kernels for a cache lack.

    Args:
        kernel: the forward kernel that would serve the call.
        target: the GPU it is built for.
    """
    if kernel.traits.arch != "sm90" or call.kernel or call.tile or call.q.dtype not in KERNEL_DTYPES:
        return False
    if kernel.traits.top_left or call.return_softmax:
        return False
    if max(kernel.traits.head_dim, kernel.traits.head_dim_v) > LARGE_HEAD_DIM:
        return False
    if call.bias is not None or call.dropout or call.seqused_q is not None:
        return False
    if call.lists_blocks or not are_functions(call.epilogue_names):
        return False
    seen = min(call.longest[1], call.window or call.longest[1])
    if seen * (call.q.shape[-1] + call.v.shape[-1]) < LEAST_NUMBERS:
        return False
    # Work tiles are counted with a large call's tile: `kernel` may have fewer rows because the call is small.
    large = registry.lookup(kernel.traits, None, target)
    large = large.for_lengths(*call.longest, call.group, target, window=call.window)
    waves = check_query_blocks(call, large) / multiprocessors
    unlike = call.varlen and call.longest[1] >= split_kv.EVEN * call.longest[0]
    if waves <= (FEW_PACKED if unlike else FEW_TILES):
        return True
    # Under a causal mask the shortest work tiles come last, and leave little idle.
    equal = not kernel.traits.causal or call.longest[1] >= 2 * call.longest[0]
    return equal and seen >= MANY_KEYS and math.ceil(waves) >= LAST_WAVE * waves


def plan_for_attention(call: Call) -> Plan:
    """The plan of a call with the kernels for a cache."""
    return split_kv.make_plan(as_cache(call))


def launch(plan: Plan, call: Call, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Write ``out`` and ``lse``, and return them. call: a call whose tensors have the strides that kernels assume."""
    return split_kv.launch(plan, as_cache(call), call.q, out, lse)
