"""What the package imports on first use, for type checkers and editors."""

from cute_attn import flash_attn as flash_attn
from cute_attn import flex as flex
from cute_attn import lab as lab
from cute_attn import sdpa as sdpa
from cute_attn import transformers as transformers
from cute_attn.api.append import append_kv
from cute_attn.api.attention import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    draw_rng_state,
)
from cute_attn.api.block_mask import block_mask
from cute_attn.api.kvcache import attention_with_kvcache
from cute_attn.api.merge import merge_attention
from cute_attn.compiler import CompiledKernel, Resources, SpillWarning, compile, prebuild
from cute_attn.compiler.registry import Unsupported, defaults, lookup, register
from cute_attn.epilogues.base import Epilogue, register_epilogue
from cute_attn.epilogues.functions.registered import mask_mod, score_mod
from cute_attn.reference.check_epilogue import check_epilogue
from cute_attn.traits import Traits

__version__: str
_imported_at: float
__all__ = [
    "CompiledKernel",
    "Epilogue",
    "Resources",
    "SpillWarning",
    "Traits",
    "Unsupported",
    "__version__",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_with_kvcache",
    "block_mask",
    "check_epilogue",
    "compile",
    "defaults",
    "draw_rng_state",
    "lookup",
    "mask_mod",
    "merge_attention",
    "prebuild",
    "register",
    "register_epilogue",
    "score_mod",
]
