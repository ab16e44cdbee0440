"""BlockMasks in which each query sees one interval of keys, made without waiting for the GPU."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cute_attn.host.mask_kinds import LISTED_ROWS, listed_first
from cute_attn.host.values import check_dtype, is_int, kind_of, python_number, wrong_shape

_INTEGERS = (torch.int32, torch.int64)


def interval_mask(begin: Tensor, end: Tensor, seqlen_k: int) -> BlockMask:
    """Make a BlockMask in which a query sees keys ``begin <= key < end``, for ``attention`` and ``flex_attention``.

    No (seqlen_q, seqlen_k) tensor is made: blocks of 128 x 128 are classified by the minimum and maximum bounds of
    their queries. If a CUDA graph captures the call, each replay makes the lists again.

    Parameters
    ----------
    begin, end : Tensor (batch or 1, nheads or 1, seqlen_q), int32 or int64
        A query with ``begin >= end`` sees no key. Bounds may be outside the sequence.
    seqlen_k : int
        Number of keys of each sequence.

    Returns
    -------
    BlockMask
        The mask's function reads ``begin`` and ``end``, which must not change while the mask is used.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described here.
    """
    seqlen_k = python_number(seqlen_k)
    _check(begin, end, seqlen_k)
    sizes = [max(pair) for pair in zip(begin.shape, end.shape, strict=True)]
    with torch.no_grad():
        kinds = [x[..., None] for x in _bounds(begin.expand(sizes), end.expand(sizes))]
        first = torch.arange(-(-seqlen_k // LISTED_ROWS), device=begin.device) * LISTED_ROWS
        last = (first + LISTED_ROWS).clamp(max=seqlen_k)
        least_begin, most_begin, least_end, most_end = kinds
        listed = (least_begin < last) & (most_end > first)
        full = (most_begin <= first) & (least_end >= last)
        partial_lists, full_lists = listed_first(listed & ~full), listed_first(full)
    one_batch, one_head = (size == 1 for size in sizes[:2])

    def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = (0 if one_batch else b, 0 if one_head else h, q_idx)
        return (kv_idx >= first_key[at]) & (kv_idx < last_key[at])

    first_key, last_key = begin.expand(sizes), end.expand(sizes)
    return BlockMask.from_kv_blocks(
        *partial_lists, *full_lists, BLOCK_SIZE=LISTED_ROWS, mask_mod=sees, seq_lengths=(sizes[2], seqlen_k)
    )


def _check(begin: Any, end: Any, seqlen_k: Any) -> None:
    for name, x in (("begin", begin), ("end", end)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {kind_of(x)}; accepted: a tensor (batch, nheads, seqlen_q)")
        check_dtype(name, x, *_INTEGERS)
        if x.dim() != 3 or x.shape[2] == 0:
            raise wrong_shape(name, x, "(batch, nheads, seqlen_q)")
    if end.device != begin.device:
        raise ValueError(f"end is on {end.device}; accepted: {begin.device}, where begin is")
    pairs = enumerate(zip(begin.shape, end.shape, strict=True))
    alike = all(m == n or (axis < 2 and 1 in (m, n)) for axis, (m, n) in pairs)
    if not alike:
        raise wrong_shape("end", end, f"{tuple(begin.shape)}, begin's, with 1 for the batch or heads")
    if not is_int(seqlen_k) or seqlen_k < 1:
        raise ValueError(f"seqlen_k is {seqlen_k!r}; accepted: an int of 1 or more")


def _bounds(begin: Tensor, end: Tensor) -> tuple[Tensor, ...]:
    """The smallest and largest begin, and the smallest and largest end, over the queries of each block.

    A query without keys gets the largest possible begin and the smallest end, so that it adds no key block to its
    block's list, and none counts as full.
    """
    empty, most = begin >= end, 1 << 30
    bounds = (begin.masked_fill(empty, most), end.masked_fill(empty, -most))
    missing = -begin.shape[-1] % LISTED_ROWS
    found = []
    for x in bounds:
        # Rows beyond the queries are as their last one.
        blocks = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1).unflatten(
            -1, (-1, LISTED_ROWS)
        )
        found += [blocks.amin(-1), blocks.amax(-1)]
    return tuple(found)
