"""The checks of a call: one sentence per error.

``check``, and ``check_append`` and ``check_attention`` with a cache, hold for every device; ``check_for_kernels`` and
``check_append_for_kernels`` for the CUDA kernels. All read metadata only, so one result holds for every call of the
same metadata; lengths are read, and checked, only on the CPU, or if the caller asks for it.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cute_attn import traits
from cute_attn.epilogues.inputs import UNBOUNDED
from cute_attn.epilogues.names import are_functions, user_epilogue
from cute_attn.host import memory
from cute_attn.host.call import DTYPE_NAMES, PYTORCHS, Call
from cute_attn.host.values import check_choice, check_dense, check_dtype, check_present, shown, wrong_shape
from cute_attn.traits import DROPOUTS as DROPOUTS

KERNEL_DTYPES = tuple(DTYPE_NAMES)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_INT32 = 2**31 - 1
# Kernels index with 32 bits. They add less than a tile to an index (none has 2**12 queries or keys), and under a window
# its bound, of up to UNBOUNDED.
_TILE = 2**12
MAX_SEQLEN = 2**31 - UNBOUNDED - 2 * _TILE
"""Maximum sequence length of the kernels."""
MAX_ROWS = 2**31 - 2 * _TILE
"""Maximum rows of packed sequences in the kernels, with each sequence padded to whole blocks."""
MAX_STEPS = 2**29
"""Maximum steps of a CTA, which counts its steps and may replay some. A step is a query block with a key block."""


# ---- checks on any device ----


def check(call: Call) -> None:
    """Raise TypeError or ValueError for the first wrong parameter, on any device."""
    check_tensors(call, ("q", "k", "v"))
    check_dtype("q", call.q, *FLOAT_DTYPES)
    for name, tensor in (("k", call.k), ("v", call.v)):
        check_dtype(name, tensor, call.q.dtype, of="q")
    _check_shapes(call)
    _check_numbers(call)
    _check_lengths(call)
    _check_score_tensors(call)
    check_epilogues(call, call.max_seqlen_k)
    check_same_bits(call)


def check_same_bits(call: Call) -> None:
    """Raise for a call with same_bits and a feature that the kernels of that mode lack, on any device."""
    if not call.same_bits:
        return
    dims = call.q.shape[-1], call.keys[1].shape[-1]
    refused = {
        f"{call.q.dtype}": call.q.dtype not in (torch.float16, torch.bfloat16),
        f"head dims {dims[0]} and {dims[1]}, which are no multiples of 8": any(dim % 8 for dim in dims),
        "bias": call.bias is not None,
        "dropout_p": bool(call.dropout),
        "block_mask": call.lists_blocks and call.k_cache is None,
        "seqused_q": call.seqused_q is not None,
        "cache_leftpad": call.cache_leftpad is not None,
        "return_softmax": call.aux == "softmax",
        "a top left mask": "top_left" in call.mask,
        "tile": bool(call.tile or call.backward_tile),
        "num_splits": call.num_splits != 0,
        f"kernel {call.kernel!r}": call.kernel not in ("", "sm90"),
        "classes of users": not are_functions(call.epilogue_names),
    }
    for what, is_given in refused.items():
        if is_given:
            raise ValueError(
                f"same_bits is True with {what}; accepted: fp16 or bf16, head dims in multiples of 8, with masks "
                "aligned bottom right, window, softcap, ALiBi, sinks, functions, lengths, caches, pages and trees"
            )


def check_epilogues(call: Call, keys: int) -> None:
    """Raise for wrong arguments of users' epilogues. keys: maximum keys of a sequence."""
    if not call.epilogues:
        return
    inputs = call.score_inputs()
    for name in call.epilogue_names:
        epilogue = user_epilogue(name)
        epilogue.check(inputs)
        if call.q.is_cuda:
            sizes = {"batch": call.batch, "head": call.nheads, "query": call.max_seqlen_q, "key": keys}
            if not any(isinstance(x, torch.SymInt) for x in sizes.values()):
                epilogue.warn_of_indices(inputs, sizes)


