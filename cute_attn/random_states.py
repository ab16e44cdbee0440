"""Seeds and offsets of dropout masks, from torch's generators.

A launch for two numbers costs as much time on the host as half a call. So one launch draws the states of all the next
offsets of a generator, and a call takes the one that belongs to the generator's own seed and offset, which it moves on,
as torch's dropouts do: the same state of a generator gives the same mask, whoever restores it, and no other one does.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_attn.launcher import as_strided

STEP = 4
"""What a draw adds to a generator's offset, which counts in fours."""

DRAWN = 4096
"""States that are drawn by one launch: 64 KB."""

_UNIT = 4
"""What offsets are multiples of, as torch's are, and seeds with them: the mem-efficient mask costs less from there."""
_END = 2**63 // _UNIT
_SALT = 0x5851F42D4C957F2D  # so that states are not the numbers that torch.randint gives for the same seed


@dataclass(slots=True)
class States:
    """States for the offsets of a generator's seed that follow each other, drawn on one stream.

    Attributes:
        generator: torch's.
        which: seed, and which DRAWN offsets of it ``drawn`` is for.
        drawn: int64 (DRAWN, 2).
    """

    generator: torch.Generator
    which: tuple[int, int] | None = None
    drawn: Tensor | None = None

    def take(self) -> Tensor:
        """The state that belongs to the generator's seed and offset, which is moved on."""
        generator = self.generator
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + STEP)
        group, place = divmod(offset // STEP, DRAWN)
        if self.which != (seed, group) or self.drawn is None:
            self.drawn, self.which = _draw_group(generator.device, seed, group), (seed, group)
        return as_strided(self.drawn, (2,), (1,), 2 * place)


def _draw_one(device: torch.device) -> Tensor:
    return _UNIT * torch.randint(0, _END, (2,), dtype=torch.int64, device=device)


def _draw_group(device: torch.device, seed: int, group: int) -> Tensor:
    """By a generator of its own, so that torch's is left alone."""
    generator = torch.Generator(device).manual_seed(seed ^ _SALT)
    generator.set_offset(64 * group)  # one launch takes less
    return _UNIT * torch.randint(0, _END, (DRAWN, 2), dtype=torch.int64, device=device, generator=generator)


_states: dict[
    tuple[int, int], States
] = {}  # of each device and stream: what one draws is not there for another


_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def draw(device: torch.device, traced: bool | None = None) -> Tensor:
    """A seed and an offset, int64 (2,), from torch's generator of ``device``, in memory that is not to be written to.

    Compilers, tracers and captures of CUDA graphs see the launches that draw two numbers, and so repeat those. traced:
    whether one of the first two looks on, if that is known.
    """
    if device.type != "cuda" or (_is_traced() if traced is None else traced) or _is_capturing():
        return _draw_one(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    place = (index, _current_stream(index))
    states = _states.get(place)
    if states is None:
        states = _states[place] = States(torch.cuda.default_generators[index])
    return states.take()


_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def _is_traced() -> bool:
    """Whether what runs now is something that will be run, rather than the thing itself.

    Modes that only watch are none of these: they may be on in a forward and off where a checkpoint repeats it, which
    has to draw the same mask.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and any(map(_is_on, _TRACERS)))
    )


def _is_on(mode: "torch._C._TorchDispatchModeKey") -> bool:
    return torch._C._get_dispatch_mode(mode) is not None
