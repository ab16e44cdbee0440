"""Under ``torch.compile``, watched calls run between two graphs. Importing this module loads torch's compiler."""

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator

from cute_attn.flex import overrides

serve = torch.compiler.disable(
    overrides.serve_compiled, reason="cute_attn watches flex_attention between two graphs"
)


@torch.compiler.assume_constant_result
def stays_whole() -> bool:
    """True if graph breaks are not allowed in the current trace: under ``fullgraph=True``, or in an export."""
    tracer = InstructionTranslator.current_tx()
    return bool(tracer.one_graph or tracer.error_on_graph_break)
