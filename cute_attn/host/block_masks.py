"""FlexAttention's BlockMask as a function of kinds of blocks, and as lists of the blocks that kernels visit.

A BlockMask names, for each block of queries, the blocks of keys that are full and those that are partial: in these its
function decides, key by key; all others are hidden. What it says of an element is a function that reads a table of
kinds. Kernels visit lists of blocks of ``LISTED_ROWS``, made on the GPU without synchronizing, once a BlockMask.
"""

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from cute_attn.epilogues.functions.known import block_mask_epilogue_of

LISTED_ROWS = 128
"""As of :mod:`cute_attn.work.block_lists`, which needs the compiler."""
PARTIAL, FULL = 1, 2
"""Kinds of blocks, beside 0: hidden."""


class _Made(NamedTuple):
    """Of a BlockMask: its kinds, and the lists by lengths and heads."""

    kinds: Tensor
    lists: dict[tuple[int, ...], tuple[Tensor, ...]]


_made: MutableMapping[Any, _Made] = weakref.WeakKeyDictionary()


def epilogue_of_block_mask(block_mask: Any, q: Tensor, k: Tensor) -> tuple[str, tuple[Tensor, ...]]:
    """The registered name of a BlockMask's epilogue, and its arguments for q (batch, seqlen, heads, dim) and k.

    Raises:
        TypeError, ValueError: no BlockMask, or one of other sizes.
    """
    _check(block_mask, q, k)
    made = _made.get(block_mask)
    if made is None:
        made = _made[block_mask] = _Made(kinds_of(block_mask), {})
    mask_mod = _visible if block_mask.mask_mod is noop_mask else block_mask.mask_mod
    whole = all(rows % LISTED_ROWS == 0 for rows in block_mask.BLOCK_SIZE)
    function = _function(made.kinds, block_mask.BLOCK_SIZE, mask_mod)
    name, tensors = block_mask_epilogue_of(function, mask_mod if whole else None, q.device)
    key = (*q.shape[:3], *k.shape[1:3])
    if key not in made.lists:
        made.lists[key] = block_lists(made.kinds, block_mask.BLOCK_SIZE, *key)
    return name, (*tensors, *made.lists[key])


def _visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> bool:
    """The function of a BlockMask without one."""
    return True


def _function(kinds: Tensor, block_size: tuple[int, int], mask_mod: Callable) -> Callable:
    """Whether a query sees a key, of a table of kinds."""
    rows, columns = block_size
    one_batch, one_head = (size == 1 for size in kinds.shape[:2])

    def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kind = kinds[0 if one_batch else b, 0 if one_head else h, q_idx // rows, kv_idx // columns]
        return (kind == FULL) | ((kind == PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return sees


def kinds_of(block_mask: Any) -> Tensor:
    """int32 (batch, heads, blocks of queries, blocks of keys): 0, ``PARTIAL`` or ``FULL``; sizes of 1 broadcast."""
    indices = block_mask.kv_indices
    kinds = indices.new_zeros((*indices.shape[:-1], indices.shape[-1] + 1), dtype=torch.int32)
    for counts, listed, kind in (
        (block_mask.kv_num_blocks, indices, PARTIAL),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL),
    ):
        if counts is not None:
            last = listed.shape[-1]
            valid = torch.arange(last, device=listed.device) < counts[..., None]
            kinds.scatter_(-1, torch.where(valid, listed, last).long(), kind)
    return kinds[..., :-1].contiguous()


def block_lists(
    kinds: Tensor,
    block_size: tuple[int, int],
    batch: int,
    seqlen_q: int,
    nheads: int,
    seqlen_k: int,
    nheads_kv: int,
) -> tuple[Tensor, ...]:
    """Counts and blocks of the key blocks of each query block, then those of the query blocks of each key block.

    As :class:`cute_attn.work.block_lists.BlockLists` has them. A key block is visited for all query heads of its kv
    head at a time: its list is the union of theirs.
    """
    for dim, seqlen, rows in ((2, seqlen_q, block_size[0]), (3, seqlen_k, block_size[1])):
        kinds = _in_listed_blocks(kinds, dim, seqlen, rows)
    shared = kinds
    if kinds.shape[1] > 1:
        groups = kinds.unflatten(1, (nheads_kv, -1))
        seen, full = (groups > 0).any(2), (groups == FULL).all(2)
        shared = (seen.int() + full.int()).repeat_interleave(nheads // nheads_kv, 1)
    return (*_lists(kinds, batch, nheads, seqlen_k), *_lists(shared.mT, batch, nheads, seqlen_q))


def _in_listed_blocks(kinds: Tensor, dim: int, seqlen: int, rows: int) -> Tensor:
    """Kinds of blocks of ``LISTED_ROWS`` along ``dim`` for blocks of ``rows``: full and hidden where all of it is."""
    count, last = -(-seqlen // LISTED_ROWS), kinds.shape[dim] - 1
    first = torch.arange(count, device=kinds.device) * LISTED_ROWS
    end = (first + LISTED_ROWS - 1).clamp(max=max(seqlen - 1, 0)) // rows
    parts = [
        kinds.index_select(dim, torch.minimum(first // rows + i, end).clamp(max=last))
        for i in range((LISTED_ROWS - 1) // rows + 2)
    ]
    seen, full = (torch.stack(x) for x in zip(*((part > 0, part == FULL) for part in parts), strict=True))
    return seen.any(0).int() + full.all(0).int()


def _lists(kinds: Tensor, batch: int, nheads: int, seqlen: int) -> tuple[Tensor, Tensor]:
    """Counts and blocks along the last dimension, of ``seqlen`` rows.

    The last block counts as partial if it ends beyond them. So it comes last in each list that has it, and kernels
    whose blocks are smaller visit none that begins there.
    """
    missing = -seqlen % LISTED_ROWS
    if missing:
        kinds = torch.cat((kinds[..., :-1], kinds[..., -1:].clamp(max=PARTIAL)), -1)
    full, listed = ((kinds >= kind).sum(-1) * LISTED_ROWS for kind in (FULL, PARTIAL))
    counts = torch.stack((full, listed - (kinds[..., -1] > 0) * missing), -1).int()
    blocks = torch.sort(kinds.contiguous(), dim=-1, descending=True, stable=True).indices.int()
    return counts.expand(batch, nheads, -1, -1), blocks.expand(batch, nheads, -1, -1)


def _check(block_mask: Any, q: Tensor, k: Tensor) -> None:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask is of {type(block_mask).__name__}; accepted: BlockMask of torch.nn.attention.flex_attention, "
            "or None"
        )
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k)):
        return  # refused with the other arguments
    rows, columns = block_mask.BLOCK_SIZE
    batch, heads, blocks_q, blocks_k = (*block_mask.kv_indices.shape[:3], block_mask.kv_indices.shape[-1])
    sizes = (q.shape[0], q.shape[2], -(-q.shape[1] // rows), -(-k.shape[1] // columns))
    broadcast = batch in (1, sizes[0]) and heads in (1, sizes[1])
    if not (broadcast and blocks_q >= sizes[2] and blocks_k >= sizes[3]):
        raise ValueError(
            f"block_mask has {batch} x {heads} x {blocks_q} x {blocks_k} blocks of {rows} x {columns}; accepted: 1 or "
            f"{sizes[0]} x 1 or {sizes[1]} x {sizes[2]} x {sizes[3]} of those for these q and k, or more"
        )
    if block_mask.kv_indices.device != q.device:
        raise ValueError(f"block_mask is on {block_mask.kv_indices.device}; accepted: {q.device}, q's device")
