"""The parameters of calls with a cache of keys and values, and their checks: one sentence an error.

As in :mod:`cute_attn.host.params`, checks read metadata only; lengths are read on the CPU, or where a caller asks for
that.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.host.memory import materialized, overlap
from cute_attn.host.params import (
    FLOAT_DTYPES,
    MAX_SEQLEN,
    _check_cumulative,
    _check_int32,
    _check_strides,
    check_apart,
    check_count,
    check_dense,
    check_sinks,
    check_starts,
    is_aligned,
    rows_are_regular,
)
from cute_attn.reference import kvcache as kvcache_reference

APPEND_DTYPES = (torch.float16, torch.bfloat16)


class AppendParams(NamedTuple):
    """Parameters of the operator ``append_kv``, in the order of its schema.

    Attributes:
        k_cache, v_cache: (entries, capacity, nheads_kv, dim), or (pages, page_size, nheads_kv, dim) with page_table.
        k, v: (batch, rows, nheads_kv, dim), or packed with cu_seqlens_k_new; None in a call that appends nothing.
        cache_seqlens: int32 (batch,), or None for full entries.
        page_table: int32 (entries, pages of an entry), or None.
        cache_batch_idx: int32 (batch,), or None.
        cu_seqlens_k_new: int32 (batch + 1,), or None.
        rotary_cos, rotary_sin: (positions, pairs), or None.
        rotary_seqlens: int32 (batch,), or None for cache_seqlens.
        rotary_interleaved: which elements make a pair.
    """

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    cache_seqlens: Tensor | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_seqlens: Tensor | None
    rotary_interleaved: bool

    @property
    def cache(self) -> kvcache_reference.Cache:
        """The cache, as the definition has it."""
        return kvcache_reference.Cache(self.k_cache, self.v_cache, self.page_table, self.cache_batch_idx)

    @property
    def rotary(self) -> kvcache_reference.Rotary | None:
        """The rotary embedding, as the definition has it."""
        if self.rotary_cos is None or self.rotary_sin is None:
            return None
        return kvcache_reference.Rotary(
            self.rotary_cos, self.rotary_sin, self.rotary_interleaved, self.rotary_seqlens
        )

    @property
    def entries(self) -> int:
        """Entries of the cache."""
        return self.k_cache.shape[0] if self.page_table is None else self.page_table.shape[0]

    def lengths_after(self) -> Tensor | None:
        """int32 (batch,): rows in use with those appended, perhaps beyond the capacity; None for full entries."""
        if self.cache_seqlens is None or self.k is None:
            return self.cache_seqlens
        if self.cu_seqlens_k_new is None:
            return self.cache_seqlens + self.k.shape[1]
        return self.cache_seqlens + self.cu_seqlens_k_new.diff()


class CacheParams(NamedTuple):
    """Parameters of the operator ``attention_with_kvcache``, in the order of its schema.

    Attributes:
        q: (batch, seqlen_q, nheads, head_dim), or packed (total, nheads, head_dim) with cu_seqlens_q.
        k_cache to rotary_interleaved: as of :class:`AppendParams`.
        cache_leftpad: int32 (batch,), the first valid row, or None.
        cu_seqlens_q: int32 (batch + 1,), or None.
        alibi_slopes: (nheads,) or (batch, nheads), or None.
        sinks: (nheads,), or None.
        tree_mask: int32 (rows of q, words), or None.
        max_seqlen_q to tile: as of :class:`cute_attn.host.params.AttentionParams`.
        num_splits: parts of each query block's keys; 0 for shares of all key blocks.
        split_keys: keys of a part, or 0.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    cache_seqlens: Tensor | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_seqlens: Tensor | None
    rotary_interleaved: bool
    cache_leftpad: Tensor | None
    cu_seqlens_q: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    tree_mask: Tensor | None
    max_seqlen_q: int
    softmax_scale: float
    mask: str
    window_left: int
    window_right: int
    softcap: float
    kernel: str
    tile: str
    num_splits: int = 0
    split_keys: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The arguments that are tensors, or None."""
        return (*self[:_INTERLEAVED], *self[_INTERLEAVED + 1 : _NUMBERS])  # type: ignore[arg-type]

    @property
    def options(self) -> tuple:
        """The other arguments."""
        return self[_INTERLEAVED], *self[_NUMBERS:]

    @classmethod
    def of(cls, tensors: tuple[Any, ...], options: tuple) -> "CacheParams":
        """From :attr:`tensors` and :attr:`options`."""
        return cls._make((*tensors[:_INTERLEAVED], options[0], *tensors[_INTERLEAVED:], *options[1:]))

    @property
    def append(self) -> AppendParams:
        """The part that concerns the cache."""
        return AppendParams._make(self[1 : 1 + len(AppendParams._fields)])

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries of a sequence, and rows of the cache."""
        packed = self.cu_seqlens_q is not None
        return min(self.max_seqlen_q, self.q.shape[0]) if packed else self.q.shape[1], self.capacity

    @property
    def cu_seqlens_k(self) -> None:
        """Keys in a cache are not packed."""
        return None

    @property
    def lengths(self) -> Tensor | None:
        """int32 (batch,): rows in use, with packed rows that were appended; None for full entries."""
        return self.cache_seqlens if self.cu_seqlens_k_new is None else self.append.lengths_after()

    @property
    def added(self) -> int:
        """Rows appended to each sequence beside :attr:`lengths`."""
        return 0 if self.k is None or self.cu_seqlens_k_new is not None else self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Rows of an entry."""
        return self.append.cache.capacity

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.q.shape[-2] // self.k_cache.shape[2]

    def output_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of out and lse."""
        lse = (self.q.shape[-2], self.q.shape[0])
        if self.cu_seqlens_q is None:
            lse = (self.q.shape[0], self.q.shape[2], self.q.shape[1])  # type: ignore[assignment]
        return (*self.q.shape[:-1], self.v_cache.shape[-1]), lse

    def score_inputs(self) -> ScoreInputs:
        """The epilogues' inputs."""
        return ScoreInputs(
            self.window_left,
            self.window_right,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            tree_mask=self.tree_mask,
            softcap=self.softcap,
        )


