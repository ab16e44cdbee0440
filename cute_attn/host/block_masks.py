"""FlexAttention's BlockMask as a function of kinds of blocks, and as lists of the blocks that kernels visit.

A BlockMask lists, for each block of queries, the full and the partial blocks of keys. In partial blocks its function
decides, key by key; all other blocks are hidden. Here a mask is a function that reads a table of kinds. Kernels visit
lists of blocks of ``LISTED_ROWS``. Tables and lists are made on the mask's device, without waiting for the device, and
kept as long as the mask lives.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from cuda.bindings import driver
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from cute_attn import compiler
from cute_attn.epilogues.functions.known import epilogue_of
from cute_attn.host import memory, record
from cute_attn.host.checks import check_count
from cute_attn.host.dispatch import beyond_transforms
from cute_attn.host.values import kind_of
from cute_attn.traits import FULL, LISTED_ROWS, PARTIAL, Traits

_MOST_LISTS = 8
_UNBOUNDED = (1 << 30, 1 << 30)
"""The block size of FlexAttention's one-block masks, which state lengths of 1 but fit any length."""


class Packed(NamedTuple):
    """Sequences that are packed one after the other, or those of a cache.

    Attributes:
        starts: cu_seqlens_q and cu_seqlens_k; () for a cache.
        sizes: sequences, maximum queries, heads, maximum keys and kv heads; then 1 for a cache.
        shapes: for a cache, what ``sizes`` follows from; :func:`tables_of` takes it in place of them.
    """

    starts: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    shapes: tuple = ()


def epilogue_of_block_mask(
    block_mask: BlockMask, q: Tensor, k: Tensor, packed: Packed | None = None
) -> tuple[str, tuple[Tensor, ...]]:
    """The registered name of a BlockMask's epilogue, and its arguments for q (batch, seqlen, heads, dim) and k.

    Returns ("", ()) without scores.

    Lengths may be shorter than the mask's. packed: the sequences of packed q (total, heads, dim) and k.
    """
    check_block_mask(block_mask)
    with beyond_transforms():
        made = _made_of(block_mask)
    starts, sizes, shapes = packed or ((), (*q.shape[:3], *k.shape[1:3]), ())
    check_fits(block_mask, made.kinds, q.device, *sizes)
    if not all(sizes):
        return "", ()
    function, partial, unites = functions_of(block_mask, made.kinds, *sizes)
    name, tensors = epilogue_of(None, function, q.device, unites=unites, partial=partial)
    key = _key_of(shapes or sizes, starts)
    found = made.lists.get(key)
    if found is None:
        with beyond_transforms():
            found = block_lists(made.kinds, block_mask.BLOCK_SIZE, *sizes, starts=starts), starts
        _keep(made.lists, key, *found)
    return name, (*tensors, *found[0])


def check_block_mask(block_mask: Any) -> None:
    """Raise TypeError for an argument that is not a BlockMask."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask is {kind_of(block_mask)}; accepted: torch's BlockMask, or None")


def functions_of(block_mask: BlockMask, kinds: Tensor, *sizes: int) -> tuple[Callable, Callable | None, bool]:
    """A mask's function, ``partial`` and ``unites`` for :func:`cute_attn.epilogues.functions.known.epilogue_of`."""
    _, _, nheads, _, nheads_kv, *_ = sizes
    mask_mod = _visible if block_mask.mask_mod is noop_mask else block_mask.mask_mod
    whole = all(rows % LISTED_ROWS == 0 for rows in block_mask.BLOCK_SIZE)
    function = _function(kinds, block_mask.BLOCK_SIZE, mask_mod)
    return function, mask_mod if whole else None, kinds.shape[1] > 1 and nheads > nheads_kv


def tables_of(
    block_mask: BlockMask, sizes: tuple, starts: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...] | None:
    """The table of kinds and the lists of an earlier call of these sizes, or None if there are none or they are stale.

    Those made in a CUDA graph's capture are not used. sizes, starts: of a batch, or those of :class:`Packed`.
    """
    made = _made.get(block_mask)
    if made is None or made.capture or not _holds(made, block_mask):
        return None
    found = made.lists.get(_key_of(sizes, starts) if starts else sizes)
    return None if found is None else (made.kinds, *found[0])


