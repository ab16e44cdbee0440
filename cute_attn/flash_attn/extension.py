"""FlashAttention-2's extension ``flash_attn_2_cuda``, on the functions of :mod:`~cute_attn.flash_attn.operators`.

Arguments are in the extension's order and without defaults. Transformer Engine imports ``varlen_bwd``. Errors are those
of the functions in ``operators``, and NotImplementedError if gen, or a forward's out, is given.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from cute_attn.flash_attn import operators
from cute_attn.flash_attn.conventions import check_tensors, refuse

__all__ = ["bwd", "fwd", "varlen_bwd", "varlen_fwd"]

_RENAMED = {"p_dropout": "dropout_p", "is_causal": "causal"}
_GRADIENTS = {"dq": "q", "dk": "k", "dv": "v"}


def _in_order(name: str, function: Callable[..., Any], arguments: str, unread: tuple[str, ...]) -> Any:
    """Wrap ``function`` under another name with ``arguments`` in this order; arguments in ``unread`` must be None.

    A backward allocates dq, dk and dv if they are None, and returns them before the result of ``function``.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parts = (one.partition("=") for one in arguments.split())
    parameters = [
        inspect.Parameter(own, kind, default=int(default) if default else inspect.Parameter.empty)
        for own, _, default in parts
    ]
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = signature.bind(*args, **kwargs).arguments
        refuse(**{own: given.pop(own) for own in unread})
        given = {_RENAMED.get(own, own): x for own, x in given.items()}
        if "dq" not in given:
            return function(**given)
        check_tensors(q=given["q"], k=given["k"], v=given["v"])
        for own, of in _GRADIENTS.items():
            given[own] = torch.empty_like(given[of]) if given[own] is None else given[own]
        return *(given[own] for own in _GRADIENTS), function(**given)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = (
        f":func:`~cute_attn.flash_attn.operators.{function.__name__}` with the extension's arguments."
    )
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


_WINDOW = "window_size_left window_size_right softcap"
_LENGTHS = "max_seqlen_q max_seqlen_k p_dropout softmax_scale zero_tensors is_causal"
_OUTER = "dout q k v out softmax_lse dq dk dv"

fwd = _in_order(
    "fwd",
    operators._flash_attn_forward,
    f"q k v out alibi_slopes p_dropout softmax_scale is_causal {_WINDOW} return_softmax gen",
    ("out", "gen"),
)
varlen_fwd = _in_order(
    "varlen_fwd",
    operators._flash_attn_varlen_forward,
    f"q k v out cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table alibi_slopes {_LENGTHS} {_WINDOW} "
    "return_softmax gen num_splits=0",
    ("out", "gen"),
)
bwd = _in_order(
    "bwd",
    operators._flash_attn_backward,
    f"{_OUTER} alibi_slopes p_dropout softmax_scale is_causal {_WINDOW} deterministic gen rng_state",
    ("gen",),
)
varlen_bwd = _in_order(
    "varlen_bwd",
    operators._flash_attn_varlen_backward,
    f"{_OUTER} cu_seqlens_q cu_seqlens_k alibi_slopes {_LENGTHS} {_WINDOW} deterministic gen rng_state",
    ("gen",),
)
