"""The arguments of the kernels of each op, and fake tensors of them for compiling.

The forward's:

    mQ        (batch, seqlen_q, nheads, head_dim)       or varlen (total_q, nheads, head_dim)
    mK        (batch, seqlen_k, nheads_kv, head_dim)    or varlen (total_k, nheads_kv, head_dim)
    mV, mO    as mK and mQ, with head_dim_v
    mLSE      (batch, nheads, seqlen_q) fp32            or varlen (nheads, total_q)
    seqlens   Seqlens: int32 tensors or None, and the largest lengths
    softmax_scale, schedule (``ForwardSchedule``), score_args (``EpilogueChain.host_args``), stream

The softmax kernel's: mQ, mK, mLSE, seqlens, softmax_scale and score_args of the forward, and

    mSoftmax  (batch, nheads, max_seqlen_q, max_seqlen_k) in the dtype of q, all zeros

The backward's, in three launches with an fp32 workspace between them:

    mDO, mDQ, mDK, mDV   as mO, mQ, mK and mV
    mLSElog2  (batch, nheads, rows)   or varlen (nheads, rows): LSE * log2(e); +inf in rows without keys and in padding
    mMinusD   as mLSElog2: -D, D = (rowsum(dO * O) - dLSE) / rp, where rp = 1 / (1 - dropout_p); 0 in those rows
    mDQaccum  (accumulators, batch, nheads, rows * padded head_dim)   or varlen (accumulators, nheads, ...)
              dQ / (rp * softmax_scale), query block by query block, each in the order of ``cute_attn.outputs.dq_order``
    mNext     (16,): 0 in its first 4 bytes, see ``BackwardSchedule``

where rows are padded to multiples of the main kernel's ``tile_m``: ceil(max_seqlen_q / tile_m) query blocks, or varlen
total_q // tile_m + batch of them (``cute_attn.device.seqlen.padded_row0``). All four are contiguous.

Sizes and strides are symbolic, strides 64 bit; rows of head_dim are 16-byte aligned, with strides in multiples of
16 bytes.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_attn.device.key_rows import CacheTables
from cute_attn.device.seqlen import Seqlens
from cute_attn.rows.new_rows import Angles, NewKeys, Queries
from cute_attn.traits import MEASURED_TENSORS, PADDED_TENSORS, SPLIT_TENSORS, Traits
from cute_attn.work.key_parts import Partials
from cute_attn.work.key_tiles import BackwardSchedule
from cute_attn.work.query_tiles import ForwardSchedule

CUTE_DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
ALIGN_BYTES = 16


def rows_fake(dtype: Any, ndim: int) -> cute.Tensor:
    """A tensor of head-dim rows: last dimension contiguous, its size and other strides multiples of 16 bytes."""
    divisibility = ALIGN_BYTES * 8 // dtype.width
    shape = (*(cute.sym_int() for _ in range(ndim - 1)), cute.sym_int(divisibility=divisibility))
    stride = (*(cute.sym_int64(divisibility=divisibility) for _ in range(ndim - 1)), 1)
    return make_fake_tensor(dtype, shape, stride=stride, assumed_align=ALIGN_BYTES)


def head_rows_fake(traits: Traits) -> cute.Tensor:
    """q, k, v, o or a gradient of them."""
    return rows_fake(CUTE_DTYPES[traits.dtype], 3 if traits.varlen else 4)


def plain_fake(dtype: Any, ndim: int) -> cute.Tensor:
    """A tensor with a contiguous last dimension and any other strides."""
    shape = tuple(cute.sym_int() for _ in range(ndim))
    stride = (*(cute.sym_int64() for _ in range(ndim - 1)), 1)
    return make_fake_tensor(dtype, shape, stride=stride, assumed_align=dtype.width // 8)


def strided_fake(dtype: Any, ndim: int) -> cute.Tensor:
    """A tensor with any strides."""
    shape = tuple(cute.sym_int() for _ in range(ndim))
    stride = tuple(cute.sym_int64() for _ in range(ndim))
    return make_fake_tensor(dtype, shape, stride=stride, assumed_align=dtype.width // 8)


def workspace_fake(ndim: int) -> cute.Tensor:
    """fp32 workspace: contiguous, every row 16-byte aligned."""
    shape = (*(cute.sym_int() for _ in range(ndim - 1)), cute.sym_int64(divisibility=16))
    stride = (*(cute.sym_int64(divisibility=16) for _ in range(ndim - 1)), 1)
    return make_fake_tensor(Float32, shape, stride=stride, assumed_align=ALIGN_BYTES)


def seqlens_fake(traits: Traits) -> Seqlens:
    """The lengths that the traits ask for."""

    def lengths(present: bool) -> cute.Tensor | None:
        return plain_fake(Int32, 1) if present else None

    return Seqlens(
        lengths(traits.varlen),
        lengths(traits.varlen),
        lengths(traits.seqused_q),
        lengths(traits.seqused_k),
        Int32(0),
        Int32(0),
    )


def split_fp32_fake_args(traits: Traits) -> tuple:
    """``__call__``'s arguments of the split of fp32 tensors, without the stream.

    mX (q, k, v) of the forward, or (q, k, v, dO); mTerms: of each but the forward's q the terms in fp16, contiguous,
    (..., 2, padded dim) for rows (..., dim): hi, then lo, or with precision tf32 (..., 1, padded dim);
    mPartials (tensors, 2, blocks) int32; mScales (tensors,): 2^-e, or 0.
    """
    count = len(SPLIT_TENSORS[traits.op])
    split = count - MEASURED_TENSORS[traits.op]
    return (
        tuple(head_rows_fake(traits) for _ in range(count)),
        tuple(rows_fake(cutlass.Float16, 4 if traits.varlen else 5) for _ in range(split)),
        make_fake_tensor(Int32, (count, 2, cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64(), 1)),
        scales_fake(),
    )


def pad_rows_fake_args(traits: Traits) -> tuple:
    """``__call__``'s arguments of the padding copies, without the stream.

    mSource, mTarget: tensors of rows, see ``PADDED_TENSORS``; those of one are padded, contiguous with 16-byte aligned
    rows, and those of the other of any head dim and strides. which: a bit for each tensor that is copied.
    mCuSeqlens: of the rows of packed queries that become O; None for other copies.
    """
    dtype, ndim = CUTE_DTYPES[traits.dtype], 3 if traits.varlen else 4
    count = len(PADDED_TENSORS[traits.op])
    anywhere, padded = (tuple(make(dtype, ndim) for _ in range(count)) for make in (strided_fake, rows_fake))
    pads = traits.op.endswith("_pad")
    bounded = traits.varlen and traits.op == "forward_unpad"
    return (
        *((anywhere, padded) if pads else (padded, anywhere)),
        Int32(0),
        plain_fake(Int32, 1) if bounded else None,
    )


def block_kinds_fake_args(mask_args: tuple | None) -> tuple:
    """``__call__``'s arguments of the kernel that finds kinds of blocks, without the stream.

    mKinds (batch or 1, nheads or 1, blocks of queries, blocks of keys) uint8; seqlen_q, seqlen_k; groups: CTAs of a
    block of queries; mask_args: the mask's captured tensors, None where it has none.
    """
    return (plain_fake(cutlass.Uint8, 4), Int32(1), Int32(1), Int32(1), mask_args)


def block_lists_fake_args() -> tuple:
    """``__call__``'s arguments of the kernel that lists blocks, without the stream.

    mKinds as of :func:`block_kinds_fake_args`; of_queries and of_keys: as of ``BlockCounts``, the blocks of keys of
    each block of queries and the reverse.
    """
    lists = tuple(tuple(plain_fake(Int32, ndim) for ndim in (3, 4, 3, 4)) for _ in range(2))
    return (plain_fake(cutlass.Uint8, 4), *lists)


def block_visits_fake_args() -> tuple:
    """``__call__``'s arguments of the kernel that lists what kernels visit, without the stream.

    mKinds as of :func:`block_kinds_fake_args`, for blocks of block_q queries and block_k keys; of_queries and of_keys:
    counts and blocks as of ``cute_attn.work.block_lists.BlockLists``; seqlen_q, seqlen_k; block_q, block_k; group:
    query heads of a kv head, 1 where mKinds has one head.
    """
    lists = tuple((plain_fake(Int32, 4), plain_fake(Int32, 4)) for _ in range(2))
    return (plain_fake(cutlass.Uint8, 4), *lists, *(Int32(1) for _ in range(5)))


def forward_fake_args(traits: Traits, score_args: tuple) -> tuple:
    """``__call__``'s arguments of a forward kernel, without the stream."""
    ndim = 3 if traits.varlen else 4
    return (
        *(head_rows_fake(traits) for _ in range(4)),
        plain_fake(Float32, ndim - 1),
        seqlens_fake(traits),
        Float32(0.0),
        ForwardSchedule(make_fake_tensor(Int32, (4,), stride=(1,), assumed_align=16), Int32(0)),
        score_args,
    )