_INTERLEAVED, _NUMBERS = map(CacheParams._fields.index, ("rotary_interleaved", "max_seqlen_q"))


Params = TypeVar("Params", AppendParams, CacheParams)


def with_materialized(params: Params) -> Params:
    """The call with copies of lazy tensors, but for caches that are written, which are none."""
    kept = ("k_cache", "v_cache") if params.k is not None else ()
    given = [(name, x) for name, x in named_tensors(params) if name not in kept]
    return params._replace(
        **dict(zip([name for name, _ in given], materialized(x for _, x in given), strict=True))
    )


def named_tensors(params: AppendParams | CacheParams) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its argument's name."""
    for name, value in zip(params._fields, params, strict=True):
        if isinstance(value, Tensor):
            yield name, value


# ---- checks on any device ----


def check_tensors(params: AppendParams | CacheParams, required: tuple[str, ...]) -> None:
    """Raise for an argument that is no dense tensor, or missing, or on another device than the first."""
    fields = type(params).__annotations__
    for name, value in zip(params._fields, params, strict=True):
        if fields[name] in (Tensor, Tensor | None) and (value is not None or name in required):
            check_dense(name, value)
    check_devices(params)


def check_devices(params: AppendParams | CacheParams) -> None:
    """Raise ValueError for a tensor that is on another device than the first."""
    first, device = params._fields[0], params[0].device
    for name, x in named_tensors(params):
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}; accepted: {device}, where {first} is")


def check_append(params: AppendParams, batch: int, leftpad: Tensor | None = None) -> None:
    """Raise TypeError or ValueError for the first wrong argument of a call with ``batch`` sequences.

    leftpad: the call's ``cache_leftpad``, checked.
    """
    check_devices(params)
    _check_cache(params, batch)
    _check_new(params, batch)
    _check_rotary(params, batch)
    if params.k_cache.device.type == "cpu":
        check_tables(params, leftpad)


