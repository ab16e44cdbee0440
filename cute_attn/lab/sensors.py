"""Read the GPU's clock, power and heat, and what limits its clock, by NVML if pynvml is installed or nvidia-smi."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

# NVML's bits of the reasons why the clock is not higher (nvml.h, nvmlClocksEventReasons).
_REASONS = {
    0x1: "idle", 0x2: "clock setting", 0x4: "power", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake", 0x100: "display clock",
}  # fmt: skip
_SLOWED = ("hardware slowdown", "heat", "heat (hardware)", "power brake")
_NVIDIA_SMI = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"


@dataclass(frozen=True)
class State:
    """The GPU at one moment, and the ``reasons`` why its clock is not higher; None for unknown values."""

    clock_mhz: int | None = None
    watts: int | None = None
    celsius: int | None = None
    reasons: tuple[str, ...] = ()

    @property
    def slowed(self) -> bool:
        """True if heat or the hardware, not the power limit, lowers the clock: measured times then mean little."""
        return any(reason in _SLOWED for reason in self.reasons)


def summary(states: Iterable[State | None]) -> State:
    """The median clock and power, the highest temperature and all reasons of some states."""
    known = [state for state in states if state is not None]
    reasons = dict.fromkeys(reason for state in known for reason in state.reasons if reason != "idle")
    return State(
        known_median(state.clock_mhz for state in known),
        known_median(state.watts for state in known),
        max((state.celsius for state in known if state.celsius is not None), default=None),
        tuple(reasons),
    )


def known_median(values: Iterable[int | None]) -> int | None:
    """The median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known)) if known else None


class Sensor(NamedTuple):
    """Reads the GPU's state. ``busy_ms``: how long the GPU must be busy for a reading under load. ``every``: the state
    is read once in so many rounds.
    """

    read: Callable[[], State | None]
    busy_ms: float
    every: int


def sensor(uuid: str) -> Sensor:
    """The sensor of the GPU with torch's UUID. nvidia-smi takes a tenth of a second, so few rounds call it."""
    try:
        import pynvml  # may not be installed

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # it is not installed, or does not know this GPU
        from cute_attn.lab.benchmark.timing import query_gpu  # loads torch

        return Sensor(lambda: parse_nvidia_smi(query_gpu(_NVIDIA_SMI)), busy_ms=500.0, every=10)
    return Sensor(lambda: _by_nvml(pynvml, handle), busy_ms=15.0, every=1)


def _by_nvml(nvml: Any, handle: Any) -> State:
    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (AttributeError, nvml.NVMLError):  # an older library, or a GPU that does not tell
            return None

    power = ask("nvmlDeviceGetPowerUsage")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return State(
        ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        None if power is None else round(power / 1000),
        ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        named(reasons or 0),
    )


def parse_nvidia_smi(line: str | None) -> State | None:
    """The state from a line of nvidia-smi's ``csv,nounits``, or None."""
    if line is None:
        return None
    clock, power, heat, reasons = (_number(value) for value in line.split(","))
    return State(clock, power, heat, named(reasons or 0))


def _number(text: str) -> int | None:
    """A decimal or hexadecimal number, or None if nvidia-smi gives no number."""
    text = text.strip()
    try:
        return int(text, 16) if text.startswith("0x") else round(float(text))
    except ValueError:
        return None


def named(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _REASONS.items() if bits & bit)
