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
from cute_attn.host import plans, record
from cute_attn.host.call import Call
from cute_attn.host.checks import (
    KERNEL_DTYPES,
    MAX_ROWS,
    check_append_for_kernels,
    check_attention,
    check_count,
    check_query_blocks,
)
from cute_attn.host.choose import check_kernel, user_classes
from cute_attn.host.counters import multiprocessors
from cute_attn.host.memory import clear_owned, on_device
from cute_attn.host.plans import Plan
from cute_attn.tiles import padded
from cute_attn.tiles.inference import FOLDED_KEYS, MAX_PARTIALS, CacheCall, CombineStreamKTile, CombineTile
from cute_attn.traits import LARGE_HEAD_DIM, ROW_BYTES, Traits, aligned_head_dim

EVEN = 8
"""Minimum keys per query with which a mask leaves a sequence's query blocks nearly equal numbers of keys."""
BOX_ROWS = 8
"""TMA loads pages with a multiple of this many rows, the period of a swizzle. Ampere kernels load other pages."""
FULL_SPLITS, IN_STEP = 0.9, 0.67
"""Minimum fractions of the CTAs that an even split of equal sequences keeps busy; below them, stream-K is used. The
second is for several work tiles per kv head, which read the same keys of a split at about the same time."""
SPLITS_AT_ONCE = 128
"""Maximum partial results of a row that the combine kernel loads at once; more need another round."""
BLOCKS_OF_A_SPLIT, ENOUGH_CTAS = 5, 48
"""Minimum key blocks per split once ``ENOUGH_CTAS`` CTAs are busy: fewer partial results merge faster."""
LEAST_SPLITS, LEAST_SPARED = 4, 448
"""Minimum number of even splits, and minimum keys that they spare each CTA, for a second launch to pay."""
FEW_SPLITS_SPARED = 1024
"""Minimum spared keys for two or three even splits of sequences of equal length."""
SPLITS_OF_A_CTA = 4
"""Minimum splits per CTA of a BlockMask's lists, whose lengths the host does not know: the last wave is a quarter."""
FEW_BYTES = 2 << 20
"""Maximum bytes of K and V per CTA for which stream-K costs more than any load imbalance."""
IDLE_BYTES = 1 << 20
"""Maximum bytes of K and V per CTA times the idle fraction of the last wave; above it, stream-K may pay."""
STREAM_K_COST, OUT_OF_STEP = 1.27, 1.5
"""Time of stream-K over the time of whole work tiles with more than 64 rows, limited by tensor cores. The first is for
one work tile per kv head, the second for several, which then read the same keys at different times."""

FEW_SEQUENCES = 4
"""Maximum sequences for even splits of several query blocks of over 64 rows, although lengths are not known here.
Stream-K takes 1.2 to 1.3 times as long if lengths are equal, and saves as much if their mean is 3/4 of the maximum."""

FOLDED_CTAS, FEW_ROWS, FEW_WORK_TILES = 0.5, 16, 2.0
"""Maximum work tiles per CTA for which ``same_bits`` splits keys among CTAs, rather than folding the splits in one CTA:
``FOLDED_CTAS`` in general, ``FEW_WORK_TILES`` up to ``FEW_ROWS`` rows per key head, whose partial results are small."""
MANY_MERGED = 4096
"""Minimum rows of a call for which a CTA of the combine kernel with ``in_order`` merges several rows."""

SIMILAR = 0.7
"""Minimum ratio of mean to maximum keys of packed sequences for whole work tiles: the longest sequence ends last."""


