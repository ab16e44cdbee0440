"""FlashAttention-2's extension ``flash_attn_2_cuda``, on the functions of :mod:`~cute_attn.flash_attn.operators`.

Arguments are in the extension's order and without defaults. Transformer Engine imports ``varlen_bwd``. Errors are those
of the functions in ``operators``, and NotImplementedError if gen, or a forward's out, is given.
"""

import torch
from torch import Tensor

from cute_attn.flash_attn import operators
from cute_attn.flash_attn.conventions import Given, check_tensors, refuse, takes

__all__ = ["bwd", "fwd", "varlen_bwd", "varlen_fwd"]

_WINDOW = "window_size_left window_size_right softcap"
_LENGTHS = "max_seqlen_q max_seqlen_k p_dropout softmax_scale zero_tensors is_causal"
_OUTER = "dout q k v out softmax_lse dq dk dv"


@takes(f"q k v out alibi_slopes p_dropout softmax_scale is_causal {_WINDOW} return_softmax gen")
def fwd(given: Given) -> operators.Outputs:
    """:func:`~cute_attn.flash_attn.operators._flash_attn_forward` with the extension's arguments."""
    return operators.forward(given)


@takes(
    "q k v out cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table alibi_slopes "
    f"{_LENGTHS} {_WINDOW} return_softmax gen num_splits=0"
)
def varlen_fwd(given: Given) -> operators.Outputs:
    """:func:`~cute_attn.flash_attn.operators._flash_attn_varlen_forward` with the extension's arguments."""
    return operators.forward(given)


@takes(f"{_OUTER} alibi_slopes p_dropout softmax_scale is_causal {_WINDOW} deterministic gen rng_state")
def bwd(given: Given) -> tuple[Tensor, ...]:
    """:func:`~cute_attn.flash_attn.operators._flash_attn_backward` with the extension's arguments.

    Allocates dq, dk and dv if they are None, and returns them before that function's result.
    """
    return _backward(given)


@takes(f"{_OUTER} cu_seqlens_q cu_seqlens_k alibi_slopes {_LENGTHS} {_WINDOW} deterministic gen rng_state")
def varlen_bwd(given: Given) -> tuple[Tensor, ...]:
    """:func:`bwd` for :func:`~cute_attn.flash_attn.operators._flash_attn_varlen_backward`."""
    return _backward(given)


def _backward(given: Given) -> tuple[Tensor, ...]:
    refuse(given, "gen")
    check_tensors(q=given["q"], k=given["k"], v=given["v"])
    for name in "qkv":
        if given[f"d{name}"] is None:
            given[f"d{name}"] = torch.empty_like(given[name])
    return given["dq"], given["dk"], given["dv"], operators.backward(given)
