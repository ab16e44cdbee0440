"""FlashAttention's functions, by the names that its tests import, on the functions of this package.

For tests of attention with a cache, of merging, of sinks and of functions of scores. :func:`fa3` and :func:`fa4` put
modules into ``sys.modules`` before such tests are imported, and the tests run unmodified:

    fa3   hopper/test_flash_attn.py of FlashAttention-3: test_flash_attn_kvcache, test_flash_attn_combine
    fa4   tests/cute/test_flash_attn.py and test_flash_attn_combine.py of FlashAttention-4: test_flash_attn_kvcache,
          _combine, _paged, _output and _varlen_output with and without sinks, _learnable_sink, _lse_grad,
          _seqlen_k_zero; its tests of functions and of lists of blocks, by :mod:`outside.cute_functions`

Helpers that the tests compare with, such as the rotary embedding and the reference of attention, come from the suite's
folder: a copy of the repository's ``flash_attn``, ``hopper`` and ``tests`` that is never part of this package. What no
kernel here computes (fp8, qv, chunks, negative windows) skips the test that asks for it.
"""

import functools
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attn.api.attention import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
)
from cute_attn.api.kvcache import attention_with_kvcache
from cute_attn.api.merge import merge_attention
from cute_attn.flash_attn import flash_attn_3

from . import cute_functions
from .cute_functions import Lengths

_MAX_MERGED_DIM = 256


# ---- modules ----


def fa3(folder: Path) -> None:
    """Provide ``flash_attn_interface``; FlashAttention-3's tests also import helpers from the folder ``hopper``."""
    _forget("flash_attn_interface", "flash_attn")
    _module("flash_attn", folder / "flash_attn")  # for its rotary embedding
    interface = _module("flash_attn_interface")
    names = flash_attn_3.__all__
    vars(interface).update({name: _skipping(getattr(flash_attn_3, name)) for name in names})
    vars(interface).update(flash_attn_combine=_fa3_combine)
    sys.path.insert(0, str(folder / "hopper"))


def fa4(folder: Path) -> None:
    """``flash_attn.cute.interface``; its helpers for tests, ``flash_attn.cute.testing``, are the suite's."""
    _forget("flash_attn")
    package = _module("flash_attn", folder / "flash_attn")
    cute = _module("flash_attn.cute", folder / "flash_attn" / "cute")
    interface, cache = _module("flash_attn.cute.interface"), _module("flash_attn.cute.cache_utils")
    vars(interface).update(
        flash_attn_func=_fa4_func,
        flash_attn_varlen_func=_fa4_varlen,
        flash_attn_combine=_fa4_combine,
        get_scheduler_metadata=_no_metadata,
        _flash_attn_fwd=_fa4_forward,
        _flash_attn_bwd=_fa4_backward,
        _tile_size_bwd_sm90=_absent("_tile_size_bwd_sm90"),
        _flash_attn_bwd_sparse_mla=_absent("_flash_attn_bwd_sparse_mla"),
        _flash_attn_fwd_combine=_fa4_forward_combine,
        _get_device_arch=lambda: 90,
    )
    vars(cache).update(JITCache=dict, get_jit_cache=lambda name: {})
    sparsity = _module("flash_attn.cute.compute_block_sparsity")
    vars(sparsity).update(compute_block_sparsity=_skipping(cute_functions.compute_block_sparsity, ValueError))
    vars(cute).update(flash_attn_func=_fa4_func, flash_attn_varlen_func=_fa4_varlen, interface=interface)
    vars(cute).update(cache_utils=cache)
    vars(package).update(cute=cute)


def _forget(*names: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]


def _module(name: str, path: Path | None = None) -> ModuleType:
    """A new module; with a path a package, whose other submodules are found there."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        module.__path__ = [str(path)]
        module.__spec__.submodule_search_locations = [str(path)]
    sys.modules[name] = module
    return module


def _absent(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        pytest.skip(f"{name} is internal to FlashAttention")

    return call


def _no_metadata(*args: Any, **kwargs: Any) -> None:
    """Kernels here compute their schedule themselves."""


def _refuse(**arguments: Any) -> None:
    """Skip the test if it passes an argument that no kernel of the package supports."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) or value not in (None, False, 0):
            pytest.skip(f"no kernel here takes {name}")


