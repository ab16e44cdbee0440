"""PyTorch's scaled_dot_product_attention on the kernels of this package.

    import cute_attn.sdpa
    cute_attn.sdpa.activate()           every fused scaled_dot_product_attention of this process, and varlen_attn
    cute_attn.sdpa.reason(q, k, v)      None, or why PyTorch's kernel computes such a call
    cute_attn.sdpa.served               number of calls per operator, and why PyTorch computed some of them
    cute_attn.sdpa.restore()

PyTorch still chooses a backend. Calls of the backends' operators (flash, memory-efficient and cuDNN attention, forward
and backward) that :func:`cute_attn.sdpa.calls.why_not` accepts run here; all others run as before. Products of fp32
tensors have fp32's precision, as in PyTorch's memory-efficient kernel, whatever ``allow_tf32`` says. Importing this
module registers it with PyTorch: ``torch.nn.attention.activate_flash_attention_impl("cute_attn")`` is equivalent to
``activate(strict=True)``.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from cute_attn.host import doors
from cute_attn.host.activation import BACKENDS, Options, for_a_block
from cute_attn.host.call import Call
from cute_attn.host.doors import served
from cute_attn.host.values import check_dense, check_flags, number
from cute_attn.sdpa import overrides
from cute_attn.sdpa.calls import request_of, why_not
from cute_attn.sdpa.overrides import Activation

__all__ = ["NAME", "activate", "active", "reason", "restore", "served"]

NAME = "cute_attn"


def activate(
    *,
    backends: Sequence[str] = BACKENDS,
    unsupported: str = "fall_back",
    rng: str = "ours",
    strict: bool = False,
) -> None:
    """Serve PyTorch's fused attention from now on; a second call replaces the options of the first.

    If nothing can be served, as on a machine without a GPU, calls have no effect, and the first one warns.

    Parameters
    ----------
    backends : sequence of {"flash", "efficient", "cudnn"}
        The backends to serve. On Hopper PyTorch prefers cuDNN for the calls that cuDNN supports, so serving only
        "flash" covers few calls there.
    unsupported : {"fall_back", "error"}
        What happens to a call that no kernel supports: PyTorch's kernel computes it, or ``Unsupported`` is raised.
    rng : {"ours", "torch"}
        How dropout masks are drawn. "ours": as by :func:`cute_attn.attention`, under every backend. Equal states of
        torch's generator give equal masks, which differ from PyTorch's. "torch": as by PyTorch's kernel, so that every
        mask stays the same bit for bit. PyTorch then computes calls with dropout within CUDA graphs and under cuDNN
        (its choice on Hopper), whose masks only cuDNN can draw.
    strict : bool
        Raise if nothing can be served.

    Raises
    ------
    ValueError
        An argument is not as described here; or with ``strict`` there is no GPU that kernels are built for.
        Served calls do not change in that case.
    """
    check_flags(strict=strict)
    options = Options(backends, unsupported, rng)
    why = doors.why_nothing_is_served()
    if why is not None:
        if strict:
            raise ValueError(why)
        doors.warn_once("cute_attn.sdpa", f"cute_attn.sdpa.activate() does nothing here: {why}")
    else:
        _start_in_pytorch(functools.partial(_start, options))


def restore() -> None:
    """Let PyTorch's kernels compute everything again; has no effect unless :func:`activate` was called.

    Safe while other threads call attention. The operators stay overridden, so a call spends some microseconds in Python
    before it reaches PyTorch's kernel. The backward of a served forward with dropout is still served.
    """
    serving = overrides.serving()
    if serving is None:
        return
    if torch.nn.attention.current_flash_attention_impl() == NAME:
        torch.nn.attention.restore_flash_attention_impl()
    else:
        serving.remove()


def active(**options: Any) -> AbstractContextManager[None]:
    """:func:`activate` with these options for a ``with`` block, after which calls are served as before it."""
    start = functools.partial(activate, **options)
    return for_a_block(start, restore, overrides.serving, lambda before: _start_in_pytorch(before.start))


def reason(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> str | None:  # fmt: skip
    """Why kernels here do not serve a call of ``scaled_dot_product_attention`` and its backward; None if they do.

    Has that function's arguments, and reads only their shapes, dtypes and devices, so fake tensors suffice. Calls with
    a mask, or causal with different lengths, are assumed to be memory-efficient attention, others flash attention.

    Raises
    ------
    TypeError
        An argument has a type that ``scaled_dot_product_attention`` does not accept.
    """
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    dropout_p, scale = number("dropout_p", dropout_p), None if scale is None else number("scale", scale)
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    for name, x in given.items():
        if x is not None or name != "attn_mask":
            check_dense(name, x)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            return f"{name} has shape {tuple(x.shape)}; accepted: (batch, heads, seqlen, head_dim)"
    if query.device.type != "cuda":
        return f"query is on {query.device}; accepted: cuda"
    if not enable_gqa and query.shape[1] != key.shape[1]:
        return f"key has {key.shape[1]} heads; accepted without enable_gqa: {query.shape[1]}, query's"
    masked = attn_mask is not None or (is_causal and query.shape[2] != key.shape[2])
    inputs = Call(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), bias=attn_mask)
    options: dict[str, Any] = {"causal": is_causal, "dropout_p": dropout_p, "scale": scale}
    request, own = request_of("efficient" if masked else "flash", inputs, **options), dict[str, Any]()
    if attn_mask is not None:
        full = (*query.shape[:3], key.shape[2])
        if not _broadcasts(tuple(attn_mask.shape), full):
            return f"attn_mask has shape {tuple(attn_mask.shape)}; accepted: {full}, or what broadcasts to it"
        dtype = query.dtype if attn_mask.dtype == torch.bool else attn_mask.dtype
        own["bias"] = torch.empty(full, dtype=dtype, device="meta")
    elif not masked:  # PyTorch pads head dims before it calls flash attention
        for name, x in zip("qkv", inputs[:3], strict=True):
            wide = (*x.shape[:-1], -(-x.shape[-1] // 8) * 8)
            own[name] = torch.empty(wide, dtype=x.dtype, device="meta")
    return why_not(request._replace(call=request.call._replace(**own)))


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    try:
        return torch.broadcast_shapes(shape, full) == full
    except RuntimeError:
        return False


# ---- where and how ----


def _start(options: Options) -> Activation:
    """Replace any earlier activation by a new one, and return it; PyTorch keeps it as a handle."""
    why = doors.why_nothing_is_served()
    if why is not None:
        raise ValueError(why)
    return Activation(options)


def _start_in_pytorch(start: Callable[[], Activation]) -> None:
    """Let PyTorch call ``start``, and keep the activation that it returns as a handle."""
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=start)
    try:
        torch.nn.attention.activate_flash_attention_impl(NAME)
    finally:
        torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_default)


_default = functools.partial(_start, Options())
torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_default)
