"""Seeds and offsets of dropout masks, from torch's generators.

A launch for two numbers costs half a call's host time. So one launch draws the states for many offsets of a
generator. A call takes the state for the generator's current seed and offset, and advances the offset as torch's
dropouts do: equal generator states give equal masks, and different ones different masks.
"""

import os
import threading
from typing import Any

import torch
from torch import Tensor

from cute_attn.host.memory import as_strided

STEP = 4
"""Increment of a generator's offset per draw, a multiple of four."""

DRAWN = 4096
"""Number of states that one launch draws: 64 KB."""

_UNIT = 4
"""Offsets, like torch's, and seeds are multiples of this, which makes the mem-efficient mask cheaper."""
_END = 2**63 // _UNIT
_SALT = 0x5851F42D4C957F2D  # so that states differ from torch.randint's numbers of the same seed


lock = threading.Lock()
"""Held while a generator's offset is read and advanced."""
os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may hold it


def advance(generator: torch.Generator, step: int) -> tuple[int, int]:
    """The generator's seed and its offset, which is then advanced. The caller holds :data:`lock`."""
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + step)
    return seed, offset


def _draw_one(device: torch.device) -> Tensor:
    return _UNIT * torch.randint(0, _END, (2,), dtype=torch.int64, device=device)


def _draw_group(device: torch.device, seed: int, group: int) -> Tensor:
    """Draw a group of states from a separate generator, so that torch's generator does not advance."""
    generator = torch.Generator(device).manual_seed(seed ^ _SALT)
    generator.set_offset(64 * group)  # one launch takes less
    return _UNIT * torch.randint(0, _END, (DRAWN, 2), dtype=torch.int64, device=device, generator=generator)


_states: dict[tuple[int, int], tuple[tuple[int, int], Tensor]] = {}
"""By device and stream, since another stream would have to wait for the draw: a seed and a group of ``DRAWN`` offsets,
and what was drawn for them, int64 (DRAWN, 2)."""

_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def draw(device: torch.device) -> Tensor:
    """A seed and an offset, int64 (2,), from torch's generator of ``device``, in memory that must not be written.

    Under compilers, tracers and CUDA graph capture each call draws two numbers itself, so that a replay draws again.
    """
    if device.type != "cuda" or _is_traced() or _is_capturing():
        return _draw_one(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    key, generator = (index, _current_stream(index)), torch.cuda.default_generators[index]
    with lock:
        seed, offset = advance(generator, STEP)
        group, place = divmod(offset // STEP, DRAWN)
        known = _states.get(key)
        if known is None or known[0] != (seed, group):
            known = _states[key] = (seed, group), _draw_group(generator.device, seed, group)
        return as_strided(known[1], (2,), (1,), 2 * place)


_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def _is_traced() -> bool:
    """True while a compiler or tracer records operators.

    Modes that only observe do not count: they may be on in a forward and off when a checkpoint recomputes it, and both
    must draw the same mask.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACERS)))
    )
