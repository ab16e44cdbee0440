"""FlexAttention's BlockMask as a function of kinds of blocks, and as lists of the blocks that kernels visit.

A BlockMask names, for each block of queries, the full and the partial blocks of keys. In partial blocks its function
decides, key by key; all other blocks are hidden. Here it is a function that reads a table of kinds. Kernels visit
lists of blocks of ``LISTED_ROWS``. Tables and lists are made on the mask's device, without waiting for it, and kept as
long as the mask lives.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from cuda.bindings import driver
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from cute_attn import compiler
from cute_attn.epilogues.functions.known import block_mask_epilogue_of
from cute_attn.host import memory, record
from cute_attn.host.checks import check_count
from cute_attn.host.values import kind_of
from cute_attn.traits import FULL, LISTED_ROWS, PARTIAL, Traits

_MOST_LISTS = 8
_UNBOUNDED = (1 << 30, 1 << 30)
"""The block size of the one-block masks that FlexAttention makes: they state lengths of 1 and fit any."""


def epilogue_of_block_mask(block_mask: BlockMask, q: Tensor, k: Tensor) -> tuple[str, tuple[Tensor, ...]]:
    """The registered name of a BlockMask's epilogue, and its arguments for q (batch, seqlen, heads, dim) and k.

    ("", ()) without scores.

    Lengths may be shorter than the mask's.

    Raises:
        TypeError, ValueError: no BlockMask, or one of other sizes or on another device.
    """
    check_block_mask(block_mask)
    made, sizes = _made_of(block_mask), (*q.shape[:3], *k.shape[1:3])
    check_fits(block_mask, made.kinds, q.device, *sizes)
    if not all(sizes):
        return "", ()
    function, partial, unites = functions_of(block_mask, made.kinds, *sizes)
    name, tensors = block_mask_epilogue_of(function, partial, unites, q.device)
    lists = made.lists.get(sizes)
    if lists is None:
        lists = block_lists(made.kinds, block_mask.BLOCK_SIZE, *sizes)
        while len(made.lists) >= _MOST_LISTS:  # lengths may differ from call to call
            made.lists.pop(next(iter(made.lists)))
        if all(type(x) is Tensor for x in lists):  # no tracer's
            made.lists[sizes] = lists
    return name, (*tensors, *lists)


def check_block_mask(block_mask: Any) -> None:
    """Raise TypeError for an argument that is no BlockMask."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask is {kind_of(block_mask)}; accepted: torch's BlockMask, or None")


def functions_of(block_mask: BlockMask, kinds: Tensor, *sizes: int) -> tuple[Callable, Callable | None, bool]:
    """What :func:`cute_attn.epilogues.functions.known.block_mask_epilogue_of` takes for a mask with these kinds."""
    _, _, nheads, _, nheads_kv = sizes
    mask_mod = _visible if block_mask.mask_mod is noop_mask else block_mask.mask_mod
    whole = all(rows % LISTED_ROWS == 0 for rows in block_mask.BLOCK_SIZE)
    function = _function(kinds, block_mask.BLOCK_SIZE, mask_mod)
    return function, mask_mod if whole else None, kinds.shape[1] > 1 and nheads > nheads_kv


def mask_of_packed(block_mask: BlockMask, device: torch.device, *sizes: int) -> Callable:
    """The mask function of a BlockMask whose sequences are packed; its blocks are not listed.

    sizes: sequences, the queries of the longest, heads, its keys and kv heads.

    Raises:
        TypeError, ValueError: as :func:`epilogue_of_block_mask`.
    """
    check_block_mask(block_mask)
    compiling = torch.compiler.is_dynamo_compiling()
    kinds = _kinds(blocks_of(block_mask)) if compiling else _made_of(block_mask).kinds
    check_fits(block_mask, kinds, device, *sizes)
    function, _, _ = functions_of(block_mask, kinds, *sizes)
    return function


