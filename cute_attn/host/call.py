"""One attention call, from any public function: with packed sequences, a cache, an append, or all of these.

The public function fills in every default. The kernels, output layouts and errors depend only on the :class:`Call`,
which :mod:`cute_attn.host.checks` and the plans read.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from cute_attn import reference
from cute_attn.epilogues.inputs import UNBOUNDED, ScoreInputs
from cute_attn.epilogues.names import lists_blocks, user_epilogue
from cute_attn.host import memory
from cute_attn.host.dispatch import DIFFERENTIABLE
from cute_attn.host.imports import after_import
from cute_attn.host.values import python_number, shown
from cute_attn.reference.kvcache import Cache, Rotary
from cute_attn.tiles import is_latent_dim
from cute_attn.traits import LARGE_HEAD_DIM, Traits, aligned_head_dim

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

PYTORCHS = "pytorch"
"""Precision of a call in compiled code: the precision of PyTorch's matrix products when the code runs."""


def pytorchs_precision() -> str:
    """The current precision of PyTorch's fp32 matrix products on CUDA, as the traits name it."""
    # allow_tf32 raises where this name of the setting has been set.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else ""


_ABSENT: Any = None
"""Placeholder for tensors that only some kinds of call have; code that reads one must know the kind."""


class Call(NamedTuple):
    """The arguments of a call. Fields up to ``same_bits`` are in the order of the operator ``cute_attn::forward``.

    Attributes:
        q: (batch, seqlen, heads, dim), or packed (total, heads, dim) with cu_seqlens_q; absent if the call only
            appends.
        k, v: like q, packed with cu_seqlens_k. With a cache, the rows to append, packed with cu_seqlens_k_new, or
            absent.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: int32 lengths, or None.
        alibi_slopes, bias, sinks: each a tensor or None.
        rng_state: int64 (2,), seed and offset of dropout, or None.
        epilogue_tensors, epilogue_numbers: arguments of users' epilogues, laid out by ``epilogues``.
        max_seqlen_q, max_seqlen_k: lengths of the longest sequences.
        mask: one of ``traits.MASKS``, or empty.
        window_left, window_right: ``UNBOUNDED`` for no bound; used only by window masks.
        softcap: 0 for none.
        dropout: one of ``traits.DROPOUTS``, or empty.
        epilogues: users' epilogues, see :func:`pack_epilogues`.
        aux: the third output: ``"softmax"``, ``"max_scores"``, or empty for none.
        kernel: ``"ARCH"`` or ``"ARCH:VARIANT"`` of the kernel, empty for the newest that supports the call.
        tile: text of the tile's fields to change, empty for the default tile.
        deterministic: whether gradients repeat bit for bit.
        backward_tile: like ``tile``, for the backward's main kernel.
        precision: one of ``traits.PRECISIONS``, empty for q's dtype, or ``PYTORCHS`` (see :meth:`resolved`).
        same_bits: whether a row's bits depend only on its sequence; ``deterministic`` is then set, too.
        k_cache, v_cache: (entries, capacity, nheads_kv, dim), or (pages, page_size, nheads_kv, dim) with page_table.
        cache_seqlens: int32 (batch,), rows in use before the append, or None for full entries.
        page_table: int32 (entries, pages of an entry), or None.
        cache_batch_idx: int32 (batch,), or None.
        cu_seqlens_k_new: int32 (batch + 1,), or None.
        rotary_cos, rotary_sin: (positions, pairs), or None.
        rotary_seqlens: int32 (batch,), or None to use cache_seqlens.
        rotary_interleaved: whether a pair is two adjacent elements, rather than one element of each half.
        cache_leftpad: int32 (batch,), each sequence's first valid row, or None.
        tree_mask: int32 (rows of q, words), or None.
        num_splits: splits of each query block's keys; 0 for a choice by shapes.
    """

    q: Tensor = _ABSENT
    k: Tensor = _ABSENT
    v: Tensor = _ABSENT
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    rng_state: Tensor | None = None
    epilogue_tensors: Sequence[Tensor] = ()
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    softmax_scale: float = 1.0
    mask: str = ""
    window_left: int = 0
    window_right: int = 0
    softcap: float = 0.0
    dropout: str = ""
    dropout_p: float = 0.0
    epilogues: Sequence[str] = ()
    epilogue_numbers: Sequence[float] = ()
    aux: str = ""
    kernel: str = ""
    tile: str = ""
    deterministic: bool = False
    backward_tile: str = ""
    precision: str = ""
    same_bits: bool = False
    k_cache: Tensor = _ABSENT
    v_cache: Tensor = _ABSENT
    cache_seqlens: Tensor | None = None
    page_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    cache_leftpad: Tensor | None = None
    tree_mask: Tensor | None = None
    rotary_interleaved: bool = True
    num_splits: int = 0

    @classmethod
    def of(cls, names: Sequence[str], values: Sequence[Any]) -> Self:
        """The call with these field values, and defaults for all other fields."""
        return cls(**dict(zip(names, values, strict=True)))

    @classmethod
    def joined(cls, tensors: Sequence[Any], rest: tuple) -> Self:
        """The call with these tensors, q to rng_state and then ``epilogue_tensors``, and values of the later fields."""
        return cls._make((*tensors[:NUM_TENSORS], tuple(tensors[NUM_TENSORS:]), *rest))

    def values(self, names: Sequence[str]) -> tuple[Any, ...]:
        """Values of these fields, for instance an operator's arguments; the inverse of :meth:`of`."""
        return tuple(getattr(self, name) for name in names)

    # ---- tensors ----

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (argument name, tensor) for every tensor of the call."""
        for name in SINGLE_TENSORS:
            x = getattr(self, name)
            if x is not None:
                yield name, x
        for i, x in enumerate(self.epilogue_tensors):
            yield f"epilogues' tensor {i}", x

    def metadata(self) -> tuple[tuple, tuple]:
        """The fields that are single tensors or None, and all other fields except ``epilogue_tensors``."""
        cache = self[_FIRST_CACHE:_LAST_CACHE]
        return (*self[:NUM_TENSORS], *cache), (*self[NUM_TENSORS + 1 : _FIRST_CACHE], *self[_LAST_CACHE:])

    def materialized(self) -> Self:
        """The call with lazy tensors copied. Caches that the call writes are kept: they are never lazy."""
        kept = ("k_cache", "v_cache") if self.k is not None else ()
        names = [name for name in SINGLE_TENSORS if name not in kept]
        found = memory.materialized(getattr(self, name) for name in names)
        return self._replace(**dict(zip(names, found, strict=True)))

    @property
    def differentiable(self) -> tuple[Any, ...]:
        """The tensors that may have a gradient or a tangent: q, k, v, bias, sinks and those of epilogues."""
        return (*self.values(DIFFERENTIABLE), *self.epilogue_tensors)

    def with_differentiable(self, tensors: Sequence[Any]) -> Self:
        """The call with these tensors in place of :attr:`differentiable`."""
        named: dict[str, Any] = dict(zip(DIFFERENTIABLE, tensors, strict=False))
        return self._replace(**named, epilogue_tensors=tuple(tensors[len(DIFFERENTIABLE) :]))

    # ---- sizes ----

    @property
    def varlen(self) -> bool:
        """True if sequences are packed one after the other instead of batched by a stride."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        if self.q is None:
            return self.cache_seqlens.shape[0]
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def nheads(self) -> int:
        return self.q.shape[-2]

    @property
    def keys(self) -> tuple[Tensor, Tensor]:
        """Keys and values: the cache's if the call has a cache."""
        return (self.k, self.v) if self.k_cache is None else (self.k_cache, self.v_cache)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.nheads // self.keys[0].shape[-2]

    @property
    def longest(self) -> tuple[int, int]:
        """Maximum queries and keys of a sequence, for kernels. If packed, at most the total rows.

        The stated maxima are not reduced if results depend on them: the mem-efficient dropout mask numbers scores by
        them, and users' epilogues may read them. With an unpacked cache the second number is its capacity.
        """
        stated = self.max_seqlen_q, self.max_seqlen_k
        if self.k_cache is not None and self.cu_seqlens_k is None:
            return min(stated[0], self.q.shape[0]) if self.varlen else self.q.shape[1], self.cache.capacity
        if not self.varlen or self.dropout == "mem_efficient" or self.epilogues:
            return stated
        return min(stated[0], self.q.shape[0]), min(stated[1], self.keys[0].shape[0])

    def seqlens(self) -> tuple:
        """Lengths for kernels: a tuple in place of ``cute_attn.device.seqlen.Seqlens``, whose module loads the DSL."""
        lengths = (self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k)
        return (*lengths, *self.longest, None, None)

    @property
    def window(self) -> int:
        """Maximum keys that a query sees in its window, or 0 if no window bounds them."""
        bounded = self.mask.startswith("window") and self.window_left + self.window_right < UNBOUNDED
        return self.window_left + self.window_right + 1 if bounded else 0

    def stated(self, side: str) -> str:
        """The beginning of an error message about too many blocks of ``side``, "q" or "k"."""
        if self.varlen:
            return f"max_seqlen_{side} is {self.longest['qk'.index(side)]}, which makes "
        return f"{side} has "

    def output_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        lse = (self.nheads, self.q.shape[0]) if self.varlen else (self.batch, self.nheads, self.q.shape[1])
        return (*self.q.shape[:-1], self.keys[1].shape[-1]), lse

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def fake_outputs(self) -> tuple[Tensor, Tensor]:
        """out and lse without values, for fake tensors."""
        out, lse = self.output_shapes()
        return self.q.new_empty(out), self.q.new_empty(lse, dtype=self.lse_dtype)

    def fake_aux(self) -> Tensor:
        """The third output without values, for fake tensors; of size 0 if there is none."""
        if self.aux == "max_scores":
            return self.fake_outputs()[1]
        return self.q.new_empty(self.softmax_shape() if self.aux else (0,))

    def softmax_shape(self) -> tuple[int, ...]:
        return (self.batch, self.nheads, self.max_seqlen_q, self.max_seqlen_k)

    @property
    def aligned(self) -> bool:
        """True if kernels can load q, k and v in place: rows are contiguous, 16-byte aligned multiples of 16 bytes."""
        return all(memory.rows_are_aligned(x) for x in (self.q, self.k, self.v))

    # ---- caches ----

    @property
    def cache(self) -> Cache:
        """The cache, as :mod:`cute_attn.reference.kvcache` defines it."""
        return Cache(self.k_cache, self.v_cache, self.page_table, self.cache_batch_idx)

    @property
    def latent(self) -> bool:
        """True if V is a view of the first columns of K, so that kernels may load K only; see :func:`is_latent`."""
        return is_latent(self.k_cache, self.v_cache)

    @property
    def alignment(self) -> int:
        """The traits' alignment: rows of the cache start at multiples of this many elements, 0 for 16 bytes."""
        return memory.row_alignment(self.k_cache, self.v_cache)

    @property
    def entries(self) -> int:
        return self.k_cache.shape[0] if self.page_table is None else self.page_table.shape[0]

    @property
    def tables(self) -> tuple[Tensor | None, Tensor | None] | None:
        """A ``CacheTables`` as kernels take it, or None."""
        table, batch_idx = self.page_table, self.cache_batch_idx
        if table is None and batch_idx is None:
            return None
        return None if table is None else memory.regular(table), batch_idx

    @property
    def rotary(self) -> Rotary | None:
        """The rotary embedding, as :mod:`cute_attn.reference.kvcache` defines it, or None."""
        if self.rotary_cos is None or self.rotary_sin is None:
            return None
        return Rotary(self.rotary_cos, self.rotary_sin, self.rotary_interleaved, self.rotary_seqlens)

    def lengths_after(self) -> Tensor | None:
        """int32 (batch,): rows in use after the append, possibly more than the capacity; None for full entries."""
        if self.cache_seqlens is None or self.k is None:
            return self.cache_seqlens
        if self.cu_seqlens_k_new is None:
            return self.cache_seqlens + self.k.shape[1]
        return self.cache_seqlens + self.cu_seqlens_k_new.diff()

    @property
    def lengths(self) -> Tensor | None:
        """int32 (batch,): rows in use, including appended rows only if they are packed; None for full entries."""
        return self.cache_seqlens if self.cu_seqlens_k_new is None else self.lengths_after()

    @property
    def added(self) -> int:
        """Rows appended to each sequence that :attr:`lengths` does not count."""
        return 0 if self.k is None or self.cu_seqlens_k_new is not None else self.k.shape[1]

    # ---- requests to the kernels ----

    @property
    def epilogue_names(self) -> tuple[str, ...]:
        return tuple(item.partition(":")[0] for item in self.epilogues)

    @property
    def lists_blocks(self) -> bool:
        """True if kernels may skip blocks that an epilogue does not list."""
        return lists_blocks(self.epilogue_names)

    def by_definition(self) -> tuple[reference.Features, ScoreInputs, reference.Lengths]:
        """Arguments of :mod:`cute_attn.reference` other than q, k, v and the scale."""
        epilogues = tuple(user_epilogue(name).reference for name in self.epilogue_names)
        lengths = reference.Lengths(*self[3:7], self.max_seqlen_q, self.max_seqlen_k)
        return reference.Features(self.mask, self.dropout, epilogues), self.score_inputs(), lengths

    def score_inputs(self, grad_bias: Tensor | None = None, max_scores: Tensor | None = None) -> ScoreInputs:
        """The epilogues' inputs, with tensors as the caller passed them.

        The backward writes ``grad_bias``, the forward ``max_scores``.
        """
        own = (self.epilogues, self.epilogue_tensors, self.epilogue_numbers)
        return ScoreInputs(
            window_left=self.window_left, window_right=self.window_right, alibi_slopes=self.alibi_slopes,
            bias=self.bias, grad_bias=grad_bias, sinks=self.sinks, tree_mask=self.tree_mask, softcap=self.softcap,
            dropout_p=self.dropout_p, rng_state=self.rng_state, max_scores=max_scores,
            extra=unpack_epilogues(*own) if self.epilogues else {},
        )  # fmt: skip

    def resolved(self) -> Self:
        """The call with the precision ``PYTORCHS`` replaced by the current one of PyTorch's products."""
        if self.precision != PYTORCHS:
            return self
        return self._replace(precision=pytorchs_precision())

    @property
    def scale_sign(self) -> int:
        """softmax_scale's sign: -1, 0 or 1."""
        return (self.softmax_scale > 0) - (self.softmax_scale < 0)

    def with_positive_scale(self) -> Self:
        """The call with a positive scale, for kernels: q is multiplied by the scale's sign, in a copy unless it is 1.

        Online softmax computes maxima of q k^T before scaling, so the scale must be positive.
        """
        sign = self.scale_sign
        if sign == 1:
            return self
        scale = abs(self.softmax_scale) if sign else 1.0
        return self._replace(q=(self.q * sign).contiguous(), softmax_scale=scale)

    def as_kernels_read(self) -> Self:
        """The call with strides for kernels: regular ones in dimensions of size 1, 0 to broadcast slopes and bias."""
        columns = 0 if self.bias is None else self.bias.shape[3]
        shapes = {
            "alibi_slopes": (self.batch, self.nheads),
            "bias": (self.batch, self.nheads, self.max_seqlen_q, columns),
        }
        views: dict[str, Any] = {}
        for name in ("q", "k", "v", *shapes):
            x = getattr(self, name)
            if x is None or (name not in shapes and memory.rows_are_regular(x)):
                continue
            shape = shapes.get(name, tuple(x.shape))
            if name not in shapes or shape != tuple(x.shape) or x.stride(-1) != 1:
                views[name] = memory.as_strided(x, shape, memory.regular_strides(x, shape))
        return self._replace(**views) if views else self

    def traits(self, arch: str, variant: str = "", *, op: str = "forward", **own: Any) -> Traits:
        """Traits of a kernel of ``arch``. own: traits to add, or to set instead of the values derived here."""
        dtype, dims = DTYPE_NAMES[self.q.dtype], (int(self.q.shape[-1]), int(self.keys[1].shape[-1]))
        if self.k_cache is None:  # other rows are padded
            dims = (aligned_head_dim(dtype, dims[0]), aligned_head_dim(dtype, dims[1]))
        fields: dict[str, Any] = {
            "head_dim_v": dims[1], "precision": self.precision, "mask": self.mask,
            "softcap": self.softcap > 0, "alibi": self.alibi_slopes is not None,
            "bias": "" if self.bias is None else DTYPE_NAMES[self.bias.dtype], "epilogues": self.epilogue_names,
            "sinks": self.sinks_dtype if op != "backward" else "", "dropout": self.dropout, "varlen": self.varlen,
            "max_scores": self.aux == "max_scores" and op in ("forward", "kvcache"),
            "seqused_q": self.seqused_q is not None, "seqused_k": self.seqused_k is not None, "variant": variant,
        }  # fmt: skip
        return Traits(op, arch, dtype, dims[0], **(fields | own))

    @property
    def sinks_dtype(self) -> str:
        """Name of the sinks' dtype in the traits, empty without sinks."""
        return "" if self.sinks is None else DTYPE_NAMES[self.sinks.dtype]


