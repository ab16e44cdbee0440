"""The functions that FlashAttention-2's autograd functions call: a forward, and a backward from its outputs.

Libraries that split a sequence across GPUs import these private functions from ``flash_attn.flash_attn_interface``
(with the signatures of FlashAttention 2.7 and later), or from the extension ``flash_attn_2_cuda``, which has arguments
in another order. A forward returns

    out          shaped like q, with v's head_dim
    softmax_lse  fp32 (batch, nheads, seqlen_q), or packed (nheads, total_q); +inf where a query sees no key
    S_dmask      the softmax, as from the public functions, with return_softmax and dropout; otherwise of size 0
    rng_state    int64 (2,), seed and offset of the dropout mask, for the backward; zeros without dropout

Unlike in FlashAttention-2, out and softmax_lse are differentiable by autograd.

A backward writes dq, dk and dv, and skips a gradient that is None. FlashAttention-2's backward returns the row sums of
dout * out, padded to its blocks. Here these stay in the workspace, and a tensor of size 0 is returned. out and
softmax_lse may cover more keys than the call has, as in ring attention: gradients are then the contributions of the
call's keys, to be summed by the caller.

Functions raise TypeError, ValueError and Unsupported as in :mod:`cute_attn.api.attention`, and NotImplementedError if
leftpad_k, a forward's zero_tensors or an argument out or gen of the extension's is given. A backward also raises for
dropout without a rng_state. num_splits is read only with a block_table.
"""

from typing import Any

import torch
from torch import Tensor

from cute_attn.api.attention import attention_backward, attention_varlen_backward, draw_rng_state
from cute_attn.flash_attn import conventions
from cute_attn.flash_attn.conventions import Given, takes

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""out, softmax_lse, S_dmask, rng_state."""
_WINDOW = "window_size_left window_size_right softcap"
_SCORES = f"dropout_p softmax_scale causal {_WINDOW} alibi_slopes"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_OUTER = "dout q k v out softmax_lse"


@takes(f"q k v {_SCORES} return_softmax")
def _flash_attn_forward(given: Given) -> Outputs:
    """The forward of :func:`~cute_attn.flash_attn.flash_attn_func`."""
    return forward(given)


@takes(
    f"q k v {_LENGTHS} dropout_p softmax_scale causal window_size_left=-1 window_size_right=-1 softcap=0.0 "
    "alibi_slopes=None return_softmax=False block_table=None leftpad_k=None seqused_k=None zero_tensors=False "
    "num_splits=0"
)
def _flash_attn_varlen_forward(given: Given) -> Outputs:
    """The forward of :func:`~cute_attn.flash_attn.flash_attn_varlen_func`."""
    return forward(given)


@takes(f"{_OUTER} dq dk dv {_SCORES} deterministic rng_state=None")
def _flash_attn_backward(given: Given) -> Tensor:
    """The backward of :func:`~cute_attn.flash_attn.flash_attn_func`; writes to dq, dk and dv."""
    return backward(given)


@takes(f"{_OUTER} dq dk dv {_LENGTHS} {_SCORES} deterministic rng_state=None zero_tensors=False")
def _flash_attn_varlen_backward(given: Given) -> Tensor:
    """The backward of :func:`~cute_attn.flash_attn.flash_attn_varlen_func`; writes to dq, dk and dv.

    Rows that belong to no sequence become 0, with or without zero_tensors.
    """
    return backward(given)


def forward(given: Given) -> Outputs:
    """A forward of batches, or of packed sequences if their lengths are among the arguments."""
    conventions.refuse(given, "out", "gen", "leftpad_k", "zero_tensors")
    lengths = conventions.lengths_of(given)
    options: dict[str, Any] = {"return_lse": True}
    door = f"flash_attn._flash_attn_{'varlen_' if lengths else ''}forward"
    q, k, v = given["q"], given["k"], given["v"]
    if given.get("block_table") is not None:
        out, lse = conventions.attend_pages(door, given, True)
        assert lse is not None
        return out, conventions.plus_infinity(lse), out.new_empty(0), out.new_zeros(2, dtype=torch.int64)
    conventions.check_tensors(q=q, k=k, v=v)
    dropout_p = conventions.probability(given["dropout_p"])
    state = draw_rng_state(q.device) if dropout_p else q.new_zeros(2, dtype=torch.int64)
    wants_softmax = conventions.flag("return_softmax", given["return_softmax"])
    if dropout_p:
        options |= {"rng_state": state, "return_softmax": wants_softmax}
    if lengths is not None:
        options["seqused_k"] = given["seqused_k"]
    out, lse, *softmax = conventions.attend(door, given, dropout_p=dropout_p, **options)
    return out, conventions.plus_infinity(lse), softmax[0] if softmax else out.new_empty(0), state


def backward(given: Given, door: str = "", **options: Any) -> Tensor:
    """Write gradients to dq, dk and dv, those that are not None. Returns a tensor of size 0.

    door: name of the function that is counted, by default FlashAttention-2's. options: further arguments of
    attention_backward.
    """
    lengths = conventions.lengths_of(given)
    door = door or f"flash_attn._flash_attn_{'varlen_' if lengths else ''}backward"
    tensors = {name: given[name] for name in _OUTER.split()}
    into = {name: given[f"d{name}"] for name in "qkv" if given[f"d{name}"] is not None}
    conventions.check_tensors(**tensors, **{f"d{name}": x for name, x in into.items()})
    nothing = given["dout"].new_empty(0, dtype=torch.float32)
    if not into:
        return nothing
    dropout_p, deterministic = conventions.probability(given.get("dropout_p", 0.0)), given["deterministic"]
    options |= {
        "dropout_p": dropout_p, "deterministic": conventions.flag("deterministic", deterministic),
        "wanted": tuple(into), "into": tuple(into.values()), "rng_state": given.get("rng_state"),
        **conventions.scores_of(given),
    }  # fmt: skip
    with torch.no_grad():
        if lengths is None:
            attention_backward(*tensors.values(), **options)
        else:
            attention_varlen_backward(
                *tensors.values(), *lengths[:2], *conventions.longest(lengths), **options
            )
    conventions.note(door, (given["q"], given["k"], given["v"]), given)
    return nothing
