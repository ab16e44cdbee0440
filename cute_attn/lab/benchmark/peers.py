"""The implementations of a workload: this package's kernels and their peers.

An implementation takes a workload and its inputs. It returns the function to time, which has no arguments and returns
the output, or in a backward the gradients: one call of autograd, after a forward that is not timed. An implementation
that cannot compute the workload raises :class:`Declined` with the reason. Under dropout each implementation draws its
own mask.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_attn.api import attention as interface
from cute_attn.lab import benchmark
from cute_attn.lab.benchmark.workload import DROPOUT_P, SOFTCAP, Inputs, Workload
from cute_attn.traits import Traits

Run = Callable[[], Tensor | tuple[Tensor, ...]]
Implementation = Callable[[Workload, Inputs], Run]


class Declined(Exception):
    """A peer does not support the workload."""


def _needs(peer: str, workload: Workload, *absent: str) -> None:
    """Raise :class:`Declined` if the workload has an epilogue, or a feature in ``absent``."""
    present = {
        "window": workload.windowed, "bias": workload.bias, "sinks": workload.sinks, "alibi": workload.alibi,
        "softcap": workload.softcap, "dropout": workload.dropout, "varlen": workload.lengths,
        "unequal head dims": workload.head_dim != workload.head_dim_v,
        "grouped heads": workload.nheads != workload.nheads_kv,
    }  # fmt: skip
    if workload.epilogues:
        raise Declined(f"{peer} has no epilogue {workload.epilogues[0]!r}")
    for feature in absent:
        if present[feature]:
            raise Declined(f"{peer} has no {feature}")


def _run(workload: Workload, x: Inputs, forward: Callable[[Inputs], Tensor]) -> Run:
    """Return the function to time; ``forward`` computes the output from the inputs."""
    if workload.op == "forward":
        return lambda: forward(x)
    leaves = x.leaves(workload)
    out = forward(x)
    grad = output_gradient(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def output_gradient(out: Tensor) -> Tensor:
    """A random gradient of the output for a backward; equal shapes and dtypes get equal gradients."""
    generator = torch.Generator(out.device).manual_seed(1) if out.device.type != "meta" else None
    return torch.randn(out.shape, generator=generator, device=out.device, dtype=out.dtype)


def call_options(workload: Workload, x: Inputs) -> dict[str, Any]:
    """A workload's features as the operator's keyword arguments."""
    return {
        "causal": workload.causal,
        "window": (workload.band[0], None) if workload.causal else workload.band,
        "alibi_slopes": x.alibi_slopes,
        "bias": x.bias,
        "sinks": x.sinks,
        "softcap": SOFTCAP if workload.softcap else 0.0,
        "dropout_p": DROPOUT_P if workload.dropout else 0.0,
        "dropout_mask": workload.dropout or "flash",
        "epilogues": x.epilogues,
    }


def ours(
    kernel: str | None, tile: str | None = None, precision: str | None = None, **more: Any
) -> Implementation:
    """Return the implementation that calls this package's operator.

    kernel: ``"sm80"`` or ``"sm80:variant"``; None lets the operator choose. tile: tile of the timed op. precision:
    precision of fp32 products. more: arguments of the operator that workloads do not have.
    """

    options = {"precision": precision, **more}
    return lambda workload, x: _run(workload, x, lambda x: output(workload, x, kernel, tile, **options))


def output(workload: Workload, x: Inputs, kernel: str | None, tile: str | None, **more: Any) -> Tensor:
    """Call the operator on a workload's inputs and return its output; for the arguments see :func:`ours`."""
    which = "tile" if workload.op == "forward" else "backward_tile"
    options = call_options(workload, x) | {"kernel": kernel, which: tile} | more
    if x.cu_seqlens is None or x.cu_seqlens_k is None:
        return _first(interface.attention(x.q, x.k, x.v, **options))
    lengths = (x.cu_seqlens, x.cu_seqlens_k, workload.longest, workload.longest_k)
    return _first(interface.attention_varlen(x.q, x.k, x.v, *lengths, **options))


def kernel_of(traits: Traits) -> str:
    """The operator's ``kernel`` argument: ``"ARCH"`` or ``"ARCH:VARIANT"``."""
    return f"{traits.arch}:{traits.variant}" if traits.variant else traits.arch


