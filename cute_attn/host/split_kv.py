"""The launches of a call with a cache on CUDA: the kvcache kernel, then the combine kernel if keys are split.

So are calls without a cache on Hopper, if the forward would have far fewer work tiles than multiprocessors. Their keys
and values are passed as a cache with one entry per sequence, or as packed sequences.

Everything that depends only on metadata is computed once and kept as a plan under that metadata. Grid and workspace
depend only on the GPU and on shapes, and the host reads no lengths, so a CUDA graph can be replayed with other
lengths and tables.
"""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.epilogues.names import are_functions
from cute_attn.host import checks, plans, record
from cute_attn.host.call import Call
from cute_attn.host.choose import check_kernel, user_classes
from cute_attn.host.counters import multiprocessors
from cute_attn.host.memory import clear_owned, on_device
from cute_attn.host.plans import Plan
from cute_attn.tiles import padded
from cute_attn.tiles.inference import FOLDED_KEYS, MAX_PARTIALS, CacheCall, CombineTile
from cute_attn.traits import LARGE_HEAD_DIM, ROW_BYTES, Traits, aligned_head_dim

BOX_ROWS = 8
"""TMA loads pages with a multiple of this many rows, the period of a swizzle. Ampere kernels load other pages."""
FEW_BYTES = 2 << 20
"""Maximum bytes of K and V per sequence and key head for which work tiles may have fewer rows: then more CTAs read."""

FEW_ROWS = 16
"""Maximum rows of a work tile that memory limits alone, and whose partial results are small."""

# Costs of a CTA, in bytes of keys and values that it would read meanwhile; fitted to 114 calls on an H200:
START, SECOND_LAUNCH = 36_000, 210_000
"""The start of a work tile, and the combine kernel."""
LONGEST_SPLIT, UNLIKE = 1_500_000, 1.035
"""Few rows of sequences whose lengths may differ have up to as many splits as leave each this many bytes of K and V, if
the estimate for equal lengths is at most this many times the shortest."""
MOST_WAVES, LEAST_BLOCKS, MOST_SPLITS = 8, 2, 128
"""Maximum splits per CTA, minimum key blocks per split, and maximum partial results of a row."""

FOLDED_CTAS, FEW_WORK_TILES = 0.5, 2.0
"""Maximum work tiles per CTA for which ``same_bits`` splits keys among CTAs, rather than folding the splits in one CTA:
``FOLDED_CTAS`` in general, ``FEW_WORK_TILES`` for ``FEW_ROWS``."""
MANY_MERGED = 4096
"""Minimum rows of a call for which a CTA of the combine kernel with ``in_order`` merges several rows."""

# For calls without a cache:
PAYS = 0.525
"""Maximum estimate with splits over that without: the forward's CTAs read faster than the estimate if they are few."""
MOST_ROWS = 128
"""Maximum rows of a work tile."""
FEW_BIASED = 128
"""Maximum rows per key head with a bias for a split to pay. TMA loads a forward's bias, threads that of a cache."""


@dataclass(frozen=True)
class Split:
    """How keys are split: the trait ``split``, and ``num_splits`` and ``split_keys`` of ``Partials``."""

    how: str = ""
    num_splits: int = 1
    split_keys: int = 0


def empty_maxima(call: Call) -> Tensor | None:
    """Memory for the rows' greatest scores, -inf, which kernels raise; None unless the call asks for them."""
    if call.aux != "max_scores":
        return None
    made = record.contiguous(call.q, call.output_shapes()[1], torch.float32)
    record.step(Tensor.fill_, made, -math.inf)
    return made


