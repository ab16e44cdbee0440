"""Gradients and tangents of tensors passed to users' epilogues, if the epilogues are traced functions.

Scores are added to fp32 in any order. If gradients must repeat bit for bit, and more than two scores may load an
element, they are added to bins of integers (:mod:`cute_attn.epilogues.functions.gradients`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_attn.epilogues.names import user_epilogue
from cute_attn.host import record
from cute_attn.host.call import Call
from cute_attn.host.dispatch import NO_GRADIENT

MAX_ELEMENTS = 2**31 - 1
"""Maximum elements of a tensor with a gradient: offsets have 32 bits."""
COPIES, COPIED_BYTES = 128, 1 << 20
"""Maximum copies of a gradient, to which CTAs add in turn, and maximum bytes of all copies. CTAs that add to one small
tensor would wait for each other."""
BINNED_BYTES, MAX_BINNED_BYTES = 1 << 24, 1 << 32
"""Maximum bytes of all copies of a gradient in bins, and of a single one."""
MAX_READERS = 1 << 39
"""Maximum scores that add to an element in bins: the least number of exponents of a bin is one."""


@dataclass(frozen=True)
class _Given:
    """One epilogue of a call, as :func:`cute_attn.host.call.pack_epilogues` says, and the index of its first tensor."""

    name: str
    letters: str
    first: int

    @property
    def tensors(self) -> slice:
        return slice(self.first, self.first + self.letters.count("t"))

    def arguments(self, wanted: Sequence[bool]) -> tuple[int, ...]:
        """Positions of the wanted tensors among the epilogue's arguments."""
        numbers = [i for i, letter in enumerate(self.letters) if letter == "t"]
        return tuple(i for i, own in zip(numbers, wanted[self.tensors], strict=True) if own)

    def number(self, argument: int) -> int:
        """The index among the call's epilogue tensors of the tensor at a position of the arguments."""
        return self.first + self.letters.count("t", 0, argument)

    def with_gradients(
        self, wanted: Sequence[bool], bins: Sequence[int] = ()
    ) -> tuple[str, tuple[int, ...]] | None:
        """Name of the epilogue in a backward, and positions of the arguments to differentiate; None if it cannot.

        bins: of each of the call's epilogue tensors, 0 for sums in fp32; () for none in bins.
        """
        arguments = self.arguments(wanted)
        exact = tuple(i for i in arguments if bins and bins[self.number(i)])
        return user_epilogue(self.name).with_gradients(arguments, exact) if arguments else (self.name, ())


def _given(epilogues: Sequence[str]) -> Iterator[_Given]:
    first = 0
    for item in epilogues:
        name, _, letters = item.partition(":")
        yield _Given(name, letters, first)
        first += letters.count("t")


def bins_of(call: Call, wanted: Sequence[bool]) -> list[int]:
    """Bins of an element of each of the call's wanted gradients; 0 for sums in fp32.

    Raises:
        NotImplementedError: an epilogue does not define them.
        ValueError: a tensor has too many elements, or too many scores may load one of them.
    """
    repeats, bins = call.deterministic or torch.are_deterministic_algorithms_enabled(), [0] * len(wanted)
    for one in _given(call.epilogues):
        found = one.with_gradients(wanted)
        if found is None:
            raise NotImplementedError(NO_GRADIENT)
        for argument in found[1]:
            x = call.epilogue_tensors[one.number(argument)]
            if repeats:
                bins[one.number(argument)] = _bins(call, one.name, argument, x)
    for x, own in zip(call.epilogue_tensors, wanted, strict=True):
        if own and x.numel() > MAX_ELEMENTS:
            raise ValueError(
                f"an epilogue's tensor of shape {tuple(x.shape)} requires a gradient; accepted: at most {MAX_ELEMENTS} "
                "elements"
            )
    return bins