# For calls without a cache:
FEW_TILES, LEAST_NUMBERS = 0.5, 1 << 18
"""Maximum work tiles per multiprocessor, and minimum elements of K and V that a query sees (those of 1,024 keys of head
dim 128), for a split to pay for a second launch."""
FEW_READING = 0.45
"""Maximum work tiles per multiprocessor with few rows per key head, for which a split pays: so many CTAs of the forward
read nearly as fast as all that a split has, without the second launch."""
FEW_PACKED = 1.0
"""Maximum work tiles per multiprocessor with few queries of packed sequences: they do not end together, since lengths
differ."""
FEW_BIASED = 128
"""Maximum rows per key head with a bias for a split to pay. TMA loads a forward's bias, threads that of a cache."""
LAST_WAVE, MANY_KEYS = 1.5, 16384
"""For more work tiles: minimum ratio of rounded-up to exact waves, and minimum keys, for a split to pay."""


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
    elif split.how == "stream_k":
        mask_args = scores[1] or None  # the DSL takes no empty tuple
        own = {"partials": partials, "mSinks": call.sinks, "seqlens": seqlens, "mask_args": mask_args}
        sizes = {"nheads_kv": call.k_cache.shape[-2], "kernel_ctas": partial_shapes[0][0] // 2}
        record.launch(*plan.functions["combine"].bind(**results, **own, **sizes))
    return out, lse


# ---- plans by metadata ----


def plan_of(call: Call) -> Plan:
    """The plan of a call, kept under its metadata."""

    def make() -> Plan:
        check_attention(call)
        check_append_for_kernels(call)
        return make_plan(call)

    tensors, options = call.metadata()
    key = ("kvcache", options, call.latent, *user_classes(call, "kvcache"))
    return plans.plan(key, (*tensors, *call.epilogue_tensors), make)


def make_plan(call: Call) -> Plan:
    """The plan of a checked call. Its division: the :class:`Split`, and the shapes of partial O and LSE, or ()."""
    queries, capacity = call.longest
    if 0 in (call.batch, queries, capacity, math.prod(call.output_shapes()[0]), call.k_cache.shape[0]):
        return Plan()
    with on_device(call.q.get_device()):
        target = compiler.default_target("sm80")
        processors = multiprocessors(call.q.get_device())
        kernel, split = choose_kernel(call, target, processors)
        functions = {"main": compiler.build(kernel, target)}
        shapes = _partial_shapes(call, kernel, split, processors)
        combine = _combine(kernel, split, shapes, call, target)
        if combine is not None:
            functions["combine"] = combine
    return Plan(kernel, functions, (split, shapes))


def _combine(kernel: Any, split: Split, shapes: tuple[tuple[int, ...], ...], call: Call, target: str) -> Any:
    traits = kernel.traits
    if not split.how:
        return None
    # On Hopper its launch overlaps the end of the kernel before it, of either generation.
    arch = registry.generations(target)[0]
    if split.how == "fixed":
        more = {"sinks": call.sinks_dtype, "alignment": traits.alignment}
        plain = Traits("combine", arch, traits.dtype, traits.head_dim_v, **more)
        tile = CombineTile.of(split.num_splits, eager=True)
        if call.same_bits:
            rows = 4 if math.prod(call.q.shape[:-1]) >= MANY_MERGED else 1
            tile = CombineTile(rows, unroll=8, in_order=True)
        tile = tile.for_head_dim(traits.head_dim_v)
        return compiler.compile(plain, tile, target)
    kept = ("mask", "sinks", "varlen", "seqused_k", "leftpad", "varlen_k", "alignment")
    same = {name: getattr(traits, name) for name in kept}
    own = Traits("combine_stream_k", arch, traits.dtype, traits.head_dim_v, **same)
    tiles, ctas = work_tiles(call, kernel.tile), shapes[0][0] // 2
    tile = CombineStreamKTile.after(kernel.tile, own, tiles, ctas, call.longest[0])
    return compiler.compile(own, tile, target)


def _partial_shapes(call: Call, kernel: Any, split: Split, processors: int) -> tuple[tuple[int, ...], ...]:
    dim = aligned_head_dim("fp32", call.v_cache.shape[-1])
    if split.how == "fixed":
        rows = call.q.shape[:-2] if call.cu_seqlens_q is None else (1, call.q.shape[0])
        heads = call.q.shape[-2]
        return (split.num_splits, *rows, heads, dim), (split.num_splits, rows[0], heads, rows[1])
    ctas = kernel.tile.blocks_per_sm * processors
    if split.how == "stream_k":
        return (2 * ctas, kernel.tile.tile_m, dim), (2 * ctas, kernel.tile.tile_m)
    if split.how == "folded":  # O so far of each CTA; its threads keep the rest
        return (ctas, kernel.tile.tile_m, padded(kernel.traits.head_dim_v)), (1, 1)
    return ()


# ---- attention of few queries with many keys on Hopper ----


def as_cache(call: Call) -> Call:
    """The same attention for Hopper's kernels with a cache: one entry per sequence, or packed sequences."""
    kept: Any = call._replace(k_cache=call.k, v_cache=call.v, cache_seqlens=call.seqused_k, kernel="sm90")
    return kept._replace(k=None, v=None, seqused_k=None)


def is_wanted(call: Call, kernel: Any, target: str, multiprocessors: int) -> bool:
    """True if splitting keys pays: few work tiles, many keys, and no feature that kernels for a cache lack.

    kernel: the forward kernel that would serve the call otherwise.
    """
    if kernel.traits.arch != "sm90" or call.kernel or call.tile or call.q.dtype not in KERNEL_DTYPES:
        return False
    if kernel.traits.top_left or call.aux == "softmax":
        return False
    if max(kernel.traits.head_dim, kernel.traits.head_dim_v) > LARGE_HEAD_DIM:
        return False
    if call.dropout or call.seqused_q is not None:
        return False
    if call.lists_blocks or not are_functions(call.epilogue_names):
        return False
    if call.bias is not None and call.longest[0] * call.group > FEW_BIASED:
        return False
    seen = min(call.longest[1], call.window or call.longest[1])
    if seen * (call.q.shape[-1] + call.v.shape[-1]) < LEAST_NUMBERS:
        return False
    # Work tiles are counted with a large call's tile: `kernel` may have fewer rows because the call is small.
    large = registry.lookup(kernel.traits, None, target)
    large = large.for_lengths(*call.longest, call.group, target, window=call.window)
    waves = check_query_blocks(call, large) / multiprocessors
    unlike = call.varlen and call.longest[1] >= EVEN * call.longest[0]
    few_rows = kernel.tile.tile_m == 64 >= call.longest[0] * call.group and not unlike
    if few_rows and FEW_READING < waves <= kernel.tile.blocks_per_sm:
        return False
    if waves <= (FEW_PACKED if unlike else FEW_TILES):
        return True
    # Under a causal mask the shortest work tiles come last, and leave little idle.
    equal = not kernel.traits.causal or call.longest[1] >= 2 * call.longest[0]
    return equal and seen >= MANY_KEYS and math.ceil(waves) >= LAST_WAVE * waves


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
    kernel = kernel_of(Split("fixed" if call.same_bits or call.lists_blocks else "stream_k"))
    choose = _split_in_order if call.same_bits else _best_split
    split = choose(call, kernel.tile, processors)
    if split.how == "stream_k" and kernel.epilogues.visits_lists:
        split = _split_of_lists(call, kernel.tile, processors)
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
    """Bytes of a row of K plus a row of V."""
    return call.q.element_size() * (call.q.shape[-1] + call.v_cache.shape[-1])


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
    """The split of a call that does not set ``num_splits``: whole work tiles, even splits, or stream-K.

    Even splits and whole work tiles cost less than stream-K, whose CTAs compute prefix sums of the lengths and merge
    more partial results. But lengths are not known here, except the mean of packed keys. In a batch they may differ,
    and then only stream-K keeps all CTAs busy. It loses little on long sequences, the alternatives on short ones.
    """
    ctas, count = tile.blocks_per_sm * processors, work_tiles(call, tile)
    seqlen_q, seqlen_k = call.longest
    seen = min(seqlen_k, call.window + tile.queries) if call.window else seqlen_k
    blocks = -(-seen // tile.tile_n)
    most = min(ctas // count, blocks, MAX_PARTIALS)
    if most > SPLITS_AT_ONCE and SPLITS_AT_ONCE * count >= FULL_SPLITS * ctas:
        most = SPLITS_AT_ONCE
    splits = min(most, max(blocks // BLOCKS_OF_A_SPLIT, -(-ENOUGH_CTAS // count), LEAST_SPLITS))
    bytes_of_block = tile.tile_n * _key_bytes(call)
    spared = tile.tile_n * (blocks - -(-blocks // max(splits, 1)))
    even = not call.mask or EVEN * seqlen_q <= seqlen_k
    shared = count > call.batch * call.k_cache.shape[-2]  # work tiles that read the same keys
    few = shared and tile.tile_m > 64 and call.batch <= FEW_SEQUENCES
    equal = few or call.batch == 1 or (call.lengths is None and call.cu_seqlens_k is None)
    least = IN_STEP if shared else FULL_SPLITS
    full = equal and even and most > 1 and most * count >= least * ctas
    if splits < LEAST_SPLITS or spared < LEAST_SPARED:
        left = -(-blocks // max(most, 1))
        pays = few or bytes_of_block * left > FEW_BYTES or tile.tile_n * (blocks - left) > FEW_SPLITS_SPARED
        splits = most if full and pays else 1
    waves = splits * count / ctas
    alone = bytes_of_block * -(-blocks // splits)
    if alone > FEW_BYTES or (splits == 1 and (math.ceil(waves) - waves) * alone > IDLE_BYTES):
        if splits == 1:
            packed = call.cu_seqlens_k is not None
            similar = not packed or call.k_cache.shape[0] >= SIMILAR * call.batch * seqlen_k
            cost = OUT_OF_STEP if shared else STREAM_K_COST
            pays = similar and tile.tile_m > 64 and math.ceil(waves) <= cost * waves
        else:
            pays = full
        if not pays:
            return Split("stream_k")
    return Split("fixed", splits) if splits > 1 else Split()


def _split_of_lists(call: Call, tile: Any, processors: int) -> Split:
    """Even splits of the listed blocks in place of stream-K, whose ranges count all blocks that a band leaves."""
    ctas, blocks = tile.blocks_per_sm * processors, -(-call.longest[1] // tile.tile_n)
    splits = -(-SPLITS_OF_A_CTA * ctas // work_tiles(call, tile))
    splits = min(splits, blocks // BLOCKS_OF_A_SPLIT, MAX_PARTIALS)
    return Split("fixed", splits) if splits > 1 else Split()


def _check_sizes(call: Call, kernel: Any, num_splits: int) -> None:
    """Raise if indices of blocks, or positions among the key blocks of all work tiles, exceed 32 bits."""
    (queries, capacity), tile = call.longest, kernel.tile
    count = work_tiles(call, tile)
    blocks = -(-capacity // tile.tile_n) + 2
    each = f"{count} blocks of up to {tile.queries} queries"
    check_count(f"q has {each}", count, MAX_ROWS)
    check_count(f"k_cache has {blocks} key blocks for each of {each}", count * blocks, MAX_ROWS)
    check_count("q has rows of heads", math.prod(call.q.shape[:-1]), MAX_ROWS)
    if kernel.traits.arch == "sm80" and kernel.traits.split != "stream_k":  # CTAs for each sequence's longest
        packs = call.k_cache.shape[-2] * -(-call.group // tile.pack_heads)
        blocks = -(-queries // tile.queries)
        each = f"{packs} heads of {blocks} blocks of {tile.queries} queries"
        count = call.batch * packs * blocks
        check_count(f"{call.stated('q')}{call.batch} sequences of {each}", count, MAX_ROWS)
    check_count("partial results have blocks", count * num_splits, MAX_ROWS)
