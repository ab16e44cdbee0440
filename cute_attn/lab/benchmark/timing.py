"""Timing on the GPU: medians of single calls, each on a cold L2, in rounds over all implementations."""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cute_attn.lab.sensors import Sensor, State

FLUSH_BYTES = 256 * 2**20  # several times the L2 of any target
FLUSHES = 4
"""Minimum flushes of the L2 before each call: 0.3 ms on an H200."""
LAUNCH = 1.5
"""Minimum ratio of the flushes' time to the host's time for one call."""
_WARM_UP = 3


class Clock:
    """Times calls on the current GPU.

    The L2 is overwritten before each call. That keeps the GPU busy while the host launches the call, so the launch is
    not timed.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU; timing a kernel needs one")
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._flush_milliseconds = 0.1
        self._flush_milliseconds = statistics.median(self.once(self._flush.zero_, _WARM_UP))

    def once(self, run: Callable[[], Any], count: int) -> list[float]:
        """The milliseconds of each of ``count`` calls, after a call that measures the host's launch time."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        launch = 1e3 * (time.perf_counter() - begin)
        flushes = max(FLUSHES, math.ceil(LAUNCH * launch / self._flush_milliseconds))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            for _ in range(flushes):
                self._flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def medians(
        self,
        runs: dict[str, Callable[[], Any]],
        milliseconds: float = 100.0,
        rounds: int = 3,
        most: int = 1000,
    ) -> dict[str, float]:
        """The median time of each function in milliseconds, by name. Each is called a few times first, then timed for
        about ``milliseconds`` over all rounds. Functions alternate, so a drifting clock affects all equally.

        most: maximum calls per function and round, since flushing the L2 costs more than a short call.
        """
        counts: dict[str, int] = {}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for name, run in runs.items():
            guess = statistics.median(self.once(run, _WARM_UP))
            counts[name] = min(most, max(3, round(milliseconds / rounds / max(guess, 1e-3))))
        for _ in range(rounds):
            for name, run in runs.items():
                times[name] += self.once(run, counts[name])
        return {name: statistics.median(samples) for name, samples in times.items()}


@functools.cache
def sensor() -> Sensor:
    return Sensor(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))


def state_under_load(run: Callable[[], Any], milliseconds: float, busy_ms: float) -> State:
    """The GPU's state after ``busy_ms`` of calls of ``run``, each of ``milliseconds``, while they run."""
    for _ in range(min(20_000, max(1, round(busy_ms / max(milliseconds, 1e-3))))):
        run()
    state = sensor().read()
    torch.cuda.synchronize()
    return state


def clock_under_load(run: Callable[[], Any], milliseconds: float) -> int | None:
    """The SM clock in MHz while ``run``, which takes ``milliseconds``, is called repeatedly; None if unknown."""
    return state_under_load(run, milliseconds, busy_ms=500).clock_mhz