def _bins(call: Call, name: str, argument: int, x: Tensor) -> int:
    """Bins for gradients that repeat; 0 if at most two scores load an element, since a sum of two has no order."""
    if call.q.dim() < 3:  # the checks report it
        return 0
    names, longest = ("batch", "head", "query", "key"), (call.max_seqlen_q, call.max_seqlen_k)
    sizes = dict(zip(names, (call.batch, call.nheads, *longest), strict=True))
    if any(isinstance(n, torch.SymInt) for n in (*sizes.values(), *x.shape)):
        return 0  # no call, but a graph of calls
    rows = call.q.shape[0] if call.varlen else call.batch * call.max_seqlen_q
    readers = user_epilogue(name).readers(argument, tuple(x.shape), sizes, rows)
    if readers <= 2:
        return 0
    what = f"an epilogue's tensor of shape {tuple(x.shape)} requires a gradient with deterministic=True"
    if readers > MAX_READERS:
        raise ValueError(f"{what}, and up to {readers} scores load an element; accepted: {MAX_READERS}")
    room = 40 - (readers - 1).bit_length()  # exponents of fp32 for which a bin has room, at most 32 of them
    bins = 1 + (256 >> min(room.bit_length() - 1, 5))
    if 8 * bins * x.numel() > MAX_BINNED_BYTES:
        raise ValueError(
            f"{what}; accepted: at most {MAX_BINNED_BYTES // (8 * bins)} elements, for a workspace of 4 GiB, or False"
        )
    return bins


def _zeros_like(x: Tensor, bins: int) -> Tensor:
    """Copies of a gradient, zeroed: fp32 (copies, *x.shape), with bins int64 (copies, bins, *x.shape).

    The shape is (1,) if ``x`` has no dimensions.
    """
    shape, dtype, most = x.shape or (1,), torch.float32, COPIED_BYTES
    if bins:
        shape, dtype, most = (bins, *shape), torch.int64, BINNED_BYTES
    copies = max(1, min(COPIES, most // max(dtype.itemsize * math.prod(shape), 1)))
    made = record.contiguous(x, (copies, *shape), dtype)
    record.step(Tensor.zero_, made)
    return made


def gradient_of(x: Tensor, copies: Tensor) -> Tensor:
    """The gradient of ``x``: the sum of its copies, in x's dtype."""
    add_up = _sum_of_bins if copies.dtype == torch.int64 else record.sum_of_copies
    made = record.contiguous(x, tuple(x.shape))
    record.step(add_up, made, copies)
    return made


def with_targets(call: Call, wanted: Sequence[bool]) -> tuple[Call, list[Tensor | None]]:
    """The call with added tensors, to which its backward adds gradients, and these tensors; see :func:`_zeros_like`."""
    bins = bins_of(call, wanted)
    given = zip(call.epilogue_tensors, wanted, bins, strict=True)
    targets = [_zeros_like(x, own) if needed else None for x, needed, own in given]
    return _with_added(call, lambda one: one.with_gradients(wanted, bins), targets), targets


def with_tangents(call: Call, tangents: Sequence[Tensor | None]) -> Call:
    """The call with tangents of its epilogues' tensors, as kernels with tangents take them.

    Raises:
        NotImplementedError: an epilogue does not take them.
    """

    def found(one: _Given) -> tuple[str, tuple[int, ...]]:
        moved = one.arguments([x is not None for x in tangents])
        own = user_epilogue(one.name).with_tangents(moved) if moved else (one.name, ())
        if own is None:
            raise NotImplementedError(
                f"a tensor of epilogue {one.name!r} has a tangent; accepted on CUDA: tensors of functions"
            )
        return own

    return _with_added(call, found, [x if x is None else x.contiguous() for x in tangents])


def _with_added(call: Call, found: Callable[[_Given], Any], more: Sequence[Tensor | None]) -> Call:
    """The call with other epilogues, and further tensors of theirs.

    found: the name of an epilogue, and the positions of its arguments; their tensors in ``more`` follow its own.
    """
    names: list[str] = []
    tensors: list[Any] = []
    for one in _given(call.epilogues):
        name, arguments = found(one)
        added = [more[one.number(argument)] for argument in arguments]
        letters = one.letters + "t" * len(added)
        names.append(f"{name}:{letters}" if letters else name)
        tensors += [*call.epilogue_tensors[one.tensors], *added]
    return call._replace(epilogues=tuple(names), epilogue_tensors=tuple(tensors))


def _sum_of_bins(made: Tensor, copies: Tensor) -> None:
    """:func:`.record.sum_of_copies` of bins, int64 ``(copies, bins, ...)``; NaN where a number was not finite.

    :mod:`cute_attn.epilogues.functions.gradients` says what a bin counts in.
    """
    total = copies.sum(0) if len(copies) > 1 else copies[0]
    scales = torch.logspace(-151, 105, len(total), 2.0, dtype=torch.float64, device=copies.device)
    found = (total * scales.view(-1, *(1,) * (total.dim() - 1))).sum(0)
    made.copy_(found.masked_fill_(total[-1] != 0, torch.nan).view(made.shape))