def deterministic(workload: Workload, x: Inputs) -> Run:
    """This package's default backward with ``deterministic=True``: gradients repeat bit for bit."""
    if workload.op != "backward":
        raise Declined("every forward is deterministic")
    return ours(None, deterministic=True)(workload, x)


def fa2(workload: Workload, x: Inputs) -> Run:
    """PyTorch's FlashAttention-2."""
    _needs("FA2 in torch", workload, "bias", "softcap", "sinks", "unequal head dims")
    if workload.op == "backward":
        _needs("FA2's backward in torch", workload, "alibi")
    lengths = (x.cu_seqlens, x.cu_seqlens_k, workload.longest, workload.longest_k)
    left, right = workload.band if workload.windowed else (None, None)
    options = {"window_size_left": left, "window_size_right": right, "alibi_slopes": x.alibi_slopes}
    dropout_p = DROPOUT_P if workload.dropout else 0.0
    # A window includes causal; FA2 takes one or the other.
    arguments = (*lengths, dropout_p, workload.causal and not workload.windowed, False)
    op = torch.ops.aten._flash_attention_forward.default
    return _run(workload, x, lambda x: op(x.q, x.k, x.v, *arguments, **options)[0])


def mem_efficient(workload: Workload, x: Inputs) -> Run:
    """PyTorch's memory-efficient (xformers) attention."""
    _needs("mem_efficient in torch", workload, "alibi", "softcap", "sinks", "grouped heads")
    if workload.bias and x.bias is not None and x.bias.dtype != x.q.dtype:
        raise Declined("mem_efficient wants a bias of q's dtype")
    left, right = workload.band
    if right:
        raise Declined("mem_efficient has no window beyond a query's own key")
    longest = (workload.longest, workload.longest_k) if workload.lengths else (None, None)
    dropout_p = DROPOUT_P if workload.dropout else 0.0
    # 1 is aligned to the first query and key, 2 to the last.
    mask = 0 if right is None else 1 if workload.equal_lengths else 2
    # Its window counts the query's own key.
    window = left + 1 if left is not None else None
    arguments = (x.cu_seqlens, x.cu_seqlens_k, *longest, dropout_p, mask, workload.op == "backward")
    op = torch.ops.aten._efficient_attention_forward.default

    def forward(x: Inputs) -> Tensor:
        if workload.lengths:
            return op(x.q[None], x.k[None], x.v[None], x.bias, *arguments, window_size=window)[0][0]
        return op(x.q, x.k, x.v, x.bias, *arguments, window_size=window)[0]

    return _run(workload, x, forward)


def cudnn(workload: Workload, x: Inputs) -> Run:
    """cuDNN, through torch's scaled_dot_product_attention."""
    _needs("cuDNN in torch", workload, "window", "alibi", "softcap", "sinks", "varlen")
    if workload.causal and not workload.equal_lengths:
        raise Declined(
            "scaled_dot_product_attention aligns causal to the first query and key, not to the last"
        )
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
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=x.bias, **options)
        return out.transpose(1, 2)

    return _run(workload, x, forward)


def fa4(workload: Workload, x: Inputs) -> Run:
    """FlashAttention-4, in the CuTe DSL."""
    _needs("FA4", workload, "bias", "alibi", "dropout")
    try:
        from flash_attn import cute as library
    except ImportError as error:
        raise Declined(f"flash-attn-4 is not installed ({error})") from error
    window = workload.band if workload.windowed else (None, None)
    return _run_flash(workload, x, library, window_size=window, learnable_sink=x.sinks)


def _run_flash(workload: Workload, x: Inputs, library: Any, **options: Any) -> Run:
    """Call ``library``'s ``flash_attn_func``, or ``flash_attn_varlen_func`` if the workload is varlen."""
    options["causal"] = workload.causal and not workload.windowed
    options["softcap"] = SOFTCAP if workload.softcap else 0.0
    function = library.flash_attn_func
    if x.cu_seqlens is not None:
        function = library.flash_attn_varlen_func
        options |= {"cu_seqlens_q": x.cu_seqlens, "cu_seqlens_k": x.cu_seqlens_k}
        options |= {"max_seqlen_q": workload.longest, "max_seqlen_k": workload.longest_k}
    return _run(workload, x, lambda x: _first(function(x.q, x.k, x.v, **options)))