def tables_of(block_mask: BlockMask, sizes: tuple[int, ...]) -> tuple[Tensor, ...] | None:
    """The table of kinds and the lists that an earlier call of these sizes was given, where they still hold.

    Outside captures of CUDA graphs. sizes: batch, queries, heads, keys and kv heads; none of packed sequences, whose
    masks have no lists.
    """
    known = _made.get(block_mask)
    if known is None:
        return None
    versions, *shape, stream, capture = known.state
    if capture or shape != [block_mask.BLOCK_SIZE, block_mask.seq_lengths]:
        return None
    source: tuple[Tensor | None, ...] = (block_mask.kv_num_blocks, block_mask.kv_indices)
    source += (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    for x, known_x, version in zip(source, known.source, versions, strict=True):
        if x is not known_x or (x is not None and x._version != version):
            return None
    kinds, lists = known.kinds, known.lists.get(sizes) if sizes else ()
    if lists is None or (kinds.is_cuda and torch._C._cuda_getCurrentRawStream(kinds.get_device()) != stream):
        return None
    return kinds, *lists


def _visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> bool:
    """The function of a BlockMask without one."""
    return True


def _function(kinds: Tensor, block_size: tuple[int, int], mask_mod: Callable) -> Callable:
    """The mask function (b, h, q_idx, kv_idx) -> bool that reads a table of kinds."""
    rows, columns = block_size
    one_batch, one_head = (size == 1 for size in kinds.shape[:2])

    def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kind = kinds[0 if one_batch else b, 0 if one_head else h, q_idx // rows, kv_idx // columns]
        return (kind == FULL) | ((kind == PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return sees


class Blocks(NamedTuple):
    """What a table of kinds is made of, by the names that a BlockMask has for it."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: Sequence[int]
    seq_lengths: Sequence[int]


class _Made(NamedTuple):
    """A BlockMask's table, and its lists by sizes; valid as long as their source is unchanged."""

    source: tuple[Tensor | None, ...]
    state: tuple
    kinds: Tensor
    lists: dict[tuple[int, ...], tuple[Tensor, ...]]


_made: MutableMapping[BlockMask, _Made] = WeakKeyDictionary()


def _made_of(block_mask: BlockMask) -> _Made:
    """A mask's cached table and lists, rebuilt if the mask's lists changed or may have, as those of inference tensors.

    They are also rebuilt on another stream, and in another capture of a CUDA graph: its replays read the lists again.
    """
    source = _source_of(block_mask)
    state = _state_of(block_mask)
    if state is None:
        return _Made(source, (), kinds_of(block_mask), {})
    known = _made.get(block_mask)
    if known is not None and known.state == state and all(map(_is, known.source, source)):
        return known
    return remember(block_mask, kinds_of(block_mask))


def remember(block_mask: BlockMask, kinds: Tensor) -> _Made:
    """Keep a mask's table of kinds as long as it lives and its lists do not change."""
    made = _Made(_source_of(block_mask), _state_of(block_mask) or (), kinds, {})
    if made.state and type(kinds) is Tensor:  # no tracer's
        _made[block_mask] = made
    return made


def blocks_of(block_mask: BlockMask) -> Blocks:
    """The blocks that a mask lists for each block of queries."""
    return Blocks._make((*_source_of(block_mask), block_mask.BLOCK_SIZE, block_mask.seq_lengths))


def _source_of(block_mask: BlockMask) -> tuple[Tensor | None, ...]:
    return (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )


def _state_of(block_mask: BlockMask) -> tuple | None:
    """The state for which a table of kinds is valid; None where changes cannot be seen."""
    source = _source_of(block_mask)
    capture = _capture(block_mask.kv_num_blocks)
    if capture is None or any(x is not None and x.is_inference() for x in source):
        return None
    versions = tuple(None if x is None else x._version for x in source)
    return (
        versions,
        block_mask.BLOCK_SIZE,
        block_mask.seq_lengths,
        _stream(block_mask.kv_num_blocks),
        capture,
    )


def _is(x: Any, y: Any) -> bool:
    return x is y


def _capture(x: Tensor | None) -> int | None:
    """The number of the CUDA graph's capture that a tensor is read in, 0 for none, None where that is not known."""
    if x is None or not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return 0
    if not compiler.has_dsl():
        return None
    result, _, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(_stream(x)))
    return None if result != driver.CUresult.CUDA_SUCCESS else int(number)


def _stream(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


@torch.inference_mode(False)
@torch.no_grad()
def kinds_of(block_mask: BlockMask | Blocks) -> Tensor:
    """Each block's kind, 0, ``PARTIAL`` or ``FULL``: uint8 (batch or 1, heads or 1, query blocks, key blocks)."""
    return _kinds(block_mask)


def _kinds(block_mask: BlockMask | Blocks) -> Tensor:
    width = block_mask.kv_indices.shape[-1]
    if block_mask.full_kv_indices is not None:
        width = max(width, block_mask.full_kv_indices.shape[-1])
    columns = max(width, -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1]))  # lists may be shorter
    kinds = _kind_where(block_mask.kv_num_blocks, block_mask.kv_indices, columns, PARTIAL)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _kind_where(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns, FULL)
        kinds = torch.maximum(kinds, full)
    return kinds[(None,) * (4 - kinds.dim())]


def _kind_where(counts: Tensor, indices: Tensor, columns: int, kind: int) -> Tensor:
    """``kind`` where the first ``counts`` of ``indices`` point to, (..., blocks of queries, columns)."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    listed = (place < counts[..., None]) & (indices >= 0) & (indices < columns)
    column = torch.where(listed, indices, columns).long()  # an extra column collects entries behind the lists
    kinds = torch.zeros(*column.shape[:-1], columns + 1, dtype=torch.uint8, device=indices.device)
    return kinds.scatter_(-1, column, kind)[..., :columns]


def block_lists(kinds: Tensor, block_size: Sequence[int], *sizes: int) -> tuple[Tensor, ...]:
    """Counts and blocks of the key blocks of each query block, then those of the query blocks of each key block.

    The layout is that of :class:`cute_attn.work.block_lists.BlockLists`. sizes: batch, queries, heads, keys and kv
    heads.
    """
    return for_each(shared_lists(kinds, block_size, *sizes), *sizes)


def for_each(lists: Sequence[Tensor], batch: int, seqlen_q: int, nheads: int, *_: int) -> tuple[Tensor, ...]:
    """Shared lists for each sequence and head."""
    return tuple(x.expand(batch, nheads, -1, -1) for x in lists)


@torch.inference_mode(False)
@torch.no_grad()
def shared_lists(kinds: Tensor, block_size: Sequence[int], *sizes: int) -> tuple[Tensor, ...]:
    """:func:`block_lists` with size 1 for sequences or heads where the mask is the same for all.

    A key block is visited for all query heads of its kv head at a time: its list is the union of theirs. On a GPU a
    kernel makes them; this code is the definition.
    """
    _, seqlen_q, nheads, seqlen_k, nheads_kv = sizes
    some = kinds.numel() and seqlen_q and seqlen_k
    if type(kinds) is Tensor and kinds.is_cuda and some and compiler.has_dsl():
        return _lists_by_kernel(kinds, block_size, *sizes)
    for dim, seqlen, rows in ((2, seqlen_q, block_size[0]), (3, seqlen_k, block_size[1])):
        kinds = _in_listed_blocks(kinds, dim, seqlen, rows)
    shared = kinds
    if kinds.shape[1] > 1:
        groups = kinds.unflatten(1, (nheads_kv, -1))
        seen, full = (groups > 0).any(2), (groups == FULL).all(2)
        shared = (seen.int() + full.int()).repeat_interleave(nheads // nheads_kv, 1)
    of_keys = _lists(shared.mT, seqlen_q, last_is_masked=seqlen_k % LISTED_ROWS > 0)
    return (*_lists(kinds, seqlen_k), *of_keys)


def _lists_by_kernel(kinds: Tensor, block_size: Sequence[int], *sizes: int) -> tuple[Tensor, ...]:
    """:func:`shared_lists` in one launch. A bundle may lack that kernel: without the DSL the definition is computed."""
    _, seqlen_q, nheads, seqlen_k, nheads_kv = sizes
    shared, (rows, columns) = kinds.shape[:2], (-(-n // LISTED_ROWS) for n in (seqlen_q, seqlen_k))
    shapes = ((rows, 2), (rows, columns), (columns, 2), (columns, rows))
    lists = [torch.empty((*shared, *shape), dtype=torch.int32, device=kinds.device) for shape in shapes]
    group = nheads // nheads_kv if shared[1] > 1 else 1
    check_count("block_mask has rows and columns of blocks", shared[0] * shared[1] * (rows + columns))
    with memory.on_device(kinds.get_device()):
        traits = Traits("block_visits", "sm80", "bf16", LISTED_ROWS)
        kernel = compiler.compile(traits, None, compiler.default_target("sm80"))
        found = {"of_queries": tuple(lists[:2]), "of_keys": tuple(lists[2:])}
        numbers = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "group": group}
        numbers |= zip(("block_q", "block_k"), block_size, strict=True)
        record.launch(*kernel.bind(mKinds=kinds, **found, **numbers))
    return tuple(lists)


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


def _lists(kinds: Tensor, seqlen: int, *, last_is_masked: bool = False) -> tuple[Tensor, Tensor]:
    """Counts and blocks along the last dimension, of ``seqlen`` rows.

    The last block counts as partial if it ends beyond them. So it is last in each list that contains it, and kernels
    with smaller blocks visit none that begins beyond the rows.

    last_is_masked: whether all blocks of the last list count as partial. That list belongs to a key block that ends
    beyond the sequence: P of its scores of 0 is infinite if a query's other scores are far below, and dQ would be NaN.
    """
    missing, hides = -seqlen % LISTED_ROWS, kinds == PARTIAL
    kinds = kinds.clone(memory_format=torch.contiguous_format)  # strides of 1 also with one block
    if missing:
        kinds[..., -1].clamp_(max=PARTIAL)
    if last_is_masked:
        kinds[..., -1, :].clamp_(max=PARTIAL)
    full, listed = ((kinds >= kind).sum(-1) * LISTED_ROWS for kind in (FULL, PARTIAL))
    if missing:
        listed = listed - (kinds[..., -1] > 0) * missing
    counts = torch.stack((full, listed), -1).int()
    blocks = torch.sort(kinds, dim=-1, descending=True, stable=True).indices
    blocks = (2 * blocks + hides.gather(-1, blocks)).int()
    return counts, blocks


def check_fits(block_mask: BlockMask, kinds: Tensor, device: torch.device, *sizes: int) -> None:
    """Raise ValueError for a mask of other sizes, or on another device."""
    batch, seqlen_q, nheads, seqlen_k, nheads_kv = sizes
    if kinds.device != device:
        raise ValueError(f"block_mask is on {kinds.device}; accepted: {device}, where q is")
    for what, dim, size in (("batch", 0, batch), ("heads", 1, nheads)):
        if kinds.shape[dim] not in (1, size):
            raise ValueError(f"block_mask has {what} {kinds.shape[dim]}; accepted: {size}, q's, or 1")
    if nheads % nheads_kv if nheads_kv else nheads:
        raise ValueError(f"q has {nheads} heads; accepted: a multiple of k's {nheads_kv}")
    for i, (what, seqlen) in enumerate((("queries", seqlen_q), ("keys", seqlen_k))):
        most = kinds.shape[2 + i] * block_mask.BLOCK_SIZE[i]
        if tuple(block_mask.BLOCK_SIZE) != _UNBOUNDED:
            most = min(most, block_mask.seq_lengths[i])
        if seqlen > most:
            raise ValueError(f"block_mask has {most} {what}; accepted: {seqlen} or more, for these q and k")