def scales_fake() -> cute.Tensor:
    """Scales of tensors in terms, as of :func:`split_fp32_fake_args`."""
    return plain_fake(Float32, 1)


def preprocess_fake_args(traits: Traits) -> tuple:
    """``__call__``'s arguments of the preprocess, without the stream.

    mDO, mO, mLSE, mDLSE, mLSElog2, mMinusD, mDQaccum, mNext, gradients, seqlens, keep_prob. mDLSE, the gradient of
    mLSE, may have any strides and is None without the trait ``lse_grad``. gradients: (mDQ, mDK, mDV) with
    varlen, or None. Of seqlens only the queries' are read, and for those gradients cu_seqlens_k.
    """
    ndim = 3 if traits.varlen else 4
    return (
        head_rows_fake(traits),
        head_rows_fake(traits),
        plain_fake(Float32, ndim - 1),
        strided_fake(Float32, ndim - 1) if traits.lse_grad else None,
        workspace_fake(ndim - 1),
        workspace_fake(ndim - 1),
        workspace_fake(ndim),
        workspace_fake(1),
        tuple(head_rows_fake(traits) for _ in range(3)) if traits.varlen else None,
        seqlens_fake(traits),
        Float32(0.0),
    )


def backward_fake_args(traits: Traits, score_args: tuple) -> tuple:
    """``__call__``'s arguments of a backward's main kernel, without the stream.

    mQ, mK, mV, mDO, mLSElog2, mMinusD, mDQaccum, mDK, mDV, seqlens, softmax_scale, schedule (``BackwardSchedule``),
    score_args.
    """
    ndim = 3 if traits.varlen else 4
    return (
        *(head_rows_fake(traits) for _ in range(4)),
        workspace_fake(ndim - 1),
        workspace_fake(ndim - 1),
        workspace_fake(ndim),
        *(head_rows_fake(traits) for _ in range(2)),
        seqlens_fake(traits),
        Float32(0.0),
        BackwardSchedule(Int32(0), Int64(0), workspace_fake(1), Int32(0)),
        score_args,
    )


