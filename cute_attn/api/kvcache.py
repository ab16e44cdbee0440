""":func:`attention_with_kvcache`: attention of new queries with a cache of keys and values, and its torch operator.

A CUDA call has up to three launches: the append kernel if the call appends or rotates rows, the kvcache kernel, and
the combine kernel if the keys of a query block are split among CTAs.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attn.api import append
from cute_attn.api.attention import Result, Window, resolve_mask, result_of
from cute_attn.api.functions import Functions, MaskMod, ScoreMod, all_epilogues, as_one_node
from cute_attn.api.operators import nothing
from cute_attn.epilogues.functions.known import with_texts, without_texts
from cute_attn.host import checks, memory, plans, record, values
from cute_attn.host.append import launch as launch_append
from cute_attn.host.bias import readable
from cute_attn.host.block_masks import Packed
from cute_attn.host.call import (
    LARGE_HEAD_DIM,
    Call,
    define,
    is_latent,
    pack_epilogues,
    pytorchs_precision,
    schema,
)
from cute_attn.host.choose import check_words
from cute_attn.host.dispatch import refuse_derivatives
from cute_attn.host.forward import Outputs
from cute_attn.host.plans import no_dispatch_mode
from cute_attn.host.split_kv import MAX_PARTIALS, empty_maxima, plan_of
from cute_attn.host.split_kv import launch as launch_attention
from cute_attn.reference import kvcache as kvcache_reference

_TENSORS = (
    "q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "page_table", "cache_batch_idx", "cu_seqlens_k_new",
    "rotary_cos", "rotary_sin", "rotary_seqlens", "cache_leftpad", "cu_seqlens_q", "alibi_slopes", "bias", "sinks",
    "tree_mask",
)  # fmt: skip
_OPTIONS = (
    "rotary_interleaved", "max_seqlen_q", "softmax_scale", "mask", "window_left", "window_right", "softcap",
    "kernel", "tile", "num_splits", "same_bits", "epilogues", "epilogue_tensors", "epilogue_numbers", "aux",
)  # fmt: skip
ARGUMENTS = (*_TENSORS[:12], _OPTIONS[0], *_TENSORS[12:], *_OPTIONS[1:])
"""Names of the arguments of the operator ``attention_with_kvcache``, in order. Each is a field of ``Call``."""


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: Any = None,
    epilogues: Sequence[str] | Mapping[str, Any] = (),
    num_splits: int = 0,
    same_bits: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
    return_max_scores: bool = False,
    kernel: str | None = None,
    tile: Any = None,
    check_lengths: bool = False,
) -> Result:
    """Append new keys and values to a cache, then attend to the cache; no gradients.

    The definition is :mod:`cute_attn.reference.kvcache`, which also computes CPU tensors. Masks, windows and ALiBi are
    aligned bottom right: a sequence's last query sees its last key. Nothing is read on the host, so a CUDA graph
    replays with other lengths and tables.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, nheads, head_dim), or packed (total_q, nheads, head_dim) with cu_seqlens_q
        k_cache's dtype; nheads is a multiple of nheads_kv. Products of fp32 tensors follow PyTorch's setting of fp32 or
        tf32 precision.
    k_cache, v_cache, k, v, page_table, cache_batch_idx, cu_seqlens_k_new, rotary_seqlens, rotary_interleaved, \
