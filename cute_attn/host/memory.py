"""Tensors' memory: outputs, views, alignment, lazy tensors, overlaps."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Tensors = tuple[Any, ...]
"""A call's first tensors, q to rng_state; an absent tensor is None."""

# ---- outputs and views ----

# Functions of torch.compile's generated code: a third of the time of the public functions, which go through the
# dispatcher. as_strided makes a view from an element on; TensorGuards compares all metadata of several tensors at once.
_guards: Any = torch._C._dynamo.guards
as_strided: Callable[..., Tensor] = _guards._reinterpret_tensor
empty_strided_cuda: Callable[..., Tensor] = _guards._empty_strided_cuda
tensor_guards: Any = _guards.TensorGuards
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


_HERE = contextlib.nullcontext()


def on_device(device: int) -> contextlib.AbstractContextManager:
    """A context in which launches go to ``device``, an index as from ``Tensor.get_device()``."""
    return _HERE if device < 0 or device == current_device() else torch.cuda.device(device)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of that shape."""
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


# ---- rows as kernels read and write them ----

ALIGNMENT_BYTES = 16


def is_aligned(x: Tensor, alignment: int = 0) -> bool:
    """True if ``x``, which must have memory, starts at a multiple of ``alignment`` elements, or of 16 bytes for 0."""
    return x.data_ptr() % (alignment * x.element_size() or ALIGNMENT_BYTES) == 0


def may_be_aligned(x: Tensor, alignment: int = 0) -> bool:
    """:func:`is_aligned`, or True for a tensor without memory, whose address is not known yet."""
    return not has_memory(x) or is_aligned(x, alignment)


def row_alignment(*tensors: Tensor) -> int:
    """The largest number of elements, up to 16 bytes, that divides head dims and row strides; 0 for 16 bytes."""
    found = whole = ALIGNMENT_BYTES // tensors[0].element_size()
    for x in tensors:
        steps = [step for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
        found = math.gcd(found, x.shape[-1], *steps)
    return 0 if found == whole else found


def rows_are_aligned(x: Tensor) -> bool:
    """:func:`rows_are_whole`, and the address, if known, is a multiple of 16 bytes."""
    return rows_are_whole(x) and may_be_aligned(x)


def rows_are_whole(x: Tensor) -> bool:
    """True if rows are contiguous, and row sizes and strides are multiples of 16 bytes. Ignores the address."""
    whole = ALIGNMENT_BYTES // x.element_size()
    if x.shape[-1] % whole or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return False
    return all(n == 1 or step % whole == 0 for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True))


# TMA has 40 bits for a stride in bytes.
_MAX_STRIDE = 2**38


def rows_are_regular(x: Tensor, alignment: int = 0) -> bool:
    """True if every stride has the divisibility that kernels assume, also in dimensions of size 1.

    alignment: strides must be multiples of this many elements, 0 for 16 bytes.
    """
    whole = alignment or ALIGNMENT_BYTES // x.element_size()
    return x.stride(-1) == 1 and all(s % whole == 0 and s <= _MAX_STRIDE for s in x.stride()[:-1])


def regular_strides(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides that broadcast ``tensor`` to ``shape``, with the divisibility that kernels assume.

    The stride of a dimension of size 1 is arbitrary in torch. It becomes 0, and 1 in the last dimension.
    """
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if tensor.shape[-1] == 1 == shape[-1]:
        strides[-1] = 1
    return (0,) * (len(shape) - len(strides)) + tuple(strides)


def regular(x: Tensor, alignment: int = 0) -> Tensor:
    """``x``, or a view of it with regular strides in dimensions of size 1."""
    return x if rows_are_regular(x, alignment) else as_strided(x, tuple(x.shape), regular_strides(x, x.shape))


def is_readable(x: Tensor, alignment: int = 0) -> bool:
    """True if kernels can access ``x`` in place, by its strides and its address if that is known."""
    return rows_are_regular(x, alignment) and may_be_aligned(x, alignment)


# ---- what the dispatcher does with a tensor ----


def is_lazy(x: Tensor) -> bool:
    """True if the values of ``x`` differ from its memory: torch negates it on each read, or it has no memory.

    Examples are ``torch._neg_view(x)``, ``z.conj().imag`` and ``torch._efficientzerotensor``. The dispatcher makes new
    tensors of them before it calls an implementation.
    """
    return x.is_neg() or x._is_zerotensor()