def convert_fake_args(traits: Traits) -> tuple:
    """``__call__``'s arguments of the convert, without the stream.

    mDQaccum, mDQ, seqlens, scale. scale: rp * softmax_scale. Of seqlens only the queries' are read.
    """
    ndim = 3 if traits.varlen else 4
    return (
        workspace_fake(ndim),
        head_rows_fake(traits),
        seqlens_fake(traits),
        Float32(0.0),
    )


def combine_fake_args(traits: Traits) -> tuple:
    """``__call__``'s arguments of the combine kernel, without the stream.

    mOpartial (partials, batch, queries, nheads, head_dim_v) and mLSEpartial (partials, batch, nheads, queries), fp32;
    mO (batch, queries, nheads, head_dim_v), mLSE (batch, nheads, queries). Packed rows are one batch. mSinks (nheads,),
    or None without ``sinks``.
    """
    return (
        rows_fake(Float32, 5),
        strided_fake(Float32, 4),
        rows_fake(CUTE_DTYPES[traits.dtype], 4),
        strided_fake(Float32, 3),
        _sinks_fake(traits),
    )


def kvcache_fake_args(traits: Traits, score_args: tuple) -> tuple:
    """``__call__``'s arguments of a kvcache kernel, without the stream.

    mQ, mK, mV, mO, mLSE, seqlens, tables, softmax_scale, schedule, score_args, partials. mK and mV: the caches as of
    ``append_fake_args``, with its tables, or with ``varlen_k`` packed as the forward's. Of seqlens max_seqlen_k is the
    capacity, and cu_seqlens_k is None without ``varlen_k``. partials is None without ``split``.
    """
    dtype = CUTE_DTYPES[traits.dtype]
    ndim = 3 if traits.varlen else 4
    return (
        rows_fake(dtype, ndim),
        *(rows_fake(dtype, 3 if traits.varlen_k else 4) for _ in range(2)),
        rows_fake(dtype, ndim),
        plain_fake(Float32, ndim - 1),
        _cache_seqlens_fake(traits),
        _tables_fake(traits),
        Float32(0.0),
        ForwardSchedule(make_fake_tensor(Int32, (4,), stride=(1,), assumed_align=16), Int32(0)),
        score_args,
        _partials_fake(traits.split) if traits.split else None,
    )