def launch(
    plan: Plan,
    call: Call,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch a call with its plan on the current stream, and return out and lse.

    Args:
        call: with queries as kernels read them, rotated.
        out, lse: tensors to write, with any strides that kernels write, or None to allocate them.
        max_scores: from :func:`empty_maxima`.
    """
    q, starts, shapes = call.q, None if out is None else call.cu_seqlens_q, call.output_shapes()
    if out is None:
        out = record.contiguous(q, shapes[0])
    if lse is None:
        lse = record.contiguous(q, shapes[1], torch.float32)
    if plan.kernel is None:
        record.also()
        lse.fill_(-math.inf)
        if call.sinks is not None:
            lse.copy_(call.sinks[:, None])
        return clear_owned(out, starts), lse
    # As kernels take them: a ``Seqlens``, ``Partials`` and ``CacheTables``, which load the DSL.
    lengths = (call.cu_seqlens_q, call.cu_seqlens_k, None, call.lengths)
    seqlens = (*lengths, *call.longest, call.cache_leftpad, call.added)
    (split, partial_shapes), partials = plan.division, None
    # The caching allocator keeps them for the stream, or for the graph that captures the call.
    if partial_shapes:
        outs, lses = (record.contiguous(q, shape, torch.float32) for shape in partial_shapes)
        partials = outs, lses, split.num_splits, split.split_keys
    if plan.kernel.traits.variant:
        record.also()  # a user's class may read its arguments
    inputs = call.as_kernels_read().score_inputs(max_scores=max_scores)
    scores = plan.kernel.score_args(inputs)
    results = {"mO": out, "mLSE": lse}
    k, v = (record.in_place(x, plan.kernel.traits.alignment) for x in (call.k_cache, call.v_cache))
    arguments = {
        "mQ": q, "mK": k, "mV": v, **results, "seqlens": seqlens, "tables": call.tables,
        "softmax_scale": call.softmax_scale, "schedule": record.work_tiles(q.get_device()), "score_args": scores,
        "partials": partials,
    }  # fmt: skip
    record.launch(*plan.functions["main"].bind(**arguments))
    if split.how == "fixed":
        assert partials is not None
        if out.dim() == 3:
            results = {name: x.unsqueeze(0) for name, x in results.items()}
        own: dict[str, Any] = {"mOpartial": partials[0], "mLSEpartial": partials[1], "mSinks": call.sinks}
        record.launch(*plan.functions["combine"].bind(**results, **own))
    return out, lse


# ---- plans by metadata ----


def plan_of(call: Call) -> Plan:
    """The plan of a call, kept under its metadata."""

    def make() -> Plan:
        checks.check_attention(call)
        checks.check_append_for_kernels(call)
        return make_plan(call)

    tensors, options = call.metadata()
    key = ("kvcache", options, call.latent, *user_classes(call, "kvcache"))
    return plans.plan(key, (*tensors, *call.epilogue_tensors), make)


def make_plan(call: Call, chosen: tuple[Any, Split] | None = None) -> Plan:
    """The plan of a checked call. Its division: the :class:`Split`, and the shapes of partial O and LSE, or ().

    chosen: what :func:`choose_kernel` chose, if it was asked before.
    """
    queries, capacity = call.longest
    if 0 in (call.batch, queries, capacity, math.prod(call.output_shapes()[0]), call.k_cache.shape[0]):
        return Plan()
    with on_device(call.q.get_device()):
        target = compiler.default_target("sm80")
        processors = multiprocessors(call.q.get_device())
        kernel, split = chosen or choose_kernel(call, target, processors)
        functions = {"main": compiler.build(kernel, target)}
        shapes = _partial_shapes(call, kernel, split, processors)
        combine = _combine(kernel, split, call, target)
        if combine is not None:
            functions["combine"] = combine
    return Plan(kernel, functions, (split, shapes))


def _combine(kernel: Any, split: Split, call: Call, target: str) -> Any:
    traits = kernel.traits
    if split.how != "fixed":
        return None
    # On Hopper its launch overlaps the end of the kernel before it, of either generation.
    arch = registry.generations(target)[0]
    more = {"sinks": call.sinks_dtype, "alignment": traits.alignment}
    plain = Traits("combine", arch, traits.dtype, traits.head_dim_v, **more)
    tile = CombineTile.of(split.num_splits, eager=True)
    if call.same_bits:
        rows = 4 if math.prod(call.q.shape[:-1]) >= MANY_MERGED else 1
        tile = CombineTile(rows, unroll=8, in_order=True)
    return compiler.compile(plain, tile.for_head_dim(traits.head_dim_v), target)


def _partial_shapes(call: Call, kernel: Any, split: Split, processors: int) -> tuple[tuple[int, ...], ...]:
    dim = aligned_head_dim("fp32", call.v_cache.shape[-1])
    if split.how == "fixed":
        rows = call.q.shape[:-2] if call.cu_seqlens_q is None else (1, call.q.shape[0])
        heads = call.q.shape[-2]
        return (split.num_splits, *rows, heads, dim), (split.num_splits, rows[0], heads, rows[1])
    if split.how == "folded":  # O so far of each CTA; its threads keep the rest
        ctas = kernel.tile.blocks_per_sm * processors
        return (ctas, kernel.tile.tile_m, padded(kernel.traits.head_dim_v)), (1, 1)
    return ()


# ---- attention of few queries with many keys on Hopper ----


def as_cache(call: Call) -> Call:
    """The same attention for Hopper's kernels with a cache: one entry per sequence, or packed sequences."""
    kept: Any = call._replace(k_cache=call.k, v_cache=call.v, cache_seqlens=call.seqused_k, kernel="sm90")
    return kept._replace(k=None, v=None, seqused_k=None)


def divided(call: Call, kernel: Any, target: str, multiprocessors: int) -> tuple[Any, Split] | None:
    """The choice of :func:`choose_kernel` for a call without a cache, if splitting keys pays; else None.

    It pays for few work tiles, many keys, and no feature that kernels for a cache lack. kernel: the forward kernel that
    would serve the call otherwise.
    """
    if kernel.traits.arch != "sm90" or call.kernel or call.tile or call.q.dtype not in checks.KERNEL_DTYPES:
        return None
    if kernel.traits.top_left or call.aux == "softmax":
        return None
    if max(kernel.traits.head_dim, kernel.traits.head_dim_v) > LARGE_HEAD_DIM:
        return None
    if call.dropout or call.seqused_q is not None:
        return None
    if call.lists_blocks or not are_functions(call.epilogue_names):
        return None
    if call.bias is not None and call.longest[0] * call.group > FEW_BIASED:
        return None
    # Finding a kernel takes time. No split pays for so many work tiles, or for so few keys.
    if math.prod(call.q.shape[:-1]) > MOST_ROWS * multiprocessors:
        return None
    cached = as_cache(call)
    if PAYS * (cached.longest[1] * _key_bytes(cached) + START) < SECOND_LAUNCH:
        return None
    chosen, split = choose_kernel(cached, target, multiprocessors)
    costs = _costs(cached, chosen.tile, multiprocessors)
    return (chosen, split) if split.num_splits > 1 and costs[split.num_splits] <= PAYS * costs[1] else None


# ---- the kernel and how keys are divided ----


def work_tiles(call: Call, tile: Any) -> int:
    """Maximum number of work tiles: query blocks of all sequences times packs of heads."""
    packs = call.k_cache.shape[-2] * -(-call.group // tile.pack_heads)
    blocks = call.batch * -(-call.longest[0] // tile.queries)
    if call.cu_seqlens_q is not None:
        blocks = min(blocks, call.q.shape[0] // tile.queries + call.batch)
    return packs * blocks


def traits_of(call: Call, arch: str, split: str, variant: str = "") -> Traits:
    """Traits of the kvcache kernel. With split "fixed" they have no sinks, which the combine kernel adds."""
    sinks = "" if split == "fixed" else call.sinks_dtype
    latent = call.latent and arch == "sm90"  # the Ampere kernel loads keys and values, wherever these are
    return call.traits(
        arch, variant, op="kvcache", sinks=sinks, seqused_k=call.lengths is not None,
        varlen_k=call.cu_seqlens_k is not None, paged=call.page_table is not None,
        batch_idx=call.cache_batch_idx is not None, leftpad=call.cache_leftpad is not None,
        tree=call.tree_mask is not None, latent=latent, split=split, alignment=call.alignment,
    )  # fmt: skip


def choose_kernel(call: Call, target: str, processors: int) -> tuple[Any, Split]:
    """The kernel with its tile, and the split of keys. The generation is the call's, or the newest that supports it."""
    check_kernel(call.kernel, ("kvcache",))
    names = _generations(call, target) if call.same_bits or not call.kernel else [call.kernel]
    reasons: list[str] = []
    for name in names:
        arch, _, variant = name.partition(":")
        try:
            found = _kernel_and_split(call, arch, variant, target, processors)
        except ValueError as reason:  # Unsupported, or a tile's field that the other generation has
            if len(names) == 1:
                raise
            reasons.append(str(reason))
            continue
        if reasons:
            warnings.warn(f"{found[0].traits} serves the call, since {'; '.join(reasons)}", stacklevel=2)
        return found
    raise registry.Unsupported("; ".join(reasons))


def _generations(call: Call, target: str) -> list[str]:
    """The generations of kernels to try for a call on a target, the newest first.

    Fp32, and rows that TMA cannot load, require Ampere kernels.
    """
    names = registry.generations(target)
    amperes = call.q.dtype == torch.float32 or call.alignment or _page_rows(call) % BOX_ROWS
    if call.same_bits:
        if names[0] != "sm90" or amperes:
            raise registry.Unsupported(
                f"same_bits is True on {target}, with pages of {_page_rows(call)} rows and rows aligned to "
                f"{call.alignment or ROW_BYTES // call.q.element_size()} elements; accepted: on Hopper, pages of "
                f"multiples of {BOX_ROWS} rows, rows aligned to 16 bytes"
            )
        return ["sm90"]
    return names[-1:] if amperes else names


def _page_rows(call: Call) -> int:
    """Rows of a page, 0 without pages."""
    return 0 if call.page_table is None else call.k_cache.shape[1]


def _kernel_and_split(call: Call, arch: str, variant: str, target: str, processors: int) -> tuple[Any, Split]:
    def kernel_of(split: Split) -> Any:
        kernel = registry.lookup(traits_of(call, arch, split.how, variant), None, target)
        kernel = kernel.for_cache(cache_call(call), target)
        if call.tile:
            kernel = replace(kernel, tile=kernel.tile.override(call.tile))
        reason = _call_reason(call, kernel.tile) or kernel.tile.reject(kernel.traits, target)
        if reason:
            raise registry.declined(kernel.traits, reason)
        _check_sizes(call, kernel, split.num_splits)
        return kernel

    if call.num_splits:
        split = Split("fixed", call.num_splits) if call.num_splits > 1 else Split()
        return kernel_of(split), split
    kernel = kernel_of(Split("fixed"))
    choose = _split_in_order if call.same_bits else _best_split
    split = choose(call, kernel.tile, processors)
    return kernel if split.how == kernel.traits.split else kernel_of(split), split


def _call_reason(call: Call, tile: Any) -> str | None:
    """Why a tile does not fit the call's pages, or None."""
    box, rows = getattr(tile, "page_rows", 0), _page_rows(call)
    if box and rows % BOX_ROWS:
        return f"pages have {rows} rows; accepted: multiples of {BOX_ROWS}"
    if box and rows % box:
        return f"page_rows is {box}; accepted: divisors of the page's {rows} rows"
    return None


def cache_call(call: Call) -> CacheCall:
    """The traits of the call that decide its tile."""
    few = not call.same_bits and call.longest[1] * _key_bytes(call) <= FEW_BYTES
    planes = call.batch * call.k_cache.shape[-2] if few else 0
    return CacheCall(*call.longest, call.group, _page_rows(call), call.same_bits, planes)


def _key_bytes(call: Call) -> int:
    """Bytes of a row of K plus a row of V; of K alone if V is its first columns."""
    return call.q.element_size() * (call.q.shape[-1] + (0 if call.latent else call.v_cache.shape[-1]))


def _split_in_order(call: Call, tile: Any, processors: int) -> Split:
    """The split of a call with ``same_bits``: splits of ``FOLDED_KEYS`` keys, in several CTAs or folded in one.

    Both give the same bits, so the choice may depend on shapes.
    """
    ctas, count = tile.blocks_per_sm * processors, work_tiles(call, tile)
    num_splits = -(-call.longest[1] // FOLDED_KEYS)
    few = min(call.longest[0] * call.group, tile.tile_m) <= FEW_ROWS
    divided = count <= (FEW_WORK_TILES if few else FOLDED_CTAS) * ctas and 1 < num_splits <= MAX_PARTIALS
    if max(call.q.shape[-1], call.v_cache.shape[-1]) <= LARGE_HEAD_DIM and not divided:
        return Split("folded", 1, FOLDED_KEYS)
    if num_splits > MAX_PARTIALS:
        raise ValueError(
            f"same_bits is True with a capacity of {call.longest[1]} and head dims above {LARGE_HEAD_DIM}; accepted: "
            f"up to {MAX_PARTIALS * FOLDED_KEYS}"
        )
    return Split("fixed", max(num_splits, 2), FOLDED_KEYS)


def _best_split(call: Call, tile: Any, processors: int) -> Split:
    """The split of a call that does not set ``num_splits``: the even one with the shortest estimated time.

    Where lengths may differ, and more splits cost little, a long sequence has more: no CTA reads it alone at the end.
    """
    costs = _costs(call, tile, processors)
    splits = min(costs, key=costs.__getitem__)
    differ = call.batch > 1 and (call.lengths is not None or call.cu_seqlens_k is not None)
    if differ and min(call.longest[0] * call.group, tile.tile_m) <= FEW_ROWS:
        enough = max(splits, -(-_seen(call, tile) * _key_bytes(call) // LONGEST_SPLIT))
        splits = max(n for n in costs if n <= enough and costs[n] <= UNLIKE * costs[splits])
    return Split("fixed", splits) if splits > 1 else Split()


def _seen(call: Call, tile: Any) -> int:
    """Maximum keys that a work tile sees."""
    return min(call.longest[1], call.window + tile.queries) if call.window else call.longest[1]


def _costs(call: Call, tile: Any, processors: int) -> dict[int, int]:
    """Estimated time by number of even splits, in bytes that a CTA reads meanwhile.

    All CTAs are taken to read at equal speed, and all sequences to be as long as the longest may be.
    """
    ctas, count = tile.blocks_per_sm * processors, work_tiles(call, tile)
    blocks, bytes_of_block = -(-_seen(call, tile) // tile.tile_n), tile.tile_n * _key_bytes(call)
    partial = 4 * min(call.longest[0] * call.group, tile.tile_m) * call.v_cache.shape[-1]
    most = max(min(blocks // LEAST_BLOCKS, MOST_WAVES * ctas // count, MOST_SPLITS), 1)

    def cost(splits: int) -> int:
        waves, alone = -(-splits * count // ctas), -(-blocks // splits) * bytes_of_block + START
        return waves * alone if splits == 1 else waves * (alone + partial) + SECOND_LAUNCH

    return {n: cost(n) for n in range(1, most + 1)}


def _check_sizes(call: Call, kernel: Any, num_splits: int) -> None:
    """Raise if indices of blocks, or positions among the key blocks of all work tiles, exceed 32 bits."""
    (queries, capacity), tile = call.longest, kernel.tile
    count = work_tiles(call, tile)
    blocks = -(-capacity // tile.tile_n) + 2
    each = f"{count} blocks of up to {tile.queries} queries"
    checks.check_count(f"q has {each}", count, checks.MAX_ROWS)
    checks.check_count(f"k_cache has {blocks} key blocks for each of {each}", count * blocks, checks.MAX_ROWS)
    checks.check_count("q has rows of heads", math.prod(call.q.shape[:-1]), checks.MAX_ROWS)
    if kernel.traits.arch == "sm80":  # CTAs for each sequence's longest
        packs = call.k_cache.shape[-2] * -(-call.group // tile.pack_heads)
        blocks = -(-queries // tile.queries)
        each = f"{packs} heads of {blocks} blocks of {tile.queries} queries"
        count = call.batch * packs * blocks
        checks.check_count(f"{call.stated('q')}{call.batch} sequences of {each}", count, checks.MAX_ROWS)
    checks.check_count("partial results have blocks", count * num_splits, checks.MAX_ROWS)
