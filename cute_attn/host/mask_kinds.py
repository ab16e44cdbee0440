"""The block mask of a function: the kinds of its blocks and lists of the blocks, computed by two launches on a GPU.

The host reads nothing. On the CPU the function is evaluated for every query and key, one block of queries at a time;
this is the definition.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.epilogues.functions.blocks import Predicate, predicate_of
from cute_attn.epilogues.functions.definition import evaluate
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.epilogues.functions.trace import Trace, as_kernels_read, trace
from cute_attn.host import memory, record
from cute_attn.host.block_masks import remember
from cute_attn.host.checks import check_count
from cute_attn.traits import FULL, LISTED_ROWS, PARTIAL, Traits

_MOST_CTAS = 1024
"""Maximum CTAs, several per multiprocessor: if a mask has fewer query blocks, several CTAs compute each of them."""
_WARPS = 4

Sizes = tuple[int, int, int, int]
"""Batch, heads, queries, keys."""


@torch.inference_mode(False)
@torch.no_grad()
def made_block_mask(
    mask_mod: Callable[..., Any], sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> BlockMask:
    """The BlockMask of a function, of size 1 along the batch or the heads if it does not depend on them.

    Raises:
        TypeError, ValueError: the function cannot be traced or captures a tensor on another device, or the mask has too
            many blocks.
        Unsupported: no kernel evaluates the function.
    """
    if device.type == "cuda":
        kinds = _kinds_by_kernel(mask_mod, sizes, block_size, device)
    else:
        kinds = _kinds_by_definition(trace(None, mask_mod, device), sizes, block_size, device)
    of_queries, of_keys = lists_of(kinds)
    mask = BlockMask(sizes[2:], *of_queries, *of_keys, BLOCK_SIZE=block_size, mask_mod=mask_mod)
    remember(mask, kinds)
    return mask


def _check_captured(tensors: tuple[Tensor, ...], device: torch.device) -> None:
    for x in tensors:
        if x.device != device:
            raise ValueError(
                f"mask_mod captures a tensor on {x.device}; accepted: {device}, the mask's device"
            )


def _shape(predicate: Predicate, sizes: Sizes, block_size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Shape of the table of kinds."""
    batch, nheads, *lengths = sizes
    rows, columns = (-(-n // size) for n, size in zip(lengths, block_size, strict=True))
    return batch if predicate.batched else 1, nheads if predicate.headed else 1, rows, columns


# ---- on the CPU ----


def _kinds_by_definition(
    traced: Trace, sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Tensor:
    """Kinds of all blocks, uint8 (batch or 1, heads or 1, blocks of queries, blocks of keys)."""
    _check_captured(traced.tensors, device)
    predicate = predicate_of(traced.graph, traced.output)
    assert predicate is not None  # since it is the graph of a mask_mod
    shape = _shape(predicate, sizes, block_size)
    kinds = torch.empty(shape, dtype=torch.uint8, device=device)
    lengths, (rows, columns) = sizes[2:], block_size
    index = [torch.arange(n, device=device) for n in (*shape[:2], *lengths)]
    batch, head, query, key = (x.view([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(index))
    score = torch.zeros((), device=device)
    for row in range(shape[2]):
        own = query[:, :, row * rows : (row + 1) * rows]
        inputs = {"score": score, "batch": batch, "head": head, "query": own, "key": key}
        seen = evaluate(predicate.traced, inputs, traced.tensors)
        seen = seen.expand(*shape[:2], own.shape[2], lengths[1])
        beyond = (0, shape[3] * columns - lengths[1], 0, rows - own.shape[2])
        blocks = torch.nn.functional.pad(seen, beyond).unflatten(3, (-1, columns))
        some, all_ = blocks.any(4).any(2), blocks.all(4).all(2)
        kinds[:, :, row] = PARTIAL * (some & ~all_) + FULL * all_
    return kinds


# ---- on a GPU ----


def _kinds_by_kernel(
    mask_mod: Callable[..., Any], sizes: Sizes, block_size: tuple[int, int], device: torch.device
) -> Tensor:
    """:func:`_kinds_by_definition` computed by a kernel."""
    name, tensors = epilogue_of(None, mask_mod, device)
    with memory.on_device(device.index):
        kernel, predicate = _kinds_kernel(name, block_size, device.index)
        _check_captured(tensors, device)
        shape = _shape(predicate, sizes, block_size)
        blocks_q = shape[0] * shape[1] * shape[2]
        groups = max(1, min(-(-shape[3] // _WARPS), _MOST_CTAS // blocks_q))
        check_count("block_mask has blocks of queries", blocks_q * groups)
        kinds = torch.empty(shape, dtype=torch.uint8, device=device)
        captured = tuple(as_kernels_read(x) for x in tensors) or None
        own = {"seqlen_q": sizes[2], "seqlen_k": sizes[3], "groups": groups, "mask_args": captured}
        record.launch(*kernel.bind(mKinds=kinds, **own))
        return kinds


@functools.lru_cache(256)
def _kinds_kernel(name: str, block_size: tuple[int, int], device: int) -> tuple[Any, Predicate]:
    """The compiled kernel for a traced mask ("" for a mask that hides nothing) on ``device``, the current device."""
    traits = Traits("block_kinds", "sm80", "bf16", LISTED_ROWS, epilogues=(name,) if name else ())
    target = compiler.default_target("sm80")
    kernel = registry.lookup(traits, f"tile_m={block_size[0]},tile_n={block_size[1]}", target)
    return compiler.build(kernel, target), kernel.predicate


# ---- lists ----

Lists = tuple[Tensor, Tensor, Tensor, Tensor]
"""Counts and indices of partial blocks, then of full blocks, as a BlockMask stores them for queries and for keys."""


def lists_of(kinds: Tensor) -> tuple[Lists, Lists]:
    """The key blocks of each query block, then the query blocks of each key block: each list in order."""
    if not kinds.is_cuda:
        return tuple((*listed_first(x == PARTIAL), *listed_first(x == FULL)) for x in (kinds, kinds.mT))  # type: ignore[return-value]
    batch, nheads, rows, columns = kinds.shape
    with memory.on_device(kinds.get_device()):
        of_queries, of_keys = (
            tuple(kinds.new_empty((batch, nheads, *shape), dtype=torch.int32) for shape in shapes * 2)
            for shapes in (((rows,), (rows, columns)), ((columns,), (columns, rows)))
        )
        check_count("block_mask has rows and columns of blocks", batch * nheads * (rows + columns))
        traits = Traits("block_lists", "sm80", "bf16", LISTED_ROWS)
        kernel = compiler.compile(traits, None, compiler.default_target("sm80"))
        record.launch(*kernel.bind(mKinds=kinds, of_queries=of_queries, of_keys=of_keys))
    return of_queries, of_keys  # type: ignore[return-value]


def listed_first(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen elements along the last dimension, and all indices, the chosen elements' first."""
    places = torch.sort(chosen.int(), dim=-1, descending=True, stable=True).indices
    return chosen.sum(-1).int(), places.int().contiguous()
