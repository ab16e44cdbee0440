"""Argument types shared by several kernels, and how each is faked (:mod:`cute_attn.compiler.arguments`).

Sizes and strides are symbolic, and strides have 64 bits. Head-dim rows are 16-byte aligned with strides in multiples of
16 bytes, unless the traits have an ``alignment``.
"""

from typing import Annotated, Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_attn.device.fakes import plain as plain
from cute_attn.device.fakes import strided as strided
from cute_attn.device.key_rows import CacheTables
from cute_attn.device.math import CUTE_DTYPES as CUTE_DTYPES
from cute_attn.device.seqlen import Seqlens
from cute_attn.traits import Traits
from cute_attn.work.block_range import Partials
from cute_attn.work.key_tiles import BackwardSchedule
from cute_attn.work.query_tiles import ForwardSchedule

ALIGN_BYTES = 16


# ---- tensors of any kernel ----


def rows(dtype: Any, ndim: int, alignment: int = 0) -> cute.Tensor:
    """A tensor of head-dim rows with a contiguous last dimension.

    The last dimension's size and all other strides are multiples of 16 bytes, or of ``alignment`` elements if given.
    """
    divisibility = alignment or ALIGN_BYTES * 8 // dtype.width
    shape = (*(cute.sym_int() for _ in range(ndim - 1)), cute.sym_int(divisibility=divisibility))
    stride = (*(cute.sym_int64(divisibility=divisibility) for _ in range(ndim - 1)), 1)
    return make_fake_tensor(dtype, shape, stride=stride, assumed_align=divisibility * dtype.width // 8)


def workspace(ndim: int) -> cute.Tensor:
    """fp32 workspace: contiguous, every row 16-byte aligned."""
    shape = (*(cute.sym_int() for _ in range(ndim - 1)), cute.sym_int64(divisibility=16))
    stride = (*(cute.sym_int64(divisibility=16) for _ in range(ndim - 1)), 1)
    return make_fake_tensor(Float32, shape, stride=stride, assumed_align=ALIGN_BYTES)


def numbers(present: bool) -> cute.Tensor | None:
    """A vector of int32, such as a length per sequence, or None unless ``present``."""
    return plain(Int32, 1) if present else None


def rank(traits: Traits) -> int:
    """Number of q's dimensions: 4, or 3 for packed sequences."""
    return 3 if traits.varlen else 4


# ---- tensors of a call ----


def head_rows(kernel: Any) -> cute.Tensor:
    return rows(CUTE_DTYPES[kernel.traits.dtype], rank(kernel.traits), kernel.traits.alignment)


HeadRows = Annotated[cute.Tensor, head_rows]
"""q, k, v, o or the gradient of one: (batch, seqlen, nheads, dim), or varlen (total, nheads, dim).

k and v have nheads_kv heads; v and o have rows of head_dim_v."""

CacheRows = Annotated[
    cute.Tensor,
    lambda kernel: rows(
        CUTE_DTYPES[kernel.traits.dtype], 3 if kernel.traits.varlen_k else 4, kernel.traits.alignment
    ),
]
"""A cache of k or v: (entries or pages, rows, nheads_kv, dim), or with ``varlen_k`` packed (total, nheads_kv, dim)."""

RowNumbers = Annotated[cute.Tensor, lambda kernel: plain(Float32, rank(kernel.traits) - 1)]
"""LSE: fp32 (batch, nheads, seqlen_q), or varlen (nheads, total_q)."""

Sinks = Annotated[
    cute.Tensor | None,
    lambda kernel: strided(CUTE_DTYPES[kernel.traits.sinks], 1) if kernel.traits.sinks else None,
]
"""Attention sinks: (nheads,), or None without ``sinks``."""

Scales = Annotated[cute.Tensor, lambda kernel: plain(Float32, 1)]
"""Scales of tensors that are split into terms: see :class:`cute_attn.kernels.split_fp32.SplitFp32`."""

Kinds = Annotated[cute.Tensor, lambda kernel: plain(cutlass.Uint8, 4)]
"""Kinds of a mask's blocks: (batch or 1, nheads or 1, blocks of queries, blocks of keys)."""


# ---- the workspace of a backward ----
# Rows are padded to multiples of the main kernel's tile_m: ceil(max_seqlen_q / tile_m) query blocks, or varlen
# total_q // tile_m + batch of them (cute_attn.device.seqlen.padded_row0). All of it is contiguous.

QueryNumbers = Annotated[cute.Tensor, lambda kernel: workspace(rank(kernel.traits) - 1)]
"""mLSElog2 and mMinusD: (batch, nheads, rows), or varlen (nheads, rows).

mLSElog2 is LSE * log2(e), +inf in rows without keys and in padding. mMinusD is -D, 0 in those rows, where
D = (rowsum(dO * O) - dLSE) / rp and rp = 1 / (1 - dropout_p)."""

Accumulators = Annotated[cute.Tensor, lambda kernel: workspace(rank(kernel.traits))]
"""mDQaccum: (accumulators, batch, nheads, rows * padded head_dim), or varlen (accumulators, nheads, ...).

They hold dQ / (rp * softmax_scale), one query block after another, each in the order of
``cute_attn.kernels.dq_order``."""

Counters = Annotated[cute.Tensor, lambda kernel: workspace(1)]
"""mCounters: fp32 zeros, used as int32 counters: see ``BackwardSchedule``."""


# ---- tuples ----
# Unions: for a bare annotated class of tuples the DSL would ask the annotation for the fields' types.


def _seqlens_fake(kernel: Any) -> Seqlens:
    traits = kernel.traits
    cached = traits.op == "kvcache"
    present = (
        traits.varlen,
        traits.varlen_k if cached else traits.varlen,
        traits.seqused_q,
        traits.seqused_k,
    )
    cu_q, cu_k, used_q, used_k = map(numbers, present)
    more = numbers(traits.leftpad), Int32(0) if cached else None
    return Seqlens(cu_q, cu_k, used_q, used_k, Int32(0), Int32(0), *more)


Lengths = Annotated[Seqlens | Any, _seqlens_fake]
"""The lengths that the traits require. With a cache, max_seqlen_k is the cache's capacity."""


def _tables_fake(kernel: Any) -> CacheTables | None:
    paged, batch_idx = kernel.traits.paged, kernel.traits.batch_idx
    if not (paged or batch_idx):
        return None
    return CacheTables(plain(Int32, 2) if paged else None, numbers(batch_idx))


Tables = Annotated[CacheTables | None, _tables_fake]
"""Tables of a cache, or None if the traits have neither ``paged`` nor ``batch_idx``."""


def _partials_fake(kernel: Any) -> Partials | None:
    if not kernel.traits.split:
        return None
    sizes = (5, 4) if kernel.traits.split == "fixed" else (3, 2)
    return Partials(rows(Float32, sizes[0]), strided(Float32, sizes[1]), Int32(0), Int32(0))


PartialResults = Annotated[Partials | None, _partials_fake]
"""Partial results of split keys, or None without a split."""

ForwardCounters = Annotated[
    ForwardSchedule | Any,
    lambda kernel: ForwardSchedule(
        make_fake_tensor(Int32, (4,), stride=(1,), assumed_align=ALIGN_BYTES), Int32(0)
    ),
]

BackwardCounters = Annotated[
    BackwardSchedule | Any, lambda kernel: BackwardSchedule(Int32(0), Int64(0), workspace(1), Int32(0))
]

ScoreArgs = Annotated[tuple, lambda kernel: kernel.epilogues.fake_args()]
"""Arguments of the epilogues: ``EpilogueChain.host_args``."""
