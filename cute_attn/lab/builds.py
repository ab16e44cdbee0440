"""Builds of many tiles in worker processes, while this process does something else."""

import contextlib
import dataclasses
import os
import queue
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cute_attn import compiler
from cute_attn.compiler import registry
from cute_attn.compiler.cache import usable_cache
from cute_attn.compiler.workers import Worker
from cute_attn.lab.benchmark.workload import Workload
from cute_attn.lab.tune_worker import build_parts, ranked
from cute_attn.tiles import Tile
from cute_attn.traits import Traits

WORKER = "cute_attn.lab.tune_worker"
# A build that takes so many times the median is given up, though not within the first seconds.
_SLOW, _LEAST_S = 3.0, 30.0
_MOST_WORKERS = 32  # each takes a gigabyte or two


@dataclass(frozen=True)
class Built:
    """The result of building one tile: its key in the cache, or the error. ``estimates``: static rank by workload;
    ``no_rank``: why there is none. ``seconds``: build time, 0 if the kernel was in the cache.
    """

    tile: Tile
    key: str = ""
    seconds: float = 0.0
    error: str = ""
    spills_in_step: int = 0
    estimates: dict[str, float] = field(default_factory=dict)
    no_rank: str = ""


class WorkerBuilds:
    """Build tiles in worker processes, and rank them for workloads.

    By default one core is left free for the process that times kernels. Kernels of the running script, which workers do
    not import, are built by this process in :meth:`take`. ``beside``: other kernels that running these needs; they are
    built first and not reported. ``pending``: number of submitted tiles whose results were not taken yet.
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
        self._wanted: queue.SimpleQueue[Tile | compiler.Request | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Built] = queue.SimpleQueue()
        self._own: list[Tile] = []
        self._running: dict[Worker, tuple[Tile, float]] = {}
        self._slow: dict[Tile, float] = {}
        self._durations: list[float] = []
        self._threads: list[threading.Thread] = []
        self._processes: list[Worker] = []
        self._lock = threading.Lock()
        self.pending = 0
        self._closed = False
        for request in beside:
            if "__main__" not in compiler.user_modules(request):
                self._want(request)

    def submit(self, tiles: Iterable[Tile]) -> None:
        """Queue tiles to be built in this order, after those submitted before."""
        for tile in tiles:
            self.pending += 1
            if "__main__" in compiler.user_modules((self._traits, tile, self._target)):
                self._own.append(tile)
                continue
            self._want(tile)

    def _want(self, what: Tile | compiler.Request) -> None:
        self._wanted.put(what)
        if len(self._threads) < self.workers:
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()

    def take(self, wait_s: float) -> list[Built]:
        """Return new results; if there are none, wait up to ``wait_s`` seconds, at most 5, for the first."""
        if self._own:
            self.pending -= 1
            return [self._build_here(self._own.pop(0))]
        self._stop_slow_ones()
        found, seconds = list[Built](), max(0.0, min(wait_s, 5.0))
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._done.get(not found and seconds > 0, seconds or None))
        self.pending -= len(found)
        return found

    def close(self) -> None:
        self._closed = True
        for _ in self._threads:
            self._wanted.put(None)
        for worker in self._processes:
            worker.stop()

    def _work(self) -> None:
        """Run one thread, which has one worker process build one tile at a time."""
        worker = Worker(WORKER)
        self._processes.append(worker)
        while (tile := self._wanted.get()) is not None and not self._closed:
            if isinstance(tile, tuple):
                worker.ask(compiler.as_message(tile, compiler.user_modules(tile)) | {"workloads": []})
                continue
            start = time.monotonic()
            with self._lock:
                self._running[worker] = (tile, start)
            request = (self._traits, tile, self._target)
            message = compiler.as_message(request, compiler.user_modules(request))
            answer = worker.ask(message | {"workloads": self._workloads})
            with self._lock:
                del self._running[worker]
                self._durations.append(time.monotonic() - start)
            error = answer.pop("error")
            if tile in self._slow:
                error = f"its build was given up after {self._slow[tile]:.0f} s"
            self._done.put(
                Built(tile, error=error.strip().splitlines()[0]) if error else Built(tile, **answer)
            )
        worker.stop()

    def _stop_slow_ones(self) -> None:
        with self._lock:
            if len(self._durations) < 5:
                return
            most = max(_LEAST_S, _SLOW * statistics.median(self._durations))
            for worker, (tile, start) in self._running.items():
                seconds = time.monotonic() - start
                if seconds > most and tile not in self._slow:
                    self._slow[tile] = seconds
                    worker.interrupt()

    def _build_here(self, tile: Tile) -> Built:
        try:
            compiled = compiler.compile(self._traits, tile, self._target)
            build_parts(compiled)
        except Exception as error:  # the result of that tile
            return Built(tile, error=f"{type(error).__name__}: {error}")
        seconds = 0.0 if compiled.from_cache else compiled.seconds
        return Built(tile, compiled.key, seconds, **ranked(compiled, self._workloads))


def build_at_once(
    kernels: Iterable[tuple[str, str | None]], target: str | None = None, *, lines: bool = False
) -> None:
    """Build the kernels that are not built yet in parallel processes.

    kernels: (name, text that changes the default tile). Does nothing if fewer than two are missing, or without a disk
    cache: callers build what they need anyway. Errors are not reported here, but when a caller needs the kernel.
    """
    missing = []
    for name, tile in kernels:
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
