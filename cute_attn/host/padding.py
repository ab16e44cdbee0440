"""Calls with rows that kernels cannot load, because of their head dim, strides or address.

One launch makes padded copies of such q, k and v. The kernels then compute with the copies, and another launch copies
their outputs to the call's head dim. The backward copies grad_out and out as well. Tensors that kernels can load stay
in place. Zeros in a head dim change no score, and the softmax scale stays the call's.

Workspace: the size, with the head dim rounded up, of each copied tensor and of each result with a head dim that is not
a multiple of 16 bytes.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.host import record
from cute_attn.host.call import DTYPE_NAMES, Call
from cute_attn.host.checks import check_count
from cute_attn.host.memory import is_readable, may_be_aligned, rows_are_aligned, rows_are_whole
from cute_attn.traits import Traits, aligned_head_dim, head_dim_multiple

MAX_ROWS = 2**31 - 2**16
"""Maximum rows of a tensor that is copied, or split into terms. A row belongs to one head of one query or key."""

Some = Sequence[Tensor | None]


def to_copy(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which tensors need a padded copy, since kernels cannot load their rows."""
    return tuple(not rows_are_aligned(x) for x in tensors)


def is_by_address(tensors: Sequence[Tensor]) -> bool:
    """True if a tensor is copied only for its address: other calls with its metadata may not need the copy."""
    return any(rows_are_whole(x) and not may_be_aligned(x) for x in tensors)


def is_writable(x: Tensor) -> bool:
    """True if kernels can write ``x`` in place: rows that are multiples of 16 bytes, at such strides and addresses."""
    return x.shape[-1] % head_dim_multiple(DTYPE_NAMES[x.dtype]) == 0 and is_readable(x)


def wide_shape(x: Tensor) -> tuple[int, ...]:
    """The shape of a padded copy of ``x``."""
    return (*x.shape[:-1], aligned_head_dim(DTYPE_NAMES[x.dtype], x.shape[-1]))


def pad(kernel: Any, tensors: Sequence[Tensor], copied: Sequence[bool]) -> list[Tensor]:
    """``tensors``, in the order of ``PADDED_TENSORS``, some replaced by padded copies in one allocation.

    kernel: a compiled :class:`cute_attn.kernels.pad_rows.PadRows`. Each copy is a multiple of 16 bytes.
    """
    if not any(copied):
        return list(tensors)
    wide = [wide_shape(x) for x, wanted in zip(tensors, copied, strict=True) if wanted]
    made = iter(record.together(tensors[0], wide, tensors[0].dtype))
    padded = [next(made) if wanted else None for wanted in copied]
    _launch(kernel, tensors, padded, None)
    return [x if copy is None else copy for x, copy in zip(tensors, padded, strict=True)]


def unpad(kernel: Any, padded: Some, results: Some, cu_seqlens: Tensor | None = None) -> None:
    """Copy ``padded`` results, in the order of ``PADDED_TENSORS``, to ``results``, except where either is None.

    cu_seqlens: cu_seqlens_q if rows of O that no sequence owns keep their contents; None for other results.
    """
    if any(x is not None for x in padded):
        _launch(kernel, padded, results, cu_seqlens)


def _launch(kernel: Any, sources: Some, targets: Some, cu_seqlens: Tensor | None) -> None:
    """Copy pairs of tensors. Arbitrary tensors replace missing ones in the arguments, which the kernel ignores."""
    both = [x is not None and y is not None for x, y in zip(sources, targets, strict=True)]
    some = both.index(True)
    source, target = (
        tuple(x if wanted else tensors[some] for x, wanted in zip(tensors, both, strict=True))
        for tensors in (sources, targets)
    )
    which = sum(wanted << i for i, wanted in enumerate(both))
    own = {"mSource": source, "mTarget": target, "which": which, "mCuSeqlens": cu_seqlens}
    record.launch(*kernel.bind(**own), direct=False)


def kernels_for(op: str, call: Call) -> dict[str, Any]:
    """The compiled kernels that pad and unpad the tensors of a forward or a backward."""
    dims, target = (call.q.shape[-1], call.v.shape[-1]), compiler.default_target("sm80")
    found = {}
    for way in ("pad", "unpad"):
        traits = Traits(f"{op}_{way}", "sm80", DTYPE_NAMES[call.q.dtype], *dims, varlen=call.varlen)
        found[way] = compiler.build(registry.lookup(traits, None, target), target)
    return found


def check_rows(named: dict[str, Tensor], copied: Sequence[bool]) -> None:
    """Raise ValueError if a tensor that is copied has too many rows."""
    for (name, x), wanted in zip(named.items(), copied, strict=True):
        if wanted:
            check_count(f"{name} has rows of heads", math.prod(x.shape[:-1]), MAX_ROWS)
