"""Functions and named epilogues among the arguments of a public function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attn.epilogues.functions.known import epilogue_of, hold
from cute_attn.host.block_masks import Packed, epilogue_of_block_mask
from cute_attn.host.call import Call, given_epilogues
from cute_attn.host.checks import check_int32, check_starts
from cute_attn.host.memory import Tensors
from cute_attn.host.plans import no_dispatch_mode
from cute_attn.host.values import check_dense, check_present, length, wrong_shape

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
MaskMod = Callable[[Any, Any, Any, Any], Any]
Functions = tuple[ScoreMod | None, MaskMod | None, Any]
"""score_mod, mask_mod and block_mask; each may be None."""
Epilogues = Sequence[str] | Mapping[str, Any]

_SEQUSED_K = Call._fields.index("seqused_k")


def all_epilogues(
    tensors: Tensors,
    epilogues: Epilogues,
    functions: Functions,
    longest: Sequence[Any] | None = None,
    packed: Packed | None = None,
) -> Epilogues:
    """The call's named epilogues, followed by the epilogues of its functions and of its BlockMask.

    Args:
        tensors: q and k first; with a BlockMask, all tensors in the order of :func:`cute_attn.api.attention._attend`.
        longest: queries and keys of the longest packed sequence; None for batches.
        packed: with a BlockMask, the sequences of a cache.
    """
    (q, k, *_), (score_mod, mask_mod, block_mask), found = tensors, functions, []
    if block_mask is not None and packed is None:
        packed = packed_sequences(tensors, longest)
        if packed is None and tensors[_SEQUSED_K] is not None:
            raise ValueError("block_mask is given with seqused_k; accepted: one of them")
        for name, x in (("q", q), ("k", k)) if packed is None else ():
            check_dense(name, x)
            if x.dim() != 4:
                raise wrong_shape(name, x, "(batch, seqlen, heads, head_dim)")
        packed = packed or Packed((), (*q.shape[:3], *k.shape[1:3]))
    if in_a_graph(functions):
        return {**given_epilogues(epilogues), **in_graphs().stand_ins(tensors, functions, packed)}
    if score_mod is not None or mask_mod is not None:
        device = q.device if isinstance(q, Tensor) else None
        dtype = torch.float64 if isinstance(q, Tensor) and q.dtype == torch.float64 else torch.float32
        found.append(epilogue_of(score_mod, mask_mod, device, dtype))
    if block_mask is not None:
        found.append(epilogue_of_block_mask(block_mask, q, k, packed))
    for name, made in found:
        if name:
            epilogues = {**given_epilogues(epilogues), name: made}
            _hold_for_graphs(name, q)
    return epilogues


def packed_sequences(tensors: Tensors, longest: Sequence[Any] | None) -> Packed | None:
    """Starts and sizes of packed sequences; None for batches. tensors, longest: see :func:`all_epilogues`."""
    if longest is None:
        return None
    (q, k, _, *starts), most = tensors[:5], []
    for side, x, start, n in zip("qk", (q, k), starts, longest, strict=True):
        check_dense(side, x)
        if x.dim() != 3:
            raise wrong_shape(side, x, "(total, heads, head_dim)")
        name = f"cu_seqlens_{side}"
        check_starts(name, start)
        check_present((("q", q), (name, start)), ())
        check_int32(name, start, starts[0].shape[0])
        most.append(min(length(f"max_seqlen_{side}", n), x.shape[0]))
    sizes = (starts[0].shape[0] - 1, most[0], q.shape[1], most[1], k.shape[1])
    return Packed((starts[0], starts[1]), sizes)


def in_a_graph(functions: Functions) -> bool:
    """True while torch's compiler interprets a call with functions."""
    return torch.compiler.is_dynamo_compiling() and any(x is not None for x in functions)


def in_graphs() -> Any:
    from cute_attn.api import in_graphs  # loads torch's compiler

    return in_graphs


def as_one_node(compute: Callable[..., Any], functions: Functions, *arguments: Any) -> Any:
    """Return ``compute(functions, *arguments)``, as one graph node if torch's compiler interprets the functions."""
    if not in_a_graph(functions):
        return compute(functions, *arguments)
    return in_graphs().whole(lambda: compute(functions, *arguments))


def _hold_for_graphs(name: str, q: Any) -> None:
    """Keep a function's epilogue alive if a graph or a tracer may name it, or a CUDA graph captures its kernel."""
    if not isinstance(q, Tensor):
        return
    if not no_dispatch_mode() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        hold(name)