def _check_cache(params: AppendParams, batch: int) -> None:
    k_cache, v_cache = params.k_cache, params.v_cache
    if k_cache.dtype not in FLOAT_DTYPES:
        raise TypeError(f"k_cache has dtype {k_cache.dtype}; accepted: {', '.join(map(str, FLOAT_DTYPES))}")
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache has dtype {v_cache.dtype}; accepted: {k_cache.dtype}, k_cache's")
    if k_cache.dim() != 4 or 0 in k_cache.shape[1:]:
        rows = "(entries, capacity" if params.page_table is None else "(pages, page_size"
        shape = tuple(k_cache.shape)
        raise ValueError(f"k_cache has shape {shape}; accepted: {rows}, nheads_kv, head_dim), none of them 0")
    if v_cache.dim() != 4 or v_cache.shape[:-1] != k_cache.shape[:-1] or not v_cache.shape[-1]:
        raise ValueError(
            f"v_cache has shape {tuple(v_cache.shape)}; accepted: {tuple(k_cache.shape[:-1])} and a head_dim_v, "
            "as k_cache"
        )
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.shape[-1] % 8 or x.shape[-1] > 256:
            raise ValueError(f"{name} has head dim {x.shape[-1]}; accepted: multiples of 8 up to 256")
        _check_strides(name, x)
    table = params.page_table
    if table is not None:
        if table.dtype != torch.int32:
            raise TypeError(f"page_table has dtype {table.dtype}; accepted: torch.int32")
        if table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
            raise ValueError(
                f"page_table has shape {tuple(table.shape)} and strides {tuple(table.stride())}; accepted: (entries, "
                "pages of an entry) with a last stride of 1"
            )
    if params.cache.capacity > MAX_SEQLEN:
        raise ValueError(f"k_cache has capacity {params.cache.capacity}; accepted: up to {MAX_SEQLEN}")
    if params.cache_batch_idx is not None:
        _check_int32("cache_batch_idx", params.cache_batch_idx, batch)
    elif params.entries != batch:
        name = "k_cache" if table is None else "page_table"
        raise ValueError(
            f"{name} has {params.entries} entries; accepted: {batch}, the batch, or cache_batch_idx beside it"
        )
    if params.cache_seqlens is not None:
        _check_int32("cache_seqlens", params.cache_seqlens, batch)


def _check_new(params: AppendParams, batch: int) -> None:
    k, v, cu_seqlens = params.k, params.v, params.cu_seqlens_k_new
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None; accepted: both k and v, or neither")
    if k is None or v is None:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens_k_new is given without k and v; accepted: with them")
        return
    if params.cache_seqlens is None:
        raise ValueError("cache_seqlens is None; accepted with k and v: rows in use before them, int32")
    for name, x, cache in (("k", k, params.k_cache), ("v", v, params.v_cache)):
        heads = tuple(cache.shape[2:])
        if x.dtype != cache.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; accepted: {cache.dtype}, {name}_cache's")
        expected = f"({batch}, rows, {heads[0]}, {heads[1]})"
        fits = x.dim() == 4 and x.shape[0] == batch
        if cu_seqlens is not None:
            expected, fits = f"(total, {heads[0]}, {heads[1]})", x.dim() == 3
        if not fits or tuple(x.shape[-2:]) != heads:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; accepted: {expected}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v has shape {tuple(v.shape)}; accepted: k's rows, {tuple(k.shape[:-1])}")
    if cu_seqlens is not None:
        _check_int32("cu_seqlens_k_new", cu_seqlens, batch + 1)
        if cu_seqlens.device.type == "cpu":
            _check_cumulative("cu_seqlens_k_new", cu_seqlens, k.shape[0], k.shape[0])
    check_apart("k_cache", params.k_cache, ())
    check_apart("v_cache", params.v_cache, [("k_cache", params.k_cache)])