check_lengths
        As for :func:`cute_attn.api.append.append_kv`. Without k and v nothing is appended, and caches may overlap. On
        CUDA, fp32 head dims are at most 256. For head dims above 256, a v_cache ``k_cache[..., :head_dim_v]``, as in
        DeepSeek's latent attention, is loaded together with k_cache on Hopper.
    cache_seqlens : Tensor (batch,), int32, or int, optional
        Rows in use before the append, including leftpad: 0 to the capacity. Values of a CUDA tensor are checked only
        with check_lengths. Required with k; otherwise the default is the capacity.
    cache_leftpad : Tensor (batch,), int32, optional
        The first valid row of each sequence. Positions of rotary embedding still count from row 0.
    cu_seqlens_q : Tensor (batch + 1,), int32, optional
        Start offsets of packed queries.
    max_seqlen_q : int, optional
        Length of the longest packed sequence, or more. Default: all rows.
    rotary_cos, rotary_sin : Tensor (positions, pairs), k_cache's dtype, optional
        Rotate new keys and the queries, in fp32 and then rounded. Query i is at rotary_seqlens[b] + i, by default
        cache_seqlens[b] + i, if causal or a window is given; otherwise all queries are at the first position.
    softmax_scale, causal, window, softcap, alibi_slopes, sinks
        As for :func:`cute_attn.attention`; causal is False or True.
    bias : Tensor (batch or 1, nheads or 1, seqlen_q or 1, keys or 1), fp16, bf16, fp32 or bool, optional
        As for :func:`cute_attn.attention`, after ALiBi. Row i is for a sequence's query i in this call, column j for
        its key j, from cache_leftpad. keys: at least the longest sequence's, which is checked on the CPU and with
        check_lengths; later keys read the last column. With packed queries seqlen_q is max_seqlen_q. If all keys that a
        query sees have a number of 1e8 or more in magnitude, out is the mean of their values only with num_splits 1.
    tree_mask : Tensor (total_q, words), int32, optional
        For queries that are a tree of draft tokens. Bit j of row i (bit j % 32 of word j // 32) is set if query i sees
        key j of the last seqlen_q keys of its sequence, which are the draft tokens' keys. All earlier keys are visible.
        total_q: rows of q, batch * seqlen_q or packed; words: at least max_seqlen_q / 32. Rows are not positions in a
        tree, so windows and ALiBi are not supported, and rotary embedding must be applied before the call.
    score_mod, mask_mod, epilogues
        As for :func:`cute_attn.attention`, after softcap, ALiBi, bias and the tree. q_idx counts a sequence's queries
        in this call, kv_idx its keys from cache_leftpad. A query's position is ``q_idx + seqlen_k - seqlen_q``; a
        function must capture these lengths. Functions support several heads per work tile, registered epilogues one.
    block_mask : torch.nn.attention.flex_attention.BlockMask, optional
        As for :func:`cute_attn.attention`, made for batch sequences or 1, nheads heads or 1, seqlen_q queries or more,
        and at least as many keys as a sequence may have: an entry's rows, or the rows of all its pages. Its queries are
        those of this call, its keys those of a sequence, from cache_leftpad. Blocks that it hides from all query heads
        of a key head are not read, except with cache_leftpad, in fp32 and for head dims above 256.
    num_splits : int
        How the keys of a query block are split on CUDA. 0: depends on shapes, the cache's capacity included; 1: no
        split; n up to 512: n splits. Repeated calls are equal bit for bit. Other splits change rounding, and so do,
        with 0, other numbers of sequences in the batch.
    same_bits : bool
        As for :func:`cute_attn.attention`: a row's results depend only on its own sequence, bit for bit. Without rotary
        embedding they equal those of :func:`cute_attn.attention` and :func:`cute_attn.attention_varlen` with the same
        keys. Requires num_splits 0, no cache_leftpad, and pages of a multiple of 8 rows.
    out : Tensor, optional
        Memory for the returned out, instead of a new tensor; must not overlap any other argument.
    return_lse : bool
        Also return the logarithm of each row's sum of exponentials.
    return_max_scores : bool
        Also return each row's greatest score, as :func:`cute_attn.attention` does.
    kernel, tile
        As for :func:`cute_attn.attention`.

    Returns
    -------
    out : Tensor, shaped like q with head_dim_v
        0 where a query sees no key. Rows of packed q that belong to no sequence are not written, or have arbitrary
        values if keys are split (``num_splits``).
    lse : Tensor (batch, nheads, seqlen_q), or packed (nheads, total_q), float32 (float64 for float64 q)
        With return_lse. Natural logarithm; -inf, or the sink, where a query sees no key.
    max_scores : Tensor, like lse
        With return_max_scores. -inf where a query sees no key.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here; the message names the argument, its value and the accepted values.
    Unsupported
        No kernel supports the call; a ValueError that gives each kernel's reason.
    NotImplementedError
        A tensor requires a gradient.
    """
    if not isinstance(cache_seqlens, Tensor | None) and isinstance(q, Tensor) and not q.is_nested:
        cache_seqlens = _one_length(cache_seqlens, q, cu_seqlens_q, k_cache, page_table)
    if isinstance(bias, Tensor) and isinstance(q, Tensor):
        bias = readable(bias, q.dtype, bias.shape[-1] if bias.dim() else 0)
    tensors = (
        q, k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx, cu_seqlens_k_new, rotary_cos,
        rotary_sin, rotary_seqlens, cache_leftpad, cu_seqlens_q, alibi_slopes, bias, sinks, tree_mask,
    )  # fmt: skip
    options = (
        rotary_interleaved, max_seqlen_q, softmax_scale, causal, window, softcap, num_splits, same_bits, kernel,
        tile, check_lengths, return_lse, return_max_scores, epilogues,
    )  # fmt: skip
    functions = (score_mod, mask_mod, block_mask)
    given, read = tensors if out is None else (*tensors, out), plans.NOTHING
    key: Hashable = options
    users = isinstance(kernel, str) and ":" in kernel  # a user's class may be registered again at any time
    reads = score_mod is not None or mask_mod is not None or block_mask is not None
    shapes: tuple = ()
    if (reads or type(epilogues) is not tuple or epilogues) and not users and isinstance(q, Tensor):
        brought, sizes = None, (*q.shape[:3], *k_cache.shape[1:3]) if isinstance(k_cache, Tensor) else ()
        if block_mask is not None:
            of_tables = getattr(page_table, "shape", None), getattr(cu_seqlens_q, "shape", None)
            sizes = shapes = q.shape, getattr(k_cache, "shape", None), *of_tables, max_seqlen_q
        if not torch.compiler.is_compiling():
            brought = plans.read_by(functions, sizes, (), epilogues)
        if brought is None:
            users = True
        else:
            own_key, own, read = brought
            key, given = (options[:-1], own_key), (*given, *own)
    arguments = (functions, tensors, out, options, shapes)
    plain = check_lengths is False and type(return_lse) is type(return_max_scores) is bool
    if users or not plain:
        found = as_one_node(_attend, *arguments)
    else:
        cached = isinstance(k_cache, Tensor) and not k_cache.is_nested and k_cache.dim() == 4
        latent = cached and k_cache.shape[-1] > LARGE_HEAD_DIM and _are_latent(k_cache, v_cache)
        precision = _precision(q) if cached and k_cache.dtype == torch.float32 else ""
        key = ("attention_with_kvcache", key, latent, precision)
        found = plans.repeat(key, given, lambda: as_one_node(_attend, *arguments), read)
    if found[2] is not None:
        return result_of(found, return_lse)
    return found[:2] if return_lse else found[0]


def _precision(q: Any) -> str:
    """PyTorch's precision of fp32 products, which may change between calls; empty for tensors of other dtypes."""
    single = isinstance(q, Tensor) and q.dtype == torch.float32 and no_dispatch_mode()
    return pytorchs_precision() if single else ""


def _are_latent(k_cache: Tensor, v_cache: Any) -> bool:
    """:func:`is_latent` for tensors with memory. A record made with latent values must not serve other values."""
    if not isinstance(v_cache, Tensor) or v_cache.is_nested or v_cache.dim() != 4 or not no_dispatch_mode():
        return False  # the checks refuse it, or the dispatcher serves it
    dense = all(x.layout is torch.strided and memory.has_memory(x) for x in (k_cache, v_cache))
    return dense and is_latent(k_cache, v_cache)


def _attend(
    functions: Functions, tensors: memory.Tensors, out: Tensor | None, options: tuple, shapes: tuple
) -> Outputs:
    """out, lse, and max_scores or None, of a call that repeats no record; tensors: in the order of ``_TENSORS``.

    shapes: the key of a BlockMask's lists.
    """
    call = Call.of(_TENSORS, tensors)
    q, k_cache, cu_seqlens_q = call.q, call.k_cache, call.cu_seqlens_q
    rotary_interleaved, max_seqlen_q, softmax_scale, causal, window, softcap, num_splits, *others = options
    same_bits, kernel, tile, check_lengths, return_lse, return_max_scores, named = others
    num_splits = values.python_number(num_splits)
    if not values.is_int(num_splits) or not 0 <= num_splits <= MAX_PARTIALS:
        raise ValueError(f"num_splits is {values.shown(num_splits)}; accepted: 0 to {MAX_PARTIALS}")
    values.check_flags(
        rotary_interleaved=rotary_interleaved, same_bits=same_bits, return_lse=return_lse,
        return_max_scores=return_max_scores, check_lengths=check_lengths,
    )  # fmt: skip
    if not values.is_one_of(causal, (False, True)):
        raise ValueError(f"causal is {values.shown(causal)}; accepted: False or True, aligned bottom right")
    for name, x in (("q", q), ("k_cache", k_cache)):
        values.check_dense(name, x)
    mask, left, right = resolve_mask(causal, window)
    packed = cu_seqlens_q is not None
    longest = q.shape[0 if packed else 1] if q.dim() > 1 else 0
    stated = longest if max_seqlen_q is None else values.length("max_seqlen_q", max_seqlen_q)
    call = call._replace(
        rotary_interleaved=bool(rotary_interleaved), max_seqlen_q=stated if packed else longest,
        softmax_scale=values.scale_of(softmax_scale, q), mask=mask, window_left=left, window_right=right,
        softcap=values.number("softcap", softcap), kernel=values.kernel_name(kernel),
        tile=values.tile_text("tile", tile), num_splits=num_splits, same_bits=bool(same_bits),
        aux="max_scores" if return_max_scores else "",
    )  # fmt: skip
    sequences = None
    if functions[2] is not None:
        if not torch.compiler.is_compiling():
            checks.check_attention(call)
        sizes = (call.batch, call.max_seqlen_q, call.nheads, call.cache.capacity, k_cache.shape[2], 1)
        sequences = Packed((), sizes, shapes)
    named = all_epilogues(tensors, named, functions, packed=sequences)
    names, own, numbers = pack_epilogues(named)
    own = memory.materialized(own)
    call = call._replace(
        epilogues=names, epilogue_tensors=own, epilogue_numbers=numbers, precision=_precision(q)
    )
    checks.check_tensors(call, ("q", "k_cache", "v_cache"))
    if q.device.type == "cpu" and (call.kernel or call.tile):
        check_words(call.kernel, kvcache=call.tile)
    for name in ("k_cache", "v_cache") if call.k is not None else ():
        checks.check_writable(name, getattr(call, name))
    call = call.materialized()
    refuse_derivatives(call.tensors(), "attention_with_kvcache")
    # Shapes are compared with out's below; while a compiler traces, the operator checks.
    if check_lengths or (out is not None and no_dispatch_mode()):
        checks.check_attention(call)
    if check_lengths:
        checks.check_lengths(call)
    if out is not None:
        checks.check_out(call, out)
    if q.is_cuda and no_dispatch_mode() and memory.all_plain([x for _, x in call.tensors()]):
        direct = out if out is not None and _is_written_directly(out, call.alignment) else None
        found, lse, aux = attend(call, direct)
    else:
        call = call._replace(epilogues=with_texts(call.epilogues))
        found, lse, aux = torch.ops.cute_attn.attention_with_kvcache.default(*call.values(ARGUMENTS))
    if out is not None and found is not out:
        found = memory.write_owned(out, found, cu_seqlens_q)
        record.also()
    return found, lse, aux if call.aux else None


def _is_written_directly(out: Tensor, alignment: int) -> bool:
    """True if kernels can write ``out``; otherwise the result is copied to it."""
    return memory.is_readable(out, alignment) and not memory.is_lazy(out)


def _one_length(
    cache_seqlens: Any, q: Tensor, cu_seqlens_q: Tensor | None, k_cache: Any, page_table: Any
) -> Tensor:
    """A tensor that gives all sequences the length ``cache_seqlens``, an int."""
    cache_seqlens = values.python_number(cache_seqlens)
    if not values.is_int(cache_seqlens):
        raise TypeError(
            f"cache_seqlens is {values.shown(cache_seqlens)}; accepted: int32 (batch,), an int or None"
        )
    most = checks.MAX_SEQLEN
    tables = page_table is None or (isinstance(page_table, Tensor) and page_table.dim() == 2)
    if isinstance(k_cache, Tensor) and k_cache.dim() == 4 and tables:  # otherwise the checks refuse them
        most = min(most, kvcache_reference.Cache(k_cache, k_cache, page_table).capacity)
    if not 0 <= cache_seqlens <= most:
        raise ValueError(f"cache_seqlens is {cache_seqlens}; accepted: 0 to {most}, the cache's capacity")
    if cu_seqlens_q is not None:
        checks.check_starts("cu_seqlens_q", cu_seqlens_q)
    rows = q if cu_seqlens_q is None else cu_seqlens_q[1:]
    batch = rows.shape[0] if rows.dim() else 0  # a q without dimensions is refused later
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)


