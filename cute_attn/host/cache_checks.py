"""The checks of calls with a cache of keys and values: one sentence per error.

As in :mod:`cute_attn.host.checks`, checks read only metadata, not the tensors' elements. They read the lengths of
sequences too if these are on the CPU, or if the caller asks for it.
"""

import itertools
import math

import torch
from torch import Tensor

from cute_attn.epilogues.names import are_functions
from cute_attn.host.call import DTYPE_NAMES, Call
from cute_attn.host.checks import (
    FLOAT_DTYPES,
    MAX_SEQLEN,
    check_apart,
    check_count,
    check_cumulative,
    check_epilogues,
    check_int32,
    check_last_stride,
    check_range,
    check_same_bits,
    check_scale,
    check_sinks,
    check_slopes,
    check_softcap,
    check_starts,
    on_host,
)
from cute_attn.host.memory import ALIGNMENT_BYTES, has_memory, is_aligned, is_first_columns, overlap
from cute_attn.host.values import check_dtype, check_present, wrong_shape
from cute_attn.traits import MAX_HEAD_DIM, MAX_HEAD_DIM_V

# ---- checks on any device ----


def check_tensors(call: Call, required: tuple[str, ...]) -> None:
    """Raise for an argument that is missing, not a dense tensor, or on another device than q or, without q, k_cache."""
    named = [(name, getattr(call, name)) for name in required]
    named += [item for item in call.tensors() if item[0] not in required]
    check_present(named, required, "q" if "q" in required else "k_cache")


def check_append(call: Call, batch: int, leftpad: Tensor | None = None) -> None:
    """Raise TypeError or ValueError for the first wrong argument of a call with ``batch`` sequences.

    leftpad: the call's ``cache_leftpad``, already checked, or None.
    """
    check_tensors(call, ("k_cache", "v_cache"))
    _check_cache(call, batch)
    _check_new(call, batch)
    _check_rotary(call, batch)
    if on_host(call.k_cache):
        check_values(call, leftpad)


def _check_cache(call: Call, batch: int) -> None:
    k_cache, v_cache = call.k_cache, call.v_cache
    check_dtype("k_cache", k_cache, *FLOAT_DTYPES)
    check_dtype("v_cache", v_cache, k_cache.dtype, of="k_cache")
    if k_cache.dim() != 4 or 0 in k_cache.shape[1:]:
        rows = "(entries, capacity" if call.page_table is None else "(pages, page_size"
        shape = tuple(k_cache.shape)
        raise ValueError(f"k_cache has shape {shape}; accepted: {rows}, nheads_kv, head_dim), none of them 0")
    if v_cache.dim() != 4 or v_cache.shape[:-1] != k_cache.shape[:-1] or not v_cache.shape[-1]:
        raise wrong_shape("v_cache", v_cache, f"{tuple(k_cache.shape[:-1])} and a head_dim_v, as k_cache")
    for name, x, most in (("k_cache", k_cache, MAX_HEAD_DIM), ("v_cache", v_cache, MAX_HEAD_DIM_V)):
        if x.shape[-1] > most:
            raise ValueError(f"{name} has head dim {x.shape[-1]}; accepted: up to {most}")
        check_last_stride(name, x)
    table = call.page_table
    if table is not None:
        check_dtype("page_table", table, torch.int32)
        if table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
            raise ValueError(
                f"page_table has shape {tuple(table.shape)} and strides {tuple(table.stride())}; accepted: (entries, "
                "pages of an entry) with a last stride of 1"
            )
    if call.cache.capacity > MAX_SEQLEN:
        raise ValueError(f"k_cache has capacity {call.cache.capacity}; accepted: up to {MAX_SEQLEN}")
    if call.cache_batch_idx is not None:
        check_int32("cache_batch_idx", call.cache_batch_idx, batch)
    elif call.entries != batch:
        name = "k_cache" if table is None else "page_table"
        raise ValueError(
            f"{name} has {call.entries} entries; accepted: {batch}, the batch, or cache_batch_idx beside it"
        )
    if call.cache_seqlens is not None:
        check_int32("cache_seqlens", call.cache_seqlens, batch)


