""":func:`append_kv`: new keys and values into a cache, with rotary embedding, and its torch operator."""

from typing import Any

import torch
from torch import Tensor

from cute_attn.host import checks, plans
from cute_attn.host.append import launch
from cute_attn.host.call import Call, define, schema
from cute_attn.host.dispatch import refuse_derivatives
from cute_attn.host.memory import Tensors
from cute_attn.host.record import overwritten
from cute_attn.host.values import check_flags
from cute_attn.reference import kvcache as kvcache_reference

ARGUMENTS = (
    *("k_cache", "v_cache", "k", "v", "cache_seqlens", "page_table", "cache_batch_idx", "cu_seqlens_k_new"),
    *("rotary_cos", "rotary_sin", "rotary_seqlens", "rotary_interleaved"),
)
"""Names of the arguments of the operator ``append_kv``, in order. Each is a field of ``Call``."""


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    check_lengths: bool = False,
) -> None:
    """Append new keys and values to a cache, in place.

    The definition is :mod:`cute_attn.reference.kvcache`, which also computes CPU tensors. Keys stored on CUDA equal
    the definition's bit for bit. Nothing is read on the host, so a CUDA graph replays with other lengths and tables.

    Parameters
    ----------
    k_cache : Tensor (entries, capacity, nheads_kv, head_dim), or (pages, page_size, nheads_kv, head_dim)
        fp16, bf16 or fp32 on CUDA, any float dtype on the CPU. The last dimension is contiguous; other strides are
        arbitrary. Kernels are fastest if head_dim and strides are multiples of 16 bytes. The address on CUDA has the
        same alignment: 16 bytes, or 4, 2 or 1 elements if head_dim and strides are only multiples of so many. head_dim
        is at most 576, the capacity 2**30 - 2**13.
    v_cache : Tensor
        As k_cache, with head_dim_v up to 512; must not overlap k_cache. The one exception is latent values: the view
        ``k_cache[..., :head_dim_v]``, with ``k[..., :head_dim_v]`` as v and without rotary embedding.
    k, v : Tensor (batch, rows, nheads_kv, head_dim) and head_dim_v, or packed (total, nheads_kv, head_dim)
        New rows.
    cache_seqlens : Tensor (batch,), int32
        Rows in use before the call, 0 to the capacity (checked on the CPU only). New rows are stored after them; rows
        beyond the capacity are not written.
    page_table : Tensor (entries, pages per entry), int32, optional
        The page numbers of each entry. Pages may have any size; the capacity is the rows of all pages of an entry.
        Page numbers beyond a sequence's end may have any value.
    cache_batch_idx : Tensor (batch,), int32, optional
        The entry of the cache, or of page_table, for each sequence; by default, b for sequence b. If several sequences
        have the same entry, the rows of an arbitrary one remain.
    cu_seqlens_k_new : Tensor (batch + 1,), int32, optional
        Start offsets of packed sequences in k and v.
    rotary_cos, rotary_sin : Tensor (positions, pairs), k_cache's dtype, optional
        Rotate the first 2 * pairs elements of new keys, in fp32. Unless rotary_seqlens is given, there must be at least
        as many positions as the capacity. Rows at positions beyond the tables are rotated as at the last position.
    rotary_seqlens : Tensor (batch,), int32, optional
        The position of each sequence's first new row; by default its cache_seqlens.
    rotary_interleaved : bool
        True: pairs are elements (2i, 2i + 1) (GPT-J). False: (i, i + pairs) (GPT-NeoX).
    check_lengths : bool
        Read lengths and tables on the host, also on CUDA, and raise if any of them, or a new row, is out of bounds.
        This waits for the device.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here; the message names the argument, its value and the accepted values.
    NotImplementedError
        A tensor requires a gradient.
    """
    tensors = (
        *(k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx, cu_seqlens_k_new),
        *(rotary_cos, rotary_sin, rotary_seqlens),
    )
    if check_lengths is not False:
        _append(tensors, rotary_interleaved, check_lengths)
        return
    key = ("append_kv", rotary_interleaved)
    plans.repeat(key, tensors, lambda: _append(tensors, rotary_interleaved, check_lengths))


def _append(tensors: Tensors, rotary_interleaved: bool, check_lengths: bool) -> tuple[()]:
    """Check and run an append that repeats no recorded one; tensors: the tensor arguments, in order."""
    k_cache, v_cache = tensors[:2]
    check_flags(rotary_interleaved=rotary_interleaved, check_lengths=check_lengths)
    call = Call.of(ARGUMENTS, (*tensors, bool(rotary_interleaved)))
    checks.check_tensors(call, ("k_cache", "v_cache", "k", "v", "cache_seqlens"))
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.check_writable(name, x)
    refuse_derivatives(call.tensors(), "append_kv")
    call = call.materialized()
    if check_lengths:
        checks.check_append(call)
        checks.check_lengths(call)
    torch.ops.cute_attn.append_kv.default(*call.values(ARGUMENTS))
    return ()


# ---- the operator ----

CACHES = {"k_cache": "Tensor(a!)", "v_cache": "Tensor(b!)"}
"""Schema types of the tensors that an append writes."""


def append_cpu(*arguments: Any) -> None:
    call = Call.of(ARGUMENTS, arguments)
    checks.check_append(call)
    append_by_definition(call)


def append_by_definition(call: Call) -> None:
    """Append k and v of checked parameters in plain torch."""
    assert call.k is not None and call.v is not None and call.cache_seqlens is not None
    more: dict[str, Any] = {"cu_seqlens_k_new": call.cu_seqlens_k_new, "rotary": call.rotary}
    kvcache_reference.append(call.cache, call.k, call.v, call.cache_seqlens, **more)


def append_cuda(*arguments: Any) -> None:
    """Run the append kernel on the current stream of the cache's device."""
    call = Call.of(ARGUMENTS, arguments)
    checks.check_append(call)
    checks.check_append_for_kernels(call)
    launch(call)
    overwritten(call.k_cache, call.v_cache, beside=(call.k, call.v))


define(
    f"append_kv({schema(ARGUMENTS, cache_seqlens='Tensor', **CACHES)}) -> ()",
    append_cpu,
    append_cuda,
    lambda *_: None,  # only caches are written
)
