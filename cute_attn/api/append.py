""":func:`append_kv`: new keys and values into a cache, with rotary embedding, and its torch operator."""

import functools
from typing import Any

import torch
from torch import Tensor

from cute_attn.host import plans
from cute_attn.host.cache_checks import (
    check_append,
    check_append_for_kernels,
    check_cache_addresses,
    check_lengths,
    check_tensors,
)
from cute_attn.host.call import DTYPE_NAMES, Call, schema
from cute_attn.host.checks import check_count, check_writable
from cute_attn.host.dispatch import no_dispatch_mode
from cute_attn.host.launch import NOW, Repeated, Steps
from cute_attn.host.memory import (
    Tensors,
    as_strided,
    contiguous_strides,
    is_aligned,
    overwritten,
    readable,
    regular_strides,
    rows_are_regular,
)
from cute_attn.reference import kvcache as kvcache_reference
from cute_attn.tiles.inference import AppendTile
from cute_attn.traits import Traits

ARGUMENTS = (
    *("k_cache", "v_cache", "k", "v", "cache_seqlens", "page_table", "cache_batch_idx", "cu_seqlens_k_new"),
    *("rotary_cos", "rotary_sin", "rotary_seqlens", "rotary_interleaved"),
)
"""Of the operator ``append_kv``, in order: fields of a call."""


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
    """Write new keys and values behind those that a cache has, in place.

    :mod:`cute_attn.reference.kvcache` is the definition; CPU tensors are computed by it. Keys equal it bit for bit.
    Nothing is read on the host, so that a CUDA graph replays with other lengths and tables.

    Parameters
    ----------
    k_cache : Tensor (entries, capacity, nheads_kv, head_dim), or (pages, page_size, nheads_kv, head_dim)
        fp16 or bf16 on CUDA, any float dtype on the CPU. The last dimension is contiguous, other strides are multiples
        of 8 elements in any order, on CUDA the data is aligned to 16 bytes; head_dim is a multiple of 8 up to 256, the
        capacity at most 2**30 - 2**13.
    v_cache : Tensor
        As k_cache, with head_dim_v, in memory of its own.
    k, v : Tensor (batch, rows, nheads_kv, head_dim) and head_dim_v, or packed (total, nheads_kv, head_dim)
        New rows.
    cache_seqlens : Tensor (batch,), int32
        Rows in use before, where the new ones go. Rows beyond the capacity are written nowhere.
    page_table : Tensor (entries, pages of an entry), int32, optional
        The pages of each entry, of any size; the capacity is all of them. Entries beyond a sequence's end may have any
        values.
    cache_batch_idx : Tensor (batch,), int32, optional
        Each sequence's entry of the cache or of page_table; by default sequence b has entry b. Where sequences share
        one, any one's rows remain.
    cu_seqlens_k_new : Tensor (batch + 1,), int32, optional
        Where packed sequences of k and v start.
    rotary_cos, rotary_sin : Tensor (positions, pairs), k_cache's dtype, optional
        Rotate the first 2 * pairs elements of new keys, in fp32. At least as many positions as the capacity, unless
        there are rotary_seqlens; positions beyond them count as the last.
    rotary_seqlens : Tensor (batch,), int32, optional
        The position of each sequence's first new row; by default its cache_seqlens.
    rotary_interleaved : bool
        Whether pairs are elements (2i, 2i + 1) (GPT-J) rather than (i, i + pairs) (GPT-NeoX).
    check_lengths : bool
        Read lengths and tables on the host and raise where they are out of bounds. This waits for the device.

    Raises
    ------
    TypeError, ValueError
        An argument is not what is described here; the message names it, its value and what is accepted.
    NotImplementedError
        A tensor requires a gradient.
    """
    tensors = (
        *(k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx, cu_seqlens_k_new),
        *(rotary_cos, rotary_sin, rotary_seqlens),
    )
    key, direct = ("append_kv", rotary_interleaved), no_dispatch_mode()
    if direct and not check_lengths:
        known = plans.find(key, tensors)  # of a call that was checked
        if known is not None and (known.constant or not torch.is_grad_enabled()):
            check_cache_addresses(k_cache, v_cache)
            known.plan(tensors)
            return overwritten(k_cache, v_cache)
    call = Call.of(ARGUMENTS, (*tensors, rotary_interleaved))
    check_tensors(call, ("k_cache", "v_cache", "k", "v", "cache_seqlens"))
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_writable(name, x)
    refuse_gradients(call, "append_kv")
    call = call.materialized()
    if check_lengths:
        check_append(call, batch_of(call))
        _check_lengths(call)
    torch.ops.cute_attn.append_kv.default(*call.values(ARGUMENTS))
    if direct and not check_lengths and k_cache.is_cuda:
        plans.keep(key, tensors, Repeated(functools.partial(_in_steps, rotary_interleaved)))