def _check_new(call: Call, batch: int) -> None:
    k, v, cu_seqlens = call.k, call.v, call.cu_seqlens_k_new
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None; accepted: both k and v, or neither")
    if k is None or v is None:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens_k_new is given without k and v; accepted: with them")
        return
    if call.cache_seqlens is None:
        raise ValueError("cache_seqlens is None; accepted with k and v: rows in use before them, int32")
    if cu_seqlens is not None:
        check_starts("cu_seqlens_k_new", cu_seqlens)
    for name, x, cache in (("k", k, call.k_cache), ("v", v, call.v_cache)):
        heads = tuple(cache.shape[2:])
        check_dtype(name, x, cache.dtype, of=f"{name}_cache")
        expected = f"({batch}, rows, {heads[0]}, {heads[1]})"
        fits = x.dim() == 4 and x.shape[0] == batch
        if cu_seqlens is not None:
            expected, fits = f"(total, {heads[0]}, {heads[1]})", x.dim() == 3
        if not fits or tuple(x.shape[-2:]) != heads:
            raise wrong_shape(name, x, expected)
    if k.shape[:-1] != v.shape[:-1]:
        raise wrong_shape("v", v, f"k's rows, {tuple(k.shape[:-1])}")
    if cu_seqlens is not None:
        check_cumulative("cu_seqlens_k_new", cu_seqlens, batch, k.shape[0], k.shape[0])
    check_apart("k_cache", call.k_cache, ())
    check_apart("v_cache", call.v_cache, ())
    if all(map(has_memory, (call.k_cache, call.v_cache, k, v))):
        _check_written(call)


def _check_written(call: Call) -> None:
    """Raise ValueError for new rows in a cache's memory: threads would read what others have written there.

    The same holds for values that would overwrite keys, unless they are equal to the new keys there.
    """
    k_cache, v_cache, k, v = call.k_cache, call.v_cache, call.k, call.v
    assert k is not None and v is not None
    check_apart("k_cache", k_cache, (("k", k), ("v", v)))
    check_apart("v_cache", v_cache, (("k", k), ("v", v)))
    if not overlap(k_cache, v_cache):
        return
    latent = is_first_columns(v_cache, k_cache) and is_first_columns(v, k)
    if not latent or call.rotary_cos is not None:
        raise ValueError(
            "v_cache shares memory with k_cache; accepted: memory of its own, or without rotary embedding the views "
            "k_cache[..., :head_dim_v] and, as v, k[..., :head_dim_v]"
        )


def _check_rotary(call: Call, batch: int) -> None:
    cos, sin, seqlens = call.rotary_cos, call.rotary_sin, call.rotary_seqlens
    if (cos is None) != (sin is None):
        missing = "rotary_cos" if cos is None else "rotary_sin"
        raise ValueError(f"{missing} is None; accepted: both rotary_cos and rotary_sin, or neither")
    if cos is None or sin is None:
        if seqlens is not None:
            raise ValueError("rotary_seqlens is given without rotary_cos and rotary_sin; accepted: with them")
        return
    head_dim = call.k_cache.shape[3]
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_dtype(name, x, call.k_cache.dtype, of="k_cache")
        if x.dim() != 2 or 0 in x.shape or 2 * x.shape[1] > head_dim or (x.shape[1] > 1 and x.stride(1) != 1):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and strides {tuple(x.stride())}; accepted: (positions, pairs) "
                f"with up to {head_dim // 2} pairs and a last stride of 1"
            )
    if sin.shape != cos.shape:
        raise wrong_shape("rotary_sin", sin, f"{tuple(cos.shape)}, rotary_cos's")
    if seqlens is not None:
        check_int32("rotary_seqlens", seqlens, batch)
        return
    if call.cache_seqlens is None:
        raise ValueError("cache_seqlens is None; accepted with rotary_cos: it or rotary_seqlens, int32")
    if cos.shape[0] < call.cache.capacity:
        raise ValueError(
            f"rotary_cos has {cos.shape[0]} positions; accepted: {call.cache.capacity} or more, the cache's "
            "capacity, or rotary_seqlens beside it"
        )