NUM_TENSORS = Call._fields.index("epilogue_tensors")
"""Number of leading fields, each a single tensor or None."""
BIAS, SINKS, SLOPES = map(Call._fields.index, ("bias", "sinks", "alibi_slopes"))
"""Indices of these fields."""
_FIRST_CACHE, _LAST_CACHE = map(Call._fields.index, ("k_cache", "rotary_interleaved"))
SINGLE_TENSORS = (*Call._fields[:NUM_TENSORS], *Call._fields[_FIRST_CACHE:_LAST_CACHE])
"""The fields that are tensors or None."""
ATTENTION = Call._fields[:_FIRST_CACHE]
"""The fields of calls without a cache."""


def is_latent(k_cache: Tensor | None, v_cache: Tensor | None) -> bool:
    """True if ``v_cache`` is a view of the first columns of a ``k_cache`` with a head dim above ``LARGE_HEAD_DIM``.

    The number of columns must be one that two warpgroups can read as values from the keys' swizzle atoms.
    """
    if k_cache is None or v_cache is None or not (k_cache.dim() and v_cache.dim()):  # the checks refuse them
        return False
    if k_cache.shape[-1] <= LARGE_HEAD_DIM or not is_latent_dim(v_cache.shape[-1]):
        return False
    return memory.is_first_columns(v_cache, k_cache)