def _check_shapes(call: Call) -> None:
    q, k, v = call.q, call.k, call.v
    dims = "(total, heads, head_dim)" if call.varlen else "(batch, seqlen, heads, head_dim)"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != (3 if call.varlen else 4):
            raise wrong_shape(name, tensor, dims)
    if not call.varlen and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch {k.shape[0]}; accepted: {q.shape[0]}, q's")
    if v.shape[:-1] != k.shape[:-1]:
        raise wrong_shape("v", v, f"{tuple(k.shape[:-1])} and a head_dim_v, as k")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]}; accepted: {q.shape[-1]}, q's")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"q, k and v have head dims {q.shape[-1]} and {v.shape[-1]}; accepted: 1 or more")
    nheads, nheads_kv = call.nheads, k.shape[-2]
    if nheads % nheads_kv if nheads_kv else nheads:
        raise ValueError(f"q has {nheads} heads; accepted: a multiple of k's {nheads_kv}")


# From here on float32 rounds to 1.
_ONE_IN_FLOAT32 = 1 - 2**-25


def _check_numbers(call: Call) -> None:
    _check_factors(call)
    if not 0 <= call.dropout_p < _ONE_IN_FLOAT32:
        raise ValueError(f"dropout_p is {call.dropout_p}; accepted: 0 <= dropout_p < 1, in float32 as well")
    if call.dropout_p and not call.dropout:
        raise ValueError(f"dropout_p is {call.dropout_p} and dropout empty; accepted: a name of a mask, or 0")
    precisions = (*traits.PRECISIONS, PYTORCHS) if call.q.dtype == torch.float32 else ()
    check_choice("mask", call.mask, ("", *traits.MASKS))
    check_choice("dropout", call.dropout, ("", *DROPOUTS))
    check_choice("precision", call.precision, ("", *precisions))
    for name in ("window_left", "window_right"):
        value = getattr(call, name)
        if not 0 <= value <= UNBOUNDED:
            raise ValueError(f"{name} is {value}; accepted: 0 to {UNBOUNDED}, which stands for no bound")