def check_attention(call: Call) -> None:
    """Raise TypeError or ValueError for the first wrong argument of ``attention_with_kvcache``, on any device."""
    q, k_cache, cu_seqlens = call.q, call.k_cache, call.cu_seqlens_q
    check_tensors(call, ("q", "k_cache", "v_cache"))
    if cu_seqlens is not None:
        check_starts("cu_seqlens_q", cu_seqlens)
    if q.dim() != (4 if cu_seqlens is None else 3):
        dims = "(batch, seqlen_q, nheads, head_dim)" if cu_seqlens is None else "(total, nheads, head_dim)"
        raise wrong_shape("q", q, dims)
    if cu_seqlens is not None:
        if not 0 <= call.max_seqlen_q <= MAX_SEQLEN:
            raise ValueError(f"max_seqlen_q is {call.max_seqlen_q}; accepted: 0 to {MAX_SEQLEN}")
        check_cumulative("cu_seqlens_q", cu_seqlens, call.batch, q.shape[0], call.max_seqlen_q)
    if call.cache_leftpad is not None:
        check_int32("cache_leftpad", call.cache_leftpad, call.batch)
    check_append(call, call.batch, call.cache_leftpad)
    check_dtype("q", q, k_cache.dtype, of="k_cache")
    if q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]}; accepted: {k_cache.shape[-1]}, k_cache's")
    nheads = q.shape[-2]
    if nheads % k_cache.shape[2]:
        raise ValueError(f"q has {nheads} heads; accepted: a multiple of k_cache's {k_cache.shape[2]}")
    if call.longest[0] > MAX_SEQLEN:
        raise ValueError(f"q has seqlen {call.longest[0]}; accepted: up to {MAX_SEQLEN}")
    check_scale(call.softmax_scale)
    check_softcap(call.softcap)
    slopes = call.alibi_slopes
    if slopes is not None:
        check_slopes(slopes, call.batch, nheads)
        if (slopes.dtype, q.dtype) != (torch.float64, torch.float64):
            check_dtype("alibi_slopes", slopes, torch.float32)
        check_last_stride("alibi_slopes", slopes)
    if call.sinks is not None:
        check_sinks(call.sinks, nheads, q.dtype)
    if call.tree_mask is not None:
        _check_tree(call, call.tree_mask)
    check_epilogues(call, call.cache.capacity)
    check_same_bits(call)
    if call.cache_leftpad is not None:
        for name in call.epilogue_names:  # a class would take the cache's rows for keys
            if not are_functions((name,)):
                raise ValueError(
                    f"epilogue {name!r}, a class, is given with cache_leftpad; accepted with it: functions"
                )


