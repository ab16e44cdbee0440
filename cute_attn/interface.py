"""How people call it: :func:`attention` on batches, :func:`attention_varlen` on packed sequences."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attn import ops
from cute_attn.call import Call, pack_epilogues
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.traits import DROPOUTS

Result = Tensor | tuple[Tensor, ...]
Window = tuple[int | None, int | None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window: Window = (None, None),
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_mask: str = "flash",
    rng_state: Tensor | None = None,
    seqused_k: Tensor | None = None,
    epilogues: Sequence[str] | Mapping[str, Any] = (),
    return_lse: bool = False,
    return_softmax: bool = False,
    kernel: str | None = None,
    tile: Any = None,
) -> Result:
    """softmax(softmax_scale * q k^T + ...) v for batches of equally long sequences.

    Scores pass, in this order, through softcap, ALiBi, bias, users' epilogues and the mask; the softmax in float32;
    dropout. A query that sees no key gives 0, and an lse of -inf. :mod:`cute_attn.reference` is the definition; CPU
    tensors are computed by it, in float32 or float64.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, nheads, head_dim)
        fp16 or bf16 on CUDA, any float dtype on the CPU. head_dim is a multiple of 8 up to 256. The last dimension is
        contiguous, other strides are multiples of 8 elements, the data is aligned to 16 bytes.
    k : Tensor (batch, seqlen_k, nheads_kv, head_dim)
        As q. nheads is a multiple of nheads_kv: consecutive query heads share a key head.
    v : Tensor (batch, seqlen_k, nheads_kv, head_dim_v)
        As k; head_dim_v may differ from head_dim.
    softmax_scale : float, optional
        Factor of the products, above 0. Default 1 / sqrt(head_dim).
    causal : bool or {"bottom_right", "top_left"}
        Whether a query sees no key after its own. Its own is aligned so that the last query sees the last key
        (True, "bottom_right") or the first query the first key ("top_left").
    window : (left, right)
        How many keys before and after its own a query sees, None or -1 for all of them: with
        ``shift = seqlen_k - seqlen_q`` (0 under "top_left"), query i sees keys i + shift - left to i + shift + right.
        With causal, right must be None or 0.
    alibi_slopes : Tensor (nheads,) or (batch, nheads), float32, optional
        slope * abs(i + shift - j) is subtracted from scores (Press et al. 2021, arXiv:2108.12409).
    bias : Tensor (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k), fp16, bf16 or fp32, optional
        Added to scores; its last dimension is contiguous. -inf hides a key.
    softcap : float
        Scores become softcap * tanh(score / softcap); 0 leaves them (Gemma 2, arXiv:2408.00118).
    dropout_p : float
        Probability of dropping an element of the softmax, 0 <= dropout_p < 1; kept ones are scaled by
        1 / (1 - dropout_p).
    dropout_mask : {"flash", "mem_efficient"}
        Which of PyTorch's two masks is drawn, bit for bit.
    rng_state : Tensor (2,), int64, optional
        Seed and offset of the mask, on q's device. Default: drawn from torch's generator of that device, anew for
        every replay of a CUDA graph. To use a mask again pass one from :func:`draw_rng_state`.
    seqused_k : Tensor (batch,), int32, optional
        How many keys of each batch exist; what lies beyond is never read.
    epilogues : sequence of str, or mapping of str to arguments
        Users' registered epilogues, in order; arguments are tensors and numbers.
    return_lse : bool
        Also return the logarithm of each row's sum of exponentials.
    return_softmax : bool
        Also return the softmax, for inspection.
    kernel : str, optional
        Which kernel to take, "ARCH" or "ARCH:VARIANT" such as "sm80". Default: the newest generation that serves.
    tile : Tile or str, optional
        A tile, or text that changes fields of the default one, such as "tile_n=32".

    Returns
    -------
    out : Tensor (batch, seqlen_q, nheads, head_dim_v), q's dtype
        Alone, or where more is asked for, the first of a tuple with, in this order,
    lse : Tensor (batch, nheads, seqlen_q), float32 (float64 for float64 q)
        Natural logarithm; -inf where a query sees no key.
    softmax : Tensor (batch, nheads, seqlen_q, seqlen_k), q's dtype
        Before dropout. The sign bit of an element that its query sees is set where dropout drops it.

    Raises
    ------
    TypeError, ValueError
        An argument is not what is described here; the message names it, its value and what is accepted.
    Unsupported
        No kernel serves the call; a ValueError that gives each kernel's reason.
    NotImplementedError
        A CUDA tensor requires a gradient.
    """
    _require_tensors(q=q, k=k, v=v)
    return _attend(
        (q, k, v, None, None, None, seqused_k),
        (_size(q, 1), _size(k, 1)),
        softmax_scale=softmax_scale,
        causal=causal,
        window=window,
        alibi_slopes=alibi_slopes,
        bias=bias,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_mask=dropout_mask,
        rng_state=rng_state,
        epilogues=epilogues,
        return_lse=return_lse,
        return_softmax=return_softmax,
        kernel=kernel,
        tile=tile,
    )


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window: Window = (None, None),
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_mask: str = "flash",
    rng_state: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    epilogues: Sequence[str] | Mapping[str, Any] = (),
    return_lse: bool = False,
    return_softmax: bool = False,
    kernel: str | None = None,
    tile: Any = None,
) -> Result:
    """:func:`attention` for sequences of different lengths, packed one after the other.

    Parameters
    ----------
    q : Tensor (total_q, nheads, head_dim)
        Sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
    k, v : Tensor (total_k, nheads_kv, head_dim), (total_k, nheads_kv, head_dim_v)
        As q, with cu_seqlens_k.
    cu_seqlens_q, cu_seqlens_k : Tensor (batch + 1,), int32
        Where sequences start, never falling, on q's device. Their values are checked on the CPU only: reading them
        on CUDA would wait for the device. A sequence may be empty.
    max_seqlen_q, max_seqlen_k : int
        The longest sequence, or more. On CUDA, queries beyond it would stay uncomputed.
    seqused_q, seqused_k : Tensor (batch,), int32, optional
        How many rows of each sequence exist; what lies beyond is never read.
    bias : Tensor (batch or 1, nheads or 1, max_seqlen_q or 1, max_seqlen_k)
        As for :func:`attention`, indexed by a position in its sequence.
    softmax_scale, causal, window, alibi_slopes, softcap, dropout_p, dropout_mask, rng_state, epilogues, return_lse, \
