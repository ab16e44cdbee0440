"""Decides from metadata which calls of PyTorch's attention operators the kernels serve.

A :class:`Request` holds the metadata that a forward and its backward both have. :func:`why_not` depends on nothing
else, so both run here or both in PyTorch, except forwards whose mask :func:`why_not_drawn` leaves to PyTorch, or with
same_bits. A request has no strides: a compiler may save a tensor with other strides. Tensors that kernels cannot read
are copied.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from cute_attn.api.attention import resolve_mask
from cute_attn.host.call import Call
from cute_attn.host.checks import check, check_for_kernels
from cute_attn.host.doors import target_of, why_no_kernel
from cute_attn.sdpa.slower import faster_by_pytorch


class Request(NamedTuple):
    """The properties of a call that its forward and its backward both know, without data and strides.

    Attributes:
        backend: one of ``cute_attn.host.activation.BACKENDS``.
        q, k, v: shapes, (batch, seqlen, heads, dim) or packed (total, heads, dim).
        dtypes: dtypes of q, k and v.
        devices: the devices of all tensors.
        target: the GPU's architecture, or empty if no kernel is built for it.
        bias: shape and dtype, or None.
        lengths: shape and dtype of cu_seqlens_q and of cu_seqlens_k, each None if it is absent.
        longest: max_seqlen_q and max_seqlen_k.
        causal, window, dropout_p, scale: arguments of the operator; window is (left, right), below 0 for no bound.
        learns: True if the operator states that a backward follows; only cuDNN's does.
        same_bits: True for a forward in which no other sequence may change a bit; backwards never state it.
    """

    backend: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    devices: frozenset[torch.device]
    target: str
    bias: tuple[tuple[int, ...], torch.dtype] | None
    lengths: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
    longest: tuple[int, int]
    causal: bool
    window: tuple[int, int]
    dropout_p: float
    scale: float | None
    learns: bool = False
    same_bits: bool = False

    @property
    def packed(self) -> bool:
        """True if sequences are packed one after the other instead of batched."""
        return self.lengths[0] is not None

    @property
    def empty(self) -> bool:
        """True if q or k has no elements: PyTorch launches nothing, and its cuDNN attention may return None."""
        return 0 in (*self.q, *self.k)


@functools.lru_cache(maxsize=4096)
def why_not(request: Request) -> str | None:
    """Why PyTorch's kernels compute a call and its backward, as one sentence; None if kernels here do."""
    reason = _stated_reason(request)
    if reason is not None:
        return reason
    try:
        call = translated(request, _meta_inputs(request))
        check(call)
        check_for_kernels(call, whole=True)
    except (TypeError, ValueError) as error:
        return str(error)
    if request.empty:
        return None
    missing = (why_no_kernel(call, request.target, op) for op in ("forward", "backward"))
    return next(filter(None, missing), None) or faster_by_pytorch(request)


def _stated_reason(request: Request) -> str | None:
    """Why a call is declined although the kernels and their checks would accept it, or None."""
    if len(request.devices) > 1 or next(iter(request.devices)).type not in ("cuda", "cpu"):
        devices = ", ".join(sorted(map(str, request.devices)))
        return f"tensors are on {devices}; accepted: one cuda device"
    if not request.target:
        return "no kernel is built for this GPU; accepted: compute capability 8.x, 9.x, 10.x or 12.x"
    if 0 in (request.q[-1], request.v[-1]):
        return f"q and v have head dims {request.q[-1]} and {request.v[-1]}; accepted: 1 or more"
    if (request.lengths[0] is None) != (request.lengths[1] is None):
        return "one of cum_seq_q and cum_seq_k is missing; accepted: both, or neither"
    if request.same_bits and request.target != "sm90":
        return f"num_splits is 1 on {request.target}, where other sequences change bits; accepted: on sm90"
    if request.backend == "flash" and request.q[-1] != request.v[-1]:
        return f"v has head_dim {request.v[-1]}; accepted by flash attention: {request.q[-1]}, q's"
    if not request.packed and len(request.q) == 4 and request.longest != (request.q[1], request.k[1]):
        return f"max_q and max_k are {request.longest}; accepted: q's and k's seqlens"
    return None