def _visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> bool:
    """The mask function of a BlockMask that has none: every key is visible."""
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
    """The fields of a BlockMask from which a table of kinds is made."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: Sequence[int]
    seq_lengths: Sequence[int]


class _Made(NamedTuple):
    """A BlockMask's table, and its lists; valid as long as :func:`_holds`.

    Attributes:
        blocks: what the table was made from.
        versions: of the tensors of ``blocks``.
        stream, capture: those in which it was made; see :func:`_capture`.
        lists: by :func:`_key_of`, each with the starts, which it keeps alive.
    """

    blocks: Blocks
    versions: tuple[int, ...]
    stream: int
    capture: int
    kinds: Tensor
    lists: dict[tuple, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


def _key_of(sizes: tuple, starts: tuple[Tensor, ...]) -> tuple:
    """The key of lists. It changes with the starts of packed sequences; -1 stands for changes that cannot be seen."""
    return (*sizes, *[(id(x), _version(x)) for x in starts])


def _version(x: Tensor | None) -> int:
    return 0 if x is None else -1 if x.is_inference() else x._version


def _keep(kept: dict[tuple, Any], key: tuple, lists: tuple[Tensor, ...], starts: tuple[Tensor, ...]) -> None:
    if any(type(x) is not Tensor for x in (*lists, *starts)) or any(x.is_inference() for x in starts):
        return  # traced, or made from lengths whose changes cannot be seen
    while len(kept) >= _MOST_LISTS:  # lengths may differ from call to call
        kept.pop(next(iter(kept)))
    kept[key] = lists, starts


_made: MutableMapping[BlockMask, _Made] = WeakKeyDictionary()


def _made_of(block_mask: BlockMask) -> _Made:
    """A mask's cached table and lists, rebuilt if the mask's lists have changed or are inference tensors.

    They are also rebuilt on another stream, and in another capture of a CUDA graph, whose replays read the lists again.
    """
    known, capture = _made.get(block_mask), _capture(block_mask.kv_num_blocks)
    if known is not None and known.capture == capture and _holds(known, block_mask):
        return known
    return remember(block_mask, kinds_of(blocks_of(block_mask)))


def _holds(made: _Made, block_mask: BlockMask) -> bool:
    """True if neither the mask nor the stream has changed since then."""
    blocks = made.blocks
    if (block_mask.BLOCK_SIZE, block_mask.seq_lengths) != blocks[4:]:
        return False
    for name, x, version in zip(Blocks._fields, blocks, made.versions, strict=False):
        if getattr(block_mask, name) is not x or (x is not None and x._version != version):
            return False
    kinds = made.kinds
    return not kinds.is_cuda or torch._C._cuda_getCurrentRawStream(kinds.get_device()) == made.stream


def remember(block_mask: BlockMask, kinds: Tensor) -> _Made:
    """Keep a mask's table of kinds as long as the mask lives and its lists do not change, if changes can be seen."""
    blocks = blocks_of(block_mask)
    versions, capture = tuple(map(_version, blocks[:4])), _capture(blocks.kv_num_blocks)
    made = _Made(blocks, versions, _stream(blocks.kv_num_blocks), capture or 0, kinds, {})
    if capture is not None and -1 not in versions and type(kinds) is Tensor:  # not traced
        _made[block_mask] = made
    return made


def blocks_of(block_mask: BlockMask) -> Blocks:
    """The blocks that a mask lists for each block of queries."""
    return Blocks(*[getattr(block_mask, name) for name in Blocks._fields])


def _capture(x: Tensor | None) -> int | None:
    """The ID of the CUDA graph capture in which a tensor is read, 0 for none, None if unknown."""
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
    """A table (..., query blocks, columns) with ``kind`` at the first ``counts`` of ``indices``, and 0 elsewhere."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    listed = (place < counts[..., None]) & (indices >= 0) & (indices < columns)
    column = torch.where(listed, indices, columns).long()  # an extra column collects entries behind the lists
    kinds = torch.zeros(*column.shape[:-1], columns + 1, dtype=torch.uint8, device=indices.device)
    return kinds.scatter_(-1, column, kind)[..., :columns]


def block_lists(
    kinds: Tensor, block_size: Sequence[int], *sizes: int, starts: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Counts and blocks of the key blocks of each query block, then those of the query blocks of each key block.

    The layout is that of :class:`cute_attn.work.block_range.BlockLists`. sizes: batch, queries, heads, keys and kv
    heads; then 1 for a cache. starts: cu_seqlens of packed sequences; the sizes are then those of the longest.
    """
    return for_each(shared_lists(kinds, block_size, *sizes, starts=starts), *sizes)


