"""Calls take the code path of a GPU up to the launch, on CPU tensors and without a GPU.

``device`` answers what a call asks the machine: its GPU, counters, how many multiprocessors, L2. ``kernels`` stands for
the compiler: what a kernel's launch runs is a function of the test. ``gpu`` does both at every door. ``poison`` fills
new memory with what no kernel leaves there. Nothing of this is patched anywhere else.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import pytest
import torch
import tvm_ffi

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.compiler.arguments import ordered, parameters
from cute_attn.host import backward, counters, forward, memory, plans, record, split_kv
from cute_attn.sdpa import operators as sdpa_operators

MULTIPROCESSORS = 132
L2_BYTES = 50 << 20
COUNTERS = torch.zeros(4, dtype=torch.int32)
"""Counters from which persistent kernels would claim work tiles; unused here."""


class Compiled(NamedTuple):
    """A compiled kernel, as far as a launch uses it."""

    function: Callable[..., object]
    kernel: Any

    @property
    def traits(self) -> Any:
        return self.kernel.traits

    @property
    def tile(self) -> Any:
        return self.kernel.tile

    def bind(self, **arguments: Any) -> tuple:
        return self.function, *ordered(self.kernel.traits, parameters(type(self.kernel)), arguments)


class Generator:
    """The attributes of a CUDA generator that the package uses."""

    def __init__(self, seed: int, offset: int) -> None:
        self.seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset


def device(
    patch: pytest.MonkeyPatch, multiprocessors: int = MULTIPROCESSORS, schedule: Any = None, target: str = ""
) -> None:
    """CPU tensors seem to be on the current GPU, which has this many multiprocessors; no call has a plan yet.

    Args:
        schedule: argument of launches that claim work tiles; by default ``COUNTERS`` and the multiprocessors.
        target: the GPU; by default the generation of each kernel.
    """
    found = (COUNTERS, multiprocessors) if schedule is None else schedule
    patch.setattr(counters, "schedule", lambda device: found)
    for module in (backward, forward, split_kv):
        patch.setattr(module, "multiprocessors", lambda device: multiprocessors)
    patch.setattr(backward, "l2_bytes", lambda device: L2_BYTES)
    patch.setattr(compiler, "default_target", lambda arch: target or arch)
    patch.setattr(memory, "current_device", lambda: -1)
    patch.setattr(record, "allocate", allocate)
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    forget_plans(patch)


def allocate(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """``record.allocate`` in the memory of the CPU."""
    return torch.empty_strided(shape, strides, dtype=dtype)


def forget_plans(patch: pytest.MonkeyPatch) -> None:
    """Drop all plans, so that calls are planned anew."""
    for known in plans.STORES:
        patch.setattr(plans, known, {})


Run = Callable[[SimpleNamespace], object]
"""Function that a kernel's launch runs; its argument has the launch's arguments by name."""


def compiled(kernel: Any, run: Run, prepared: bool = False) -> Compiled:
    """The compiler's result for a kernel. prepared: as a TVM FFI function, whose launches can be recorded."""
    names = parameters(type(kernel))

    def launch(*given: Any) -> None:
        values = map(as_torch, given) if prepared else given
        pairs = zip(names.items(), values, strict=True)
        run(SimpleNamespace(**{name: _named(annotation, x) for (name, annotation), x in pairs}))

    return Compiled(tvm_ffi.convert(launch) if prepared else launch, kernel)


def _named(annotation: Any, x: Any) -> Any:
    """A tuple as the class that the kernel's annotation names."""
    if not isinstance(x, tuple) or get_origin(annotation) is not Annotated:
        return x
    (own,) = get_args(annotation)[:1]
    kinds = [kind for kind in (own, *get_args(own)) if hasattr(kind, "_make")]
    return kinds[0]._make(x) if kinds else x


def kernels(patch: pytest.MonkeyPatch, launched: Callable[[Any, str], Run], prepared: bool = False) -> None:
    """The compiler builds functions of Python, ``launched(kernel, target)``. prepared: as of :func:`compiled`."""

    def build(kernel: Any, target: str) -> Compiled:
        return compiled(kernel, launched(kernel, target), prepared)

    def compile(traits: Any, tile: Any, target: str) -> Compiled:
        return build(registry.lookup(traits, tile, target), target)

    patch.setattr(compiler, "build", build)
    patch.setattr(compiler, "compile", compile)


def poison(patch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, or with -1 for integers."""

    def poisoned(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        filling = math.nan if dtype.is_floating_point else -1
        size = (
            1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        )
        return torch.full((size,), filling, dtype=dtype).as_strided(shape, strides)

    patch.setattr(record, "allocate", poisoned)
    patch.setattr(torch.Tensor, "new_empty_strided", lambda like, *given, dtype: poisoned(*given, dtype))


def gpu(
    patch: pytest.MonkeyPatch, launched: Callable[[Any, str], Run], multiprocessors: int = MULTIPROCESSORS
) -> None:
    """CPU tensors are a Hopper GPU's at every door; ``launched``: as of :func:`kernels`.

    Of PyTorch's fused attention the operators are served, ``torch.ops.aten._scaled_dot_product_flash_attention`` and
    others: its function finds no backend for CPU tensors.
    """
    device(patch, multiprocessors, tvm_ffi.convert((COUNTERS, multiprocessors)), "sm90")
    kernels(patch, launched, prepared=True)
    patch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
    patch.setattr(sdpa_operators, "runs_kernels", lambda q: True)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)


@contextlib.contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """torch's deterministic algorithms, if they are wanted."""
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def launches() -> Iterator[tuple[pytest.MonkeyPatch, dict[str, tuple[Any, str]]]]:
    """:func:`gpu`, by a patch for more; and (kernel, target), by a name of both, of all that calls launch there."""
    found: dict[str, tuple[Any, str]] = {}

    def launched(kernel: Any, target: str) -> Run:
        found[f"{kernel.traits} {kernel.tile} {target}"] = kernel, target
        return lambda given: None

    with pytest.MonkeyPatch.context() as patch:
        gpu(patch, launched)
        yield patch, found


def as_torch(x: Any) -> Any:
    """Convert a TVM FFI function's arguments to torch's tensors and to tuples."""
    if isinstance(x, tvm_ffi.Tensor):
        return torch.from_dlpack(x)
    return tuple(map(as_torch, x)) if isinstance(x, tvm_ffi.Array) else x