# ---- the operator ----


def _call_of(arguments: tuple) -> Call:
    call = Call.of(ARGUMENTS, arguments)
    return call._replace(epilogues=without_texts(call.epilogues)) if call.epilogues else call


def attend_cpu(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _call_of(arguments)
    checks.check_attention(call)
    if call.k is not None:
        append.append_by_definition(call)
    lengths = kvcache_reference.Lengths(call.lengths_after(), call.cache_leftpad, call.cu_seqlens_q)
    features, inputs, _ = call.by_definition()
    out, lse, max_scores = kvcache_reference.attention(
        *(_rotated(call), call.cache, call.softmax_scale, lengths, features, inputs), return_max_scores=True
    )
    return out, lse, max_scores if call.aux else out.new_empty(0)


def _rotated(call: Call) -> Tensor:
    """The queries, rotated by the definition if the call has a rotary embedding."""
    rotary, q = call.rotary, call.q
    first = call.cache_seqlens if call.rotary_seqlens is None else call.rotary_seqlens
    if rotary is None or first is None or not q.numel():
        return q
    positions = kvcache_reference.query_positions(first, call.cu_seqlens_q, q.shape[:-2], bool(call.mask))
    return kvcache_reference.rotate(q.flatten(0, -3), positions, rotary).view(q.shape)


def attend_cuda(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run the append, kvcache and combine kernels that a call needs, on the current stream of q's device."""
    call = _call_of(arguments)
    if call.q.dtype == torch.float32:
        call = call._replace(precision=pytorchs_precision())
    out, lse, aux = attend(call)
    return out, lse, nothing(out) if aux is None else aux


def attend(call: Call, out: Tensor | None = None) -> Outputs:
    """Plan a call and launch its kernels; out: None, or memory that kernels can write directly."""
    plan = plan_of(call)
    checks.check_cache_addresses(call)
    call = call.with_positive_scale()
    q = call.q
    rotates = call.rotary_cos is not None and q.numel() > 0
    with memory.on_device(q.get_device()):
        if call.k is not None or rotates:
            rotated = launch_append(call, q if rotates else None)
            q = q if rotated is None else rotated
        max_scores = empty_maxima(call)
        call = call._replace(q=record.readable(q, call.alignment))
        found = launch_attention(plan, call, out, max_scores=max_scores)
    if call.k is not None:
        record.overwritten(call.k_cache, call.v_cache, beside=(call.k, call.v))
    if out is not None:
        record.overwritten(out, alone=True)
    return *found, max_scores


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _call_of(arguments)
    return *call.fake_outputs(), call.fake_aux()


_SCHEMA = schema(ARGUMENTS, k="Tensor?", v="Tensor?", **append.CACHES)
define(
    f"attention_with_kvcache({_SCHEMA}) -> (Tensor out, Tensor lse, Tensor aux)",
    attend_cpu,
    attend_cuda,
    _fake,
)
