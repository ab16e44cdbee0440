"""What runs between two graphs where a compiler meets it. Importing this module loads torch's compiler."""

import torch

from cute_attn.epilogues.functions.known import epilogue_of as _epilogue_of

epilogue_of = torch.compiler.disable(
    _epilogue_of, reason="cute_attn traces score_mod and mask_mod outside of graphs"
)
"""As of :mod:`cute_attn.epilogues.functions.known`."""
