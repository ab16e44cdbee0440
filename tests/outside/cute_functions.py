"""FlashAttention-4's functions of scores, which are written in CuTe, as functions of torch's elementwise operations.

A function's code runs as it is, with :data:`CUTE` for the modules that it calls and a :class:`Lane` for each vector of
scores. So the tracer of this package sees its operations, and tests compare the result with their functions in torch.
"""

import inspect
import itertools
import operator
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.nn.functional import pad

from cute_attn.api.block_mask import block_mask as made_block_mask


class Lane:
    """A value of one score; also a fragment of one element, and a vector of length one."""

    shape, dtype, element_type = 1, None, None

    def __init__(self, x: Any = None) -> None:
        """x: a number or what torch's functions take."""
        self.x = x

    def __getitem__(self, index: Any) -> "Lane":
        return self

    def __setitem__(self, index: Any, x: Any) -> None:
        self.x = plain(x)

    def store(self, x: Any) -> None:
        """Set the value."""
        self.x = plain(x)

    def load(self) -> "Lane":
        """The value as it is now."""
        return Lane(self.x)

    def to(self, kind: Callable[[Any], Any]) -> Any:
        """A cast: kind is a number's class in CUTE, or CuTe's."""
        return getattr(CUTE["cutlass"], kind.__name__)(self)


def plain(x: Any) -> Any:
    """What torch's functions take, of a lane or a number."""
    return x.x if isinstance(x, Lane) else x


def _elementwise(function: Callable[..., Any]) -> Callable[..., Lane]:
    return lambda *args: Lane(function(*map(plain, args)))


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"):
    _function = getattr(operator, f"__{_name}__")
    setattr(Lane, f"__{_name}__", _elementwise(_function))
    setattr(Lane, f"__r{_name}__", _elementwise(lambda x, y, function=_function: function(y, x)))
for _name in ("lt", "le", "eq", "ne", "ge", "gt", "neg"):
    setattr(Lane, f"__{_name}__", _elementwise(getattr(operator, f"__{_name}__")))


class Table:
    """A tensor that a function reads elements of."""

    element_type = None

    def __init__(self, tensor: Tensor) -> None:
        """tensor: read as it is when the function is called."""
        self.tensor = tensor

    def __getitem__(self, index: Any) -> Lane:
        index = index if isinstance(index, tuple) else (index,)
        return Lane(self.tensor[tuple(map(plain, index))])


def _number(name: str, of_python: type, dtype: torch.dtype) -> Callable[[Any], Any]:
    def convert(x: Any) -> Any:
        if isinstance(x, Lane):
            return Lane(x.x.to(dtype) if hasattr(x.x, "to") else of_python(x.x))
        return of_python(getattr(x, "value", x))

    convert.__name__ = name
    return convert


def _same(x: Any, *types: Any) -> Any:
    return x


CUTE = {
    "cutlass": SimpleNamespace(
        Int32=_number("Int32", int, torch.int32),
        Float32=_number("Float32", float, torch.float32),
        Boolean=_number("Boolean", bool, torch.bool),
        range_constexpr=range,
        min=_elementwise(torch.minimum),
    ),
    "cute": SimpleNamespace(
        jit=_same,
        TensorSSA=_same,
        where=_elementwise(torch.where),
        full_like=lambda like, x: plain(x),
        make_rmem_tensor=lambda shape, dtype: Lane(),
        size=_same,
        math=SimpleNamespace(exp2=_elementwise(torch.exp2)),
    ),
    "mlir_math": SimpleNamespace(absi=_elementwise(torch.abs)),
    "utils": SimpleNamespace(scalar_to_ssa=_same),
}
"""Modules by the names that the tests give them, with what their functions call."""


def in_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function of a CuTe function, with CUTE for its modules; so are the functions that it calls."""
    inner = inspect.unwrap(function)
    names = dict(inner.__globals__)
    for name, value in names.items():
        if name in inner.__code__.co_names and hasattr(value, "__wrapped__"):
            names[name] = in_torch(value)
    return FunctionType(inner.__code__, names | CUTE, inner.__name__, None, inner.__closure__)


class Lengths(NamedTuple):
    """A call's sequences, from which a function's ``seqlen_info`` follows.

    Attributes:
        starts: of packed queries and keys.
        used: numbers of queries and keys.
        whole: queries and keys of a batch's sequences.
    """

    starts: tuple[Tensor | None, Tensor | None]
    used: tuple[Tensor | None, Tensor | None]
    whole: tuple[int, int]

    def of(self, b: Any) -> SimpleNamespace:
        """Sequence b's, with offsets among all rows."""
        found = {}
        for name, starts, used, whole in zip("qk", self.starts, self.used, self.whole, strict=True):
            length: Any = whole
            if used is not None:
                length = Lane(used[b])
            elif starts is not None:
                length = Lane(starts[b + 1] - starts[b])
            found[f"offset_{name}"] = 0 if starts is None else Lane(starts[b])
            found[f"seqlen_{name}"] = length
        return SimpleNamespace(**found)


