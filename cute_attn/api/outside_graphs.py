"""Functions that compiled code runs between two graphs. Importing this module loads torch's compiler."""

from typing import Any

import torch
from torch import Tensor

from cute_attn.epilogues.functions import known
from cute_attn.host import block_masks, mask_kinds

_REASON = "cute_attn traces score_mod, mask_mod and block_mask outside of graphs"


def _held(found: tuple[str, tuple[Tensor, ...]]) -> tuple[str, tuple[Tensor, ...]]:
    """An epilogue that a graph names."""
    if found[0]:
        known.hold(found[0])
    return found


def _epilogue_of(*arguments: Any) -> tuple[str, tuple[Tensor, ...]]:
    return _held(known.epilogue_of(*arguments))


def _epilogue_of_block_mask(*arguments: Any) -> tuple[str, tuple[Tensor, ...]]:
    return _held(block_masks.epilogue_of_block_mask(*arguments))


def _made_block_mask(*arguments: Any) -> Any:
    return mask_kinds.made_block_mask(*arguments)


epilogue_of = torch.compiler.disable(_epilogue_of, reason=_REASON)
epilogue_of_block_mask = torch.compiler.disable(_epilogue_of_block_mask, reason=_REASON)
made_block_mask = torch.compiler.disable(_made_block_mask, reason=_REASON)
