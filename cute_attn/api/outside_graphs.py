"""What runs between two graphs where a compiler meets it. Importing this module loads torch's compiler."""

import torch

from cute_attn.epilogues.functions import known
from cute_attn.host import block_masks, mask_kinds

_REASON = "cute_attn traces score_mod, mask_mod and block_mask outside of graphs"

epilogue_of = torch.compiler.disable(known.epilogue_of, reason=_REASON)
epilogue_of_block_mask = torch.compiler.disable(block_masks.epilogue_of_block_mask, reason=_REASON)
made_block_mask = torch.compiler.disable(mask_kinds.made_block_mask, reason=_REASON)