def _in_steps(rotary_interleaved: bool, tensors: Tensors, steps: Steps) -> tuple[()]:
    """The launch of a call that was checked. tensors: the other arguments, in order."""
    launch(Call.of(ARGUMENTS, (*tensors, rotary_interleaved)), steps=steps)
    return ()


_check_lengths = check_lengths  # the parameter of the same name hides it


def refuse_gradients(call: Call, function: str) -> None:
    """Raise NotImplementedError where autograd would record the call."""
    if torch.is_grad_enabled():
        for name, x in call.tensors():
            if x.requires_grad:
                raise NotImplementedError(
                    f"{name} requires a gradient, which {function} does not give; accepted: tensors without one"
                )


def batch_of(call: Call) -> int:
    """Number of sequences of an append."""
    seqlens = call.cache_seqlens
    if seqlens is None or seqlens.dim() != 1:
        shape = None if seqlens is None else tuple(seqlens.shape)
        raise ValueError(f"cache_seqlens has shape {shape}; accepted: (batch,)")
    return seqlens.shape[0]


# ---- the operator ----

_library = torch.library.Library("cute_attn", "FRAGMENT")
CACHES = {"k_cache": "Tensor(a!)", "v_cache": "Tensor(b!)"}
"""The types, in schemas, of what an append writes."""
_library.define(
    f"append_kv({schema(ARGUMENTS, cache_seqlens='Tensor', **CACHES)}) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def append_cpu(*arguments: Any) -> None:
    """By the definition."""
    call = Call.of(ARGUMENTS, arguments)
    check_append(call, batch_of(call))
    append_by_definition(call)


def append_by_definition(call: Call) -> None:
    """Of checked parameters with k and v."""
    assert call.k is not None and call.v is not None and call.cache_seqlens is not None
    kvcache_reference.append(
        call.cache,
        call.k,
        call.v,
        call.cache_seqlens,
        cu_seqlens_k_new=call.cu_seqlens_k_new,
        rotary=call.rotary,
    )


def append_cuda(*arguments: Any) -> None:
    """By the append kernel, on the current stream of the cache's device."""
    call = Call.of(ARGUMENTS, arguments)
    check_append(call, batch_of(call))
    check_append_for_kernels(call)
    launch(call)
    overwritten(call.k_cache, call.v_cache)


_library.impl("append_kv", append_cpu, "CPU")
_library.impl("append_kv", append_cuda, "CUDA")


@torch.library.register_fake("cute_attn::append_kv", lib=_library)
def _append_fake(*arguments: Any) -> None:
    """Nothing but the caches is written."""


# ---- the launch ----


def traits_of(call: Call, arch: str, q: Tensor | None) -> Traits:
    """Of the append kernel; q: queries to rotate."""
    rotary = "interleaved" if call.rotary_interleaved else "halves"
    return Traits(
        "append",
        arch,
        DTYPE_NAMES[call.k_cache.dtype],
        call.k_cache.shape[-1],
        call.v_cache.shape[-1],
        varlen=q is not None and q.dim() == 3,
        rotary="" if call.rotary_cos is None else rotary,
        rotate_q=q is not None,
        varlen_new=call.cu_seqlens_k_new is not None,
        paged=call.page_table is not None,
        batch_idx=call.cache_batch_idx is not None,
    )


def launch(
    call: Call,
    q: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    rises: bool = False,
    steps: Steps = NOW,
) -> Tensor | None:
    """Launch the kernel: append, and with ``q`` return its rotated copy.

    Args:
        call: checked; without k and v nothing is appended.
        q: queries to rotate, or None.
        cu_seqlens_q: where packed ones start.
        rises: whether positions of queries rise within a sequence.
    """
    from cute_attn import compiler

    rotated = None
    with torch.cuda.device(call.k_cache.device):
        if any(x is not None and not is_aligned(x) for x in (q, call.k, call.v)):
            steps.unlike_others()
        if q is not None:
            q = readable(q)
            shape = tuple(q.shape)
            rotated = steps.empty(q, shape, contiguous_strides(shape), q.dtype)
        arguments, rows = kernel_arguments(call, q, rotated, cu_seqlens_q, rises)
        if rows:
            target = compiler.default_target("sm80")
            traits = traits_of(call, "sm90" if target == "sm90" else "sm80", q)
            steps.launch(compiler.compile(traits, None, target).function, *arguments)
    return rotated


def kernel_arguments(
    call: Call,
    q: Tensor | None,
    rotated: Tensor | None,
    cu_seqlens_q: Tensor | None,
    rises: bool,
) -> tuple[tuple, int]:
    """The kernel's arguments as :mod:`cute_attn.kernels.arguments` has them, and how many rows there are."""
    from cute_attn.device.key_rows import CacheTables
    from cute_attn.rows.new_rows import Angles, NewKeys, Queries

    first = call.cache_seqlens if call.rotary_seqlens is None else call.rotary_seqlens
    seqlens = first if call.cache_seqlens is None else call.cache_seqlens
    if call.k is None or call.v is None or call.k.numel() == 0:
        # A dimension of 0 rows before an address that is aligned.
        none = [x[:0] for x in (call.k_cache, call.v_cache)]
        k, v = (x[:, 0] if call.cu_seqlens_k_new is not None else x for x in none)
    else:
        k, v = readable(call.k), readable(call.v)
    tables = None
    if call.page_table is not None or call.cache_batch_idx is not None:
        table = call.page_table
        tables = CacheTables(None if table is None else _regular(table), call.cache_batch_idx)
    angles = None
    if call.rotary_cos is not None and call.rotary_sin is not None:
        angles = Angles(_regular(call.rotary_cos), _regular(call.rotary_sin), first)
    queries = None if q is None else Queries(q, rotated, cu_seqlens_q, int(rises))
    rows = k.numel() // k.shape[-1] // k.shape[-2]
    if q is not None:
        rows += q.numel() // q.shape[-1] // max(q.shape[-2], 1)
    check_count("k and q have rows", rows)
    heads = max(k.shape[-2] * (k.shape[-1] + v.shape[-1]), 0 if q is None else q.shape[-2] * q.shape[-1])
    check_count("k and v, or q, have elements in a row of all heads", heads, _MAX_ROW)
    if seqlens is None or seqlens.shape[0] == 0:
        rows = 0  # what rows there are belong to no sequence
    new = NewKeys(_regular(k), _regular(v), seqlens, call.cu_seqlens_k_new)
    return (_regular(call.k_cache), _regular(call.v_cache), tables, new, angles, queries), rows


# The grid's second extent is at most 65,535 CTAs, of threads with 8 elements each.
_MAX_ROW = 65_535 * AppendTile().num_threads * 8


def _regular(x: Tensor) -> Tensor:
    """A view with the strides that kernels assume, also of dimensions of size 1."""
    return x if rows_are_regular(x) else as_strided(x, tuple(x.shape), regular_strides(x, x.shape))
