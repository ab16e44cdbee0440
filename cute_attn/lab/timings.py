"""Timings on disk, so that a stopped study goes on, and a study with one more tile in its space times only that tile.

The file has a line of JSON per timing. A timing is identified by the cache keys of the kernel and of the default that
it was timed against, the workload, the GPU and its driver. It holds log-ratios to the default from alternating rounds,
which do not depend on the clock of the day.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from cute_attn.compiler.cache import caches_folder, default_cache

TimingKey = tuple[str, str, str, str, str]
"""Cache keys of the kernel and of the default it was timed against, workload, GPU, driver."""


@dataclass(frozen=True)
class Timing:
    """Logarithms of the kernel's speed over the default's, one per round, and median milliseconds of a call."""

    log_ratios: tuple[float, ...]
    ms: float


def default_path() -> Path:
    """The file next to the kernels' cache: by default ``cute_attn-lab/timings.jsonl`` in the user's cache folder."""
    cache = default_cache()
    root = cache.root if cache is not None else caches_folder() / "cute_attn"
    return root.with_name(f"{root.name}-lab") / "timings.jsonl"


class Timings:
    """The file's timings, and the kernels that a process began to run and never returned from.

    A kernel is noted before it first runs and crossed off afterwards. A kernel still noted has hung or lost the GPU.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()
        self._found: dict[TimingKey, Timing] = {}
        self._begun: set[str] = set()
        if self.path.is_file():
            for line in self.path.read_text().splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            values = json.loads(line)
            if "timing" in values:
                timing = values["timing"]
                ratios = tuple(map(float, timing["log_ratios"]))
                self._found[tuple(values["key"])] = Timing(ratios, float(timing["ms"]))
            elif values["begun"]:
                self._begun.add(values["kernel"])
            else:
                self._begun.discard(values["kernel"])
        except (ValueError, KeyError, TypeError):  # a line that a killed process did not finish is no timing
            return

    def get(self, key: TimingKey) -> Timing | None:
        return self._found.get(key)

    def put(self, key: TimingKey, log_ratios: Sequence[float], ms: float) -> Timing:
        """Keep a timing, in place of an earlier one of that key."""
        timing = self._found[key] = Timing(tuple(log_ratios), ms)
        self._append({"key": key, "timing": asdict(timing)})
        return timing

    def began(self, kernel: str) -> None:
        """Note a kernel that is about to run for the first time."""
        self._append({"kernel": kernel, "begun": True})

    def ended(self, kernel: str) -> None:
        """Cross a kernel off: it returned, whatever it computed."""
        self._append({"kernel": kernel, "begun": False})

    def hung(self, kernel: str) -> bool:
        """True if an earlier process began to run the kernel and never returned."""
        return kernel in self._begun

    def _append(self, values: dict[str, Any]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(self.path.with_suffix(".lock")), self.path.open("a+b") as file:
            # A new line, in case a killed process did not end the previous one.
            file.write(b"\n" * bool(file.tell()) + json.dumps(values).encode() + b"\n")
