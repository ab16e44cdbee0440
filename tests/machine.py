"""A machine with a GPU, where there is none: calls go the way of CUDA tensors up to the launch, with CPU tensors.

``device`` answers what a call asks the machine: its GPU, counters, how many multiprocessors. ``kernels`` stands for
the compiler: what a kernel's launch runs is a function of the test. ``poison`` fills new memory with what no kernel
leaves there. Nothing of this is patched anywhere else.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.host import backward, counters, kvcache_launcher, launcher, memory, plans

MULTIPROCESSORS = 132
COUNTERS = torch.zeros(4, dtype=torch.int32)
"""By which persistent kernels claim work tiles; none does here."""


class Compiled(NamedTuple):
    """What the compiler returns, as far as a launch looks at it."""

    function: Callable[..., object]
    tile: Any


def device(
    patch: pytest.MonkeyPatch, multiprocessors: int = MULTIPROCESSORS, schedule: Any = None, target: str = ""
) -> None:
    """CPU tensors lie on the current GPU, of so many multiprocessors, for which no call has a plan yet.

    Args:
        schedule: what a launch that claims work tiles gets; by default ``COUNTERS`` and the multiprocessors.
        target: the GPU; by default any kernel's own generation.
    """
    found = (COUNTERS, multiprocessors) if schedule is None else schedule
    patch.setattr(counters, "schedule", lambda device: found)
    for module in (backward, kvcache_launcher, launcher):
        patch.setattr(module, "multiprocessors", lambda device: multiprocessors)
    patch.setattr(compiler, "default_target", lambda arch: target or arch)
    patch.setattr(memory, "current_device", lambda: -1)
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    forget_plans(patch)


def forget_plans(patch: pytest.MonkeyPatch) -> None:
    """Calls are planned anew."""
    patch.setattr(plans, "_plans", {})
    patch.setattr(plans, "_guarded", {})


def kernels(patch: pytest.MonkeyPatch, launched: Callable[[Any, str], Callable[..., object]]) -> None:
    """The compiler builds functions of Python: ``launched(kernel, target)`` takes the arguments of a launch."""

    def build(kernel: Any, target: str) -> Compiled:
        return Compiled(launched(kernel, target), kernel.tile)

    def compile(traits: Any, tile: Any, target: str) -> Compiled:
        return build(registry.lookup(traits, tile, target), target)

    patch.setattr(compiler, "build", build)
    patch.setattr(compiler, "compile", compile)


def poison(patch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, or -1 where numbers are whole."""

    def poisoned(like: torch.Tensor, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        filling = math.nan if dtype.is_floating_point else -1
        size = (
            1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        )
        return torch.full((size,), filling, dtype=dtype).as_strided(shape, strides)

    patch.setattr(memory, "new_empty_strided", poisoned)