def _check_tree(call: Call, tree: Tensor) -> None:
    check_dtype("tree_mask", tree, torch.int32)
    rows, words = math.prod(call.q.shape[:-2]), -(-call.max_seqlen_q // 32)
    if tree.dim() != 2 or tree.shape[0] != rows or tree.shape[1] < words or tree.stride(1) != 1:
        raise ValueError(
            f"tree_mask has shape {tuple(tree.shape)} and strides {tuple(tree.stride())}; accepted: ({rows}, {words}) "
            f"or more words, with a last stride of 1, for {rows} queries of which a sequence has up to "
            f"{call.max_seqlen_q}"
        )
    if call.mask.startswith("window") or call.alibi_slopes is not None:
        name = "alibi_slopes" if call.alibi_slopes is not None else "a window"
        raise ValueError(
            f"tree_mask is given with {name}; accepted: without, as a query's position is not its row in a tree"
        )


def check_lengths(call: Call, leftpad: Tensor | None = None) -> None:
    """Raise ValueError if a length, an entry or an appended row is out of bounds. Waits for the device."""
    if call.cu_seqlens_q is not None:
        rows = call.q.shape[0]
        check_cumulative("cu_seqlens_q", call.cu_seqlens_q.cpu(), call.batch, rows, call.max_seqlen_q)
    if call.cu_seqlens_k_new is not None and call.cache_seqlens is not None:
        batch, rows = call.cache_seqlens.shape[0], call.k.shape[0]
        check_cumulative("cu_seqlens_k_new", call.cu_seqlens_k_new.cpu(), batch, rows, rows)
    check_values(call, leftpad)
    after = call.lengths_after()
    if call.cache_seqlens is None or after is None:
        return
    capacity = call.cache.capacity
    for b, (before, end) in enumerate(zip(call.cache_seqlens.tolist(), after.tolist(), strict=True)):
        if end > capacity:
            raise ValueError(
                f"cache_seqlens[{b}] is {before} and {end - before} rows are appended; accepted: up to the capacity, "
                f"{capacity}, together"
            )


def check_values(call: Call, leftpad: Tensor | None = None) -> None:
    """Raise ValueError if a length, a sequence's entry or a page of its rows is out of bounds.

    Appended rows may exceed the capacity; rows beyond it are not written. Waits for the device.
    """
    bounds = (
        ("cache_seqlens", call.cache_seqlens, call.cache.capacity),
        ("cache_leftpad", leftpad, call.cache.capacity),
        ("cache_batch_idx", call.cache_batch_idx, call.entries - 1),
    )
    for name, values, most in bounds:
        if values is not None:
            check_range(name, values, most, wait=True)
    if call.page_table is None:
        return
    pages, size = call.k_cache.shape[:2]
    after = call.lengths_after()
    ends = itertools.repeat(call.cache.capacity) if after is None else after.tolist()
    if leftpad is not None and call.k is not None and call.cache_seqlens is not None:
        leftpad = torch.minimum(leftpad, call.cache_seqlens)  # new rows may start in the padding
    starts = itertools.repeat(0) if leftpad is None else leftpad.tolist()
    entries = range(call.entries) if call.cache_batch_idx is None else call.cache_batch_idx.tolist()
    table = call.page_table.tolist()
    for entry, start, end in zip(entries, starts, ends, strict=False):
        for i in range(start // size, min(-(-end // size), len(table[entry]))):
            if not 0 <= table[entry][i] < pages:
                raise ValueError(f"page_table[{entry}, {i}] is {table[entry][i]}; accepted: 0 to {pages - 1}")


# ---- checks of the kernels' requirements ----


def check_append_for_kernels(call: Call) -> None:
    """Raise for a call that the append kernel does not support. Assumes :func:`check_append`."""
    for name, x in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        check_dtype(name, x, *DTYPE_NAMES, on=" on CUDA")
    check_cache_addresses(call)
    if call.k is not None:
        check_count("k has elements in rows of one head", call.k.numel() // call.k.shape[-1])


def check_cache_addresses(call: Call) -> None:
    """Raise for errors in addresses: a cache less aligned than its rows, or caches that are written and overlap."""
    k_cache, v_cache = call.k_cache, call.v_cache
    if call.k is not None:
        _check_written(call)
    if not (k_cache.data_ptr() | v_cache.data_ptr()) % 16:
        return
    alignment = call.alignment
    multiple = alignment * k_cache.element_size() or ALIGNMENT_BYTES
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not is_aligned(x, alignment):
            raise ValueError(
                f"{name} starts {x.data_ptr() % multiple} bytes past a multiple of {multiple}; accepted: aligned as "
                "its rows are"
            )