# ---- torch operators ----

LIBRARY = torch.library.Library("cute_attn", "FRAGMENT")


Implementation = Callable[..., Any]


def define(
    signature: str, cpu: Implementation, cuda: Implementation, fake: Implementation, *tags: torch.Tag
) -> None:
    """Define an operator by its signature, and its implementations for tensors on the CPU, on GPUs and fake ones."""
    name = signature.partition("(")[0]
    LIBRARY.define(signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"cute_attn::{name}", fake, lib=LIBRARY)
    _undivided.append(name)
    if _DTENSORS in sys.modules:
        _divide()


_DTENSORS = "torch.distributed.tensor"
_undivided = list[str]()
"""Operators that DTensors do not know yet."""


def _divide() -> None:
    """Register how the operators divide DTensors."""
    from cute_attn.host.sharding import register  # imports them

    while _undivided:
        register(_undivided.pop())


after_import(_DTENSORS, _divide)


_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    Sequence[str]: "str[]",
    Sequence[float]: "float[]",
    int: "SymInt",
    **{kind: kind.__name__ for kind in (float, str, bool)},
}


def schema(names: Sequence[str], **other: str) -> str:
    """The arguments in an operator's schema: these fields. other: types to use instead, as for a written tensor."""
    kinds = Call.__annotations__
    return ", ".join(f"{other.get(name) or _TYPES[kinds[name]]} {name}" for name in names)


