"""Calls under ``torch.compile``: they run between two graphs. Importing this module loads its compiler.

Inside a graph, functions of scores would have to be graphs themselves; here a function's tensors and closures are read
when it is called.
"""

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator

from cute_attn import flex
from cute_attn.flex import overrides

_REASON = "cute_attn computes flex_attention between two graphs"

flex_attention = torch.compiler.disable(flex.flex_attention, reason=_REASON)
serve = torch.compiler.disable(overrides.serve_compiled, reason=_REASON)


@torch.compiler.assume_constant_result
def stays_whole() -> bool:
    """True if the traced graph may not be broken: under ``fullgraph=True``, or in an export.

    Raises:
        Unsupported: it may not, and the options of :func:`cute_attn.flex.activate` ask for an error.
    """
    try:
        tracer = InstructionTranslator.current_tx()
    except AttributeError:  # another tracer
        whole = True
    else:
        whole = bool(tracer.one_graph or tracer.error_on_graph_break)
    activation = overrides.serving()
    if whole and activation is not None:
        overrides.fall_through(
            activation.options,
            "it is in a graph that may not be broken; accepted: without fullgraph=True or an export",
        )
    return whole