def _refuse_dtype(x: Tensor) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        pytest.skip(f"no kernel here takes {x.dtype}")


def _refuse_merging(out_partial: Tensor) -> None:
    if out_partial.shape[-1] > _MAX_MERGED_DIM:
        pytest.skip(f"head dims above {_MAX_MERGED_DIM} are not merged")


# ---- conventions ----


def _window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """Bounds as numbers, None for none. FlashAttention-4 also has negative ones, which no kernel here supports."""
    left, right = (None if x is None else int(x) for x in window_size)
    return left, 0 if causal else right


def _fa4_window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    left, right = _window(window_size, causal)
    if left is not None and right is not None and left + right < 0:
        left = right = None
    if min(left or 0, right or 0) < 0:
        pytest.skip("no kernel here takes negative windows")
    return left, right


def _packed(
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    longest: tuple[int | None, int | None],
    seqused: tuple[Tensor | None, Tensor | None],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Batches, packed sequences or one of each, as ``attention_varlen``: out and lse in q's layout."""
    q, k, v = tensors
    if options.get("softmax_scale") is None:
        options = options | {"softmax_scale": q.shape[-1] ** -0.5}
    if all(x is None for x in (*cu_seqlens, *seqused)):
        return attention(*tensors, return_lse=True, **options)
    batched = q.dim() == 4
    batch, rows = q.shape[:2] if batched else (0, 0)
    starts, flat = [], []
    for x, cu in zip((q, k), cu_seqlens, strict=True):
        if cu is None:
            count, each = x.shape[:2]
            cu = torch.arange(0, count * each + 1, max(each, 1), dtype=torch.int32, device=x.device)
            cu = cu if each else torch.zeros(count + 1, dtype=torch.int32, device=x.device)
        starts.append(cu)
    for x in (q, k, v):
        flat.append(x.flatten(0, 1) if x.dim() == 4 else x)
    most = [
        n if n is not None else (x.shape[1] if x.dim() == 4 else x.shape[0])
        for x, n in zip((q, k), longest, strict=True)
    ]
    out, lse = attention_varlen(
        *flat, *starts, *most, seqused_q=seqused[0], seqused_k=seqused[1], return_lse=True, **options
    )
    if batched:
        out, lse = out.unflatten(0, (batch, rows)), lse.unflatten(1, (batch, rows)).transpose(0, 1)
    return out, lse


# ---- FlashAttention-3 ----


def _skipping(
    function: Callable[..., Any], error: type[Exception] = NotImplementedError
) -> Callable[..., Any]:
    """``function``, which skips the test if it raises that no kernel here computes the call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except error as why:
            pytest.skip(str(why))

    return call


def _fa3_combine(out_partial: Tensor, lse_partial: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    _refuse_merging(out_partial)
    return flash_attn_3.flash_attn_combine(out_partial, lse_partial, **options)


# ---- FlashAttention-4 ----


def _fa4_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    if args:
        pytest.skip("positional arguments after v are qv's")
    return _fa4_varlen(q, k, v, **options)


def _fa4_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    deterministic: bool = False,
    seqlen_k_per_split: int | None = None,
    gather_kv_indices: Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    **hints: Any,
) -> tuple[Tensor, Tensor]:
    """hints: arguments that change no result, such as pack_gqa, scheduler_metadata, return_lse and score_mod_bwd."""
    _refuse(qv=qv, gather_kv_indices=gather_kv_indices)
    _refuse_dtype(q)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": _fa4_window(window_size, causal),
        "softcap": softcap or 0.0,
        "sinks": learnable_sink,
    }
    if block_sparse_tensors is not None:  # needs the longest sequences
        max_seqlen_q = max_seqlen_q or _rows(q, cu_seqlens_q)
        max_seqlen_k = max_seqlen_k or _rows(k, cu_seqlens_k)
    rows = max_seqlen_q or _rows(q), max_seqlen_k or _rows(k)
    if page_table is not None:
        rows = rows[0], page_table.shape[1] * k.shape[1]
    lengths = Lengths((cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k), rows)
    options |= _fa4_functions(score_mod, mask_mod, block_sparse_tensors, lengths, aux_tensors, aux_scalars)
    differentiates = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, learnable_sink)
    )
    is_cache = k.dim() == 4 and cu_seqlens_k is None and seqused_q is None and not differentiates
    if page_table is not None or (is_cache and (seqused_k is not None or num_splits != 1)):
        options |= {"num_splits": num_splits} if seqlen_k_per_split is None else {"same_bits": True}
        options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        out, lse = attention_with_kvcache(
            q, k, v, cache_seqlens=seqused_k, page_table=page_table, return_lse=True, **options
        )
        return out, lse
    options["deterministic"] = deterministic
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return _packed((q, k, v), starts, longest, (seqused_q, seqused_k), options)


def _rows(x: Tensor, cu_seqlens: Tensor | None = None) -> int:
    """The length of a batch's sequences, of the longest packed one, or without cu_seqlens of all."""
    return x.shape[x.dim() - 3] if cu_seqlens is None else int(cu_seqlens.diff().max())


def _fa4_functions(
    score_mod: Any, mask_mod: Any, sparse: Any, lengths: Lengths, *aux: Any, by_keys: bool = False
) -> dict[str, Any]:
    """score_mod, mask_mod and block_mask."""
    score, mask = (f and cute_functions.translated(f, lengths, *aux) for f in (score_mod, mask_mod))
    if sparse is None:
        return {"score_mod": score, "mask_mod": mask}
    return {"score_mod": score, "block_mask": cute_functions.block_mask(sparse, mask, lengths.whole, by_keys)}


def _fa4_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
    softmax_scale: float | None = None, causal: bool = False, softcap: float = 0.0,
    window_size_left: int | None = None, window_size_right: int | None = None, *,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, deterministic: bool = False,
    score_mod: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, **hints: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``_flash_attn_bwd``. hints: tiles and score_mod_bwd, which is derived here."""
    lengths = Lengths((cu_seqlens_q, cu_seqlens_k), (None, None), (_rows(q), _rows(k)))
    aux = (aux_tensors, aux_scalars)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "softcap": softcap,
        "window": _fa4_window((window_size_left, window_size_right), causal),
        "deterministic": deterministic,
        **_fa4_functions(score_mod, mask_mod, block_sparse_tensors, lengths, *aux, by_keys=True),
    }
    if cu_seqlens_q is None:
        return attention_backward(dout, q, k, v, out, lse, **options)
    packed = (cu_seqlens_q, cu_seqlens_k, *lengths.whole)
    return attention_varlen_backward(dout, q, k, v, out, lse, *packed, **options)


def _fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, *args: Any,
    out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """``_flash_attn_fwd``: out, lse and two results that only other functions of FlashAttention-4 read."""
    if args:
        pytest.skip("positional arguments of an internal function")
    window = (options.pop("window_size_left", None), options.pop("window_size_right", None))
    for name in ("tile_mn", "_arch"):
        options.pop(name, None)
    with torch.no_grad():
        found = _fa4_varlen(q, k, v, window_size=window, **options)
    for given, x in zip((out, lse), found, strict=True):
        if given is not None:
            given.copy_(x)
    return *found, None, None


def _fa4_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rows are merged one by one, so lengths, which only tell which rows to skip, change nothing.

    lse_partial and the result's LSE have heads last.
    """
    _refuse_merging(out_partial)
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    merged, lse = merge_attention(out_partial, lse_partial.transpose(-1, -2), dtype=dtype)
    merged = merged if out is None else out.copy_(merged)
    return merged, lse.transpose(-1, -2) if return_lse else None


def _fa4_forward_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    num_splits_dynamic_ptr: Tensor | None = None,
    **hints: Any,
) -> None:
    _refuse(num_splits_dynamic_ptr=num_splits_dynamic_ptr, semaphore_to_reset=hints.get("semaphore_to_reset"))
    _, found = _fa4_combine(out_partial, lse_partial, out=out, out_dtype=out.dtype)
    if lse is not None and found is not None:
        lse.copy_(found)


for _function in (_fa4_forward, _fa4_backward, _fa4_forward_combine):  # their tests replace it
    _function.compile_cache = {}  # type: ignore[attr-defined]
