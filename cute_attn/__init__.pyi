"""What the package imports on first use, for type checkers and editors.

What a call returns depends on ``return_lse``, ``return_softmax`` and ``return_max_scores``; its other options are
stated once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

from torch import Tensor

from cute_attn import flash_attn as flash_attn
from cute_attn import flex as flex
from cute_attn import lab as lab
from cute_attn import sdpa as sdpa
from cute_attn import transformers as transformers
from cute_attn.api.append import append_kv
from cute_attn.api.attention import (
    Causal,
    MaskMod,
    ScoreMod,
    Window,
    attention_backward,
    attention_varlen_backward,
    draw_rng_state,
)
from cute_attn.api.block_mask import block_mask
from cute_attn.api.merge import merge_attention
from cute_attn.api.sums import attention_sums
from cute_attn.compiler import CompiledKernel, Resources, SpillWarning, compile, prebuild
from cute_attn.compiler.registry import Unsupported, defaults, lookup, register
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.functions.registered import mask_mod, score_mod
from cute_attn.epilogues.names import register_epilogue
from cute_attn.reference.check_epilogue import check_epilogue
from cute_attn.traits import Traits

class _AttentionOptions(TypedDict, total=False):
    softmax_scale: float | None
    causal: Causal
    window: Window
    alibi_slopes: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    softcap: float
    dropout_p: float
    dropout_mask: str
    rng_state: Tensor | None
    seqused_k: Tensor | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: Any
    epilogues: Sequence[str] | Mapping[str, Any]
    kernel: str | None
    tile: Any
    deterministic: bool
    same_bits: bool
    backward_tile: Any
    precision: str | None
    out: Tensor | None

class _VarlenOptions(_AttentionOptions, total=False):
    seqused_q: Tensor | None

class _KvcacheOptions(TypedDict, total=False):
    cache_seqlens: Tensor | int | None
    k: Tensor | None
    v: Tensor | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    cu_seqlens_k_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_seqlens: Tensor | None
    rotary_interleaved: bool
    softmax_scale: float | None
    causal: bool
    window: Window
    softcap: float
    alibi_slopes: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    tree_mask: Tensor | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: Any
    epilogues: Sequence[str] | Mapping[str, Any]
    num_splits: int
    same_bits: bool
    out: Tensor | None
    kernel: str | None
    tile: Any
    check_lengths: bool

@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_softmax: Literal[False] = ...,
    return_max_scores: Literal[False] = ...,
    **options: Unpack[_AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_softmax: Literal[False] = ...,
    return_max_scores: Literal[True],
    **options: Unpack[_AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_softmax: Literal[True],
    return_max_scores: Literal[False] = ...,
    **options: Unpack[_AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_softmax: Literal[False] = ...,
    return_max_scores: Literal[False] = ...,
    **options: Unpack[_AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_softmax: Literal[False] = ...,
    return_max_scores: Literal[True],
    **options: Unpack[_AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_softmax: Literal[True],
    return_max_scores: Literal[False] = ...,
    **options: Unpack[_AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = ...,
    return_softmax: bool = ...,
    return_max_scores: bool = ...,
    **options: Unpack[_AttentionOptions],
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    return_softmax: Literal[False] = ...,
    return_max_scores: Literal[False] = ...,
    **options: Unpack[_VarlenOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    return_softmax: Literal[False] = ...,
    return_max_scores: Literal[True],
    **options: Unpack[_VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    return_softmax: Literal[True],
    return_max_scores: Literal[False] = ...,
    **options: Unpack[_VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    return_softmax: Literal[False] = ...,
    return_max_scores: Literal[False] = ...,
    **options: Unpack[_VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    return_softmax: Literal[False] = ...,
    return_max_scores: Literal[True],
    **options: Unpack[_VarlenOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    return_softmax: Literal[True],
    return_max_scores: Literal[False] = ...,
    **options: Unpack[_VarlenOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = ...,
    return_softmax: bool = ...,
    return_max_scores: bool = ...,
    **options: Unpack[_VarlenOptions],
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_scores: Literal[False] = ...,
    **options: Unpack[_KvcacheOptions],
) -> Tensor: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_scores: Literal[True],
    **options: Unpack[_KvcacheOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[True],
    return_max_scores: Literal[False] = ...,
    **options: Unpack[_KvcacheOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[True],
    return_max_scores: Literal[True],
    **options: Unpack[_KvcacheOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: bool = ...,
    return_max_scores: bool = ...,
    **options: Unpack[_KvcacheOptions],
) -> Tensor | tuple[Tensor, ...]: ...

__version__: str
_imported_at: float
_HOME: dict[str, str]
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
    "attention_sums",
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