def combine_shares_fake_args(traits: Traits, mask_args: tuple | None) -> tuple:
    """``__call__``'s arguments of the combine kernel after shares, without the stream.

    partials (``Partials``), mO and mLSE as the kvcache kernel's, mSinks as of combine, seqlens as the kvcache kernel's,
    mask_args (None where the mask has none), nheads_kv, slots.
    """
    ndim = 3 if traits.varlen else 4
    return (
        _partials_fake("shares"),
        rows_fake(CUTE_DTYPES[traits.dtype], ndim),
        plain_fake(Float32, ndim - 1),
        _sinks_fake(traits),
        _cache_seqlens_fake(traits),
        mask_args,
        Int32(0),
        Int32(0),
    )


def _sinks_fake(traits: Traits) -> cute.Tensor | None:
    return strided_fake(CUTE_DTYPES[traits.sinks], 1) if traits.sinks else None


def _partials_fake(split: str) -> Partials:
    sizes = (5, 4) if split == "parts" else (3, 2)
    return Partials(rows_fake(Float32, sizes[0]), strided_fake(Float32, sizes[1]), Int32(0), Int32(0))


def _cache_seqlens_fake(traits: Traits) -> Seqlens:
    """Lengths of packed or batched queries and of what is used of a cache."""

    def lengths(present: bool) -> cute.Tensor | None:
        return plain_fake(Int32, 1) if present else None

    cu_seqlens = lengths(traits.varlen), lengths(traits.varlen_k)
    longest, added_k = (Int32(0), Int32(0)), Int32(0)
    return Seqlens(*cu_seqlens, None, lengths(traits.seqused_k), *longest, lengths(traits.leftpad), added_k)


def _tables_fake(traits: Traits) -> CacheTables | None:
    if not (traits.paged or traits.batch_idx):
        return None
    return CacheTables(
        plain_fake(Int32, 2) if traits.paged else None, plain_fake(Int32, 1) if traits.batch_idx else None
    )


def append_fake_args(traits: Traits) -> tuple:
    """``__call__``'s arguments of the append kernel, without the stream.

    mKcache, mVcache: (entries or pages, rows, nheads_kv, head_dim or head_dim_v); tables (``CacheTables``), or None
    without ``paged`` and ``batch_idx``; new; angles, or None without ``rotary``; queries, or None without ``rotate_q``.
    The latter three are tuples of ``cute_attn.rows.new_rows``.
    """
    dtype = CUTE_DTYPES[traits.dtype]

    def lengths(present: bool = True) -> cute.Tensor | None:
        return plain_fake(Int32, 1) if present else None

    rows_new, rows_q = (3 if packed else 4 for packed in (traits.varlen_new, traits.varlen))
    new = NewKeys(
        rows_fake(dtype, rows_new), rows_fake(dtype, rows_new), lengths(), lengths(traits.varlen_new)
    )
    angles = Angles(plain_fake(dtype, 2), plain_fake(dtype, 2), lengths()) if traits.rotary else None
    queries = (
        Queries(rows_fake(dtype, rows_q), rows_fake(dtype, rows_q), lengths(traits.varlen), Int32(0))
        if traits.rotate_q
        else None
    )
    return (rows_fake(dtype, 4), rows_fake(dtype, 4), _tables_fake(traits), new, angles, queries)
