"""Contenders of a comparison, and the GPU that checks each of them before it times it."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cute_attn.compiler import default_target, registry
from cute_attn.host.backward import kernels_of
from cute_attn.lab.benchmark import peers
from cute_attn.lab.benchmark.results import TOLERANCE, difference, first_line
from cute_attn.lab.benchmark.timing import Clock, sensor, state_under_load
from cute_attn.lab.benchmark.workload import Inputs, Workload
from cute_attn.lab.builds import build_at_once
from cute_attn.lab.check import Expected, small_workloads
from cute_attn.lab.sensors import State
from cute_attn.tiles import Tile, check_tile, text_of
from cute_attn.traits import Traits

Run = Callable[[], Any]

_MOST_CALLS = 200  # calls of a sample; each overwrites L2 beforehand


class Wrong(ValueError):
    """A kernel's output differs from the reference, so it is not timed."""


class Lost(RuntimeError):
    """The GPU's context is lost: no kernel can run in this process any more."""


@dataclass(frozen=True)
class Contender:
    """A kernel, or a peer from :data:`cute_attn.lab.benchmark.peers.PEERS`. ``tile``: text that changes fields of the
    kernel's default tile, or "" for the tile that a call chooses.
    """

    kernel: str = ""
    tile: str = ""
    peer: str = ""

    @staticmethod
    def of(what: "Contender | Traits | str | tuple[Traits | str, Tile | str | None]") -> "Contender":
        """Make a contender of a peer's or kernel's name, or (kernel's name, tile); else TypeError or ValueError."""
        if isinstance(what, Contender):
            return what
        name, tile = what if isinstance(what, tuple | list) and len(what) == 2 else (what, None)
        check_tile(tile)
        if name in peers.PEERS and tile is None:
            return Contender(peer=name)
        if isinstance(name, str) and "-" not in name:
            accepted = f"a peer ({', '.join(peers.PEERS)}), or a kernel's name such as forward-sm90-bf16-d128"
            raise ValueError(f"the kernel or peer is {name!r}; accepted: {accepted}")
        return Contender(Traits.of(name).name, text_of(tile))

    def __str__(self) -> str:
        return self.peer or (f"{self.kernel} {self.tile}" if self.tile else f"{self.kernel} (default tile)")


class Gpu:
    """torch's current GPU. Timings are only comparable for the same ``gpu`` and ``driver``."""

    def __init__(self) -> None:
        self._clock = Clock()
        self.gpu = torch.cuda.get_device_name()
        self.driver = sensor().driver or "unknown"
        self._checks = Checks()
        self._milliseconds: WeakKeyDictionary[Run, float] = WeakKeyDictionary()

    now = staticmethod(time.monotonic)

    def build(self, contenders: Sequence[Contender], workloads: Sequence[Workload]) -> None:
        """Build all kernels that the contenders need, in parallel. A failed build is raised by :meth:`prepare`."""
        wanted = (r for c in contenders if c.kernel for r in needed_kernels(c, workloads))
        build_at_once((traits.name, text_of(tile) or None) for traits, tile, _ in wanted)

    def prepare(self, contender: Contender, workload: Workload) -> Run:
        """Check the contender against the reference, and return the function to time.

        Raises:
            Wrong: its output differs.
            Lost: it ended the GPU's context.
            Exception: it cannot run; a peer raises :class:`cute_attn.lab.benchmark.peers.Declined` with the reason.
        """
        try:
            run = self._checks.checked(contender, workload)
            self._milliseconds[run] = sorted(self._clock.once(run, 3))[1]
        except Exception as error:
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # it raises again if the context is lost
                what = f"{contender} ended the GPU's context on {workload.name}: {first_line(error)}"
                raise Lost(what) from error
            raise
        return run

    def sample(self, run: Run, milliseconds: float) -> float:
        """The median time in milliseconds of calls that take about ``milliseconds`` together, each on a cold L2."""
        count = round(milliseconds / max(self._milliseconds[run], 1e-3))
        return statistics.median(self._clock.once(run, min(_MOST_CALLS, max(3, count))))

    def state(self, run: Run) -> State:
        """Clock, power and heat under the load of ``run``."""
        return state_under_load(run, self._milliseconds[run], busy_ms=15)