def _check_lengths(call: Call) -> None:
    for name, x in (("max_seqlen_q", call.q), ("max_seqlen_k", call.k)):
        value = getattr(call, name)
        if call.varlen and not 0 <= value <= _MAX_INT32:
            raise ValueError(f"{name} is {value}; accepted: 0 to {_MAX_INT32}")
        if not call.varlen and value != x.shape[1]:
            raise ValueError(f"{name} is {value}; accepted: {x.shape[1]}, {name[-1]}'s seqlen")
    if (call.cu_seqlens_q is None) != (call.cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q or cu_seqlens_k is missing; accepted: both, or neither")
    for side, x in (("q", call.q), ("k", call.k)):
        cu_seqlens, seqused = getattr(call, f"cu_seqlens_{side}"), getattr(call, f"seqused_{side}")
        rows: int | Sequence[int] | None = None if call.varlen else x.shape[1]
        if cu_seqlens is not None:
            name = f"cu_seqlens_{side}"
            check_starts(name, cu_seqlens)
            rows = check_cumulative(
                name, cu_seqlens, call.batch, x.shape[0], getattr(call, f"max_seqlen_{side}")
            )
        if seqused is not None:
            check_int32(f"seqused_{side}", seqused, call.batch)
            check_range(f"seqused_{side}", seqused, rows)


def check_starts(name: str, cu_seqlens: Any) -> None:
    """Raise TypeError or ValueError for cumulative lengths that do not give the number of sequences."""
    check_dense(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise wrong_shape(name, cu_seqlens, "(batch + 1,), cumulative lengths, the first 0")


def check_int32(name: str, tensor: Tensor, length: int) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is ``length`` contiguous int32 numbers."""
    check_dtype(name, tensor, torch.int32)
    if tuple(tensor.shape) != (length,):
        raise wrong_shape(name, tensor, f"({length},)")
    if length > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(0)}; accepted: 1, contiguous")


def check_cumulative(
    name: str, cu_seqlens: Tensor, batch: int, rows: int, max_seqlen: int
) -> list[int] | None:
    """Raise unless these are cumulative lengths of ``batch`` sequences within ``rows`` and ``max_seqlen``.

    Returns the lengths, or None if they are not :func:`on_host` and so not read.
    """
    check_int32(name, cu_seqlens, batch + 1)
    if not on_host(cu_seqlens):
        return None
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[0] < 0 or bounds[-1] > rows or any(one < 0 for one in lengths):
        raise ValueError(
            f"{name} is {shown(bounds)}; accepted: rising numbers from 0 up to {rows}, the packed rows"
        )
    if lengths and max(lengths) > max_seqlen:
        raise ValueError(
            f"max_seqlen_{name[-1]} is {max_seqlen}; accepted: {max(lengths)} or more, {name}'s longest"
        )
    return lengths


def check_range(name: str, values: Tensor, most: int | Sequence[int] | None, *, wait: bool = False) -> None:
    """Raise ValueError for a value below 0 or above ``most``: a bound for all, a bound per value, or None if unknown.

    wait: read the values even if :func:`on_host` is False, and wait for the device.
    """
    if most is None or not (wait or on_host(values)):
        return
    bounds = itertools.repeat(most) if isinstance(most, int | torch.SymInt) else most
    for b, (value, bound) in enumerate(zip(values.tolist(), bounds, strict=False)):
        if not 0 <= value <= bound:
            raise ValueError(f"{name}[{b}] is {value}; accepted: 0 to {bound}")


def on_host(x: Tensor) -> bool:
    """True if lengths in ``x`` can be checked without waiting for a device or tracing: real numbers on the CPU."""
    return x.device.type == "cpu" and memory.has_memory(x)


def _check_score_tensors(call: Call) -> None:
    batch, nheads = call.batch, call.nheads
    slopes, bias, rng_state = call.alibi_slopes, call.bias, call.rng_state
    if call.sinks is not None:
        check_sinks(call.sinks, nheads, call.q.dtype)
    if slopes is not None and tuple(slopes.shape) not in ((nheads,), (batch, nheads)):
        raise wrong_shape("alibi_slopes", slopes, f"({nheads},) or ({batch}, {nheads})")
    if bias is not None:
        # With a cache a bias may have any number of columns; lengths may be unknown here.
        keys = call.max_seqlen_k if call.k_cache is None else max((1, *bias.shape[-1:]))
        full = (batch, nheads, call.max_seqlen_q, keys)
        if (
            bias.dim() != 4
            or bias.shape[3] != full[3]
            or any(size not in (1, whole) for size, whole in zip(bias.shape, full, strict=True))
        ):
            raise wrong_shape("bias", bias, f"{full}, where each may be 1, without leading dimensions too")
        if bias.dtype not in FLOAT_DTYPES:
            raise TypeError(f"bias has dtype {bias.dtype}; accepted: {_list((*FLOAT_DTYPES, torch.bool))}")
    if call.dropout:
        if rng_state is None:
            raise ValueError(
                "rng_state is None; accepted: int64 (2,), seed and offset, where there is dropout"
            )
        check_dtype("rng_state", rng_state, torch.int64)
        if tuple(rng_state.shape) != (2,) or rng_state.stride(0) != 1:
            shape, stride = tuple(rng_state.shape), tuple(rng_state.stride())
            raise ValueError(f"rng_state has shape {shape}, stride {stride}; accepted: (2,), (1,)")


# Kernels divide fp32 numbers by the scale and by the softcap, which keep all quotients far from the bounds of fp32.
_LARGEST_FACTOR = 2.0**60
# Their tanh errs by 2e-7, and so a capped score by 1e-3 at most: no more than P rounds in 16 bits.
_LARGEST_SOFTCAP = 2.0**12


def _check_factors(call: Call) -> None:
    """Raise ValueError unless kernels can compute with the scale and the softcap in fp32."""
    scale, softcap = call.softmax_scale, call.softcap
    if scale and not 1 / _LARGEST_FACTOR <= abs(scale) <= _LARGEST_FACTOR:
        accepted = "a finite number, 0 or from 2**-60 to 2**60 in magnitude"
        raise ValueError(f"softmax_scale is {scale}; accepted: {accepted}")
    if softcap and not 1 / _LARGEST_FACTOR <= softcap <= _LARGEST_SOFTCAP:
        raise ValueError(f"softcap is {softcap}; accepted: a number from 2**-60 to 2**12, or 0 for none")


def check_sinks(sinks: Tensor, nheads: int, dtype: torch.dtype = torch.float32) -> None:
    """Raise TypeError or ValueError unless sinks are one number per head, of ``dtype`` or a dtype of up to 32 bits."""
    accepted = tuple(dict.fromkeys((*DTYPE_NAMES, dtype)))
    check_dtype("sinks", sinks, *accepted)
    if tuple(sinks.shape) != (nheads,):
        raise wrong_shape("sinks", sinks, f"({nheads},), a number per head")


def _list(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items))


# ---- calls with a cache, on any device ----


def check_tensors(call: Call, required: tuple[str, ...]) -> None:
    """Raise for an argument that is missing, not a dense tensor, or on another device than q or, without q, k_cache."""
    named = [(name, getattr(call, name)) for name in required]
    named += [item for item in call.tensors() if item[0] not in required]
    check_present(named, required, "q" if "q" in required else "k_cache")


def check_append(call: Call) -> None:
    """Raise TypeError or ValueError for the first wrong argument of a call's cache and new rows."""
    check_tensors(call, ("k_cache", "v_cache"))
    if call.q is None and (call.cache_seqlens is None or call.cache_seqlens.dim() != 1):
        shape = None if call.cache_seqlens is None else tuple(call.cache_seqlens.shape)
        raise ValueError(f"cache_seqlens has shape {shape}; accepted: (batch,)")
    _check_cache(call)
    _check_new(call)
    _check_rotary(call)
    if on_host(call.k_cache):
        _check_values(call)


def _check_cache(call: Call) -> None:
    k_cache, v_cache, batch = call.k_cache, call.v_cache, call.batch
    check_dtype("k_cache", k_cache, *FLOAT_DTYPES)
    check_dtype("v_cache", v_cache, k_cache.dtype, of="k_cache")
    if k_cache.dim() != 4 or 0 in k_cache.shape[1:]:
        rows = "(entries, capacity" if call.page_table is None else "(pages, page_size"
        shape = tuple(k_cache.shape)
        raise ValueError(f"k_cache has shape {shape}; accepted: {rows}, nheads_kv, head_dim), none of them 0")
    if v_cache.dim() != 4 or v_cache.shape[:-1] != k_cache.shape[:-1] or not v_cache.shape[-1]:
        raise wrong_shape("v_cache", v_cache, f"{tuple(k_cache.shape[:-1])} and a head_dim_v, as k_cache")
    for name, x, most in (
        ("k_cache", k_cache, traits.MAX_HEAD_DIM),
        ("v_cache", v_cache, traits.MAX_HEAD_DIM_V),
    ):
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
    for name in ("cache_batch_idx", "cache_seqlens", "cache_leftpad"):
        if getattr(call, name) is not None:
            check_int32(name, getattr(call, name), batch)
    if call.cache_batch_idx is None and call.entries != batch:
        name, others = ("k_cache", "page_table or ") if table is None else ("page_table", "")
        raise ValueError(
            f"{name} has {call.entries} entries; accepted: {batch}, the batch, or {others}cache_batch_idx beside it"
        )


def _check_new(call: Call) -> None:
    k, v, cu_seqlens, batch = call.k, call.v, call.cu_seqlens_k_new, call.batch
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
    if all(map(memory.has_memory, (call.k_cache, call.v_cache, k, v))):
        _check_appended(call)


def _check_appended(call: Call) -> None:
    """Raise ValueError for new rows in a cache's memory: threads would read what others have written there.

    The same holds for values that would overwrite keys, unless they are equal to the new keys there.
    """
    k_cache, v_cache, k, v = call.k_cache, call.v_cache, call.k, call.v
    assert k is not None and v is not None
    check_apart("k_cache", k_cache, (("k", k), ("v", v)))
    check_apart("v_cache", v_cache, (("k", k), ("v", v)))
    if not memory.overlap(k_cache, v_cache):
        return
    latent = memory.is_first_columns(v_cache, k_cache) and memory.is_first_columns(v, k)
    if not latent or call.rotary_cos is not None:
        raise ValueError(
            "v_cache shares memory with k_cache; accepted: memory of its own, or without rotary embedding the views "
            "k_cache[..., :head_dim_v] and, as v, k[..., :head_dim_v]"
        )


def _check_rotary(call: Call) -> None:
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
        check_int32("rotary_seqlens", seqlens, call.batch)
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
    check_append(call)
    check_dtype("q", q, k_cache.dtype, of="k_cache")
    if q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]}; accepted: {k_cache.shape[-1]}, k_cache's")
    nheads = q.shape[-2]
    if nheads % k_cache.shape[2]:
        raise ValueError(f"q has {nheads} heads; accepted: a multiple of k_cache's {k_cache.shape[2]}")
    if call.longest[0] > MAX_SEQLEN:
        raise ValueError(f"q has seqlen {call.longest[0]}; accepted: up to {MAX_SEQLEN}")
    _check_factors(call)
    _check_score_tensors(call)
    if call.bias is not None and on_host(call.bias):
        _check_columns(call, call.bias)
    slopes = call.alibi_slopes
    if slopes is not None:
        if (slopes.dtype, q.dtype) != (torch.float64, torch.float64):
            check_dtype("alibi_slopes", slopes, torch.float32)
        check_last_stride("alibi_slopes", slopes)
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


