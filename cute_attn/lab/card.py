"""What is compared, and the GPU that does it: a contender is checked before it is timed."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cute_attn.compiler import default_target, is_built, prebuild, registry
from cute_attn.host.backward import kernels_of
from cute_attn.lab.benchmark import peers
from cute_attn.lab.benchmark.results import TOLERANCE, difference, first_line
from cute_attn.lab.benchmark.timing import Clock, query_gpu
from cute_attn.lab.benchmark.workload import Inputs, Workload
from cute_attn.lab.check import Expected, small_workloads
from cute_attn.lab.sensors import State, sensor
from cute_attn.tiles import Tile, check_tile, text_of
from cute_attn.traits import Traits

Run = Callable[[], Any]

_MOST_CALLS = 200  # of a sample; each overwrites the L2 beforehand


class Wrong(ValueError):
    """A kernel's output is not the reference's; it is not timed."""


class Lost(RuntimeError):
    """The GPU's context is lost: nothing runs any more in this process."""


@dataclass(frozen=True)
class Contender:
    """A kernel by its name, with text that changes fields of the default tile, "" for the one that a call takes by
    itself; or a peer, one of :data:`cute_attn.lab.benchmark.peers.PEERS`.
    """

    kernel: str = ""
    tile: str = ""
    peer: str = ""

    @staticmethod
    def of(what: "Contender | Traits | str | tuple[Traits | str, Tile | str | None]") -> "Contender":
        """From a peer's or a kernel's name, or (kernel's name, tile); TypeError or ValueError for anything else."""
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
    """torch's current GPU; ``gpu`` and ``driver`` say which, since timings of another are others."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU; timing a kernel needs one")
        self.gpu = torch.cuda.get_device_name()
        self.driver = query_gpu("driver_version") or "unknown"
        self._clock = Clock()
        self._sensor = sensor(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        self._checks = Checks()
        self._milliseconds: WeakKeyDictionary[Run, float] = WeakKeyDictionary()

    now = staticmethod(time.monotonic)

    def build(self, contenders: Sequence[Contender], workloads: Sequence[Workload]) -> None:
        """Build all kernels that these need, in parallel. One that does not build fails in :meth:`prepare`."""
        wanted = [r for c in contenders if c.kernel for r in needed_kernels(c, workloads)]
        missing = [r for r in dict.fromkeys(wanted) if not is_built(registry.lookup(*r), r[2])]
        if len(missing) > 1:
            list(prebuild(missing))

    def prepare(self, contender: Contender, workload: Workload) -> Run:
        """The function to time; its output was compared with the reference.

        Raises:
            Wrong: the output differs.
            Lost: it ended the GPU's context.
            Exception: it cannot run; a :class:`cute_attn.lab.benchmark.peers.Declined` gives a peer's reason.
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
        """The median time of calls, in milliseconds, each on a cold L2, that take about ``milliseconds`` together."""
        count = round(milliseconds / max(self._milliseconds[run], 1e-3))
        return statistics.median(self._clock.once(run, min(_MOST_CALLS, max(3, count))))

    def state(self, run: Run, round_: int) -> State | None:
        """Clock, power and heat under the load of ``run``, or None in rounds that do not read them."""
        if round_ % self._sensor.every:
            return None
        for _ in range(min(20_000, max(1, round(self._sensor.busy_ms / self._milliseconds[run])))):
            run()
        state = self._sensor.read()
        torch.cuda.synchronize()
        return state


# ---- against the reference ----


class Checks:
    """Inputs of workloads, and the outputs expected: computed once, compared with many tiles."""

    def __init__(self) -> None:
        self._inputs: dict[Workload, Inputs] = {}
        self._first: dict[Workload, tuple[Contender, tuple[Tensor, ...]]] = {}
        self._small: dict[Workload, Expected] = {}
        self._passed: set[tuple[str, Tile]] = set()

    def checked(self, contender: Contender, workload: Workload) -> Run:
        """The function to time; see :meth:`Gpu.prepare`.

        A kernel is compared with the reference at a few small sizes; on this workload, without dropout, each contender
        with the first one.
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
        for workload in small_sizes(traits, tile):
            if workload not in self._small:
                self._small[workload] = Expected.of(workload)
            expected = self._small[workload]
            accuracy = expected.accuracy(expected.run(peers.kernel_of(traits), tile.text))
            if not accuracy.passed:
                raise Wrong(
                    f"{contender} is wrong on {workload.name}: its error is {accuracy.error:.2g}, "
                    f"allowed are {accuracy.allowed:.2g}"
                )


def small_sizes(traits: Traits, tile: Any) -> list[Workload]:
    """:func:`cute_attn.lab.check.small_workloads` that the tile accepts.

    Packed heads divide those of a key head; a bias that TMA loads has several rows, of multiples of 16 bytes.
    """
    group, step = max(2, getattr(tile, "pack_heads", 1)), 8 if getattr(tile, "bias_stages", 0) else 1
    sizes = [
        replace(size, nheads=2 * group, seqlen=-(-size.seqlen // step) * step)
        for size in small_workloads(traits)
    ]
    return list(dict.fromkeys(sizes))


def tile_at(contender: Contender, workload: Workload, target: str | None = None) -> Tile:
    """The tile that a kernel takes on a workload: its own, or the default one, which depends on lengths and heads."""
    traits = Traits.parse(contender.kernel)
    target = target or default_target(traits.arch)
    kernel = registry.lookup(traits, contender.tile or None, target)
    if contender.tile or traits.op not in ("forward", "backward"):
        return kernel.tile
    return kernel.for_lengths(*workload.tile_lengths, target, workload.pairs, workload.seen_by_window).tile


def needed_kernels(
    contender: Contender, workloads: Sequence[Workload], target: str | None = None
) -> Iterator[tuple[Traits, Tile, str]]:
    """The kernels that checking and timing a kernel launches: its own, of a backward also the forwards before it."""
    traits = Traits.parse(contender.kernel)
    target = target or default_target(traits.arch)
    for workload in workloads:
        try:
            kernel = registry.lookup(traits, tile_at(contender, workload, target), target)
        except registry.Unsupported:  # as preparing it will say
            continue
        if traits.op == "forward":
            yield traits, kernel.tile, target
            continue
        yield from ((*part, target) for part in kernels_of(kernel))
        variant = traits.variant if ("forward", traits.arch, traits.variant) in registry.KERNELS else ""
        forward = Contender(replace(traits, op="forward", bias_grad=False, variant=variant).name)
        for size in (workload, *small_sizes(traits, kernel.tile)):
            yield Traits.parse(forward.kernel), tile_at(forward, size, target), target
