"""Decides from metadata which calls of PyTorch's attention operators the kernels serve.

A :class:`Request` is a call of an operator, translated to a call of the kernels. :func:`why_not` depends only on
metadata that a forward and its backward both have, so both run here or both in PyTorch, except forwards whose mask
:func:`why_not_drawn` leaves to PyTorch, or with same_bits. It ignores strides: a compiler may save a tensor with other
strides. Tensors that kernels cannot read are copied.
"""

from typing import Any, NamedTuple

import torch

from cute_attn.api.attention import Causal, resolve_mask
from cute_attn.host import plans
from cute_attn.host.call import Call
from cute_attn.host.checks import check, check_for_kernels
from cute_attn.host.doors import target_of, why_no_kernel
from cute_attn.host.values import scale_of
from cute_attn.sdpa.slower import faster_by_pytorch


class Request(NamedTuple):
    """A call of one of PyTorch's operators.

    Attributes:
        backend: one of ``cute_attn.host.activation.BACKENDS``.
        call: the call of the kernels, of the operator's tensors with rows before heads, without a dropout state.
        devices: the devices of all tensors.
        target: the GPU's architecture, or empty if no kernel is built for it.
        learns: True if the operator states that a backward follows; only cuDNN's does.
    """

    backend: str
    call: Call
    devices: frozenset[torch.device]
    target: str
    learns: bool


def why_not(request: Request) -> str | None:
    """Why PyTorch's kernels compute a call and its backward, as one sentence; None if kernels here do."""
    backend, call, *others = request
    tensors, options = call.metadata()
    key = ("sdpa", backend, options, *others)
    return plans.plan(key, tensors, lambda: _stated_reason(request) or _reason(request) or "") or None


def _reason(request: Request) -> str | None:
    """Why kernels do not serve a call, from their checks and the registry; or why PyTorch's is faster; or None."""
    call = _on_meta(request.call)
    try:
        check(call)
        check_for_kernels(call, whole=True)
    except (TypeError, ValueError) as error:
        return str(error)
    # PyTorch launches nothing, and its cuDNN attention may return None.
    if 0 in (*call.q.shape, *call.k.shape):
        return None
    missing = (why_no_kernel(call, request.target, op) for op in ("forward", "backward"))
    return next(filter(None, missing), None) or faster_by_pytorch(request)


def _on_meta(call: Call) -> Call:
    """The call with contiguous meta tensors, only those that a backward has, and with dropout a state."""
    tensors: dict[str, Any] = {
        name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in call.tensors()
    }
    state = torch.empty(2, dtype=torch.int64, device="meta") if call.dropout else None
    return call._replace(**tensors | {"rng_state": state, "seqused_k": None, "alibi_slopes": None})


def _stated_reason(request: Request) -> str | None:
    """Why a call is declined although the kernels and their checks would accept it, or None."""
    call, target, dims = request.call, request.target, (request.call.q.shape[-1], request.call.v.shape[-1])
    if len(request.devices) > 1 or next(iter(request.devices)).type not in ("cuda", "cpu"):
        devices = ", ".join(sorted(map(str, request.devices)))
        return f"tensors are on {devices}; accepted: one cuda device"
    if not target:
        return "no kernel is built for this GPU; accepted: compute capability 8.x, 9.x, 10.x or 12.x"
    if 0 in dims:
        return f"q and v have head dims {dims[0]} and {dims[1]}; accepted: 1 or more"
    if (call.cu_seqlens_q is None) != (call.cu_seqlens_k is None):
        return "one of cum_seq_q and cum_seq_k is missing; accepted: both, or neither"
    if call.same_bits and target != "sm90":
        return f"num_splits is 1 on {target}, where other sequences change bits; accepted: on sm90"
    if request.backend == "flash" and dims[0] != dims[1]:
        return f"v has head_dim {dims[1]}; accepted by flash attention: {dims[0]}, q's"
    return None


def why_not_drawn(request: Request, rng: str, capturing: bool) -> str | None:
    """Why PyTorch must draw a forward's dropout mask, and so compute the forward; None if that is not so.

    A backward draws no mask. rng: see :func:`cute_attn.sdpa.activate`. capturing: whether a CUDA graph is being
    captured.
    """
    if not request.call.dropout or rng != "torch":
        return None
    if request.backend == "cudnn":
        return "rng is 'torch' with dropout; accepted under cuDNN, whose masks nothing else draws: rng='ours'"
    if capturing:
        return "rng='torch' cannot advance the generator within a CUDA graph; accepted: rng='ours'"
    return None


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

    Flash attention aligns a causal mask with the last query and key, the other backends with the first.

    Args:
        inputs: the tensors, with rows before heads.
        window: (left, right), None or below 0 for no bound.
        longest: max_seqlen_q and max_seqlen_k; by default the seqlens.
        learns: see :class:`Request`.
        same_bits: True for a forward in which no other sequence may change a bit; backwards never state it.
    """
    q, k = inputs[:2]
    left, right = (None if bound is None or bound < 0 else bound for bound in window)
    aligned: Causal = False if not causal else "bottom_right" if backend == "flash" else "top_left"
    mask, left, right = resolve_mask(aligned, (left, 0 if causal else right))
    longest_q, longest_k = longest or (x.shape[1] if x.dim() > 1 else 0 for x in (q, k))
    dropout = ("mem_efficient" if backend == "efficient" else "flash") if dropout_p else ""
    # The precision is that of fp32, whatever PyTorch's flags say: so does its memory-efficient kernel.
    call = inputs._replace(
        max_seqlen_q=longest_q, max_seqlen_k=longest_k, softmax_scale=scale_of(scale, q), mask=mask, window_left=left,
        window_right=right, dropout=dropout, dropout_p=dropout_p, deterministic=same_bits, same_bits=same_bits,
    )  # fmt: skip
    return Request(
        backend, call, frozenset(x.device for _, x in inputs.tensors()), target_of(q.device), learns
    )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