# ---- users' epilogues through a schema of plain lists ----


def given_epilogues(epilogues: Sequence[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    """Epilogues as a mapping of names to arguments."""
    names = tuple(epilogues) if isinstance(epilogues, tuple | list | Mapping) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"epilogues is {shown(epilogues)}; accepted: a tuple of names, or a dict of names to arguments"
        )
    return epilogues if isinstance(epilogues, Mapping) else dict.fromkeys(epilogues, ())


def pack_epilogues(
    epilogues: Sequence[str] | Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[Tensor, ...], tuple[float, ...]]:
    """Epilogues and their arguments as lists that an operator's schema can carry.

    Each name is followed by a letter for each of its arguments: ``"my_bias:tf"`` takes a tensor and a number.
    """
    given = given_epilogues(epilogues)
    names: list[str] = []
    tensors: list[Tensor] = []
    numbers: list[float] = []
    for name, arguments in given.items():
        if ":" in name:
            raise ValueError(f"epilogues has the name {name!r}; accepted: names without a colon")
        letters = ""
        for value in map(python_number, arguments if isinstance(arguments, tuple | list) else (arguments,)):
            if isinstance(value, Tensor):
                letters += "t"
                tensors.append(value)
            elif isinstance(value, int) and abs(value) > 2**53:
                raise ValueError(f"epilogues[{name!r}] has {value}; accepted: ints up to 2**53")
            elif isinstance(value, int | float):
                letters += "f" if isinstance(value, float) else "i"
                numbers.append(float(value))
            else:
                raise TypeError(f"epilogues[{name!r}] has {shown(value)}; accepted: tensors, floats and ints")
        names.append(f"{name}:{letters}" if letters else name)
    return tuple(names), tuple(tensors), tuple(numbers)


def unpack_epilogues(
    epilogues: Sequence[str], tensors: Sequence[Tensor], numbers: Sequence[float]
) -> dict[str, tuple]:
    """The inverse of :func:`pack_epilogues`: for each name a tuple of its arguments."""
    given = iter(numbers)
    kinds: dict[str, Iterator[Any]] = {"t": iter(tensors), "f": given, "i": map(int, given)}
    pairs = (item.partition(":")[::2] for item in epilogues)
    return {name: tuple(next(kinds[letter]) for letter in letters) for name, letters in pairs}
