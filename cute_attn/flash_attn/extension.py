"""FlashAttention-2's extension ``flash_attn_2_cuda``: the same steps as :mod:`~cute_attn.flash_attn.operators`.

Arguments are in the extension's order and without defaults. Transformer Engine imports ``varlen_bwd``.
"""

import torch
from torch import Tensor

from cute_attn.flash_attn import operators
from cute_attn.flash_attn.conventions import refuse

__all__ = ["bwd", "fwd", "varlen_bwd", "varlen_fwd"]


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: None,
) -> operators.Outputs:
    """out, softmax_lse, S_dmask and rng_state.

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention`.
    NotImplementedError
        out or gen is given.
    """
    refuse(out=out, gen=gen)
    return operators._flash_attn_forward(
        q,
        k,
        v,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    )


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: None,
    num_splits: int = 0,
) -> operators.Outputs:
    """:func:`fwd` of packed sequences.

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention_varlen`.
    NotImplementedError
        out, gen, leftpad_k or zero_tensors is given.
    """
    refuse(out=out, gen=gen)
    return operators._flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
        block_table,
        leftpad_k,
        seqused_k,
        zero_tensors,
        num_splits,
    )


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: None,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, those that are None newly made, and a tensor of size 0.

    Raises
    ------
    TypeError, ValueError, Unsupported
        As :func:`cute_attn.attention_backward`.
    NotImplementedError
        gen is given.
    """
    refuse(gen=gen)
    into = _into((q, k, v), (dq, dk, dv))
    return *into, operators._flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        *into,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
    )


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: None,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`bwd` of packed sequences.

    Raises
    ------
    TypeError, ValueError, Unsupported, NotImplementedError
        As that function.
    """
    refuse(gen=gen)
    into = _into((q, k, v), (dq, dk, dv))
    return *into, operators._flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        *into,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
        zero_tensors,
    )


def _into(
    tensors: tuple[Tensor, Tensor, Tensor], given: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors to write gradients into."""
    operators.check_tensors(q=tensors[0], k=tensors[1], v=tensors[2])
    dq, dk, dv = (torch.empty_like(x) if own is None else own for x, own in zip(tensors, given, strict=True))
    return dq, dk, dv
