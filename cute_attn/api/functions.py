"""Functions and named epilogues among the arguments of a public function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attn.epilogues.functions.known import epilogue_of, hold
from cute_attn.epilogues.functions.trace import check_function
from cute_attn.host.block_masks import epilogue_of_block_mask, mask_of_packed
from cute_attn.host.call import Call, given_epilogues
from cute_attn.host.checks import check_starts
from cute_attn.host.memory import Tensors
from cute_attn.host.plans import no_dispatch_mode
from cute_attn.host.values import check_dense, length, wrong_shape

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
MaskMod = Callable[[Any, Any, Any, Any], Any]
Functions = tuple[ScoreMod | None, MaskMod | None, Any]
"""score_mod, mask_mod and block_mask; each may be None."""
Epilogues = Sequence[str] | Mapping[str, Any]

_SEQUSED_K = Call._fields.index("seqused_k")


def all_epilogues(
    tensors: Tensors, epilogues: Epilogues, functions: Functions, longest: Sequence[Any] | None = None
) -> Epilogues:
    """The epilogues and, after them, those of the functions and of the BlockMask.

    Args:
        tensors: q and k first; with a BlockMask as :func:`cute_attn.api.attention._attend` has them.
        epilogues, functions: the call's.
        longest: queries and keys of the longest sequence, of packed ones.
    """
    if functions[2] is not None and longest is not None:
        functions = (functions[0], _mask_of_packed(tensors, functions, longest), None)
    (q, k, *_), (score_mod, mask_mod, block_mask), found = tensors, functions, []
    if block_mask is not None:
        _check_for_block_mask(q, k, tensors[_SEQUSED_K])
    if in_a_graph(functions):
        return {**given_epilogues(epilogues), **in_graphs().stand_ins(tensors, functions)}
    if score_mod is not None or mask_mod is not None:
        device = q.device if isinstance(q, Tensor) else None
        dtype = torch.float64 if isinstance(q, Tensor) and q.dtype == torch.float64 else torch.float32
        found.append(epilogue_of(score_mod, mask_mod, device, dtype))
    if block_mask is not None:
        found.append(epilogue_of_block_mask(block_mask, q, k))
    for name, made in found:
        if name:
            epilogues = {**given_epilogues(epilogues), name: made}
            _hold_for_graphs(name, q)
    return epilogues


def _mask_of_packed(tensors: Tensors, functions: Functions, longest: Sequence[Any]) -> MaskMod:
    """A call's mask_mod and BlockMask as one function, of packed sequences."""
    (q, k, _, starts, *_), (_, mask_mod, block_mask) = tensors, functions
    for name, x in (("q", q), ("k", k)):
        check_dense(name, x)
        if x.dim() != 3:
            raise wrong_shape(name, x, "(total, heads, head_dim)")
    check_starts("cu_seqlens_q", starts)
    most = [
        min(length(f"max_seqlen_{side}", n), x.shape[0])
        for side, n, x in zip("qk", longest, (q, k), strict=True)
    ]
    sizes = (starts.shape[0] - 1, most[0], q.shape[1], most[1], k.shape[1])
    listed = mask_of_packed(block_mask, q.device, *sizes)
    if mask_mod is None:
        return listed
    check_function("mask_mod", mask_mod)

    def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b, h, q_idx, kv_idx) & listed(b, h, q_idx, kv_idx)

    return both


def in_a_graph(functions: Functions) -> bool:
    """True while torch's compiler interprets a call with functions."""
    return torch.compiler.is_dynamo_compiling() and any(x is not None for x in functions)


def in_graphs() -> Any:
    """:mod:`cute_attn.api.in_graphs`."""
    from cute_attn.api import in_graphs  # loads torch's compiler

    return in_graphs


def _hold_for_graphs(name: str, q: Any) -> None:
    """Keep a function's epilogue if a graph or a tracer may name it, or a CUDA graph captures its kernel."""
    if not isinstance(q, Tensor):
        return
    if not no_dispatch_mode() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        hold(name)


def _check_for_block_mask(q: Any, k: Any, seqused_k: Tensor | None) -> None:
    """Raise for a call that a BlockMask does not fit, whatever it lists."""
    if seqused_k is not None:
        raise ValueError("block_mask is given with seqused_k; accepted: one of them")
    for name, x in (("q", q), ("k", k)):
        check_dense(name, x)
        if x.dim() != 4:
            raise wrong_shape(name, x, "(batch, seqlen, heads, head_dim)")