def translated(
    function: Callable[..., Any], lengths: Lengths, tensors: Any, scalars: Any
) -> Callable[..., Any]:
    """A score_mod or mask_mod for this package. tensors, scalars: ``aux_tensors``, ``aux_scalars``."""
    inner = in_torch(function)
    tables = [Table(x) for x in tensors or ()]
    scores = len(inspect.signature(inner).parameters) - 6 - (scalars is not None)
    aux = (tables, scalars) if scalars is not None else (tables,)

    def mask_mod(b, h, q_idx, kv_idx):
        return plain(inner(*map(Lane, (b, h, q_idx, kv_idx)), lengths.of(b), *aux))

    def score_mod(score, b, h, q_idx, kv_idx):
        return plain(inner(*map(Lane, (score, b, h, q_idx, kv_idx)), lengths.of(b), *aux))

    return score_mod if scores else mask_mod


# ---- lists of blocks ----


def block_mask(
    sparse: Any, mask_mod: Callable[..., Any] | None, lengths: tuple[int, int], by_keys: bool = False
) -> BlockMask:
    """A BlockMask of ``BlockSparseTensorsTorch``.

    mask_mod: as :func:`translated` returns it. lengths: of queries and of keys. by_keys: the lists are each key
    block's, as a backward reads them.
    """
    sparse = sparse if sparse.cu_total_m_blocks is None else _batched(sparse)
    size, rows = sparse.block_size, sparse.mask_block_idx.shape[2:]
    if size is None:
        size = tuple(-(-n // r) for n, r in zip(lengths, reversed(rows) if by_keys else rows, strict=True))
    columns = -(-lengths[not by_keys] // size[not by_keys])
    turn = -1 if by_keys else 1
    lists = []
    for counts, indices in (sparse[:2], sparse[2:4]):
        lists += [counts, indices if indices is None else pad(indices, (0, columns - indices.shape[-1]))]
    made = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=size[::turn], mask_mod=mask_mod or noop_mask, seq_lengths=lengths[::turn]
    )
    if not by_keys:
        return made
    fields = {
        f"{full}{ours}_{name}": getattr(made, f"{full}{theirs}_{name}")
        for full in ("", "full_")
        for ours, theirs in (("kv", "q"), ("q", "kv"))
        for name in ("num_blocks", "indices")
    }
    return BlockMask(lengths, BLOCK_SIZE=size, mask_mod=made.mask_mod, **fields)


def _batched(sparse: Any) -> Any:
    """The lists of packed sequences, as of a batch of the longest."""
    firsts = sparse.cu_total_m_blocks.tolist()
    rows = [end - first for first, end in itertools.pairwise(firsts)]
    total = sparse.mask_block_idx.shape[1]
    places = [total // firsts[-1] * first for first in firsts]
    if sparse.cu_block_idx_offsets is not None:
        places = sparse.cu_block_idx_offsets.tolist()
    columns = [(end - place) // n for (place, end), n in zip(itertools.pairwise(places), rows, strict=True)]
    lists = []
    for counts, indices in (sparse[:2], sparse[2:4]):
        of_counts = counts.new_zeros(len(rows), counts.shape[0], max(rows))
        of_indices = counts.new_zeros(*of_counts.shape, max(columns))
        for i, (m, n) in enumerate(zip(rows, columns, strict=True)):
            of_counts[i, :, :m] = counts[:, firsts[i] : firsts[i + 1]]
            of_indices[i, :, :m, :n] = indices[:, places[i] : places[i + 1]].unflatten(1, (m, n))
        lists += [of_counts, of_indices]
    return type(sparse)(*lists, block_size=sparse.block_size)


def compute_block_sparsity(
    tile_m: int, tile_n: int, batch_size: int, num_heads: int, seqlen_q: int, seqlen_k: int,
    mask_mod: Callable[..., Any], aux_tensors: Any, device: Any, aux_scalars: Any = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, seqused_k: Tensor | None = None,
    cu_total_m_blocks: Tensor | None = None, cu_block_idx_offsets: Tensor | None = None, **hints: Any,
) -> Any:  # fmt: skip
    """FlashAttention-4's, by :func:`cute_attn.block_mask`. hints: how it finds blocks."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # type: ignore[import-not-found]

    lengths = Lengths((cu_seqlens_q, cu_seqlens_k), (None, seqused_k), (seqlen_q, seqlen_k))
    mod = translated(mask_mod, lengths, aux_tensors, aux_scalars)
    options = {"block_size": (tile_m, tile_n), "device": device}

    def lists(made: BlockMask, batch: int) -> list[Tensor]:
        found = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
        return [x.expand(batch, num_heads, *x.shape[2:]) for x in found]

    if cu_seqlens_q is None:
        found = lists(made_block_mask(mod, batch_size, num_heads, seqlen_q, seqlen_k, **options), batch_size)
        return BlockSparseTensorsTorch(*found, block_size=(tile_m, tile_n))
    rows = cu_seqlens_q.diff().tolist()
    columns = [seqlen_k] * batch_size
    if cu_seqlens_k is not None or seqused_k is not None:
        columns = (cu_seqlens_k.diff() if seqused_k is None else seqused_k).tolist()
    each = []
    for i, (m, n) in enumerate(zip(rows, columns, strict=True)):
        made = made_block_mask(lambda b, *rest, i=i: mod(i, *rest), None, num_heads, m, n, **options)
        each.append([x[0].flatten(1) for x in lists(made, 1)])
    packed = [torch.cat(x, 1) for x in zip(*each, strict=True)]
    return BlockSparseTensorsTorch(
        *packed, cu_total_m_blocks, cu_block_idx_offsets, block_size=(tile_m, tile_n)
    )