def check_lengths(call: Call) -> None:
    """Raise ValueError if a length, an entry or an appended row is out of bounds. Waits for the device."""
    if call.cu_seqlens_q is not None:
        rows = call.q.shape[0]
        check_cumulative("cu_seqlens_q", call.cu_seqlens_q.cpu(), call.batch, rows, call.max_seqlen_q)
    if call.cu_seqlens_k_new is not None and call.cache_seqlens is not None:
        rows = call.k.shape[0]
        check_cumulative("cu_seqlens_k_new", call.cu_seqlens_k_new.cpu(), call.batch, rows, rows)
    _check_values(call)
    after = call.lengths_after()
    if call.bias is not None:
        _check_columns(call, call.bias)
    if call.cache_seqlens is None or after is None:
        return
    capacity = call.cache.capacity
    for b, (before, end) in enumerate(zip(call.cache_seqlens.tolist(), after.tolist(), strict=True)):
        if end > capacity:
            raise ValueError(
                f"cache_seqlens[{b}] is {before} and {end - before} rows are appended; accepted: up to the capacity, "
                f"{capacity}, together"
            )


def _check_values(call: Call) -> None:
    """Raise ValueError if a length, a sequence's entry or a page of its rows is out of bounds.

    Appended rows may exceed the capacity; rows beyond it are not written. Waits for the device.
    """
    bounds = (
        ("cache_seqlens", call.cache_seqlens, call.cache.capacity),
        ("cache_leftpad", call.cache_leftpad, call.cache.capacity),
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
    leftpad = call.cache_leftpad
    if leftpad is not None and call.k is not None and call.cache_seqlens is not None:
        leftpad = torch.minimum(leftpad, call.cache_seqlens)  # new rows may start in the padding
    starts = itertools.repeat(0) if leftpad is None else leftpad.tolist()
    entries = range(call.entries) if call.cache_batch_idx is None else call.cache_batch_idx.tolist()
    table = call.page_table.tolist()
    for entry, start, end in zip(entries, starts, ends, strict=False):
        for i in range(start // size, min(-(-end // size), len(table[entry]))):
            if not 0 <= table[entry][i] < pages:
                raise ValueError(f"page_table[{entry}, {i}] is {table[entry][i]}; accepted: 0 to {pages - 1}")


def _check_columns(call: Call, bias: Tensor) -> None:
    """Raise ValueError if a sequence has more keys than a bias of several columns. Waits for the device."""
    ends, capacity, columns = call.lengths_after(), call.cache.capacity, bias.shape[3]
    lengths = [capacity] * call.batch if ends is None else ends.clamp(max=capacity).tolist()
    starts = [0] * call.batch if call.cache_leftpad is None else call.cache_leftpad.tolist()
    for b, (start, end) in enumerate(zip(starts, lengths, strict=True)):
        if end - start > columns > 1:
            raise ValueError(
                f"bias has {columns} columns; accepted: {end - start} or more, the keys of sequence {b}, or 1"
            )


# ---- checks of the kernels' requirements ----


def check_for_kernels(call: Call, *, whole: bool = False) -> None:
    """Raise for unsupported dtypes, head dims and sizes. Assumes :func:`check`.

    whole: refuse head dims whose rows are no multiples of 16 bytes, which are padded otherwise.
    """
    if call.q.dtype not in KERNEL_DTYPES:
        raise TypeError(
            f"q has dtype {call.q.dtype}; accepted on CUDA: {_list(KERNEL_DTYPES)} "
            f"(on the CPU: {_list(FLOAT_DTYPES)})"
        )
    multiple = traits.head_dim_multiple(DTYPE_NAMES[call.q.dtype]) if whole else 1
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        dim = tensor.shape[-1]
        if dim % multiple or dim > traits.MAX_HEAD_DIM:
            which = "head_dim_v" if name == "v" else "head_dim"
            accepted = traits.head_dims_text(multiple, traits.MAX_HEAD_DIM)
            raise ValueError(f"{name} has {which} {dim}; accepted: {accepted}")
    _check_sizes(call)
    if call.alibi_slopes is not None:
        check_dtype("alibi_slopes", call.alibi_slopes, torch.float32)
        check_last_stride("alibi_slopes", call.alibi_slopes)
    if call.bias is not None:
        check_dtype("bias", call.bias, *DTYPE_NAMES)
        check_last_stride("bias", call.bias)


def _check_sizes(call: Call) -> None:
    for side, tensor, longest in zip("qk", (call.q, call.k), call.longest, strict=True):
        if call.varlen and tensor.shape[0] > MAX_ROWS:
            raise ValueError(f"{side} has {tensor.shape[0]} packed rows; accepted on CUDA: up to {MAX_ROWS}")
        if longest > MAX_SEQLEN:
            which = f"max_seqlen_{side} is" if call.varlen else f"{side} has seqlen"
            raise ValueError(f"{which} {longest}; accepted on CUDA: up to {MAX_SEQLEN}")
    check_count(f"q has {call.batch} sequences of {call.nheads} heads", call.batch * call.nheads)


def check_count(what: str, count: int, most: int = _MAX_INT32) -> None:
    """Raise if ``count`` exceeds ``most``. what: describes the count in the error."""
    if count > most:
        raise ValueError(f"{what}, {count} in all; accepted on CUDA: up to {most}")


def check_query_blocks(call: Call, kernel: Any) -> int:
    """The number of query blocks of a forward kernel; raises if it exceeds 32 bits."""
    queries = getattr(kernel.tile, "queries", kernel.tile.tile_m)
    packs = call.k.shape[-2] * -(-call.group // getattr(kernel.tile, "pack_heads", 1))
    if call.varlen and kernel.traits.arch == "sm90":  # its work tiles are the blocks of all sequences
        blocks = call.q.shape[0] // queries + call.batch
        each = f"rows in {call.batch} sequences, each padded to blocks of {queries}"
        check_count(f"q has {call.q.shape[0]} {each}", blocks * queries, MAX_ROWS)
        check_count(f"q has {packs} heads of {call.q.shape[0]} {each}: blocks", blocks * packs, MAX_ROWS)
        return blocks * packs
    blocks = -(-call.longest[0] // queries)
    what = (
        f"{call.stated('q')}{call.batch} sequences of {packs} heads of {blocks} blocks of {queries} queries"
    )
    check_count(what, call.batch * packs * blocks, MAX_ROWS)
    return call.batch * packs * blocks


def check_steps(call: Call, query_blocks: int, tile: Any, multiprocessors: int) -> None:
    """Raise if a CTA of a persistent kernel would count its steps beyond 32 bits.

    query_blocks: number of query blocks of all heads and sequences.
    """
    seen = call.longest[1]
    if call.mask.startswith("window"):
        seen = min(seen, call.window_left + call.window_right + tile.tile_m)
    key_blocks = -(-seen // tile.tile_n) + 1
    what = f"{call.stated('k')}up to {key_blocks} key blocks for each of {query_blocks} blocks of queries"
    steps = query_blocks * key_blocks // multiprocessors
    check_count(f"{what}: steps of each of {multiprocessors} multiprocessors", steps, MAX_STEPS)


def check_last_stride(name: str, tensor: Tensor) -> None:
    """Raise ValueError for rows whose elements are not contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tuple(tensor.stride())}; accepted: a last stride of 1")


def check_gradients(call: Call, outer: Sequence[Tensor | None]) -> None:
    """Raise if a backward's gradients of out and lse, out and lse do not fit the call. Assumes :func:`check`."""
    kinds = tuple(zip(call.output_shapes(), (call.q.dtype, call.lse_dtype), strict=True))
    names = ("grad_out", "grad_lse", "out", "lse")
    for name, tensor, (shape, dtype) in zip(names, outer, (*kinds, *kinds), strict=True):
        if tensor is None and name.startswith("grad"):
            continue
        check_dense(name, tensor)
        assert tensor is not None
        if tensor.device != call.q.device:
            raise ValueError(f"{name} is on {tensor.device}; accepted: {call.q.device}, where q is")
        if tuple(tensor.shape) != shape:
            raise wrong_shape(name, tensor, shape)
        check_dtype(name, tensor, dtype)


def check_out(call: Call, out: Tensor, *, rows: bool = False) -> None:
    """Raise if ``out`` cannot be written in place of a new output. Assumes that the call is checked.

    rows: True if kernels write it directly whenever they read q, k and v without padded copies.
    """
    wanted = {"device": call.q.device, "dtype": call.q.dtype, "shape": call.output_shapes()[0]}
    check_written("out", out, call.tensors(), rows=rows and call.q.is_cuda and call.aligned, **wanted)


def check_written(
    name: str, written: Any, others: Iterable[tuple[str, Tensor | None]], *, rows: bool = False, **wanted: Any
) -> None:
    """Raise if a result cannot be written to ``written``, a caller's tensor of the ``wanted`` device, dtype and shape.

    others: the call's other tensors, by name. rows: whether kernels write the tensor in place.
    """
    check_like(name, written, **wanted)
    present = [(other, x) for other, x in others if x is not None]
    if torch.is_grad_enabled() and (written.requires_grad or any(x.requires_grad for _, x in present)):
        raise ValueError(f"{name} is given where autograd records; accepted: without gradients")
    check_apart(name, written, present)
    if rows:
        check_rows(name, written)


def check_like(name: str, tensor: Any, **wanted: Any) -> None:
    """Raise unless ``tensor`` is dense and has the wanted device, dtype and shape."""
    check_dense(name, tensor)
    for what, value in wanted.items():
        own = getattr(tensor, what)
        if own != value:
            own, value = (tuple(x) if isinstance(x, torch.Size) else x for x in (own, value))
            raise ValueError(f"{name} has {what} {own}; accepted: {value}")


def check_rows(name: str, written: Tensor) -> None:
    """Raise ValueError for a tensor that kernels cannot write in place, because of its strides or address."""
    if memory.is_readable(written):
        return
    start = ""
    if not memory.may_be_aligned(written):
        past = written.data_ptr() % memory.ALIGNMENT_BYTES
        start = f" and starts {past} bytes past a multiple of {memory.ALIGNMENT_BYTES}"
    raise ValueError(
        f"{name} has strides {tuple(written.stride())}{start}; accepted: rows of contiguous elements that start at "
        f"multiples of {memory.ALIGNMENT_BYTES} bytes"
    )


def check_has_memory(name: str, written: Tensor) -> None:
    """Raise ValueError for a tensor of ``torch._efficientzerotensor``, which cannot be written."""
    if not torch.compiler.is_compiling() and written._is_zerotensor():
        raise ValueError(f"{name} is a tensor of zeros without memory; accepted: a tensor to write")


def check_writable(name: str, written: Tensor) -> None:
    """Raise ValueError for a tensor that an operator cannot write, because its memory does not contain its values."""
    check_has_memory(name, written)
    if not torch.compiler.is_compiling() and written.is_neg():
        raise ValueError(f"{name} is a view that torch negates where it is read; accepted: a tensor to write")


def check_apart(name: str, written: Tensor, others: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if elements of a written tensor overlap each other or another argument.

    Only tensors with addresses are compared; those of compilers and function transforms have none.
    """
    check_has_memory(name, written)
    addressed, sizes = memory.has_memory(written), zip(written.shape, written.stride(), strict=True)
    if memory.overlaps_itself(written) if addressed else any(n > 1 and step == 0 for n, step in sizes):
        raise ValueError(
            f"{name} has shape {tuple(written.shape)} and strides {tuple(written.stride())}, so that elements share "
            "memory; accepted: elements of which each has its own"
        )
    for other, x in others:
        if addressed and memory.has_memory(x) and memory.overlap(written, x):
            raise ValueError(f"{name} shares memory with {other}; accepted: memory of its own")


def check_append_for_kernels(call: Call) -> None:
    """Raise for a call that the kernels of a cache do not support. Assumes :func:`check_append`."""
    for name, x in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        check_dtype(name, x, *DTYPE_NAMES, on=" on CUDA")
    if call.bias is not None:
        check_dtype("bias", call.bias, *DTYPE_NAMES, on=" on CUDA")
        check_last_stride("bias", call.bias)
    check_cache_addresses(call)
    if call.k is not None:
        check_count("k has elements in rows of one head", call.k.numel() // call.k.shape[-1])


def check_cache_addresses(call: Call) -> None:
    """Raise for errors in addresses: a cache less aligned than its rows, or caches that are written and overlap."""
    k_cache, v_cache = call.k_cache, call.v_cache
    if call.k is not None:
        _check_appended(call)
    if not (k_cache.data_ptr() | v_cache.data_ptr()) % 16:
        return
    alignment = call.alignment
    multiple = alignment * k_cache.element_size() or memory.ALIGNMENT_BYTES
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not memory.is_aligned(x, alignment):
            raise ValueError(
                f"{name} starts {x.data_ptr() % multiple} bytes past a multiple of {multiple}; accepted: aligned as "
                "its rows are"
            )