def _check_rotary(params: AppendParams, batch: int) -> None:
    cos, sin, seqlens = params.rotary_cos, params.rotary_sin, params.rotary_seqlens
    if (cos is None) != (sin is None):
        missing = "rotary_cos" if cos is None else "rotary_sin"
        raise ValueError(f"{missing} is None; accepted: both rotary_cos and rotary_sin, or neither")
    if cos is None or sin is None:
        if seqlens is not None:
            raise ValueError("rotary_seqlens is given without rotary_cos and rotary_sin; accepted: with them")
        return
    head_dim = params.k_cache.shape[3]
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.dtype != params.k_cache.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; accepted: {params.k_cache.dtype}, k_cache's")
        if x.dim() != 2 or 0 in x.shape or 2 * x.shape[1] > head_dim or (x.shape[1] > 1 and x.stride(1) != 1):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and strides {tuple(x.stride())}; accepted: (positions, pairs) "
                f"with up to {head_dim // 2} pairs and a last stride of 1"
            )
    if sin.shape != cos.shape:
        raise ValueError(
            f"rotary_sin has shape {tuple(sin.shape)}; accepted: {tuple(cos.shape)}, rotary_cos's"
        )
    if seqlens is not None:
        _check_int32("rotary_seqlens", seqlens, batch)
        return
    if params.cache_seqlens is None:
        raise ValueError("cache_seqlens is None; accepted with rotary_cos: it or rotary_seqlens, int32")
    if cos.shape[0] < params.cache.capacity:
        raise ValueError(
            f"rotary_cos has {cos.shape[0]} positions; accepted: {params.cache.capacity} or more, the cache's "
            "capacity, or rotary_seqlens beside it"
        )


def check_attention(params: CacheParams) -> None:
    """Raise TypeError or ValueError for the first wrong argument of ``attention_with_kvcache``, on any device."""
    q, k_cache, cu_seqlens = params.q, params.k_cache, params.cu_seqlens_q
    check_devices(params)
    if q.dim() != (4 if cu_seqlens is None else 3):
        dims = "(batch, seqlen_q, nheads, head_dim)" if cu_seqlens is None else "(total, nheads, head_dim)"
        raise ValueError(f"q has shape {tuple(q.shape)}; accepted: {dims}")
    if cu_seqlens is not None:
        check_starts("cu_seqlens_q", cu_seqlens)
        _check_int32("cu_seqlens_q", cu_seqlens, params.batch + 1)
        if cu_seqlens.device.type == "cpu":
            _check_cumulative("cu_seqlens_q", cu_seqlens, q.shape[0], params.max_seqlen_q)
    if params.cache_leftpad is not None:
        _check_int32("cache_leftpad", params.cache_leftpad, params.batch)
    check_append(params.append, params.batch, params.cache_leftpad)
    if q.dtype != k_cache.dtype:
        raise TypeError(f"q has dtype {q.dtype}; accepted: {k_cache.dtype}, k_cache's")
    if q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]}; accepted: {k_cache.shape[-1]}, k_cache's")
    nheads = q.shape[-2]
    if nheads % k_cache.shape[2]:
        raise ValueError(f"q has {nheads} heads; accepted: a multiple of k_cache's {k_cache.shape[2]}")
    if params.longest[0] > MAX_SEQLEN:
        raise ValueError(f"q has seqlen {params.longest[0]}; accepted: up to {MAX_SEQLEN}")
    if not (math.isfinite(params.softmax_scale) and params.softmax_scale > 0):
        raise ValueError(f"softmax_scale is {params.softmax_scale}; accepted: a finite number above 0")
    if not (math.isfinite(params.softcap) and params.softcap >= 0):
        raise ValueError(f"softcap is {params.softcap}; accepted: a finite number above 0, or 0 for none")
    slopes = params.alibi_slopes
    if slopes is not None:
        _check_slopes(slopes, params.batch, nheads, q.dtype)
    if params.sinks is not None:
        check_sinks(params.sinks, nheads, q.dtype)
    if params.tree_mask is not None:
        _check_tree(params, params.tree_mask)


def _check_slopes(slopes: Tensor, batch: int, nheads: int, dtype: torch.dtype) -> None:
    if tuple(slopes.shape) not in ((nheads,), (batch, nheads)):
        raise ValueError(
            f"alibi_slopes has shape {tuple(slopes.shape)}; accepted: ({nheads},) or ({batch}, {nheads})"
        )
    if slopes.dtype != torch.float32 and (slopes.dtype, dtype) != (torch.float64, torch.float64):
        raise TypeError(f"alibi_slopes has dtype {slopes.dtype}; accepted: torch.float32")
    if slopes.shape[-1] > 1 and slopes.stride(-1) != 1:
        raise ValueError(f"alibi_slopes has strides {tuple(slopes.stride())}; accepted: a last stride of 1")


