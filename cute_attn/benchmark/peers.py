"""Who computes a workload: this package's kernels, and the peers they are compared with.

Each is a function from a workload and its inputs to a call without arguments that returns the output. One that cannot
compute the workload raises :class:`Declined`, which says why. Under dropout each draws the mask it has.
"""

import importlib.metadata
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from cute_attn.benchmark.workload import DROPOUT_P, SOFTCAP, Inputs, Workload

Run = Callable[[], Tensor]
Implementation = Callable[[Workload, Inputs], Run]


class Declined(Exception):
    """A peer does not offer what the workload needs."""


def _needs(peer: str, workload: Workload, *absent: str) -> None:
    """Decline if the workload has a feature that is among ``absent``."""
    present = {
        "window": workload.window,
        "bias": workload.bias,
        "alibi": workload.alibi,
        "softcap": workload.softcap,
        "dropout": workload.dropout,
        "varlen": workload.lengths,
        "unequal head dims": workload.head_dim != workload.head_dim_v,
        "grouped heads": workload.nheads != workload.nheads_kv,
    }
    for feature in absent:
        if present[feature]:
            raise Declined(f"{peer} has no {feature}")


def call_options(workload: Workload, x: Inputs) -> dict[str, Any]:
    """The operator's keyword arguments that a workload's features are."""
    return {
        "causal": workload.causal,
        "window": (workload.window or None, None),
        "alibi_slopes": x.alibi_slopes,
        "bias": x.bias,
        "softcap": SOFTCAP if workload.softcap else 0.0,
        "dropout_p": DROPOUT_P if workload.dropout else 0.0,
        "dropout_mask": workload.dropout or "flash",
    }


def ours(kernel: str, tile: str | None = None) -> Implementation:
    """This package's kernel, ``"sm80"`` or ``"sm80:variant"``, through the operator."""

    def implementation(workload: Workload, x: Inputs) -> Run:
        from cute_attn import interface

        options = call_options(workload, x) | {"kernel": kernel, "tile": tile}
        if x.cu_seqlens is None:
            return lambda: _first(interface.attention(x.q, x.k, x.v, **options))
        lengths = (x.cu_seqlens, x.cu_seqlens, max(workload.lengths), max(workload.lengths))
        return lambda: _first(interface.attention_varlen(x.q, x.k, x.v, *lengths, **options))

    return implementation


def fa2(workload: Workload, x: Inputs) -> Run:
    """PyTorch's FlashAttention-2."""
    _needs("FA2 in torch", workload, "bias", "softcap", "unequal head dims")
    forward = torch.ops.aten._flash_attention_forward.default
    cu_seqlens = (x.cu_seqlens, x.cu_seqlens)
    longest = max(workload.lengths, default=workload.seqlen)
    options = {
        "window_size_left": workload.window or None,
        "window_size_right": 0 if workload.window else None,
        "alibi_slopes": x.alibi_slopes,
    }
    dropout_p = DROPOUT_P if workload.dropout else 0.0
    # A window says by itself what causal would; FA2 takes one or the other.
    causal = workload.causal and not workload.window
    return lambda: forward(x.q, x.k, x.v, *cu_seqlens, longest, longest, dropout_p, causal, False, **options)[
        0
    ]


def mem_efficient(workload: Workload, x: Inputs) -> Run:
    """PyTorch's memory-efficient (xformers) attention."""
    _needs("mem_efficient in torch", workload, "alibi", "softcap", "grouped heads")
    if workload.lengths:
        x = Inputs(x.q[None], x.k[None], x.v[None], None, None, x.cu_seqlens)
    if workload.bias and x.bias is not None and x.bias.dtype != x.q.dtype:
        raise Declined("mem_efficient wants a bias of q's dtype")
    forward = torch.ops.aten._efficient_attention_forward.default
    longest = max(workload.lengths) if workload.lengths else None
    dropout_p = DROPOUT_P if workload.dropout else 0.0
    mask = 1 if workload.causal else 0
    # Its window counts the query's own key.
    window = workload.window + 1 if workload.window else None
    arguments = (x.q, x.k, x.v, x.bias, x.cu_seqlens, x.cu_seqlens, longest, longest, dropout_p, mask, False)
    if workload.lengths:
        return lambda: forward(*arguments, window_size=window)[0][0]
    return lambda: forward(*arguments, window_size=window)[0]


def cudnn(workload: Workload, x: Inputs) -> Run:
    """cuDNN, through torch's scaled_dot_product_attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _needs("cuDNN in torch", workload, "window", "alibi", "softcap", "varlen")
    if workload.bias and workload.causal:
        raise Declined("scaled_dot_product_attention has no bias beside causal")
    q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))
    options: dict[str, Any] = {
        "attn_mask": x.bias,
        "is_causal": workload.causal,
        "dropout_p": DROPOUT_P if workload.dropout else 0.0,
        "enable_gqa": workload.nheads != workload.nheads_kv,
    }

    def run() -> Tensor:
        backend: AbstractContextManager = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        with backend:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        return out.transpose(1, 2)

    return run


def fa4(workload: Workload, x: Inputs) -> Run:
    """FlashAttention-4, the DSL's other user."""
    _needs("FA4", workload, "bias", "alibi", "dropout")
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise Declined(f"flash-attn-4 is not installed ({error})") from error
    options: dict[str, Any] = {
        "causal": workload.causal and not workload.window,
        "window_size": (workload.window, 0) if workload.window else (None, None),
        "softcap": SOFTCAP if workload.softcap else 0.0,
    }
    if x.cu_seqlens is None:
        return lambda: _first(flash_attn_func(x.q, x.k, x.v, **options))
    longest = max(workload.lengths)
    options |= {"cu_seqlens_q": x.cu_seqlens, "cu_seqlens_k": x.cu_seqlens}
    options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda: _first(flash_attn_varlen_func(x.q, x.k, x.v, **options))


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


PEERS: dict[str, Implementation] = {"fa2": fa2, "mem_efficient": mem_efficient, "cudnn": cudnn, "fa4": fa4}


def own_kernels() -> dict[str, Implementation]:
    """This package's forward kernels that the current GPU runs, by name."""
    from cute_attn import registry
    from cute_attn.compiler import default_target

    return {
        f"cute_attn/forward-{arch}": ours(arch)
        for op, arch, variant in registry.KERNELS
        if op == "forward" and not variant and default_target(arch) in registry.RUNS_ON[arch]
    }


def versions() -> dict[str, str]:
    """The peers' versions."""
    try:
        fa4_version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        fa4_version = "not installed"
    in_torch = f"torch {torch.__version__}"
    return {
        "fa2": in_torch,
        "mem_efficient": in_torch,
        "cudnn": str(torch.backends.cudnn.version()),
        "fa4": fa4_version,
    }