return_softmax, kernel, tile
        As for :func:`attention`.

    Returns
    -------
    out : Tensor (total_q, nheads, head_dim_v)
        Alone, or the first of a tuple with, in this order, lse and softmax. Rows beyond seqused_q are 0 (lse: -inf);
        rows that cu_seqlens_q gives to no sequence are not written.
    lse : Tensor (nheads, total_q)
    softmax : Tensor (batch, nheads, max_seqlen_q, max_seqlen_k)

    Raises
    ------
    TypeError, ValueError, Unsupported, NotImplementedError
        As :func:`attention`.
    """
    _require_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return _attend(
        (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        (max_seqlen_q, max_seqlen_k),
        softmax_scale=softmax_scale,
        causal=causal,
        window=window,
        alibi_slopes=alibi_slopes,
        bias=bias,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_mask=dropout_mask,
        rng_state=rng_state,
        epilogues=epilogues,
        return_lse=return_lse,
        return_softmax=return_softmax,
        kernel=kernel,
        tile=tile,
    )


def draw_rng_state(device: torch.device | str) -> Tensor:
    """A dropout mask's seed and offset, int64 (2,), from torch's generator of ``device``.

    The kernels read it on the device, so what a CUDA graph captures is the drawing: each replay draws anew.
    """
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def _attend(
    tensors: tuple[Tensor | None, ...],
    max_seqlens: tuple[int, int],
    *,
    softmax_scale: float | None,
    causal: bool | str,
    window: Window,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    softcap: float,
    dropout_p: float,
    dropout_mask: str,
    rng_state: Tensor | None,
    epilogues: Sequence[str] | Mapping[str, Any],
    return_lse: bool,
    return_softmax: bool,
    kernel: str | None,
    tile: Any,
) -> Result:
    q, k, v = tensors[:3]
    assert q is not None
    if dropout_mask not in DROPOUTS:
        raise ValueError(f"dropout_mask is {dropout_mask!r}; accepted: {', '.join(map(repr, DROPOUTS))}")
    dropout = dropout_mask if dropout_p else ""
    if not dropout:
        rng_state = None
    elif rng_state is None:
        rng_state = draw_rng_state(q.device)
    names, epilogue_tensors, epilogue_numbers = pack_epilogues(epilogues) if epilogues else ((), (), ())
    _refuse_gradients(q, (k, v, bias), (alibi_slopes, *epilogue_tensors))
    mask, window_left, window_right = resolve_mask(causal, window)
    call = Call._make(
        (
            *tensors,
            alibi_slopes,
            bias,
            rng_state,
            epilogue_tensors,
            *max_seqlens,
            q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            mask,
            window_left,
            window_right,
            softcap,
            dropout,
            dropout_p,
            names,
            epilogue_numbers,
            return_softmax,
            kernel or "",
            "" if tile is None else str(tile),
        )
    )
    out, lse, softmax = ops.forward(call)
    if not (return_lse or return_softmax):
        return out
    return (out, *((lse,) if return_lse else ()), *((softmax,) if softmax is not None else ()))


def resolve_mask(causal: bool | str, window: Window) -> tuple[str, int, int]:
    """The traits' word for a mask, and its bounds.

    Raises
    ------
    ValueError
        causal or window is not what :func:`attention` describes.
    """
    if causal not in (False, True, "bottom_right", "top_left"):
        raise ValueError(f"causal is {causal!r}; accepted: False, True, 'bottom_right', 'top_left'")
    if not (isinstance(window, tuple | list) and len(window) == 2):
        raise ValueError(f"window is {window!r}; accepted: (left, right), each None or a number of keys")
    left, right = (_bound(window, side) for side in (0, 1))
    where = "_top_left" if causal == "top_left" else ""
    if causal:
        if right not in (0, UNBOUNDED):
            raise ValueError(f"window is {window!r}; accepted with causal: a right of None or 0")
        return ("causal" + where, left, 0) if left == UNBOUNDED else ("window" + where, left, 0)
    return ("", left, right) if left == right == UNBOUNDED else ("window", left, right)


def _bound(window: Window, side: int) -> int:
    bound = window[side]
    if bound is None or bound == -1:
        return UNBOUNDED
    if isinstance(bound, bool) or not isinstance(bound, int | torch.SymInt) or bound < 0:
        raise ValueError(
            f"window is {window!r}; accepted: numbers of keys from 0, or None or -1 for no bound"
        )
    return min(bound, UNBOUNDED)


def _refuse_gradients(
    q: Tensor, inputs: tuple[Tensor | None, ...], others: tuple[Tensor | None, ...]
) -> None:
    """Raise where autograd would expect a gradient that nothing computes."""
    if not torch.is_grad_enabled():
        return
    if q.is_cuda and (q.requires_grad or any(x is not None and x.requires_grad for x in (*inputs, *others))):
        raise NotImplementedError(ops.NO_GRADIENT)
    # The reference is differentiable in everything, the operator that a compiler sees in q, k, v and bias only.
    if torch.compiler.is_compiling() and any(x is not None and x.requires_grad for x in others):
        raise NotImplementedError(
            "alibi_slopes or an epilogue's tensor requires a gradient under torch.compile; accepted: q, k, v and bias"
        )


def _require_tensors(**tensors: Any) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; accepted: a torch.Tensor")


def _size(x: Tensor, dim: int) -> int:
    """x.shape[dim], or 0 where x lacks it: the checks will say so."""
    return x.shape[dim] if x.dim() > dim else 0
