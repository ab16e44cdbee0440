"""Builds of many tiles in worker processes, while this process does something else."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.compiler.cache import usable_cache
from cute_attn.compiler.workers import Workers
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.lab.tune_worker import build_parts, ranked
from cute_attn.tiles import Tile
from cute_attn.traits import Traits

_MOST_WORKERS = 32  # each takes a gigabyte or two


@dataclass(frozen=True)
class Built:
    """The result of building one tile. ``estimates``: static rank by workload; ``no_rank``: why there is none.
    ``seconds``: build time, 0 if the kernel was in the cache.
    """

    tile: Tile
    seconds: float = 0.0
    error: str = ""
    spills_in_step: int = 0
    estimates: dict[str, float] = field(default_factory=dict)
    no_rank: str = ""


class WorkerBuilds:
    """Build tiles in worker processes, and rank them for workloads.

    By default one core is left free for the process that times kernels. Kernels of the running script, which workers do
    not import, are built by this process in :meth:`take`. ``beside``: other kernels that running these needs; they are
    built first and not reported.
    """

    def __init__(
        self,
        traits: Traits,
        target: str,
        workloads: Sequence[Workload],
        beside: Iterable[compiler.Request] = (),
        workers: int | None = None,
    ) -> None:
        self.workers = workers or min(_MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) - 1))
        self._traits, self._target = traits, target
        self._workloads = [dataclasses.asdict(workload) for workload in workloads]
        self._processes = Workers("cute_attn.lab.tune_worker", self.workers)
        self._building: dict[concurrent.futures.Future[dict[str, Any]], Tile] = {}
        self._own: list[Tile] = []
        for request in beside:
            modules = compiler.user_modules(request)
            if "__main__" not in modules:
                self._processes.ask(compiler.as_message(request, modules) | {"workloads": []})

    @property
    def pending(self) -> int:
        """Number of submitted tiles whose results were not taken yet."""
        return len(self._building) + len(self._own)

    def submit(self, tiles: Iterable[Tile]) -> None:
        """Queue tiles to be built in this order, after those submitted before."""
        for tile in tiles:
            request = (self._traits, tile, self._target)
            modules = compiler.user_modules(request)
            if "__main__" in modules:
                self._own.append(tile)
                continue
            message = compiler.as_message(request, modules) | {"workloads": self._workloads}
            self._building[self._processes.ask(message)] = tile

    def take(self, wait_s: float) -> list[Built]:
        """Return new results; if there are none, wait up to ``wait_s`` seconds, at most 5, for the first."""
        if self._own:
            return [self._build_here(self._own.pop(0))]
        done, _ = concurrent.futures.wait(
            self._building, min(wait_s, 5.0), concurrent.futures.FIRST_COMPLETED
        )
        return [_built(self._building.pop(future), **future.result()) for future in done]

    def close(self) -> None:
        self._processes.stop()

    def _build_here(self, tile: Tile) -> Built:
        try:
            compiled = compiler.compile(self._traits, tile, self._target)
            build_parts(compiled)
        except Exception as error:  # the result of that tile
            return Built(tile, error=f"{type(error).__name__}: {error}")
        seconds = 0.0 if compiled.from_cache else compiled.seconds
        return Built(tile, seconds, **ranked(compiled, self._workloads))


def _built(tile: Tile, error: str | None, **answer: Any) -> Built:
    return Built(tile, error=error.strip().splitlines()[0]) if error else Built(tile, **answer)


def build_at_once(
    kernels: Iterable[tuple[str, str | None]], target: str | None = None, *, lines: bool = False
) -> None:
    """Build the kernels that are not built yet in parallel processes.

    kernels: (name, text that changes the default tile). Does nothing if fewer than two are missing, or without a disk
    cache: callers build what they need anyway. Errors are not reported here, but when a caller needs the kernel.
    """
    missing = []
    for name, tile in dict.fromkeys(kernels):
        traits = Traits.parse(name)
        on = target or compiler.default_target(traits.arch)
        try:
            kernel = registry.lookup(traits, tile, on)
        except ValueError:
            continue
        request = (traits, kernel.tile, on)
        if not compiler.is_built(kernel, on, lines=lines) and request not in missing:
            missing.append(request)
    if len(missing) > 1 and usable_cache() is not None:
        list(compiler.prebuild(missing, lines=lines))
