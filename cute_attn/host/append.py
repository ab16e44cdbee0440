"""The launch of the append kernel, which writes new keys and values to a cache and rotated queries to a copy."""

from typing import Any

from torch import Tensor

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.host import record
from cute_attn.host.call import DTYPE_NAMES, Call
from cute_attn.host.checks import check_count
from cute_attn.host.memory import ALIGNMENT_BYTES, on_device, regular
from cute_attn.tiles.inference import AppendTile
from cute_attn.traits import Traits


def traits_of(call: Call, arch: str, q: Tensor | None) -> Traits:
    """Traits of the append kernel; q: queries to rotate."""
    rotary = "interleaved" if call.rotary_interleaved else "halves"
    return Traits(
        "append", arch, DTYPE_NAMES[call.k_cache.dtype], call.k_cache.shape[-1], call.v_cache.shape[-1],
        varlen=q is not None and q.dim() == 3, rotary="" if call.rotary_cos is None else rotary,
        rotate_q=q is not None, varlen_new=call.cu_seqlens_k_new is not None, paged=call.page_table is not None,
        batch_idx=call.cache_batch_idx is not None, alignment=call.alignment,
    )  # fmt: skip


def launch(call: Call, q: Tensor | None = None) -> Tensor | None:
    """Launch the kernel of a checked call: append k and v, if any, and with ``q`` return its rotated copy."""
    rotated = None
    with on_device(call.k_cache.get_device()):
        if q is not None:
            q = record.readable(q, call.alignment)
            rotated = record.contiguous(q, tuple(q.shape))
        arguments, rows = kernel_arguments(call, q, rotated)
        if rows:
            target = compiler.default_target("sm80")
            traits = traits_of(call, registry.generations(target)[0], q)
            record.launch(*compiler.compile(traits, None, target).bind(**arguments))
    return rotated


def kernel_arguments(call: Call, q: Tensor | None, rotated: Tensor | None) -> tuple[dict[str, Any], int]:
    """The kernel's arguments, with tuples in place of its classes, and the number of rows.

    Under a mask, positions of queries rise within a sequence.
    """
    alignment = call.alignment
    first = call.cache_seqlens if call.rotary_seqlens is None else call.rotary_seqlens
    seqlens = first if call.cache_seqlens is None else call.cache_seqlens
    if call.k is None or call.v is None or call.k.numel() == 0:
        # A dimension of 0 rows before an address that is aligned.
        none = [x[:0] for x in (call.k_cache, call.v_cache)]
        k, v = (x[:, 0] if call.cu_seqlens_k_new is not None else x for x in none)
    else:
        k, v = record.readable(call.k, alignment), record.readable(call.v, alignment)
    angles = None
    if call.rotary_cos is not None and call.rotary_sin is not None:
        angles = (regular(call.rotary_cos), regular(call.rotary_sin), first)
    queries = None if q is None else (q, rotated, call.cu_seqlens_q, int(bool(call.mask)))
    rows = k.numel() // k.shape[-1] // k.shape[-2]
    if q is not None:
        rows += q.numel() // q.shape[-1] // max(q.shape[-2], 1)
    check_count("k and q have rows", rows)
    heads = max(k.shape[-2] * (k.shape[-1] + v.shape[-1]), 0 if q is None else q.shape[-2] * q.shape[-1])
    vector = alignment or ALIGNMENT_BYTES // k.element_size()
    check_count("k and v, or q, have elements in a row of all heads", heads, _MAX_ROW * vector)
    if seqlens is None or seqlens.shape[0] == 0:
        rows = 0  # rows, if any, belong to no sequence
    new = (regular(k, alignment), regular(v, alignment), seqlens, call.cu_seqlens_k_new)
    own = (record.in_place(x, alignment) for x in (call.k_cache, call.v_cache))
    caches = {**dict(zip(("mKcache", "mVcache"), own, strict=True)), "tables": call.tables}
    return {**caches, "new": new, "angles": angles, "queries": queries}, rows


# The grid's second extent is at most 65,535 CTAs, of threads with a vector each.
_MAX_ROW = 65_535 * AppendTile().num_threads
