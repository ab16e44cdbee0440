"""A function that compiled code runs between two graphs. Importing this module loads torch's compiler."""

from typing import Any

import torch

from cute_attn.host import mask_kinds


def _made_block_mask(*arguments: Any) -> Any:
    return mask_kinds.made_block_mask(*arguments)


made_block_mask = torch.compiler.disable(
    _made_block_mask, reason="cute_attn makes a mask's blocks outside of graphs"
)