def why_not_drawn(request: Request, rng: str, capturing: bool) -> str | None:
    """Why PyTorch must draw a forward's dropout mask, and so compute the forward; None if that is not so.

    A backward draws no mask. rng: see :func:`cute_attn.sdpa.activate`. capturing: whether a CUDA graph is being
    captured.
    """
    if not request.dropout_p or rng != "torch":
        return None
    if request.backend == "cudnn":
        return "rng is 'torch' with dropout; accepted under cuDNN, whose masks nothing else draws: rng='ours'"
    if capturing:
        return "rng='torch' cannot advance the generator within a CUDA graph; accepted: rng='ours'"
    return None


def _meta_inputs(request: Request) -> Call:
    """Contiguous meta tensors with a request's shapes and dtypes, and with dropout a state."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = map(empty, (request.q, request.k, request.v), request.dtypes)
    starts_q, starts_k = (None if x is None else empty(*x) for x in request.lengths)
    bias = None if request.bias is None else empty(*request.bias)
    state = empty((2,), torch.int64) if request.dropout_p else None
    return Call(q, k, v, starts_q, starts_k, bias=bias, rng_state=state)


def translated(request: Request, inputs: Call) -> Call:
    """The call of the kernels for a request. inputs: the call's tensors, with rows before heads.

    Flash attention aligns a causal mask with the last query and key, the other backends with the first.
    """
    left, right = (None if bound < 0 else bound for bound in request.window)
    alignment = "bottom_right" if request.backend == "flash" else "top_left"
    bounds = (left, 0 if request.causal else right)
    mask, window_left, window_right = resolve_mask(alignment if request.causal else False, bounds)
    dropout = ("mem_efficient" if request.backend == "efficient" else "flash") if request.dropout_p else ""
    # The precision is that of fp32, whatever PyTorch's flags say: so does its memory-efficient kernel.
    return inputs._replace(
        max_seqlen_q=request.longest[0], max_seqlen_k=request.longest[1],
        softmax_scale=request.q[-1] ** -0.5 if request.scale is None else request.scale, mask=mask,
        window_left=window_left, window_right=window_right, dropout=dropout, dropout_p=request.dropout_p,
        deterministic=request.same_bits, same_bits=request.same_bits,
    )  # fmt: skip


def request_of(
    backend: str,
    inputs: Call,
    *,
    causal: bool,
    dropout_p: float,
    scale: float | None,
    window: tuple[int | None, int | None] = (None, None),
    longest: tuple[int, int] | None = None,
    learns: bool = False,
    same_bits: bool = False,
) -> Request:
    """The request that describes an operator's arguments.

    inputs: the tensors, with rows before heads. longest: max_seqlen_q and max_seqlen_k; by default the seqlens.
    learns, same_bits: see :class:`Request`.
    """
    (q, k, v, *lengths), bias = inputs[:5], inputs.bias
    sizes = [x.shape[1] if x.dim() > 1 else 0 for x in (q, k)]
    return Request(
        backend=backend,
        q=tuple(q.shape),
        k=tuple(k.shape),
        v=tuple(v.shape),
        dtypes=(q.dtype, k.dtype, v.dtype),
        devices=frozenset(x.device for _, x in inputs.tensors()),
        target=target_of(q.device),
        bias=None if bias is None else (tuple(bias.shape), bias.dtype),
        lengths=tuple(None if x is None else (tuple(x.shape), x.dtype) for x in lengths),
        longest=(sizes[0], sizes[1]) if longest is None else longest,
        causal=causal,
        window=tuple(-1 if bound is None else max(bound, -1) for bound in window),  # type: ignore[arg-type]
        dropout_p=dropout_p,
        scale=scale,
        learns=learns,
        same_bits=same_bits,
    )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
