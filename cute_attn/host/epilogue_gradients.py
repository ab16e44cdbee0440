"""Gradients of tensors passed to users' epilogues, if the epilogues are traced functions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_attn.epilogues.names import user_epilogue
from cute_attn.host import record
from cute_attn.host.call import Call
from cute_attn.host.dispatch import NO_GRADIENT
from cute_attn.host.memory import on_device

MAX_ELEMENTS = 2**31 - 1
"""Maximum elements of a tensor with a gradient: offsets have 32 bits."""
COPIES, COPIED_BYTES = 128, 1 << 20
"""Maximum copies of a gradient, to which CTAs add in turn, and maximum bytes of all copies. CTAs that add to one small
tensor would wait for each other."""


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

    def with_gradients(self, wanted: Sequence[bool]) -> tuple[str, tuple[int, ...]] | None:
        """Name of the epilogue in a backward, and positions of the arguments to differentiate; None if it cannot."""
        arguments = self.arguments(wanted)
        return user_epilogue(self.name).with_gradients(arguments) if arguments else (self.name, ())


def _given(epilogues: Sequence[str]) -> Iterator[_Given]:
    first = 0
    for item in epilogues:
        name, _, letters = item.partition(":")
        yield _Given(name, letters, first)
        first += letters.count("t")


def check_wanted(call: Call, wanted: Sequence[bool]) -> None:
    """Raise if kernels do not compute the wanted gradients of the epilogues' tensors.

    Raises:
        NotImplementedError: an epilogue does not define them, or gradients must repeat bit for bit, which sums in
            arbitrary order do not.
        ValueError: a tensor has too many elements.
    """
    found = [one.with_gradients(wanted) for one in _given(call.epilogues)]
    if None in found:
        raise NotImplementedError(NO_GRADIENT)
    adds = any(one is not None and one[1] for one in found)
    if adds and (call.deterministic or torch.are_deterministic_algorithms_enabled()):
        raise NotImplementedError(
            "the gradient of an epilogue's tensor is asked for with deterministic=True; accepted: False, or tensors "
            "without one"
        )
    for x, own in zip(call.epilogue_tensors, wanted, strict=True):
        if own and x.numel() > MAX_ELEMENTS:
            raise ValueError(
                f"an epilogue's tensor of shape {tuple(x.shape)} requires a gradient; accepted: at most {MAX_ELEMENTS} "
                "elements"
            )


def _zeros_like(x: Tensor) -> Tensor:
    """Copies of a gradient, zeroed: fp32 (copies, *x.shape), or (copies, 1) if ``x`` has no dimensions."""
    copies = max(1, min(COPIES, COPIED_BYTES // max(4 * x.numel(), 1)))
    with on_device(x.get_device()):
        made = record.contiguous(x, (copies, *(x.shape or (1,))), torch.float32)
        record.step(Tensor.zero_, made)
    return made


def gradient_of(x: Tensor, copies: Tensor) -> Tensor:
    """The gradient of ``x``: the sum of its copies, in x's dtype."""
    with on_device(x.get_device()):
        made = record.contiguous(x, tuple(x.shape))
        record.step(record.sum_of_copies, made, copies)
    return made


def with_targets(call: Call, wanted: Sequence[bool]) -> tuple[Call, list[Tensor | None]]:
    """The call with added tensors, fp32 (copies, *shape), into which its backward adds gradients; and these tensors."""
    check_wanted(call, wanted)
    targets = [_zeros_like(x) if own else None for x, own in zip(call.epilogue_tensors, wanted, strict=True)]
    names: list[str] = []
    tensors: list[Tensor] = []
    for one in _given(call.epilogues):
        name, arguments = one.with_gradients(wanted)  # type: ignore[misc]
        added = [targets[one.first + one.letters.count("t", 0, number)] for number in arguments]
        letters = one.letters + "t" * len(added)
        names.append(f"{name}:{letters}" if letters else name)
        tensors += [*call.epilogue_tensors[one.tensors], *added]  # type: ignore[list-item]
    return call._replace(epilogues=tuple(names), epilogue_tensors=tuple(tensors)), targets
