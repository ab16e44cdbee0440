"""The torch operator ``cute_attn::block_tables``: a BlockMask's tables for kernels, in graphs of torch's compiler."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_attn.host.block_masks import Blocks, for_each, kinds_of, list_shapes, shared_lists
from cute_attn.host.call import define

Tables = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def block_tables(blocks: Blocks, *sizes: int, starts: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """The table of block kinds, then the lists that :func:`cute_attn.host.block_masks.block_lists` returns."""
    kinds, *lists = torch.ops.cute_attn.block_tables.default(*blocks, sizes, starts)
    return kinds, *for_each(lists, *sizes)


def _made(*arguments: Any) -> Tables:
    *blocks, sizes, starts = arguments
    listed = Blocks._make(blocks)
    kinds = kinds_of(listed).contiguous()
    return kinds, *shared_lists(kinds, listed.BLOCK_SIZE, *sizes, starts=starts)  # type: ignore[return-value]


def _fake(*arguments: Any) -> Tables:
    counts, indices, _, full, block_size, seq_lengths, sizes, starts = arguments
    widths = [x.shape[-1] for x in (indices, full) if x is not None]
    columns = max(*widths, -(-seq_lengths[1] // block_size[1]))
    shared = (1,) * (3 - counts.dim()) + tuple(counts.shape[:-1])
    of_lists = (sizes[0], shared[1]) if starts else shared
    kinds = indices.new_empty((*shared, counts.shape[-1], columns), dtype=torch.uint8)
    lists = [
        indices.new_empty((*of_lists, *shape), dtype=torch.int32) for shape in list_shapes(sizes[1], sizes[3])
    ]
    return kinds, *lists


_BLOCKS = "Tensor kv_num_blocks, Tensor kv_indices, Tensor? full_kv_num_blocks, Tensor? full_kv_indices"
define(
    f"block_tables({_BLOCKS}, SymInt[] block_size, SymInt[] seq_lengths, SymInt[] sizes, Tensor[] starts) -> "
    "(Tensor kinds, Tensor key_counts, Tensor key_blocks, Tensor query_counts, Tensor query_blocks)",
    *(_made, _made, _fake),
    # Partitions of a graph that CUDA replays take tables as inputs: in its memory pool they are found alive afterwards.
    torch.Tag.cudagraph_unsafe,
)