def for_each(lists: Sequence[Tensor], batch: int, seqlen_q: int, nheads: int, *_: int) -> tuple[Tensor, ...]:
    """Shared lists, expanded to every sequence and head."""
    return tuple(x.expand(batch, nheads, -1, -1) for x in lists)


@torch.inference_mode(False)
@torch.no_grad()
def shared_lists(
    kinds: Tensor, block_size: Sequence[int], *sizes: int, starts: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """:func:`block_lists` with size 1 for sequences or heads where the mask is the same for all.

    A key block is visited for all query heads of its kv head at once, so its list is the union of the heads' lists. So
    are all lists of a cache, whose work tiles have several heads. On a GPU a kernel makes the lists, except for packed
    sequences; this code is the definition.
    """
    _, seqlen_q, nheads, seqlen_k, nheads_kv, *cached = sizes
    some = kinds.numel() and seqlen_q and seqlen_k and not starts
    if type(kinds) is Tensor and kinds.is_cuda and some and compiler.has_dsl():
        return _lists_by_kernel(kinds, block_size, *sizes)
    queries, keys = (
        starts[side].diff().long() if starts else torch.full((1,), seqlen, device=kinds.device)
        for side, seqlen in enumerate((seqlen_q, seqlen_k))
    )
    kinds = _in_listed_blocks(kinds, 2, queries, seqlen_q, block_size[0])
    kinds = _in_listed_blocks(kinds, 3, keys, seqlen_k, block_size[1])
    shared = kinds
    if kinds.shape[1] > 1:
        groups = kinds.unflatten(1, (nheads_kv, -1))
        seen, full = (groups > 0).any(2), (groups == FULL).all(2)
        shared = (seen.int() + full.int()).repeat_interleave(nheads // nheads_kv, 1)
    return (
        *_lists(shared if cached else kinds, keys, in_order=bool(cached)),
        *_lists(shared.mT, queries, keys),
    )


def list_shapes(seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, int], ...]:
    """Shapes of the four lists of one sequence and head: counts and blocks of query blocks, then of key blocks."""
    rows, columns = (-(-n // LISTED_ROWS) for n in (seqlen_q, seqlen_k))
    return (rows, 2), (rows, columns), (columns, 2), (columns, rows)


def _lists_by_kernel(kinds: Tensor, block_size: Sequence[int], *sizes: int) -> tuple[Tensor, ...]:
    """:func:`shared_lists` in one launch. Only with the DSL, since a bundle may lack the kernel."""
    _, seqlen_q, nheads, seqlen_k, nheads_kv, *cached = sizes
    shared, shapes = kinds.shape[:2], list_shapes(seqlen_q, seqlen_k)
    rows, columns = shapes[1]
    lists = [torch.empty((*shared, *shape), dtype=torch.int32, device=kinds.device) for shape in shapes]
    group = nheads // nheads_kv if shared[1] > 1 else 1
    check_count("block_mask has rows and columns of blocks", shared[0] * shared[1] * (rows + columns))
    with memory.on_device(kinds.get_device()):
        traits = Traits("block_visits", "sm80", "bf16", LISTED_ROWS)
        kernel = compiler.compile(traits, None, compiler.default_target("sm80"))
        found = {"of_queries": tuple(lists[:2]), "of_keys": tuple(lists[2:])}
        numbers = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "group": group, "in_order": len(cached)}
        numbers |= zip(("block_q", "block_k"), block_size, strict=True)
        record.launch(*kernel.bind(mKinds=kinds, **found, **numbers))
    return tuple(lists)


def _in_listed_blocks(kinds: Tensor, dim: int, lengths: Tensor, most: int, rows: int) -> Tensor:
    """Kinds of blocks of ``LISTED_ROWS`` along ``dim``, from blocks of ``rows``: full or hidden if a whole block is.

    lengths: the length of each sequence, or one for all; blocks beyond it are hidden. most: the maximum length.
    """
    first = torch.arange(-(-most // LISTED_ROWS), device=kinds.device) * LISTED_ROWS
    last = (lengths[:, None] - 1).clamp(min=0)
    end = torch.minimum(first + LISTED_ROWS - 1, last) // rows
    shape = [max(kinds.shape[0], len(lengths)), *kinds.shape[1:]]
    kinds = kinds.expand(shape[0], -1, -1, -1)
    shape[dim], along = len(first), [-1 if i in (0, dim) else 1 for i in range(4)]
    along[0] = len(lengths)

    def kind_of(part: Tensor) -> Tensor:
        place = torch.minimum(part, end).clamp(max=kinds.shape[dim] - 1)
        return kinds.gather(dim, place.view(along).expand(shape))

    parts = [kind_of(first // rows + i) for i in range((LISTED_ROWS - 1) // rows + 2)]
    seen, full = (torch.stack(x) for x in zip(*((part > 0, part == FULL) for part in parts), strict=True))
    return (seen.any(0).int() + full.all(0).int()) * (first < lengths[:, None]).view(along)


def _with_partial_ends(kinds: Tensor, lengths: Tensor, dim: int) -> Tensor:
    """``kinds``, with each sequence's last block along ``dim`` at most partial if it extends beyond the sequence.

    Along a list this puts the block last, so that kernels with smaller blocks visit none that begins beyond the rows.
    Across lists it makes key blocks that extend beyond the keys partial. In a full block, P of the scores of 0 beyond
    the keys is infinite if a query's other scores are far below, and dQ would be NaN.
    """
    shape = [-1 if i in (0, dim) else 1 for i in range(4)]
    ends = _ends(lengths, kinds.shape[dim]).view(len(lengths), *shape[1:])
    return torch.where(ends, kinds.clamp(max=PARTIAL), kinds)


def _ends(lengths: Tensor, count: int) -> Tensor:
    """(len(lengths), count): True for the block in which a sequence ends before the block does."""
    place = torch.arange(count, device=lengths.device)
    return (place == lengths[:, None] // LISTED_ROWS) & (lengths[:, None] % LISTED_ROWS > 0)


def _lists(
    kinds: Tensor, lengths: Tensor, keys: Tensor | None = None, in_order: bool = False
) -> tuple[Tensor, Tensor]:
    """Counts and blocks along the last dimension, of ``lengths`` rows. keys: key lengths for lists of key blocks."""
    hides = kinds == PARTIAL
    kinds = kinds.clamp(max=PARTIAL) if in_order else _with_partial_ends(kinds, lengths, 3)
    if keys is not None:
        kinds = _with_partial_ends(kinds, keys, 2)
    full, listed = ((kinds >= kind).sum(-1) * LISTED_ROWS for kind in (FULL, PARTIAL))
    ends = _ends(lengths, kinds.shape[3])[:, None, None]
    listed = listed - ((kinds > 0) & ends).sum(-1) * (-lengths % LISTED_ROWS)[:, None, None]
    counts = torch.stack((full, listed), -1).int()
    blocks = torch.sort(kinds, dim=-1, descending=True, stable=True).indices
    blocks = (2 * blocks + hides.gather(-1, blocks)).int().contiguous()
    return counts, blocks


def check_fits(block_mask: BlockMask, kinds: Tensor, device: torch.device, *sizes: int) -> None:
    """Raise ValueError for a mask of other sizes, or on another device."""
    batch, seqlen_q, nheads, seqlen_k, nheads_kv, *_ = sizes
    if kinds.device != device:
        raise ValueError(f"block_mask is on {kinds.device}; accepted: {device}, where q is")
    for what, dim, size in (("batch", 0, batch), ("heads", 1, nheads)):
        if kinds.shape[dim] != 1 and kinds.shape[dim] != size:  # "in" compares no symbolic sizes in graphs
            raise ValueError(f"block_mask has {what} {kinds.shape[dim]}; accepted: {size}, q's, or 1")
    if nheads % nheads_kv if nheads_kv else nheads:
        raise ValueError(f"q has {nheads} heads; accepted: a multiple of k's {nheads_kv}")
    for i, (what, seqlen) in enumerate((("queries", seqlen_q), ("keys", seqlen_k))):
        most = kinds.shape[2 + i] * block_mask.BLOCK_SIZE[i]
        if tuple(block_mask.BLOCK_SIZE) != _UNBOUNDED:
            most = min(most, block_mask.seq_lengths[i])
        if seqlen > most:
            raise ValueError(f"block_mask has {most} {what}; accepted: {seqlen} or more, for these q and k")