def _check_tree(params: CacheParams, tree: Tensor) -> None:
    if tree.dtype != torch.int32:
        raise TypeError(f"tree_mask has dtype {tree.dtype}; accepted: torch.int32")
    rows, words = math.prod(params.q.shape[:-2]), -(-params.max_seqlen_q // 32)
    if tree.dim() != 2 or tree.shape[0] != rows or tree.shape[1] < words or tree.stride(1) != 1:
        raise ValueError(
            f"tree_mask has shape {tuple(tree.shape)} and strides {tuple(tree.stride())}; accepted: ({rows}, {words}) "
            f"or more words, with a last stride of 1, for {rows} queries of which a sequence has up to "
            f"{params.max_seqlen_q}"
        )
    if params.mask.startswith("window") or params.alibi_slopes is not None:
        name = "alibi_slopes" if params.alibi_slopes is not None else "a window"
        raise ValueError(
            f"tree_mask is given with {name}; accepted: without, as a query's position is not its row in a tree"
        )


def check_lengths(params: AppendParams, leftpad: Tensor | None = None) -> None:
    """Raise ValueError where a length or an entry is out of bounds. Waits for the device."""
    capacity = params.cache.capacity
    after = params.lengths_after()
    if params.cache_seqlens is not None and after is not None:
        for b, (before, end) in enumerate(zip(params.cache_seqlens.tolist(), after.tolist(), strict=True)):
            if before < 0 or end > capacity:
                raise ValueError(
                    f"cache_seqlens[{b}] is {before} and {end - before} rows are appended; accepted: from 0 to the "
                    f"capacity, {capacity}"
                )
    if leftpad is not None:
        _check_range("cache_leftpad", leftpad, capacity + 1)
    check_tables(params, leftpad)


def check_tables(params: AppendParams, leftpad: Tensor | None = None) -> None:
    """Raise ValueError where a sequence's entry, or a page of its rows, is out of bounds. Waits for the device."""
    if params.cache_batch_idx is not None:
        _check_range("cache_batch_idx", params.cache_batch_idx, params.entries)
    if params.page_table is None:
        return
    pages, size = params.k_cache.shape[:2]
    after = params.lengths_after()
    ends = itertools.repeat(params.cache.capacity) if after is None else after.tolist()
    starts = itertools.repeat(0) if leftpad is None else leftpad.tolist()
    entries = range(params.entries) if params.cache_batch_idx is None else params.cache_batch_idx.tolist()
    table = params.page_table.tolist()
    for entry, start, end in zip(entries, starts, ends, strict=False):
        for i in range(max(start, 0) // size, min(-(-end // size), len(table[entry]))):
            if not 0 <= table[entry][i] < pages:
                raise ValueError(f"page_table[{entry}, {i}] is {table[entry][i]}; accepted: 0 to {pages - 1}")


def _check_range(name: str, values: Tensor, end: int) -> None:
    for b, value in enumerate(values.tolist()):
        if not 0 <= value < end:
            raise ValueError(f"{name}[{b}] is {value}; accepted: 0 to {end - 1}")


# ---- checks of what the kernels need ----


def check_append_for_kernels(params: AppendParams) -> None:
    """Raise for what the append kernel does not support. Assumes :func:`check_append`."""
    for name, x in (("k_cache", params.k_cache), ("v_cache", params.v_cache)):
        if x.dtype not in APPEND_DTYPES:
            accepted = ", ".join(map(str, APPEND_DTYPES))
            raise TypeError(f"{name} has dtype {x.dtype}; accepted on CUDA: {accepted}")
    check_cache_addresses(params.k_cache, params.v_cache, params.k is not None)
    if params.k is not None:
        check_count("k has elements in rows of one head", params.k.numel() // params.k.shape[-1])


def check_cache_addresses(k_cache: Tensor, v_cache: Tensor, written: bool = True) -> None:
    """Raise for what metadata does not show: where a cache starts, and that both share memory that is written."""
    if written and overlap(k_cache, v_cache):
        raise ValueError("v_cache shares memory with k_cache; accepted: memory of its own")
    if not (k_cache.data_ptr() | v_cache.data_ptr()) % 16:
        return
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not is_aligned(x):
            raise ValueError(
                f"{name} starts {x.data_ptr() % 16} bytes past a multiple of 16; accepted: aligned"
            )


def readable(x: Tensor) -> Tensor:
    """``x``, or a copy where kernels cannot read its strides or its address."""
    if rows_are_regular(x) and is_aligned(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)