def has_memory(x: Tensor) -> bool:
    """True if ``x`` has an address and numbers now, unlike meta, fake and traced tensors, DTensors and wrappers."""
    if torch.compiler.is_compiling() or x.is_meta or _is_wrapped(x) or torch._is_functional_tensor(x):
        return False
    return type(x) in _PLAIN or not (is_fake(x) or is_traceable_wrapper_subclass(x))


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_PLAIN = frozenset((Tensor, type(None), torch.nn.Parameter))


def none_overrides(tensors: Sequence[Any]) -> bool:
    """True if each is a plain tensor or None. A subclass may override operators."""
    return _PLAIN.issuperset(map(type, tensors))


def all_plain(tensors: Sequence[Any]) -> bool:
    """True if each is None or fully described by its memory: none overrides operators, is lazy or functional."""
    return none_overrides(tensors) and not any(
        x is not None and (is_lazy(x) or torch._is_functional_tensor(x)) for x in tensors
    )


def materialized(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """``tensors``, with lazy ones copied except while a compiler traces, whose operators materialize them."""
    if torch.compiler.is_compiling():
        return tuple(tensors)
    return tuple(x.clone() if isinstance(x, Tensor) and is_lazy(x) else x for x in tensors)


# ---- rows of packed sequences ----


def write_owned(out: Tensor, found: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Copy ``found`` to ``out``, except rows of packed tensors that no sequence owns; returns ``out``."""
    if cu_seqlens is not None:
        found = torch.where(_owned(out, cu_seqlens), found, out)
    return out.copy_(found)


def clear_owned(out: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Zero ``out``, except rows of packed tensors that no sequence owns; returns ``out``."""
    return out.zero_() if cu_seqlens is None else out.masked_fill_(_owned(out, cu_seqlens), 0.0)


def _owned(out: Tensor, cu_seqlens: Tensor) -> Tensor:
    """A (total, 1, 1) mask of the rows of (total, heads, dim) that a sequence owns. The host reads nothing."""
    row = torch.arange(out.shape[0], device=out.device)
    return ((row >= cu_seqlens[0]) & (row < cu_seqlens[-1]))[:, None, None]


# ---- overlaps ----


def is_first_columns(x: Tensor, whole: Tensor) -> bool:
    """True if ``x`` is the view ``whole[..., :n]``. Both must have memory, and equal shapes except in the last size."""
    return (
        x.shape[-1] <= whole.shape[-1] and x.data_ptr() == whole.data_ptr() and x.stride() == whole.stride()
    )


_Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides, and bytes of an element."""
_MAX_TRIALS = 10_000
"""Maximum candidates of a search for two elements that overlap; then the answer is that there are none."""


def overlaps_itself(x: Tensor) -> bool:
    """True if two elements of ``x`` overlap, as in an expanded tensor."""
    shape, strides, size = _layout(x)
    for i, n in enumerate(shape):  # two whose indices first differ in dimension i
        later, rest = (n - 1, *shape[i + 1 :]), (shape[i + 1 :], strides[i + 1 :], size)
        if 0 not in shape and _overlap(strides[i] * size, rest, (later, strides[i:], size)):
            return True
    return False


def overlap(x: Tensor, y: Tensor) -> bool:
    """True if an element of ``x`` overlaps one of ``y``.

    Two views of one tensor whose rows alternate do not overlap.
    """
    if not torch._C._is_alias_of(x, y):  # type: ignore[attr-defined]
        return False
    return _overlap(y.data_ptr() - x.data_ptr(), _layout(x), _layout(y))


def _layout(x: Tensor) -> _Layout:
    return tuple(x.shape), tuple(x.stride()), x.element_size()


@functools.lru_cache(maxsize=4096)
def _overlap(distance: int, x: _Layout, y: _Layout) -> bool:
    """True if elements of the two layouts overlap. distance: bytes from x to y."""
    arrays: Any = []
    for address, (shape, strides, size) in ((1 << 60, x), ((1 << 60) + distance, y)):  # nothing is read there
        steps = tuple(step * size for step in strides)
        sizes = tuple(n if step else min(n, 1) for n, step in zip(shape, strides, strict=True))
        described = {"data": (address, True), "shape": sizes, "strides": steps, "typestr": f"|V{size}"}
        arrays.append(np.asarray(SimpleNamespace(__array_interface__=described | {"version": 3})))
    try:
        return np.shares_memory(arrays[0], arrays[1], max_work=_MAX_TRIALS)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False
