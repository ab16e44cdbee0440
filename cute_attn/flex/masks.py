"""A BlockMask of FlexAttention as what :func:`cute_attn.attention` takes: a function of a table of block kinds."""

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_PARTIAL, _FULL = 1, 2
_UNBOUNDED = (1 << 30, 1 << 30)
"""The block size of FlexAttention's own masks of one block, which states lengths of 1 and fits any."""


def mask_mod_of(block_mask: BlockMask, query: Tensor, key: Tensor) -> Callable[..., Any]:
    """What a BlockMask shows: full blocks whole, partial ones where its mask_mod says so, no others.

    query, key: as of :func:`cute_attn.flex.flex_attention`, of which lengths may be shorter than the mask's.

    Raises:
        TypeError, ValueError: the mask is not one for such tensors.
    """
    kinds = _checked_kinds(block_mask, query, key)
    rows, columns = block_mask.BLOCK_SIZE
    mask_mod: Callable[..., Any] = block_mask.mask_mod
    per_batch, per_head = kinds.shape[0] > 1, kinds.shape[1] > 1

    def shown(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kind = kinds[b if per_batch else 0, h if per_head else 0, q_idx // rows, kv_idx // columns]
        return (kind == _FULL) | ((kind == _PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return shown


def _checked_kinds(block_mask: BlockMask, query: Tensor, key: Tensor) -> Tensor:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask is a {type(block_mask).__name__}; accepted: a BlockMask, or None")
    device = block_mask.kv_num_blocks.device
    if device != query.device:
        raise ValueError(f"block_mask is on {device}; accepted: {query.device}, where query is")
    kinds = kinds_of(block_mask)
    for what, dim in (("batch", 0), ("heads", 1)):
        if kinds.shape[dim] not in (1, query.shape[dim]):
            raise ValueError(
                f"block_mask has {what} {kinds.shape[dim]}; accepted: {query.shape[dim]}, query's, or 1"
            )
    for i, (name, x) in enumerate((("query", query), ("key", key))):
        most = kinds.shape[2 + i] * block_mask.BLOCK_SIZE[i]
        if tuple(block_mask.BLOCK_SIZE) != _UNBOUNDED:
            most = min(most, block_mask.seq_lengths[i])
        if x.shape[2] > most:
            raise ValueError(f"{name} has seqlen {x.shape[2]}; accepted: up to {most}, block_mask's")
    return kinds


class _Kept(NamedTuple):
    """A table, and what it was made of: it holds as long as that is the same."""

    lists: tuple[Tensor | None, ...]
    state: tuple
    table: Tensor


_tables: MutableMapping[BlockMask, _Kept] = WeakKeyDictionary()


def kinds_of(block_mask: BlockMask) -> Tensor:
    """The kinds of all blocks: 0 hidden, 1 partial, 2 full.

    Made on the mask's device, without waiting for it, and kept as long as the mask lives, but made anew where its lists
    changed, on another stream, and for each call where a change would not be seen: within the capture of a CUDA graph,
    whose replays read the lists again, and of inference tensors, which count no changes.

    Returns
    -------
    Tensor (batch or 1, heads or 1, blocks of queries, blocks of keys), uint8
    """
    lists = (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    if _changes_unseen(lists):
        return _table(block_mask)
    versions = tuple(None if x is None else x._version for x in lists)
    state = (versions, block_mask.BLOCK_SIZE, block_mask.seq_lengths, _stream(lists[0]))
    kept = _tables.get(block_mask)
    if kept is not None and kept.state == state and all(map(_is, kept.lists, lists)):
        return kept.table
    table = _table(block_mask)
    if type(table) is Tensor:  # no tracer's
        _tables[block_mask] = _Kept(lists, state, table)
    return table


def _is(x: Any, y: Any) -> bool:
    return x is y


def _changes_unseen(lists: tuple[Tensor | None, ...]) -> bool:
    on_gpu = lists[0] is not None and lists[0].is_cuda
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return True
    return any(x is not None and x.is_inference() for x in lists)


def _stream(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


@torch.inference_mode(False)
@torch.no_grad()
def _table(block_mask: BlockMask) -> Tensor:
    width = block_mask.kv_indices.shape[-1]
    if block_mask.full_kv_indices is not None:
        width = max(width, block_mask.full_kv_indices.shape[-1])
    columns = max(width, -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1]))  # lists may be shorter
    table = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns, _PARTIAL)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns, _FULL)
        table = torch.maximum(table, full)
    return table[(None,) * (4 - table.dim())]


def _listed(counts: Tensor, indices: Tensor, columns: int, kind: int) -> Tensor:
    """``kind`` where the first ``counts`` of ``indices`` point to, (..., blocks of queries, columns)."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    listed = (place < counts[..., None]) & (indices >= 0) & (indices < columns)
    column = torch.where(listed, indices, columns).to(
        torch.int64
    )  # one more takes what lies behind the lists
    table = torch.zeros(*column.shape[:-1], columns + 1, dtype=torch.uint8, device=indices.device)
    return table.scatter_(-1, column, kind)[..., :columns]