# ---- against the reference ----


class Checks:
    """Inputs and expected outputs of workloads, computed once and used to check many tiles."""

    def __init__(self) -> None:
        self._inputs: dict[Workload, Inputs] = {}
        self._first: dict[Workload, tuple[Contender, tuple[Tensor, ...]]] = {}
        self._small: dict[Workload, Expected] = {}
        self._passed: set[tuple[str, Tile]] = set()

    def checked(self, contender: Contender, workload: Workload) -> Run:
        """The function to time; see :meth:`Gpu.prepare`.

        A kernel is compared with the reference at a few small sizes. On this workload, unless it has dropout, each
        contender is compared with the first contender.
        """
        if contender.peer:
            implementation = peers.PEERS[contender.peer]
        else:
            traits = Traits.parse(contender.kernel)
            if replace(workload.traits(traits.arch), variant=traits.variant) != traits:
                raise ValueError(
                    f"workload is {workload.name}; accepted: workloads of {traits}, with its head dims and features"
                )
            tile = tile_at(contender, workload)
            if (contender.kernel, tile) not in self._passed:
                self._check_small_sizes(contender, traits, tile)
                self._passed.add((contender.kernel, tile))
            implementation = peers.ours(peers.kernel_of(traits), contender.tile or None)
        if workload not in self._inputs:
            torch.manual_seed(0)
            self._inputs[workload] = workload.inputs()
        run = implementation(workload, self._inputs[workload])
        results = run()
        results = results if isinstance(results, tuple) else (results,)
        first, expected = self._first.setdefault(workload, (contender, results))
        apart = max(map(difference, results, expected))
        if not workload.dropout and not apart <= TOLERANCE:
            said = f"it differs from {first} by {apart:.2g} of the largest element"
            raise Wrong(f"{contender} is wrong on {workload.name}: {said}")
        return run

    def _check_small_sizes(self, contender: Contender, traits: Traits, tile: Tile) -> None:
        for workload in small_workloads(traits, tile):
            if workload not in self._small:
                self._small[workload] = Expected.of(workload)
            expected = self._small[workload]
            accuracy = expected.accuracy(expected.run(peers.kernel_of(traits), tile.text))
            if not accuracy.passed:
                raise Wrong(
                    f"{contender} is wrong on {workload.name}: its error is {accuracy.error:.2g}, "
                    f"allowed are {accuracy.allowed:.2g}"
                )


def tile_at(contender: Contender, workload: Workload, target: str | None = None) -> Tile:
    """A kernel's tile on a workload: the contender's, or the default one, which depends on lengths and heads."""
    traits = Traits.parse(contender.kernel)
    target = target or default_target(traits.arch)
    kernel = registry.lookup(traits, contender.tile or None, target)
    if contender.tile or traits.op not in ("forward", "backward"):
        return kernel.tile
    return kernel.for_lengths(*workload.tile_lengths, target, workload.pairs, workload.seen_by_window).tile


def needed_kernels(
    contender: Contender, workloads: Sequence[Workload], target: str | None = None
) -> Iterator[tuple[Traits, Tile, str]]:
    """The kernels that checking and timing a contender launches; for a backward also its helpers and forwards."""
    traits = Traits.parse(contender.kernel)
    target = target or default_target(traits.arch)
    for workload in workloads:
        try:
            kernel = registry.lookup(traits, tile_at(contender, workload, target), target)
        except registry.Unsupported:  # preparing it will raise the same error
            continue
        if traits.op == "forward":
            yield traits, kernel.tile, target
            continue
        yield from ((*part, target) for part in kernels_of(kernel))
        variant = traits.variant if ("forward", traits.arch, traits.variant) in registry.KERNELS else ""
        forward = Contender(replace(traits, op="forward", bias_grad=False, variant=variant).name)
        for size in (workload, *small_workloads(traits, kernel.tile)):
            yield Traits.parse(forward.kernel), tile_at(forward, size, target), target
