"""Who computes a workload: this package's kernels, and the peers they are compared with.

Each is a function from a workload and its inputs to a call without arguments that returns the output, or for a
backward the gradients: from one call of autograd to its end, after a forward that is not timed. One that cannot compute
the workload raises :class:`Declined`, which says why. Under dropout each draws the mask it has.
"""

import importlib.metadata
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from cute_attn.benchmark.workload import DROPOUT_P, SOFTCAP, Inputs, Workload

Run = Callable[[], Tensor | tuple[Tensor, ...]]
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


def _run(workload: Workload, x: Inputs, forward: Callable[[Inputs], Tensor]) -> Run:
    """What is timed, by a function of the inputs that gives the output."""
    if workload.op == "forward":
        return lambda: forward(x)
    leaves = x.leaves(workload)
    out = forward(x)
    generator = torch.Generator(out.device).manual_seed(1) if out.device.type != "meta" else None
    grad = torch.randn(out.shape, generator=generator, device=out.device, dtype=out.dtype)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


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
    """This package's kernel, ``"sm80"`` or ``"sm80:variant"``, through the operator; the tile is of what is timed."""

    def implementation(workload: Workload, x: Inputs) -> Run:
        from cute_attn import interface

        which = "tile" if workload.op == "forward" else "backward_tile"
        options = call_options(workload, x) | {"kernel": kernel, which: tile}

        def forward(x: Inputs) -> Tensor:
            if x.cu_seqlens is None:
                return _first(interface.attention(x.q, x.k, x.v, **options))
            lengths = (x.cu_seqlens, x.cu_seqlens, max(workload.lengths), max(workload.lengths))
            return _first(interface.attention_varlen(x.q, x.k, x.v, *lengths, **options))

        return _run(workload, x, forward)

    return implementation


def fa2(workload: Workload, x: Inputs) -> Run:
    """PyTorch's FlashAttention-2."""
    _needs("FA2 in torch", workload, "bias", "softcap", "unequal head dims")
    if workload.op == "backward":
        _needs("FA2's backward in torch", workload, "alibi")
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
    arguments = (*cu_seqlens, longest, longest, dropout_p, causal, False)
    op = torch.ops.aten._flash_attention_forward.default
    return _run(workload, x, lambda x: op(x.q, x.k, x.v, *arguments, **options)[0])


def mem_efficient(workload: Workload, x: Inputs) -> Run:
    """PyTorch's memory-efficient (xformers) attention."""
    _needs("mem_efficient in torch", workload, "alibi", "softcap", "grouped heads")
    if workload.bias and x.bias is not None and x.bias.dtype != x.q.dtype:
        raise Declined("mem_efficient wants a bias of q's dtype")
    longest = max(workload.lengths) if workload.lengths else None
    dropout_p = DROPOUT_P if workload.dropout else 0.0
    mask = 1 if workload.causal else 0
    # Its window counts the query's own key.
    window = workload.window + 1 if workload.window else None
    arguments = (x.cu_seqlens, x.cu_seqlens, longest, longest, dropout_p, mask, workload.op == "backward")
    op = torch.ops.aten._efficient_attention_forward.default

    def forward(x: Inputs) -> Tensor:
        if workload.lengths:
            return op(x.q[None], x.k[None], x.v[None], x.bias, *arguments, window_size=window)[0][0]
        return op(x.q, x.k, x.v, x.bias, *arguments, window_size=window)[0]

    return _run(workload, x, forward)


def cudnn(workload: Workload, x: Inputs) -> Run:
    """cuDNN, through torch's scaled_dot_product_attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _needs("cuDNN in torch", workload, "window", "alibi", "softcap", "varlen")
    if workload.bias and workload.causal:
        raise Declined("scaled_dot_product_attention has no bias beside causal")
    if workload.bias_grad:
        raise Declined("cuDNN in torch has no gradient of a bias")
    options: dict[str, Any] = {
        "is_causal": workload.causal,
        "dropout_p": DROPOUT_P if workload.dropout else 0.0,
        "enable_gqa": workload.nheads != workload.nheads_kv,
    }

    def forward(x: Inputs) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))
        backend: AbstractContextManager = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        with backend:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=x.bias, **options)
        return out.transpose(1, 2)

    return _run(workload, x, forward)


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
    function = flash_attn_func
    if x.cu_seqlens is not None:
        longest = max(workload.lengths)
        options |= {"cu_seqlens_q": x.cu_seqlens, "cu_seqlens_k": x.cu_seqlens}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        function = flash_attn_varlen_func
    return _run(workload, x, lambda x: _first(function(x.q, x.k, x.v, **options)))


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


PEERS: dict[str, Implementation] = {"fa2": fa2, "mem_efficient": mem_efficient, "cudnn": cudnn, "fa4": fa4}


def own_kernels(op: str = "forward") -> dict[str, Implementation]:
    """This package's kernels for an operation that the current GPU runs, by name."""
    from cute_attn import registry
    from cute_attn.compiler import default_target

    return {
        f"cute_attn/{op}-{arch}": ours(arch)
        for op_, arch, variant in registry.KERNELS
        if op_ == op and not variant and default_target(arch) in registry.RUNS_ON[arch]
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