def fa3(workload: Workload, x: Inputs) -> Run:
    """FlashAttention-3, in C++ for Hopper, with the kernels of the installed build."""
    _needs("FA3", workload, "bias", "alibi", "sinks", "dropout")
    if workload.op == "backward" and workload.lengths:
        raise Declined("FA3's backward is not called with varlen: builds without that kernel end the process")
    try:
        import flash_attn_interface as library  # type: ignore[import-not-found]
        from flash_attn_config import CONFIG  # type: ignore[import-not-found]
    except ImportError as error:
        raise Declined(f"FA3 is not installed ({error})") from error
    sm8x = x.q.is_cuda and torch.cuda.get_device_capability(x.q.device)[0] == 8
    absent = _fa3_lacks(workload, sm8x, CONFIG["build_flags"])
    if absent:
        raise Declined(f"FA3 was built without {absent}")
    band = workload.band if workload.windowed else (None, None)
    window = tuple(-1 if side is None else side for side in band)
    num_splits = 0 if workload.op == "forward" else 1  # 0 leaves the number of splits to FA3
    return _run_flash(workload, x, library, window_size=window, num_splits=num_splits)


def _fa3_lacks(workload: Workload, sm8x: bool, flags: Mapping[str, bool]) -> str | None:
    """What the workload needs and the FA3 build lacks, or None.

    FA3 rounds a head dim up to 64, 96, 128, 192 or 256. A build without that kernel would use a larger one, whose speed
    is not representative of FA3.
    """
    widest = max(workload.head_dim, workload.head_dim_v)
    kernel = next((dim for dim in (64, 96, 128, 192, 256) if widest <= dim), widest)
    needed = {
        "SM8x": (sm8x, "its kernels for sm80, sm86 and sm89"),
        "LOCAL": (workload.windowed, "windows"),
        "SOFTCAP": (workload.softcap, "softcap"),
        "FP16": (workload.dtype == "fp16", "fp16"),
        "VARLEN": (bool(workload.lengths), "varlen"),
        "BACKWARD": (workload.op == "backward", "its backward"),
        f"HDIM{kernel}": (True, f"its kernel for head dims up to {kernel}"),
    }
    for name, (needs, words) in needed.items():
        if needs and flags.get(f"FLASHATTENTION_DISABLE_{name}", False):
            return words
    if workload.head_dim != workload.head_dim_v and widest > 64:
        larger = 64 if workload.head_dim <= 64 else 192
        if flags.get(f"FLASH_ATTENTION_DISABLE_HDIMDIFF{larger}", False):
            return f"its kernels for unequal head dims, q's up to {larger}"
    return None


def ffpa(workload: Workload, x: Inputs) -> Run:
    """ffpa-attn's CuTe DSL kernels, for head dims above 256; for smaller ones its function calls PyTorch's kernels."""
    absent = "window,bias,alibi,softcap,sinks,dropout,varlen,unequal head dims"
    _needs("ffpa", workload, *absent.split(","))
    if workload.head_dim <= 256:
        raise Declined("ffpa has kernels of its own above head dim 256")
    try:
        from ffpa_attn import ffpa_attn_func  # type: ignore[import-not-found]
    except ImportError as error:
        raise Declined(f"ffpa-attn is not installed ({error})") from error
    options: dict[str, Any] = {
        "is_causal": workload.causal,
        "enable_gqa": workload.nheads != workload.nheads_kv,
        "backend": "cutedsl",
    }

    def forward(x: Inputs) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))
        return ffpa_attn_func(q, k, v, **options).transpose(1, 2)

    return _run(workload, x, forward)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


PEERS: dict[str, Implementation] = {name: globals()[name] for name in benchmark.PEERS}


def versions() -> dict[str, str]:
    in_torch = dict.fromkeys(("fa2", "mem_efficient"), f"torch {torch.__version__}")
    fa3, fa4, ffpa = map(_installed, ("flash-attn-3", "flash-attn-4", "ffpa-attn"))
    cudnn = str(torch.backends.cudnn.version())
    others = {"cudnn": cudnn, "fa3": fa3 or _fa3_commit(), "fa4": fa4, "ffpa": ffpa}
    return in_torch | {name: version or "not installed" for name, version in others.items()}


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fa3_commit() -> str | None:
    """The commit that FA3 was built from, read from a file COMMIT next to its interface."""
    found = importlib.util.find_spec("flash_attn_interface")
    if found is None or found.origin is None:
        return None
    try:
        return "commit " + Path(found.origin).with_name("COMMIT").read_text().strip()[:12]
    except OSError:
        return None
